"""The operating system's errors as ours, translated where an engine meets the system."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Generator

from objectcache_schemas.errors import Busy, ObjectCacheError, StorageFull, Unavailable

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_TOO_MANY_FILES = frozenset({errno.EMFILE, errno.ENFILE})
RETRY_AFTER_S = 1.0


@contextlib.contextmanager
def translated(operation: str) -> Generator[None, None, None]:
    """Raise what `OSError` in the body means; `operation` names the file and what is done to it."""
    try:
        yield
    except OSError as error:
        raise as_our_error(error, operation) from error


def as_our_error(error: OSError, operation: str) -> ObjectCacheError:
    """`StorageFull`, `Busy` (out of file descriptors), else `Unavailable`."""
    if error.errno in _FULL:
        return StorageFull(f"{operation}: {error.strerror}; delete objects or add space")
    if error.errno in _TOO_MANY_FILES:
        return Busy(
            f"{operation}: {error.strerror}; raise the limit on open files (ulimit -n)",
            retry_after_s=RETRY_AFTER_S,
        )
    return Unavailable(f"{operation}: {error.strerror or error}")
