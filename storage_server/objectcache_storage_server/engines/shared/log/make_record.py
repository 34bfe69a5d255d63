"""One record of changes: judged at the log's end, appended, and applied.

A record that another server was quicker than is made again from the start, against the index that
the other's record made. One whose outcome is not known is settled before anything else is appended.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event
from typing import Any

import lmdb

from objectcache_schemas.errors import InvalidRequest, StorageFull
from objectcache_storage_server.engines.blobs.blob_store import StoreTimeout
from objectcache_storage_server.engines.shared.index.apply_record import RecordApplier
from objectcache_storage_server.engines.shared.index.index_tables import IndexDamage
from objectcache_storage_server.engines.shared.index.replayed_change import (
    DoesNotFit,
    RecordDraft,
    ReplayedChange,
)
from objectcache_storage_server.engines.shared.log.append_record import (
    PAUSE_S_MAX,
    PAUSE_S_MIN,
    Appender,
    LostRace,
    unknown_outcome,
)
from objectcache_storage_server.engines.shared.log.log_records import (
    ENVELOPE_BYTES,
    LogRecord,
    pack_record,
    record_checksum,
)
from objectcache_storage_server.engines.shared.log.replay import LogReplay
from objectcache_storage_server.engines.shared.log.writers.own_writer import OwnWriter
from objectcache_storage_server.engines.shared.operations import join_operations
from objectcache_storage_server.engines.shared.shared_catalog import UnknownOutcome
from objectcache_storage_server.engines.stores.shared_store import SharedStore

LOST_RACES_MAX = 3  # before a server asks for its turn
TURN_TRIES = 4  # that a turn is long enough for
EXPECTED_RECORD_BYTES = 1 << 18  # that the index has room for before a change is judged


class WaitingChange:
    """A change in line."""

    def __init__(self, act: Callable[[ReplayedChange], Any], deadline_s: float) -> None:
        self.act = act
        self.deadline_s = deadline_s
        self.called = Event()  # it is over, or has to lead
        self.is_over = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.has_changed = False  # something of it is in the record
        self.is_out = False  # refused after it had changed something, so the record is without it
        self.is_alone = False  # it had no room beside others
        self.is_returned = False  # a record had no room for it, and it has waited again since
        self.is_abandoned = False  # its caller has left: it was told that the outcome is unknown

    def fail(self, error: BaseException) -> None:
        """No record of it was made, or it is not known; what was judged counts for nothing."""
        if isinstance(error, UnknownOutcome) and not self.has_changed:
            error = StoreTimeout("the store did not answer in time; nothing was changed")
        self.error = error


class _TryAgain(Exception):
    """The record is to be made again, of what the group is now."""


class RecordMaker:
    """Makes records. Its methods are called with the replay's lock held."""

    def __init__(
        self,
        store: SharedStore,
        replay: LogReplay,
        own: OwnWriter,
        give_back: Callable[[list[WaitingChange]], None],
    ) -> None:
        """`give_back` puts changes that a record has no room for back in line, first of all."""
        self.lost_races = 0  # since the start
        self._store = store
        self._replay = replay
        self._own = own
        self._give_back = give_back
        self._is_full = False  # the record that is being made had no room for all that waits
        self._appender = Appender(store, replay, own)
        self._body_bytes_max = store.capabilities.record_bytes_max - ENVELOPE_BYTES

    def make(
        self, group: list[WaitingChange], gather: Callable[[list[WaitingChange]], None]
    ) -> None:
        """Make a record of a group and of what `gather` adds to it. Each gets a result or an
        error; what is raised is the error of all.
        """
        lost = 0
        self._is_full = False
        while True:
            deadline_s = group[0].deadline_s  # nobody of the group has a later one
            self._appender.settle(deadline_s)
            self._wait_for_turn(deadline_s)
            if not self._is_full and not group[0].is_alone:
                gather(group)
            begun_s = time.monotonic()
            try:
                self._try(group, deadline_s)
                return
            except _TryAgain:
                continue
            except LostRace:
                lost += 1
                wanted_s = TURN_TRIES * (time.monotonic() - begun_s)
                self._follow(group, deadline_s)
                if lost >= LOST_RACES_MAX:
                    self._ask_for_turn(wanted_s, deadline_s)
                    lost = 0
            except StorageFull:
                if len(group) == 1:
                    raise
                for one in group:  # another may be small enough, or free something
                    one.is_alone = True
                self._return_from(group, 1)

    def _try(self, group: list[WaitingChange], deadline_s: float) -> None:
        try:
            with self._replay.index.writing(EXPECTED_RECORD_BYTES) as txn:
                draft = self._judged(txn, group)
                if not draft.encoded:
                    self._check_at_end(deadline_s)
                    return
                record, packed = self._packed(draft)
                draft.applier.finish(record.sequence, record_checksum(packed), len(packed))
                self._appender.append(record, packed, deadline_s)
                self._commit(txn, draft.applier)
        except UnknownOutcome:
            if not self._appender.is_stored_after_all(deadline_s):
                _have_judged_again(group)
                raise _TryAgain from None

    # --- judging ---

    def _judged(self, txn: lmdb.Transaction[bytes], group: list[WaitingChange]) -> RecordDraft:
        """What the group changes, applied. Raises `_TryAgain`."""
        index = self._replay.index
        applier = RecordApplier(txn, index.databases, self._own.number)
        self._check_own(applier)
        draft = RecordDraft(applier, index, self._body_bytes_max)
        for place, one in enumerate(group):
            if not one.is_out:
                self._judge(draft, group, place)
        return draft

    def _check_own(self, applier: RecordApplier) -> None:
        """Go on under another number where other servers took this one for dead."""
        if not self._own.is_registered:
            return
        row = applier.view.writer_row(self._own.number)
        if row is None or row.fenced_by is not None:
            self._own.renew()
            raise _TryAgain

    def _judge(self, draft: RecordDraft, group: list[WaitingChange], place: int) -> None:
        one = group[place]
        before = len(draft.encoded)
        one.error, one.has_changed = None, False
        try:
            one.result = one.act(ReplayedChange(draft))
        except DoesNotFit as unfit:
            if before:
                self._return_from(group, place)
            else:
                one.error, one.is_out = self._too_large(unfit), True
            raise _TryAgain from unfit
        except (IndexDamage, lmdb.Error):
            raise
        except BaseException as error:
            one.error = error
            if len(draft.encoded) > before:
                one.is_out = True
                raise _TryAgain from error
        one.has_changed = len(draft.encoded) > before

    def _too_large(self, unfit: DoesNotFit) -> InvalidRequest:
        return InvalidRequest(
            f"the change takes {unfit.size_bytes} bytes or more of the commit log, and a record of "
            f"the store {self._store.capabilities.name} has at most {self._body_bytes_max}: "
            f"store or delete fewer objects at once"
        )

    def _return_from(self, group: list[WaitingChange], first: int) -> None:
        """Have these judged again later: what they were told was because of others, which may not
        be stored after all.
        """
        self._is_full = True
        returned = group[first:]
        del group[first:]
        _have_judged_again(returned)
        for one in returned:
            one.is_returned = True
        self._give_back(returned)

    def _packed(self, draft: RecordDraft) -> tuple[LogRecord, bytes]:
        state = draft.applier.state
        record = LogRecord(
            self._replay.store_id,
            state.end,
            self._own.number,
            self._own.next_sequence(),
            state.checksum,
            join_operations(draft.encoded),
        )
        return record, pack_record(record)

    # --- appending ---

    def _commit(self, txn: lmdb.Transaction[bytes], applier: RecordApplier) -> None:
        try:
            txn.commit()
        except lmdb.Error as error:  # the record counts; only this index is without it
            self._replay.set_damaged(IndexDamage(str(error)))
            raise unknown_outcome() from error
        self._own.set_registered()
        turn_s = applier.touched.turn_s
        self._replay.turns.saw(self._own.number, turn_s, time.monotonic())
        self._replay.applied(applier.number, applier.touched)

    def _check_at_end(self, deadline_s: float) -> None:
        """What changes nothing was judged at the log's end, too. Raises `LostRace`."""
        if self._store.log_end(self._replay.end, deadline_s) > self._replay.end:
            raise LostRace

    # --- other servers ---

    def _follow(self, group: list[WaitingChange], deadline_s: float) -> None:
        """Apply what won the race, and have everybody judged again."""
        self.lost_races += 1
        _have_judged_again(group)
        pause_s = PAUSE_S_MIN
        while not self._replay.step(deadline_s):
            self._appender.pause(pause_s, deadline_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)
        if time.monotonic() > deadline_s:
            raise StoreTimeout("other servers' changes came first until it was too late")

    def _ask_for_turn(self, wanted_s: float, deadline_s: float) -> None:
        asking = [WaitingChange(lambda change: change.ask_for_turn(wanted_s), deadline_s)]
        while True:
            try:
                self._try(asking, deadline_s)
                return
            except _TryAgain:
                continue
            except LostRace:
                self._follow(asking, deadline_s)

    def _wait_for_turn(self, deadline_s: float) -> None:
        while True:
            now_s = time.monotonic()
            wait_s = min(self._replay.turns.wait_s(self._own.number, now_s), deadline_s - now_s)
            if wait_s <= 0:
                return
            self._store.wait_for_record(self._replay.end, wait_s)
            self._replay.step(deadline_s)


def _have_judged_again(group: list[WaitingChange]) -> None:
    """The index is another one: nobody is left out, or refused, for what was judged before."""
    for one in group:
        one.is_out, one.error = False, None
