"""What opening a store settles: which store it is, and an index of it to go on from."""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path

from objectcache_schemas.errors import Unavailable
from objectcache_storage_server.engines.blobs.blob_store import StoreTimeout
from objectcache_storage_server.engines.shared.index.index_folders import IndexFolders
from objectcache_storage_server.engines.shared.index.index_state import IndexState
from objectcache_storage_server.engines.shared.index.index_tables import IndexDamage
from objectcache_storage_server.engines.shared.index.replayed_index import ReplayedIndex
from objectcache_storage_server.engines.shared.log.checkpoint_files import (
    CALL_S,
    PREFIX,
    DamagedCheckpoint,
    checkpoint_number,
    manifest_names,
    read_checkpoint,
)
from objectcache_storage_server.engines.shared.log.log_records import (
    STORE_ID_BYTES,
    DamagedRecord,
    LogRecord,
    pack_record,
    unpack_record,
)
from objectcache_storage_server.engines.shared.log.writers.own_writer import OwnWriter, random_bits
from objectcache_storage_server.engines.shared.operations import join_operations
from objectcache_storage_server.engines.stores.shared_store import (
    LostObject,
    SharedStore,
    TrimmedLog,
)

LISTINGS_MAX = 3  # a checkpoint may be removed while it is read, once there is a newer one

log = logging.getLogger("objectcache.storage_server.engines.shared")


def store_identity(store: SharedStore, own: OwnWriter, deadline_s: float) -> bytes:
    """The id that record 0 gave the store, and each record says; makes that record in an empty log.
    Raises `DamagedRecord` where none can be read, `StoreTimeout`, `StorageFull`, `Unavailable`.
    """
    first = 0
    damage: DamagedRecord | None = None
    while True:
        try:
            found = store.read_log(first, 1, deadline_s)
        except TrimmedLog as trimmed:
            first = trimmed.first
            continue
        if found:
            try:
                return unpack_record(found[0], first).store_id
            except DamagedRecord as error:
                damage, first = damage or error, first + 1
                continue
        if damage is not None:
            raise damage
        store_id = random_bits(8 * STORE_ID_BYTES).to_bytes(STORE_ID_BYTES, "big")
        record = LogRecord(store_id, 0, own.number, own.next_sequence(), 0, join_operations([]))
        try:
            if store.append(0, pack_record(record), deadline_s):
                own.set_registered()
        except StoreTimeout as error:
            log.warning("the store's first record may not be stored: %s", error)


class IndexOpener:
    """Opens the index that is there, or makes one."""

    def __init__(
        self, store: SharedStore, store_id: bytes, folders: IndexFolders, bytes_max: int
    ) -> None:
        """Raises `Unavailable` where the folders are of another store."""
        folders.check_store(store_id)
        self.store_id = store_id
        self._store = store
        self._folders = folders
        self._bytes_max = bytes_max
        self._distrusted: set[str] = set()  # checkpoints whose index turned out to be damaged

    def opened(self, deadline_s: float) -> ReplayedIndex:
        """The index that an earlier start left behind, or a new one. Raises `StorageFull`,
        `StoreTimeout`, `Unavailable`.
        """
        path = self._folders.find()
        if path is not None:
            try:
                return self._kept(path, deadline_s)
            except IndexDamage as damage:
                log.error("the index is made again from the store: %s", damage)
                self._folders.discard(path)
        return self.made(deadline_s)

    def made(self, deadline_s: float) -> ReplayedIndex:
        """An index to go on from: of the newest whole checkpoint, or an empty one where the log
        has all records. Raises `StorageFull`, `StoreTimeout`, `Unavailable`.
        """
        reason = ""
        for _ in range(LISTINGS_MAX):
            names = manifest_names(self._store, deadline_s)
            for name in names:
                index = None if name in self._distrusted else self._of_checkpoint(name)
                if index is not None:
                    return index
            try:
                self._store.read_log(0, 1, deadline_s)
            except TrimmedLog as trimmed:
                reason = (
                    f"the store's log begins at record {trimmed.first}, and of {len(names)} "
                    f"checkpoints none can be read that comes so far: restore the store's objects "
                    f"{PREFIX}* from a replica or a backup"
                )
            else:
                return self._empty()
        raise Unavailable(reason)

    def made_beyond(self, record: DamagedRecord, deadline_s: float) -> ReplayedIndex:
        """An index of the newest whole checkpoint that comes beyond this record, and so does
        without it. Raises the record's damage where there is none, `StorageFull`, `StoreTimeout`,
        `Unavailable`.
        """
        for name in manifest_names(self._store, deadline_s):
            if checkpoint_number(name) <= record.number:
                break
            index = None if name in self._distrusted else self._of_checkpoint(name)
            if index is not None:
                log.warning("an index is made of %s, since %s", name, record)
                return index
        raise record

    def distrust(self, index: ReplayedIndex) -> None:
        """The index is damaged: do not make another of the checkpoint that it began with."""
        self._distrusted.add(index.origin)

    def discard(self, index: ReplayedIndex) -> None:
        """Remove an index that is closed."""
        self._folders.discard(index.folder)

    def _kept(self, path: Path, deadline_s: float) -> ReplayedIndex:
        index = ReplayedIndex(path, self._bytes_max)
        try:
            with index.reading() as view:
                state = view.state
            if state.store_id != self.store_id:
                raise IndexDamage("it is of another store")
            self._check_not_ahead(
                state.end,
                "this server",
                "remove the shared index in the data directory (server.data_dir)",
                deadline_s,
            )
        except BaseException:
            index.close()
            raise
        return index

    def _check_not_ahead(self, end: int, who: str, remedy: str, deadline_s: float) -> None:
        """Raise `Unavailable` where the log is shorter than what was replayed of it: what would be
        appended after that would leave a hole.
        """
        log_end = self._store.log_end(0, deadline_s)
        if log_end < end:
            raise Unavailable(
                f"the store's log ends with record {log_end - 1}, and {who} knew record "
                f"{end - 1}: the store was set back to an earlier state, and what was acknowledged "
                f"since is lost; {remedy} to go on with what the store has"
            )

    def _empty(self) -> ReplayedIndex:
        """An index to which no record was applied yet."""
        path = self._folders.create()
        try:
            index = ReplayedIndex(path, self._bytes_max)
            index.start(IndexState(self.store_id))
        except IndexDamage as damage:
            raise Unavailable(f"no index can be made: {damage}") from damage
        self._folders.set_whole(path)
        return index

    def _of_checkpoint(self, name: str) -> ReplayedIndex | None:
        """The index of a checkpoint; None where that is damaged, or the log was trimmed beyond it.
        Raises `Unavailable` where the log ends before it.
        """
        path = self._folders.create()
        with contextlib.ExitStack() as unused:
            unused.callback(self._folders.discard, path)
            try:
                index = read_checkpoint(self._store, name, self.store_id, path, self._bytes_max)
                unused.callback(index.close)
                with index.reading() as view:
                    end = view.state.end
                self._store.read_log(end, 1, time.monotonic() + CALL_S)
                self._check_not_ahead(
                    end,
                    f"the checkpoint {name}",
                    "restore its log, or remove that object",
                    time.monotonic() + CALL_S,
                )
            except (DamagedCheckpoint, LostObject, TrimmedLog) as error:
                log.warning("a checkpoint of the shared store's index is passed over: %s", error)
                return None
            unused.pop_all()
        self._folders.set_whole(path)
        return index
