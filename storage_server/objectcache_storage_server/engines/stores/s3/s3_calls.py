"""Requests of obstore, in a thread with an event loop: their deadlines, what is tried again, and
their errors as ours.

A call goes on until its deadline: an answer that says "not now", a connection that breaks or an
answer that breaks off is asked for again. obstore itself tries nothing again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from objectcache_schemas.errors import StorageFull, Unavailable
from objectcache_storage_server.engines.blobs.blob_store import StoreTimeout
from objectcache_storage_server.engines.stores.store_calls import check_deadline

T = TypeVar("T")

FIRST_PAUSE_S = 0.05
PAUSE_S_MAX = 1.0
ATTEMPT_S = 15.0  # for an answer, before the request is made again on another connection
NOT_ALLOWED_S = 2.0  # during which a refusal of the key is not believed: keys reach servers late
CHECK_S = 5.0  # for the one answer that whoever makes a store waits for first
JOIN_S = 5.0
FULL_CODES = frozenset({"QuotaExceeded", "StorageFull", "XMinioStorageFull", "507"})
_KEY_REMEDIES = {
    "InvalidAccessKeyId": "; is AWS_ACCESS_KEY_ID, or the profile, that of this S3?",
    "SignatureDoesNotMatch": "; is AWS_SECRET_ACCESS_KEY, or the profile's, that of this key?",
}
_NO_CONNECTION = "connection:"
_FINAL_STATUS = frozenset({"400", "405", "411", "413", "501"})  # the same request fails again
_SAYS_NOT_DONE = re.compile("4")  # a status; 5xx and what has none leave open what was done

log = logging.getLogger("objectcache.storage_server.engines.stores.s3")


class MissingKey(Exception):
    """404: of the key, or of the bucket."""


class RangeAtEnd(Exception):
    """416: the range begins behind the object's end."""


class MaybeOurs(AlreadyExistsError):
    """There is one already, which an earlier attempt may have put."""


class S3Calls:
    """The loop and its thread, for the process that made them: obstore hangs after a fork."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="s3-requests", daemon=True)
        self._thread.start()

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Have the loop run it. Raises `Unavailable` in a process that was forked."""
        if os.getpid() != self._process:
            coroutine.close()
            raise Unavailable("S3: this process was forked from the one that opened the store")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call(self, operation: str, deadline_s: float, coroutine: Coroutine[Any, Any, T]) -> T:
        """What it returns or raises; it keeps its deadline itself."""
        try:
            check_deadline(deadline_s, operation)
        except StoreTimeout:
            coroutine.close()
            raise
        return self.begin(coroutine).result()

    def close(self) -> None:
        """Give up what is under way, and end the thread."""
        if os.getpid() == self._process and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(_cancel_all())
        finally:
            self._loop.close()


async def _cancel_all() -> None:
    """End what is under way in this loop."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def check_answers(where: str, request: Callable[[], Awaitable[object]]) -> None:
    """Ask once: whoever makes a store is told at once of what a server that starts waits for.
    Raises `Unavailable` unless there was an answer, whichever that was.
    """
    try:
        async with asyncio.timeout(CHECK_S):
            await request()
    except TimeoutError:
        raise Unavailable(
            f"{where} does not answer within {CHECK_S:g} s: is its endpoint the right one?"
        ) from None
    except (BaseError, OSError) as error:
        reason = _reason(error)
        if reason.startswith(_NO_CONNECTION):
            raise Unavailable(
                f"{where} cannot be reached ({reason}): is its endpoint the right one, and does "
                f"it run?"
            ) from error


async def until(
    deadline_s: float, operation: str, request: Callable[[], Awaitable[T]], *, is_put: bool = False
) -> T:
    """What one request answers, tried again until the deadline.

    Raises `MissingKey`, `RangeAtEnd`, obstore's `AlreadyExistsError`, `Unavailable`; of a put
    `StorageFull`, too. `StoreTimeout` where an attempt may have been carried out or may be yet: a
    put whose earlier attempt had no answer is not undone by what a later one is told.
    """
    pause_s = FIRST_PAUSE_S
    begin_s = time.monotonic()
    reason = "no answer"
    is_open = False  # an attempt may have been carried out, or may be yet
    while (left_s := deadline_s - time.monotonic()) > 0:
        try:
            async with asyncio.timeout(min(left_s, ATTEMPT_S)):
                return await request()
        except TimeoutError:
            reason, is_open = "no answer", is_put
        except (AlreadyExistsError, PreconditionError) as error:
            raise (MaybeOurs if is_open else AlreadyExistsError)(str(error)) from error
        except (BaseError, OSError) as error:
            reason = _reason(error)
            final = _final_error(operation, error, reason, time.monotonic() - begin_s, is_put)
            if final and is_open:
                raise StoreTimeout(
                    f"{operation}: may have been carried out; a later attempt was refused: {final}"
                ) from error
            if final:
                raise final from error
            is_open |= is_put and not _SAYS_NOT_DONE.match(reason)
        left_s = deadline_s - time.monotonic()
        if left_s > 0:
            await asyncio.sleep(min(pause_s, left_s))
        pause_s = min(pause_s * 2, PAUSE_S_MAX)
    log.warning("%s: gave up at its deadline: %s", operation, reason)
    raise StoreTimeout(f"{operation}: no good answer in time (the last: {reason})")


def _final_error(
    operation: str, error: BaseException, reason: str, passed_s: float, is_put: bool
) -> Exception | None:
    """What an answer means that the same request would have again; none where it may go well."""
    if is_put and not FULL_CODES.isdisjoint(reason.split()):
        return StorageFull(f"{operation}: S3 has no room ({reason}); delete objects or add space")
    if isinstance(error, FileNotFoundError) or reason.startswith("404"):  # the latter of a listing
        return MissingKey(operation)
    if isinstance(error, PermissionDeniedError | UnauthenticatedError):
        if passed_s <= NOT_ALLOWED_S:
            return None
        remedy = next((_KEY_REMEDIES[word] for word in reason.split() if word in _KEY_REMEDIES), "")
        return Unavailable(f"{operation}: S3 does not allow it ({reason}){remedy}")
    if isinstance(error, NotSupportedError):
        return Unavailable(f"{operation}: S3 does not know it ({reason})")
    if reason.startswith("416"):
        return RangeAtEnd(operation)
    if reason[:3] in _FINAL_STATUS:
        return Unavailable(f"{operation}: S3 refuses it ({reason})")
    return None


def _reason(error: BaseException) -> str:
    """Status and code of an answer, or what became of the connection. Never the whole text: it
    repeats what was sent.
    """
    text = str(error)
    status = re.search(r"status code: (\d{3})", text)
    code = re.search(r"<Code>(\w{1,60})</Code>", text)
    kind = re.search(r"kind: (\w{1,30}),", text)
    found = [match[1] for match in (status, code) if match]
    if not found and kind:
        number = re.search(r"Os \{\s*code: (\d{1,3}),", text)
        found = [_NO_CONNECTION, os.strerror(int(number[1])) if number else kind[1]]
        if "dns error" in text:
            found[1] = "the host's name is not known"
    return " ".join(found) or type(error).__name__
