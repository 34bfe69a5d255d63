"""Appending one record, and learning what became of it where the store did not say."""

from __future__ import annotations

import time
from dataclasses import dataclass

from objectcache_schemas.errors import StorageFull, Unavailable
from objectcache_storage_server.engines.blobs.blob_store import StoreTimeout
from objectcache_storage_server.engines.shared.index.index_tables import IndexDamage
from objectcache_storage_server.engines.shared.log.log_records import LogRecord, UnreadableRecord
from objectcache_storage_server.engines.shared.log.replay import LogReplay
from objectcache_storage_server.engines.shared.log.writers.own_writer import OwnWriter
from objectcache_storage_server.engines.shared.shared_catalog import UnknownOutcome
from objectcache_storage_server.engines.stores.shared_store import SharedStore

PAUSE_S_MIN, PAUSE_S_MAX = 0.005, 0.5  # between two tries to learn what became of a record


class LostRace(Exception):
    """Another server has the number, or a later one; follow it and try again."""


@dataclass(frozen=True, slots=True)
class _Unsettled:
    """A record that may have been appended, or may yet be."""

    record: LogRecord
    packed: bytes
    was_entered: bool  # the log had a record of its writer before


class Appender:
    """Appends records, one at a time. Its methods are called with the replay's lock held."""

    def __init__(self, store: SharedStore, replay: LogReplay, own: OwnWriter) -> None:
        self._store = store
        self._replay = replay
        self._own = own
        self._unsettled: _Unsettled | None = None

    def append(self, record: LogRecord, packed: bytes, deadline_s: float) -> None:
        """Raises `LostRace`, `StorageFull`, `Unavailable`, and `UnknownOutcome` for a record that
        is unsettled from then on.
        """
        unsettled = _Unsettled(record, packed, self._own.is_registered)
        try:
            is_ours = self._store.append(record.number, packed, deadline_s)
        except StoreTimeout as error:
            self._unsettled = unsettled
            raise unknown_outcome() from error
        except (StorageFull, Unavailable):
            raise
        except BaseException as error:
            self._unsettled = unsettled
            raise unknown_outcome() from error
        if not is_ours:
            raise LostRace

    def settle(self, deadline_s: float) -> None:
        """Have nothing unsettled. Raises `StoreTimeout`, `Unavailable`."""
        if self._unsettled is not None:
            self._settle(deadline_s)

    def is_stored_after_all(self, deadline_s: float) -> bool:
        """What became of the record that is unsettled. Raises `UnknownOutcome`."""
        try:
            is_stored = self._settle(deadline_s)
        except (StorageFull, Unavailable) as error:
            raise unknown_outcome() from error
        except IndexDamage as damage:
            self._replay.set_damaged(damage)
            raise unknown_outcome() from damage
        if is_stored is None:
            raise unknown_outcome()
        return is_stored

    def _settle(self, deadline_s: float) -> bool | None:
        """Follow the log until the number is taken; whether it is by the unsettled record, None
        where nobody can tell any more.

        The same record is appended again: whichever try the store carries out, it is one record.
        Raises `StoreTimeout`, `Unavailable`.
        """
        unsettled = self._unsettled
        if unsettled is None:  # stored, and this index is without it
            raise unknown_outcome()
        record, pause_s = unsettled.record, PAUSE_S_MIN
        while self._replay.end <= record.number:
            try:
                self._store.append(record.number, unsettled.packed, deadline_s)
                if self._replay.step(deadline_s):
                    continue
            except UnreadableRecord:
                raise
            except (StorageFull, Unavailable):
                if self._replay.renewal_reason:
                    raise
            self.pause(pause_s, deadline_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)
        self._unsettled = None
        return self._is_in_index(unsettled)

    def _is_in_index(self, unsettled: _Unsettled) -> bool | None:
        record = unsettled.record
        with self._replay.index.reading() as view:
            row = view.writer_row(record.writer)
        if row is None:  # it has made no record yet, or it was forgotten, with what it had made
            return None if unsettled.was_entered else False
        is_stored = row.sequence >= record.sequence
        if is_stored and record.writer == self._own.number:
            self._own.set_registered()
        return is_stored

    def pause(self, pause_s: float, deadline_s: float) -> None:
        """Wait a moment, or for a record. Raises `StoreTimeout` at the deadline."""
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise StoreTimeout("the store did not say in time what its log ends with")
        self._store.wait_for_record(self._replay.end, min(pause_s, left_s))


def unknown_outcome() -> UnknownOutcome:
    """For a change that may have been made."""
    return UnknownOutcome(
        "the store did not answer in time: the change may have been stored, or may yet be"
    )
