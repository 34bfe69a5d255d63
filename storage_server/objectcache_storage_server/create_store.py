"""`python -m objectcache_storage_server.create_store`: what `objectcache create-store` runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from objectcache_schemas.errors import InvalidRequest, ObjectCacheError
from objectcache_storage_server.engines.stores.open_store import ADDRESSES, create_store

PROGRAM = "objectcache create-store"
DESCRIPTION = """\
Make the store that several storage servers share, once, before the first of them is started. What
its address names must be there: the bucket, the pool, the mounted file system, the folder in which
the store's own is made.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 2 for a wrong address, 1 where no store was made."""
    parser = argparse.ArgumentParser(PROGRAM, description=DESCRIPTION)
    parser.add_argument("address", metavar="URL", help=ADDRESSES)
    address: str = parser.parse_args(arguments).address
    try:
        create_store(address)
    except InvalidRequest as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    except ObjectCacheError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    print(f"made a store in {address}")
    return 0


def _leave(status: int) -> NoReturn:
    """End without taking the interpreter apart: threads of a store's own library that come back to
    it meanwhile abort the process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _leave(main())
