"""The command line: `objectcache`, or `python -m objectcache.cli`.

`app` declares the commands, `processes` says how the two servers are started, `supervise` keeps
both running, `restarts` decides what follows a death, `settings_table` writes docs/settings.md.
`admin` holds the operator's commands.
"""

from __future__ import annotations


def main() -> None:
    """Entry point of the console script."""
    from objectcache.cli.app import app

    app()
