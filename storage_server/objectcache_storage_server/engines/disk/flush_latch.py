"""Whether an engine may acknowledge what it stores: until the first flush that fails.

The kernel says of a write-back that failed once, to whichever flush asks first, and the next flush
succeeds without having written anything. So what one flush is told may concern what another one
was asked for: from the first failure on nothing is acknowledged any more, by anybody, until the
store is opened again and looks at what the device has. Reading goes on all the while.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Callable, Generator
from pathlib import Path

from objectcache_schemas.errors import Unavailable

log = logging.getLogger("objectcache.storage_server.engines.flush_latch")


class FlushLatch:
    """One engine's, asked before every acknowledgement. Safe to use from any thread."""

    def __init__(self) -> None:
        self._failure = ""

    @property
    def failure(self) -> str:
        """What could not be flushed, and why; empty while all could be."""
        return self._failure

    def check(self) -> None:
        """Raise `Unavailable` once a flush has failed."""
        if self._failure:
            raise self._error()

    def end(self, what: str, error: BaseException) -> Unavailable:
        """A flush of `what` has failed: nothing is acknowledged any more. Returns what to raise."""
        if not self._failure:
            self._failure = f"{what} could not be flushed: {_reason(error)}"
            log.error("%s; the store takes no changes until it is opened again", self._failure)
        return self._error()

    def give_up(self, reason: str) -> None:
        """Nothing is acknowledged any more, for this reason."""
        self._failure = self._failure or reason

    @contextlib.contextmanager
    def flushing(self, what: str) -> Generator[None, None, None]:
        """Flush `what` in the block: an error there ends it, and is raised as `Unavailable`."""
        self.check()
        try:
            yield
        except Exception as error:
            raise self.end(what, error) from error
        except BaseException as error:
            self.end(what, error)
            raise

    def _error(self) -> Unavailable:
        return Unavailable(
            f"{self._failure}; nothing is stored or deleted until the storage server is started "
            "again, what is stored can be read: see to the device, then restart the server"
        )


class Flushes:
    """Flushes that one file, or one device, is told of: what one is told may concern another."""

    def __init__(self, latch: FlushLatch, what: str) -> None:
        self._latch = latch
        self._what = what
        self._changed = threading.Condition()
        self._running: set[object] = set()

    @contextlib.contextmanager
    def one(
        self, is_failure: Callable[[Exception], bool] = lambda error: True
    ) -> Generator[None, None, None]:
        """Flush in the block. It counts once those that run beside it have ended well, too.

        Raises `Unavailable` where it does not count. An error that is none of a flush, as
        `is_failure` says, is raised as it is.
        """
        token = object()
        with self._changed:
            self._latch.check()
            self._running.add(token)
        try:
            yield
        except Exception as error:
            if is_failure(error):
                raise self._latch.end(self._what, error) from error
            raise
        except BaseException as error:
            self._latch.end(self._what, error)
            raise
        finally:
            self._leave(token)
        self._latch.check()

    def _leave(self, token: object) -> None:
        """Wait for those beside, unless it is known already that none of them counts."""
        with self._changed:
            self._running.remove(token)
            self._changed.notify_all()
            beside = set(self._running)
            self._changed.wait_for(lambda: bool(self._latch.failure) or not beside & self._running)


def forget_cached(path: Path) -> None:
    """Have the page cache forget a file that nobody has open, if there is one: it keeps pages whose
    write failed, and no later flush writes them. So what is read is what the device has. Raises
    `OSError`.
    """
    if not path.exists():
        return
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        try:
            os.fdatasync(descriptor)
        except OSError as error:  # of the process before, said to nobody until now
            if error.errno != errno.EIO:
                raise
            log.warning("what %s was last written is partly lost: %s", path, error)
            os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _reason(error: BaseException) -> str:
    """Why, without a file's name, which `str(error)` may hold."""
    code = getattr(error, "errno", None) or getattr(error, "code", None)
    if isinstance(code, int) and code > 0:
        return os.strerror(code)
    return str(getattr(error, "sqlite_errorname", type(error).__name__))
