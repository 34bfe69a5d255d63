"""The catalog that several servers share: a log in their store, replayed by each of them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import TypeVar

from objectcache_schemas.errors import Busy, Conflict, ObjectCacheError, StorageFull
from objectcache_schemas.limits import GIB
from objectcache_schemas.operators.engine_status import CheckpointTaken
from objectcache_storage_server.engines.shared.index.apply_record import Touched
from objectcache_storage_server.engines.shared.index.index_folders import IndexFolders
from objectcache_storage_server.engines.shared.index.index_state import IndexState
from objectcache_storage_server.engines.shared.index.index_tables import IndexDamage
from objectcache_storage_server.engines.shared.index.replayed_change import ReplayedChange
from objectcache_storage_server.engines.shared.index.replayed_view import ReplayedView
from objectcache_storage_server.engines.shared.log.change_line import ChangeLine
from objectcache_storage_server.engines.shared.log.checkpoint_files import (
    CALL_S,
    CheckpointManifest,
    remove_copy,
    write_checkpoint,
)
from objectcache_storage_server.engines.shared.log.keep_checkpoints import (
    RETRY_FACTOR,
    RETRY_S_MIN,
    CheckpointRule,
    remove_all_but_newest,
    remove_old,
)
from objectcache_storage_server.engines.shared.log.log_follower import (
    BEHIND_S_MAX,
    OPEN_S_MAX,
    LogFollower,
)
from objectcache_storage_server.engines.shared.log.open_index import IndexOpener, store_identity
from objectcache_storage_server.engines.shared.log.shared_question import SharedQuestion
from objectcache_storage_server.engines.shared.log.writers.heartbeats import Heartbeats
from objectcache_storage_server.engines.shared.log.writers.own_writer import OwnWriter
from objectcache_storage_server.engines.shared.shared_catalog import SharedCatalog, UnknownOutcome
from objectcache_storage_server.engines.shared.versions import ExtentName
from objectcache_storage_server.engines.stores.shared_store import SharedStore

T = TypeVar("T")

INDEX_BYTES_MAX = 64 * GIB  # of addresses; the file grows as it is filled
HEARTBEAT_S = 3.0
CALL_S_MAX = 10.0  # for a heartbeat, and for what is asked to follow the log
_RULE = CheckpointRule()


class LogCatalog(SharedCatalog):
    """Buckets, versions, extents and documents of a shared store. Safe to use from any thread.

    Two threads of its own follow the log, and tell the other servers that this one lives.
    """

    def __init__(
        self,
        store: SharedStore,
        folder: Path,
        *,
        index_bytes_max: int = INDEX_BYTES_MAX,
        heartbeat_s: float = HEARTBEAT_S,
        call_s_max: float = CALL_S_MAX,
        checkpoint_rule: CheckpointRule = _RULE,
    ) -> None:
        """Open a store's log, whose end has been replayed when this returns. `folder` is for the
        index. The store stays the caller's, who closes it after the catalog. `call_s_max`: what its
        threads give the store for an answer.

        Raises `Unavailable` where the folder is of another store, a record cannot be read, or the
        store cannot be asked.
        """
        deadline_s = time.monotonic() + OPEN_S_MAX
        self._store = store
        self._checkpoint_rule = checkpoint_rule
        self._checkpointing = threading.Lock()
        self._next_checkpoint_s = float("-inf")  # by the monotonic clock
        self._own = OwnWriter()
        self._heartbeats = Heartbeats(self.change, self._own, heartbeat_s, call_s_max)
        store_id = store_identity(store, self._own, deadline_s)
        opener = IndexOpener(store, store_id, IndexFolders(folder), index_bytes_max)
        self._follower = LogFollower(
            store, opener, self._own, self._heartbeats.hasten, deadline_s, call_s_max
        )
        self._replay = self._follower.replay
        self._line = ChangeLine(store, self._replay, self._own)
        self._end = SharedQuestion(self._follower.ask_end, "ask for the log's end")
        try:
            self._follower.start(deadline_s)
        except BaseException:
            self._follower.close()
            raise
        self._heartbeats.start()

    def __repr__(self) -> str:
        return f"<LogCatalog of {self._store!r} {self._replay!r}>"

    def close(self) -> None:
        """Stop its threads, and let go of the index once every call has ended."""
        self._heartbeats.close()
        self._follower.close()

    # --- looking up, and changes ---

    @contextlib.contextmanager
    def reading(self) -> Generator[ReplayedView, None, None]:
        with self._replay.reading() as view:
            yield view

    def follow(self, deadline_s: float) -> None:
        end = self._end.answer(deadline_s)
        self._replay.follow_to(end, deadline_s)

    def change(self, act: Callable[[ReplayedChange], T], deadline_s: float) -> T:
        result: T = self._line.change(act, deadline_s)
        return result

    @property
    def writer(self) -> int:
        return self._own.registered()

    @property
    def entered_writer(self) -> int:
        """The number under which this server writes, 0 while it is not entered in the log: for
        whoever only looks, and must not wait.
        """
        return self._own.entered

    @property
    def lag_records(self) -> int | None:
        """Records that the log is known to have and that have not been replayed. Its end is asked
        for every second while they cannot be. None where the end is not known: it was not heard
        lately, or what should follow the last record that was is refused.
        """
        if time.monotonic() - self._follower.heard_s >= BEHIND_S_MAX:
            return None
        known = max(self._end.latest, self._follower.end_seen)
        lag = max(0, known - self._replay.end)
        is_refused = self._heartbeats.refused_s >= BEHIND_S_MAX
        return None if is_refused and not lag else lag

    @property
    def behind_s(self) -> float:
        """How long ago the index was last known to be at the log's end: a second or two where all
        is well.
        """
        return time.monotonic() - self._follower.at_end_s

    @property
    def store_failure(self) -> str:
        """Why this server cannot do all that needs the store, and for how long that is so; empty
        while it hears of what the others do and they hear of it: one look at the log, or one
        heartbeat, that fails is no reason. Never blocks.
        """
        behind_s = self.behind_s
        if behind_s >= BEHIND_S_MAX:
            return f"the shared store's log cannot be followed, for {behind_s:.0f} s so far"
        refused_s = self._heartbeats.refused_s
        if refused_s >= BEHIND_S_MAX:
            return f"the shared store's log takes no record, for {refused_s:.0f} s so far"
        return ""

    @property
    def lost_races(self) -> int:
        """How often another server's record came before one of ours, since the start."""
        return self._line.maker.lost_races

    def note_used(self, extents: Iterable[ExtentName]) -> None:
        """With the next heartbeat."""
        self._heartbeats.note_used(extents)

    def listen(self, listener: Callable[[Touched], None]) -> None:
        """Call `listener` after records were applied, from the thread that follows the log; what it
        raises is logged.
        """
        self._follower.listen(listener)

    # --- for the upkeep of the store ---

    def describe_server(self, document: bytes) -> None:
        """Have the log say this of the server, such as its address, until another is given."""
        self._heartbeats.describe(document)

    def silent_writers(self, lease_s: float) -> list[int]:
        """Writers that are not fenced and have appended nothing for longer than this, in time in
        which this server knew the log's end.
        """
        return self._follower.silent(lease_s)

    def keep_checkpoint(self, now_s: float) -> bool:
        """Take a checkpoint where this server holds the upkeep lease and one is due, and remove
        what it replaces; whether it did. After a failure there is none for a while. `now_s` is on
        the clock of `time.monotonic`. Raises `StorageFull`, `StoreTimeout`, `Unavailable`.
        """
        if now_s < self._next_checkpoint_s:
            return False
        with self.reading() as view:
            state = view.state
        index = self._replay.index
        if state.upkeep_holder != self._own.number:
            return False
        is_short = self._store.is_short(time.monotonic() + CALL_S)
        if not self._checkpoint_rule.is_due(state, index.used_bytes, is_short):
            return False
        with self._one_checkpoint() as is_free:
            if not is_free:
                return False
            begun_s = time.monotonic()
            try:
                _, is_named = self._checkpoint(
                    lambda change: change.state.upkeep_holder == change.writer, is_short
                )
            except ObjectCacheError:
                taken_s = time.monotonic() - begun_s
                self._next_checkpoint_s = now_s + max(RETRY_S_MIN, RETRY_FACTOR * taken_s)
                raise
            return is_named

    def take_checkpoint(self) -> CheckpointTaken:
        """Take a checkpoint now, whoever holds the upkeep lease, and remove what it replaces. See
        `Engine.take_checkpoint`.
        """
        begun_s = time.monotonic()
        with self._one_checkpoint() as is_free:
            if not is_free:
                raise Busy("another checkpoint of this store is being taken")
            self.follow(begun_s + CALL_S)
            is_short = self._store.is_short(begun_s + CALL_S)
            manifest, is_named = self._checkpoint(lambda change: True, is_short)
        if not is_named:
            raise Conflict(f"another server took a checkpoint behind {manifest.number} meanwhile")
        taken_s = time.monotonic() - begun_s
        return CheckpointTaken(
            number=manifest.number, size_bytes=manifest.size_bytes, taken_s=taken_s
        )

    @contextlib.contextmanager
    def _one_checkpoint(self) -> Generator[bool, None, None]:
        """Whether nobody else in this process is taking one."""
        is_free = self._checkpointing.acquire(blocking=False)
        try:
            yield is_free
        finally:
            if is_free:
                self._checkpointing.release()

    def _checkpoint(
        self, may_name: Callable[[ReplayedChange], bool], is_short: bool
    ) -> tuple[CheckpointManifest, bool]:
        """Take one, and whether it counts: by a record, made only where there is none behind it and
        `may_name` says so at the log's end.
        """
        try:
            manifest, names = self._copied_index(is_short)
        except IndexDamage as damage:
            self._replay.set_damaged(damage)
            raise self._replay.unavailable() from damage

        def name(change: ReplayedChange) -> IndexState | None:
            newest = change.state.checkpoint
            if not may_name(change) or (newest is not None and newest >= manifest.number):
                return None
            change.name_checkpoint(manifest.number)
            return change.state

        try:
            named = self.change(name, time.monotonic() + CALL_S)
        except UnknownOutcome:
            raise  # a record may name it
        except ObjectCacheError:
            remove_copy(self._store, names)
            raise
        if named is None:
            remove_copy(self._store, names)
        else:
            remove_old(self._store, named, self._checkpoint_rule, is_short)
        return manifest, named is not None

    def _copied_index(self, is_short: bool) -> tuple[CheckpointManifest, list[str]]:
        """In the store; in place of an older copy, where there is no room for one more. Raises as
        `write_checkpoint`.
        """
        index = self._replay.index
        is_reserved = is_short and index.used_bytes <= self._checkpoint_rule.reserved_bytes_max
        try:
            return write_checkpoint(self._store, index, is_reserved=is_reserved)
        except StorageFull:
            with self.reading() as view:
                state = view.state
            if not remove_all_but_newest(self._store, state):
                raise
            return write_checkpoint(self._store, index, is_reserved=is_reserved)
