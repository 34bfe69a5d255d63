"""The index, kept at the log's end by whoever needs it there."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Generator, Sequence

import msgspec

from objectcache_schemas.errors import Unavailable
from objectcache_schemas.limits import MIB
from objectcache_storage_server.engines.blobs.blob_store import StoreTimeout
from objectcache_storage_server.engines.shared.index.apply_record import RecordApplier, Touched
from objectcache_storage_server.engines.shared.index.index_state import IndexState
from objectcache_storage_server.engines.shared.index.index_tables import IndexDamage
from objectcache_storage_server.engines.shared.index.replayed_index import ReplayedIndex
from objectcache_storage_server.engines.shared.index.replayed_view import ReplayedView
from objectcache_storage_server.engines.shared.log.log_records import (
    DamagedRecord,
    LogRecord,
    UnreadableRecord,
    record_checksum,
    unpack_record,
)
from objectcache_storage_server.engines.shared.log.open_index import IndexOpener
from objectcache_storage_server.engines.shared.log.turns import AppendTurns
from objectcache_storage_server.engines.shared.operations import split_operations
from objectcache_storage_server.engines.stores.shared_store import SharedStore, TrimmedLog

READ_BYTES = 4 * MIB  # of records that are applied by one transaction
SWAP_S = 10.0  # for the last records of an index that takes another's place; changes wait

log = logging.getLogger("objectcache.storage_server.engines.shared")


class LogReplay:
    """The index and its lock. Safe to use from any thread."""

    def __init__(
        self,
        store: SharedStore,
        opener: IndexOpener,
        index: ReplayedIndex,
        on_applied: Callable[[Touched], None],
    ) -> None:
        """`on_applied` is told of what records changed, with the lock held."""
        self.store_id = opener.store_id
        self.turns = AppendTurns()
        self._store = store
        self._opener = opener
        self._index = index
        self._on_applied = on_applied
        self._lock = threading.Lock()  # of all that changes the index
        self._reading = threading.Lock()  # of the log, by whoever does not change the index yet
        self._failure: UnreadableRecord | None = None
        self.renewal_reason = ""  # why the index has to be made again; empty is that it has not
        self.is_damaged = False
        self.damage: DamagedRecord | None = None  # what it has stopped at
        self._damaging: int | None = None  # record that an index was thrown away for
        with index.reading() as view:
            self.end = view.state.end  # number of the next record to apply

    def __repr__(self) -> str:
        return f"<LogReplay up to record {self.end}>"

    @property
    def index(self) -> ReplayedIndex:
        """The index as it is now; another takes its place when it is made again."""
        return self._index

    def close(self) -> None:
        """Close the index once every look-up has ended."""
        with self._lock:
            self._index.close()

    # --- looking up ---

    @contextlib.contextmanager
    def reading(self) -> Generator[ReplayedView, None, None]:
        """One moment of what has been replayed. Raises `Unavailable`."""
        self._check()
        with contextlib.ExitStack() as opened:
            try:
                yield self._view(opened)
            except IndexDamage as damage:
                self.set_damaged(damage)
                raise self.unavailable() from damage

    def _view(self, opened: contextlib.ExitStack) -> ReplayedView:
        while True:
            index = self._index
            try:
                return opened.enter_context(index.reading())
            except Unavailable:
                if index is self._index:
                    raise

    # --- following ---

    @contextlib.contextmanager
    def locked(self, deadline_s: float) -> Generator[None, None, None]:
        """Nobody else changes the index in the block. Raises `StoreTimeout`, `Unavailable`."""
        with _acquired(self._lock, deadline_s):
            try:
                self._check()
                if self.renewal_reason:
                    raise self.unavailable()
                yield
            except IndexDamage as damage:
                self.set_damaged(damage)
                raise self.unavailable() from damage

    def follow_to(self, end: int, deadline_s: float) -> None:
        """Apply records up to number `end`. Raises `StoreTimeout`, `Unavailable`."""
        while self.end < end:
            if not self.follow_some(deadline_s) and self.end < end:
                raise Unavailable(f"record {self.end} of the store's log is not there")

    def follow_some(self, deadline_s: float) -> bool:
        """Apply some of the records that follow; false where there are none. Changes go on while
        they are read. Raises `StoreTimeout`, `Unavailable`.
        """
        with _acquired(self._reading, deadline_s):
            self._check()
            first = self.end
            packed = self._read(first, deadline_s)
            if not packed:
                return False
            with self.locked(deadline_s):
                known = self.end - first  # that somebody else has applied meanwhile
                if 0 <= known < len(packed):
                    self._apply(packed[known:])
            return True

    def step(self, deadline_s: float) -> bool:
        """The same for whoever holds the lock. Raises `IndexDamage`, too."""
        packed = self._read(self.end, deadline_s)
        if packed:
            self._apply(packed)
        return bool(packed)

    def _read(self, first: int, deadline_s: float) -> list[bytes]:
        try:
            return self._store.read_log(first, READ_BYTES, deadline_s)
        except TrimmedLog as trimmed:
            if first != self.end:  # somebody came further meanwhile
                return []
            self.renewal_reason = f"the log begins at record {trimmed.first}"
            raise self.unavailable() from trimmed

    def applied(self, end: int, touched: Touched) -> None:
        """The index has come to `end`, with the lock held."""
        self.end = end
        self._on_applied(touched)

    def _apply(self, packed: Sequence[bytes]) -> None:
        touched = Touched()
        failure: UnreadableRecord | None = None
        end = self.end
        with self._index.writing(sum(map(len, packed))) as txn:
            for each in packed:
                try:
                    record = self._opened(each, end)
                    applier = RecordApplier(txn, self._index.databases, record.writer)
                    _apply_record(applier, record, each)
                except UnreadableRecord as error:
                    failure = error
                    break
                except IndexDamage as damage:
                    self._note_damaging(end, damage)
                    raise
                self.turns.saw(record.writer, applier.touched.turn_s, time.monotonic())
                touched.add(applier.touched)
                end += 1
            txn.commit()
        self.applied(end, touched)
        if failure is not None:
            self.fail(failure)
            raise failure

    def _opened(self, packed: bytes, number: int) -> LogRecord:
        record = unpack_record(packed, number)
        if record.store_id != self.store_id:
            raise UnreadableRecord(
                f"record {number} of the store's log is of the store {record.store_id.hex()}, and "
                f"the records before it are of {self.store_id.hex()}: two stores were mixed up; "
                f"restore the one that is meant"
            )
        return record

    def _note_damaging(self, number: int, damage: IndexDamage) -> None:
        """An index in which a record cannot be applied is made again, once."""
        if self._damaging == number:
            failure = UnreadableRecord(
                f"record {number} of the store's log contradicts the records before it ({damage}); "
                f"restore the store to a state without it"
            )
            self.fail(failure)
            raise failure from damage
        self._damaging = number

    # --- when something is wrong ---

    def fail(self, failure: UnreadableRecord) -> None:
        """Nothing is looked up or changed any more, unless it was damage and the index is made
        again of a checkpoint beyond it.
        """
        log.error("stopped following the shared store's log: %s", failure)
        self._failure = failure
        self.damage = failure if isinstance(failure, DamagedRecord) else None

    def set_damaged(self, damage: IndexDamage) -> None:
        """The index is not to be used any more; it is made again."""
        if not self.is_damaged:
            log.error("the index is damaged and is made again from the store: %s", damage)
        self.renewal_reason, self.is_damaged = str(damage), True

    def renew(self, index: ReplayedIndex, deadline_s: float, is_ending: Callable[[], bool]) -> None:
        """Use another index in place of this one, which goes when its look-ups have ended. It is
        brought to the log's end before. Raises `StoreTimeout`, and `Unavailable`, too, between
        two reads of the log once `is_ending` says so.
        """
        behind = LogReplay(self._store, self._opener, index, lambda touched: None)
        behind._damaging = self._damaging
        self._bring_to_end(behind, deadline_s, is_ending)
        with self._lock:  # a change that was under way may have ended meanwhile
            swap_by_s = min(deadline_s, time.monotonic() + SWAP_S)
            self._bring_to_end(behind, swap_by_s, is_ending)
            before, self._index = self._index, index
            self.end = behind.end
            self.renewal_reason, self.is_damaged = "", False
            self._failure = self.damage = None
            self._on_applied(Touched(is_everything=True))
        before.close()
        self._opener.discard(before)

    def _bring_to_end(
        self, behind: LogReplay, deadline_s: float, is_ending: Callable[[], bool]
    ) -> None:
        """Replay what another index lacks. Raises `StoreTimeout`, `Unavailable`."""
        try:
            while behind.follow_some(deadline_s):
                if is_ending():
                    raise Unavailable("the server ends while its index is made again")
        except UnreadableRecord as failure:
            self.fail(failure)
            raise
        except Unavailable:
            if behind.is_damaged:
                self._opener.distrust(behind.index)
                self._damaging = behind._damaging
            raise

    def _check(self) -> None:
        if self._failure is not None:
            raise UnreadableRecord(str(self._failure))
        if self.is_damaged:
            raise self.unavailable()

    def unavailable(self) -> Unavailable:
        return Unavailable(
            f"the index is made again from the store ({self.renewal_reason}); try again"
        )


@contextlib.contextmanager
def _acquired(lock: threading.Lock, deadline_s: float) -> Generator[None, None, None]:
    if not lock.acquire(timeout=max(deadline_s - time.monotonic(), 0)):
        raise StoreTimeout("another call on the shared store's log did not end in time")
    try:
        yield
    finally:
        lock.release()


def _apply_record(applier: RecordApplier, record: LogRecord, packed: bytes) -> None:
    """Raises `UnreadableRecord`, `IndexDamage`."""
    state: IndexState = applier.state
    if record.previous != state.checksum:
        raise UnreadableRecord(
            f"record {record.number} of the store's log does not follow the record before it as "
            f"this server knows it: the store was set back to an earlier state; stop the server "
            f"and remove the shared index in its data directory (server.data_dir)"
        )
    try:
        operations = split_operations(record.body)
    except msgspec.MsgspecError as error:
        raise UnreadableRecord(
            f"record {record.number} of the store's log says something that this server does not "
            f"know ({error}): a newer server writes to the store; update this one"
        ) from error
    for operation in operations:
        applier.apply(operation)
    applier.finish(record.sequence, record_checksum(packed), len(packed))
