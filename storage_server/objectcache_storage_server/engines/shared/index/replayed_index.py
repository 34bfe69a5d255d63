"""One LMDB environment that holds a replayed index.

It is a cache of the store, so nothing is flushed. Pages are changed in place of the mapped file, by
which a commit of random keys costs a third of what writing its pages out would. What LMDB cannot
know is that a file system may have no room for such a page, which would end the process: room is
taken beforehand.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import lmdb

from objectcache_schemas.errors import Busy, StorageFull
from objectcache_schemas.limits import MIB
from objectcache_storage_server.engines.disk.system_errors import translated
from objectcache_storage_server.engines.lmdb_spaces.transaction_users import TransactionUsers
from objectcache_storage_server.engines.shared.index.copied_pieces import copied_pieces
from objectcache_storage_server.engines.shared.index.index_state import IndexState
from objectcache_storage_server.engines.shared.index.index_tables import (
    TABLES_MAX,
    IndexDamage,
    IndexTables,
)
from objectcache_storage_server.engines.shared.index.replayed_view import ReplayedView

DATA_NAME = "data.mdb"  # as LMDB calls it
READERS_MAX = 1024  # snapshots at a time; each takes a cache line of the lock file
SPARE_TRANSACTIONS = 32  # of ended snapshots, kept for the next ones
ROOM_STEP_BYTES = 8 * MIB
# Bytes of pages that a byte of a record may change: a delete of nine takes a page of keys with it.
_CHANGED_PER_BYTE = 512
# Of the file that may be in use when only deletes are taken. The rest is for pages that they
# replace, for those that a look-up still reads, and for what other servers store.
_FULL_FRACTION = 7 / 8


class ReplayedIndex:
    """Safe to read from any thread; whoever changes it holds the lock of the replay."""

    def __init__(self, folder: Path, bytes_max: int) -> None:
        """Open or create it. Raises `IndexDamage`, `StorageFull`, `Unavailable`."""
        self.folder = folder
        self.origin = ""  # manifest of the checkpoint that it began with, in this process
        self._users = TransactionUsers()
        self._room_bytes = 0  # from the file's begin on, that the file system has given
        with contextlib.ExitStack() as opened, translated("open the index", folder):
            with translated_replay("open"):
                self._environment = lmdb.open(
                    str(folder),
                    map_size=bytes_max // mmap.PAGESIZE * mmap.PAGESIZE,
                    mode=0o600,
                    sync=False,
                    metasync=False,
                    writemap=True,
                    max_dbs=TABLES_MAX,
                    max_readers=READERS_MAX,
                    max_spare_txns=SPARE_TRANSACTIONS,
                )
                opened.callback(self._environment.close)
                self._descriptor = os.open(folder / DATA_NAME, os.O_RDWR | os.O_CLOEXEC)
                opened.callback(os.close, self._descriptor)
                self._page_bytes = self._environment.stat()["psize"]
                self._map_bytes = self._environment.info()["map_size"]
                self.take_room(0)
                self.databases = IndexTables.opened(self._environment)
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Close it once every transaction has ended. A second call has no effect."""
        self._users.end()
        self._opened.close()

    @property
    def used_bytes(self) -> int:
        """Of the file, up to the last page that was ever used."""
        with self._users.one():
            return self._used_bytes()

    def _used_bytes(self) -> int:
        return (self._environment.info()["last_pgno"] + 1) * self._page_bytes

    @contextlib.contextmanager
    def reading(self) -> Generator[ReplayedView, None, None]:
        """One consistent snapshot. Raises `IndexDamage`, also from its look-ups."""
        with self._users.one(), translated_replay("read"), self._environment.begin() as txn:
            yield ReplayedView(txn, self.databases)

    @contextlib.contextmanager
    def writing(self, record_bytes: int) -> Generator[lmdb.Transaction[bytes], None, None]:
        """One transaction, undone at the block's end unless it was committed there.

        `record_bytes`: of the records that it applies. Raises `IndexDamage`, `StorageFull`.
        """
        with self._users.one(), translated_replay("write"):
            self.take_room(record_bytes)
            txn = self._environment.begin(write=True)
            try:
                yield txn
            finally:
                with contextlib.suppress(lmdb.Error):  # of one that was committed
                    txn.abort()

    def start(self, state: IndexState) -> None:
        """Say how far an empty index has come."""
        with self.writing(0) as txn:
            state.put(txn, self.databases.meta)
            txn.commit()

    @contextlib.contextmanager
    def copying(
        self, piece_bytes: int
    ) -> Generator[tuple[IndexState, Iterator[bytes]], None, None]:
        """What a moment of the index is, and a compact copy of it in pieces."""
        with (
            self._users.one(),
            translated_replay("copy"),
            self._environment.begin() as txn,
        ):

            def write(descriptor: int) -> None:
                self._environment.copyfd(descriptor, compact=True, txn=txn)

            with contextlib.closing(copied_pieces(write, piece_bytes)) as pieces:
                yield IndexState.get(txn, self.databases.meta), pieces

    def check_room(self, txn: lmdb.Transaction[bytes]) -> None:
        """Raise `StorageFull` where only deletes are taken any more: they change pages, too."""
        handles = (getattr(self.databases, each.name) for each in dataclasses.fields(IndexTables))
        used_pages = sum(
            stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
            for stat in map(txn.stat, handles)
        )
        if used_pages * self._page_bytes > _FULL_FRACTION * self._map_bytes:
            raise _full_index("write")

    def take_room(self, record_bytes: int) -> None:
        """Have room for the pages that applying records changes. Raises `StorageFull`."""
        used_bytes = self._used_bytes()
        changed_bytes = min(_CHANGED_PER_BYTE * record_bytes, used_bytes + 8 * record_bytes)
        wanted_bytes = min(used_bytes + changed_bytes + ROOM_STEP_BYTES, self._map_bytes)
        missing_bytes = wanted_bytes - self._room_bytes
        if missing_bytes <= 0:
            return
        missing_bytes = min(
            -(-missing_bytes // ROOM_STEP_BYTES) * ROOM_STEP_BYTES,
            self._map_bytes - self._room_bytes,
        )
        with translated("grow the index", self.folder):
            os.posix_fallocate(self._descriptor, self._room_bytes, missing_bytes)
        self._room_bytes += missing_bytes


@contextlib.contextmanager
def translated_replay(operation: str) -> Generator[None, None, None]:
    """Raise what an error of LMDB in the body means."""
    try:
        yield
    except lmdb.MapFullError as error:
        raise _full_index(operation) from error
    except lmdb.ReadersFullError as error:
        raise Busy(f"{operation} the index: {READERS_MAX} look-ups are under way") from error
    except lmdb.Error as error:
        raise IndexDamage(f"{operation} the index: {error}") from error


def _full_index(operation: str) -> StorageFull:
    return StorageFull(
        f"{operation} the index: it has reached storage.index_bytes_max; "
        f"delete objects or raise the setting"
    )
