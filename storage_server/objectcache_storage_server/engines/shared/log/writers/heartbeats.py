"""What tells the other servers that this one lives, and what it reads."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from objectcache_schemas.errors import ObjectCacheError, StorageFull
from objectcache_storage_server.engines.shared.index.replayed_change import ReplayedChange
from objectcache_storage_server.engines.shared.log.writers.own_writer import OwnWriter
from objectcache_storage_server.engines.shared.versions import ExtentName

RETRY_S = 1.0  # after one that failed, while the server is not entered in the log
USED_EXTENTS_MAX = 4096  # in one heartbeat; what is read beside them goes untold

log = logging.getLogger("objectcache.storage_server.engines.shared")

_Told = tuple[int, bytes]  # writer and document


class _Change(Protocol):
    def __call__(self, act: Callable[[ReplayedChange], _Told], deadline_s: float) -> _Told: ...


class Heartbeats:
    """A thread that appends one where nothing else was, or where there is something to tell."""

    def __init__(
        self, change: _Change, own: OwnWriter, heartbeat_s: float, call_s_max: float
    ) -> None:
        """`call_s_max`: for which one is tried, before the next says what is so by then."""
        self._change = change
        self._own = own
        self._heartbeat_s = heartbeat_s
        self._call_s_max = call_s_max
        self._is_closing = False
        self._is_due_now = threading.Event()
        self._lock = threading.Lock()
        self._used: set[ExtentName] = set()
        self._document = b""
        self._told: _Told = (0, b"")  # what the log has
        self._refused = (0.0, -1)  # since when, and what was appended by then
        self._seen = (0, 0)  # writer and its records in the log at the last look
        self._thread = threading.Thread(target=self._run, name="shared-heartbeat", daemon=True)

    def start(self) -> None:
        """Enter the server in the log, where that is possible now, and begin."""
        self._try_to_send()
        self._thread.start()

    def close(self) -> None:
        """End, once a heartbeat that is under way has ended."""
        self._is_closing = True
        self._is_due_now.set()
        self._thread.join()

    def note_used(self, extents: Iterable[ExtentName]) -> None:
        """Have the next one say that these were read."""
        with self._lock:
            room = USED_EXTENTS_MAX - len(self._used)
            self._used.update(itertools.islice(extents, max(room, 0)))

    def describe(self, document: bytes) -> None:
        """Have it say this of the server, at once and after each change of its writer."""
        with self._lock:
            self._document = document
        self._is_due_now.set()

    def hasten(self) -> None:
        """Send one at once."""
        self._is_due_now.set()

    @property
    def refused_s(self) -> float:
        """For how long no record of this server could be appended, but for want of space; 0 where
        the last heartbeat was, or anything since.
        """
        since_s, appended = self._refused
        return time.monotonic() - since_s if appended == self._own.appended else 0.0

    def _run(self) -> None:
        while not self._is_closing:
            is_registered = self._own.is_registered
            wait_s = self._heartbeat_s if is_registered else min(RETRY_S, self._heartbeat_s)
            is_due = self._is_due_now.wait(wait_s)
            self._is_due_now.clear()
            if not self._is_closing and (is_due or self._is_due()):
                self._try_to_send()

    def _is_due(self) -> bool:
        """Whether there is something to say, or nothing was appended since the last look."""
        own = self._own
        before, self._seen = self._seen, (own.number, own.appended)
        has_news = bool(self._used) or self._told != (own.number, self._document)
        return has_news or not own.is_registered or before == self._seen

    def _try_to_send(self) -> None:
        with self._lock:
            used, self._used = self._used, set()
            document = self._document

        def act(change: ReplayedChange) -> _Told:
            told = (change.writer, document)
            change.heartbeat(None if told == self._told else document, used)
            return told

        begun_s = time.monotonic()
        try:
            self._told = self._change(act, begun_s + self._call_s_max)
        except ObjectCacheError as error:
            log.warning("no heartbeat could be appended to the shared store's log: %s", error)
            self.note_used(used)
            if not isinstance(error, StorageFull) and self._refused[1] != self._own.appended:
                self._refused = (begun_s, self._own.appended)
        except Exception:  # a defect; the next one is to be tried all the same
            log.exception("no heartbeat could be appended to the shared store's log")
