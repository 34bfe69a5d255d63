"""Changes of several threads in one line: one of them makes a record of all that wait.

It is the one whose deadline is the latest, and it takes nobody with a later one: so no call lasts
longer than its own deadline. What a record had no room for makes one itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock
from typing import Any

from objectcache_storage_server.engines.blobs.blob_store import StoreTimeout
from objectcache_storage_server.engines.shared.index.replayed_change import ReplayedChange
from objectcache_storage_server.engines.shared.log.append_record import unknown_outcome
from objectcache_storage_server.engines.shared.log.make_record import RecordMaker, WaitingChange
from objectcache_storage_server.engines.shared.log.replay import LogReplay
from objectcache_storage_server.engines.shared.log.writers.own_writer import OwnWriter
from objectcache_storage_server.engines.stores.shared_store import SharedStore

GROUP_MAX = 64  # changes of one record


class ChangeLine:
    """Makes changes, each on behalf of its thread. Safe to use from any thread."""

    def __init__(self, store: SharedStore, replay: LogReplay, own: OwnWriter) -> None:
        self.maker = RecordMaker(store, replay, own, self._give_back)
        self._replay = replay
        self._lock = Lock()
        self._line: list[WaitingChange] = []
        self._is_led = False  # somebody leads, and will call the first in line

    def change(self, act: Callable[[ReplayedChange], Any], deadline_s: float) -> Any:
        """What `act` returns, once its change is durable and in the index. Raises as
        `SharedCatalog.change` says.
        """
        own = WaitingChange(act, deadline_s)
        with self._lock:
            self._line.append(own)
            leads, self._is_led = not self._is_led, True
        if leads or self._is_called_to_lead(own):
            self._lead(own)
        if own.error is not None:
            raise own.error
        return own.result

    def _is_called_to_lead(self, own: WaitingChange) -> bool:
        """Wait in line; false when the change is over. Raises `StoreTimeout`, `UnknownOutcome`."""
        own.called.wait(max(own.deadline_s - time.monotonic(), 0))
        with self._lock:
            if own.is_over:
                return False
            if own.called.is_set():
                return True
            if own not in self._line:  # a record of it is under way
                own.is_abandoned = True
                raise unknown_outcome()
            self._line.remove(own)
        raise StoreTimeout("changes before this one did not end in time; nothing was changed")

    def _lead(self, own: WaitingChange) -> None:
        """Make a record of what waits, and call the next one to lead."""
        with self._lock:
            self._line.remove(own)
        group = [own]
        try:
            with self._replay.locked(own.deadline_s):
                self.maker.make(group, self._gather)
        except BaseException as error:
            for one in group:
                one.fail(error)
        with self._lock:
            for one in group:
                one.is_over = True
                one.called.set()
            self._is_led = bool(self._line)
            if self._line:
                _next_leader(self._line).called.set()

    def _gather(self, group: list[WaitingChange]) -> None:
        """Take what waits no longer than the first of the group into it."""
        latest_s = group[0].deadline_s
        with self._lock:
            fitting = [one for one in self._line if not one.is_alone and one.deadline_s <= latest_s]
            taken = fitting[: GROUP_MAX - len(group)]
            self._line = [one for one in self._line if one not in taken]
        group += taken

    def _give_back(self, changes: list[WaitingChange]) -> None:
        """Have them wait again, first of all, but for those whose callers have left: nobody would
        come when such a one is called to lead.
        """
        with self._lock:
            self._line[:0] = [one for one in changes if not one.is_abandoned]


def _next_leader(line: list[WaitingChange]) -> WaitingChange:
    """Who waits longest of all; one that a record had no room for comes before."""
    if line[0].is_returned:
        return line[0]
    return max(line, key=lambda one: one.deadline_s)
