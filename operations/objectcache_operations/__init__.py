"""The command line: `objectcache`, or `python -m objectcache_operations`.

`console` declares the commands, `supervisor` keeps the servers of `objectcache serve` running,
`admin` holds the operator's commands.
"""

from __future__ import annotations


def main() -> None:
    """Entry point of the console script."""
    from objectcache_operations.console.app import app

    app()
