"""The operating system's errors as ours, translated where an engine meets the system.

A message may reach a client, who is not told where the server keeps its files: it names the
operation and the reason, and the path is logged.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Generator
from pathlib import Path

from objectcache_schemas.errors import Busy, ObjectCacheError, StorageFull, Unavailable

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_TOO_MANY_FILES = frozenset({errno.EMFILE, errno.ENFILE})
RETRY_AFTER_S = 1.0

log = logging.getLogger("objectcache.storage_server.engines.system_errors")


@contextlib.contextmanager
def translated(operation: str, path: str | Path) -> Generator[None, None, None]:
    """Raise what `OSError` in the body means; `operation` says what is done to what is at `path`,
    without naming it.
    """
    try:
        yield
    except OSError as error:
        raise as_our_error(error, operation, path) from error


def as_our_error(error: OSError, operation: str, path: str | Path) -> ObjectCacheError:
    """`StorageFull`, `Busy` (out of file descriptors), else `Unavailable`; logs the path."""
    log.warning("%s (%s): %s", operation, path, error)
    reason = _reason(error)
    if error.errno in _FULL:
        return StorageFull(f"{operation}: {reason}; delete objects or add space")
    if error.errno in _TOO_MANY_FILES:
        return Busy(
            f"{operation}: {reason}; raise the limit on open files (ulimit -n)",
            retry_after_s=RETRY_AFTER_S,
        )
    return Unavailable(f"{operation}: {reason}")


def _reason(error: OSError) -> str:
    """Why, without the file's name, which `str(error)` may hold."""
    return os.strerror(error.errno) if error.errno is not None else type(error).__name__
