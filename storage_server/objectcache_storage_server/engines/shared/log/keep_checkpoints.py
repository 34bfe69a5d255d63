"""When a checkpoint is taken, and what may go once there is one."""

from __future__ import annotations

import time
from dataclasses import dataclass

from objectcache_schemas.limits import MIB
from objectcache_storage_server.engines.shared.index.index_state import IndexState
from objectcache_storage_server.engines.shared.log.checkpoint_files import (
    CALL_S,
    DamagedCheckpoint,
    check_checkpoint,
    checkpoint_number,
    manifest_names,
    objects_before,
)
from objectcache_storage_server.engines.stores.shared_store import (
    LostObject,
    SharedStore,
    StoredObject,
)

RETRY_S_MIN = 60.0  # from a checkpoint that failed to the next try, at least,
RETRY_FACTOR = 20  # and so many times as long as it took: each copies the whole index
RECORDS_KEPT = 1000  # behind the log's end, for servers that were stopped for a moment


@dataclass(frozen=True, slots=True)
class CheckpointRule:
    """After how much log a checkpoint is due, whichever comes first."""

    records: int = 20_000
    log_bytes: int = 64 * MIB
    index_part: float = 0.25  # of the index's bytes, where that is more than `log_bytes`
    records_kept: int = RECORDS_KEPT
    # Where the store has no space, the log behind two checkpoints, and three copies of the index
    # are to fit into what it holds back, in a folder 16 MiB and 4 KiB a record.
    records_when_short: int = 1000
    reserved_bytes_max: int = 2 * MIB  # of an index, for its copy to take of that space

    def is_due(self, state: IndexState, index_bytes: int, is_short: bool) -> bool:
        """Whether so much has come since the newest checkpoint. `is_short`: see `SharedStore`."""
        records = state.end - (state.checkpoint or 0)
        if is_short and records >= self.records_when_short:
            return True
        log_bytes = state.log_bytes - state.checkpoint_log_bytes
        wanted_bytes = max(self.log_bytes, int(self.index_part * index_bytes))
        return records >= self.records or log_bytes >= wanted_bytes

    def first_kept(self, state: IndexState, is_short: bool) -> int:
        """The first record that is still wanted: those behind the checkpoint before the newest,
        should the newest be damaged, and, where there is space, some for whoever is a little
        behind.
        """
        if state.checkpoint_before is None:
            return 0
        records_kept = 0 if is_short else self.records_kept
        return max(min(state.checkpoint_before, state.end - records_kept), 0)


def remove_old(store: SharedStore, state: IndexState, rule: CheckpointRule, is_short: bool) -> None:
    """Remove older checkpoints, leftovers of them, and trim the log. Raises `StoreTimeout`,
    `Unavailable`; the rest goes the next time.
    """
    deadline_s = time.monotonic() + CALL_S
    store.delete([each.name for each in old_objects(store, state, deadline_s)], deadline_s)
    first = rule.first_kept(state, is_short)
    if first:
        store.trim_log(first, deadline_s)


def old_objects(store: SharedStore, state: IndexState, deadline_s: float) -> list[StoredObject]:
    """Those of checkpoints that are older than the two newest, and of tries that nobody can be
    writing any more. Raises `StoreTimeout`, `Unavailable`.
    """
    newest = state.checkpoint or 0
    oldest = newest if state.checkpoint_before is None else state.checkpoint_before
    return objects_before(store, oldest, newest, deadline_s)


def remove_all_but_newest(store: SharedStore, state: IndexState) -> bool:
    """Make room for another checkpoint: remove what is there only for the case that the newest one
    is damaged, once it has been read; whether there was any. Raises `StoreTimeout`, `Unavailable`.
    """
    deadline_s = time.monotonic() + CALL_S
    names, newest = manifest_names(store, deadline_s), state.checkpoint
    if newest is None or len(names) < 2 or checkpoint_number(names[0]) != newest:
        return False
    try:
        check_checkpoint(store, names[0], state.store_id)
    except (DamagedCheckpoint, LostObject):
        return False
    old = objects_before(store, newest, newest, deadline_s)
    store.delete([each.name for each in old], deadline_s)
    store.trim_log(newest, deadline_s)
    return True
