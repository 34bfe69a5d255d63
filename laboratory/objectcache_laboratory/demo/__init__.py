"""The demonstration: a conversation over a document, its prefix kept in a real server.

Read `conversation` first: what is measured and checked. `server_process` starts the server,
`report` and `timeline_svg` show the outcome, `app` ties them together.
"""

from objectcache_laboratory.demo.app import main, run_demo
from objectcache_laboratory.demo.options import DemoOptions

__all__ = ["DemoOptions", "main", "run_demo"]
