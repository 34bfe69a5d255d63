"""The local engine's index: an LMDB environment of buckets, objects and extents.

Readers see one commit each and never wait; writers wait for each other. A commit flushes its pages
before the page that makes it current is written, which is flushed by the durable ones only: a power
loss takes the index back to an earlier commit, never to half of one. That page is flushed by
whichever commit or flush comes next, so a failure of that one is a failure of all (`flush_latch`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TypeVar

import lmdb

from objectcache_runtime.private_files import flush_directory
from objectcache_schemas.errors import StorageFull, Unavailable
from objectcache_schemas.limits import MIB
from objectcache_storage_server.engines.catalog import TransactionCatalog
from objectcache_storage_server.engines.disk.flush_latch import Flushes, FlushLatch, forget_cached
from objectcache_storage_server.engines.disk.space_reserve import SpaceReserve
from objectcache_storage_server.engines.disk.system_errors import translated
from objectcache_storage_server.engines.lmdb_spaces.transaction_users import TransactionUsers
from objectcache_storage_server.engines.local.index.index_change import (
    ENCODED_FORMAT,
    FORMAT_KEY,
    IndexChange,
)
from objectcache_storage_server.engines.local.index.index_errors import (
    full_index,
    is_full,
    is_no_room,
    no_room_for_index,
    translated_index,
)
from objectcache_storage_server.engines.local.index.index_rows import USES_ROWS
from objectcache_storage_server.engines.local.index.index_view import Databases, IndexView
from objectcache_storage_server.engines.local.records import Version

__all__ = ["USES_ROWS", "IndexChange", "IndexView", "LocalIndex"]

T = TypeVar("T")

PLAIN_FORMAT = b"1"  # nothing is or was to be encoded: older programs can read it
CODECLESS_FORMAT = b"2"  # extents with encoded slices do not say which codec encoded them
RESERVE_BYTES = 8 * MIB  # freed on a full device, so that deletes can be written down
READERS_MAX = 1024  # snapshots at a time; each takes a cache line of the lock file
SPARE_TRANSACTIONS = 32  # of ended snapshots, kept for the next ones
# Of the pages that the index may have: those in use when only deletes are taken. The rest is for
# the pages that a delete replaces, and for those that a snapshot still reads.
_FULL_FRACTION = 7 / 8
DATA_NAME, LOCK_NAME = "data.mdb", "lock.mdb"  # as LMDB calls them


class LocalIndex(TransactionCatalog[Version]):
    """Buckets, objects and extents. Safe to use from any thread."""

    def __init__(
        self,
        folder: Path,
        bytes_max: int,
        on_damage: Callable[[str, str], None],
        latch: FlushLatch,
    ) -> None:
        """Open or create it, as the device has it. `on_damage` takes the key of each row that was
        dropped, and why.

        Raises `Unavailable` for an index that cannot be read, or of another format.
        """
        self._folder = folder
        self._on_damage = on_damage
        self._write_lock = threading.Lock()
        self._sync_lock = threading.Lock()
        self._synced_commit = 0
        self._latch = latch
        self._flushes = Flushes(latch, "the index")
        self._lost: set[int] = set()
        self._users = TransactionUsers()
        with translated("open the index", folder), contextlib.ExitStack() as opened:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            forget_cached(folder / DATA_NAME)
            with translated_index("open", folder):
                self._environment = opened.enter_context(_open(folder, bytes_max))
                self._own_descriptor = os.open(folder / DATA_NAME, os.O_RDONLY | os.O_CLOEXEC)
                opened.callback(os.close, self._own_descriptor)
                self._databases = _prepare(self._environment)
                self._used_pages_max = _used_pages_max(self._environment)
            self._reserve = SpaceReserve(folder / "reserve", RESERVE_BYTES)
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Close it once every transaction has ended. A second call has no effect."""
        self._users.end()
        self._opened.close()

    # --- transactions ---

    @contextlib.contextmanager
    def reading(self) -> Generator[IndexView, None, None]:
        """One consistent snapshot: all its look-ups see the same commits."""
        with (
            self._users.one(),
            translated_index("read", self._folder),
            self._environment.begin() as txn,
        ):
            view = IndexView(txn, self._databases)
            yield view
        if view.damage and not self._latch.failure:
            self.change_with_reserve(lambda change: change.drop(view.damage))

    @contextlib.contextmanager
    def writing(self, *, durable: bool = True) -> Generator[IndexChange, None, None]:
        """One transaction; an error in the block undoes it. Raises `StorageFull`.

        `durable`: it survives a power loss once the block has ended. Otherwise it may be lost,
        with all that came after it, until a durable one has ended.
        """
        with self._changing(durable=durable, from_reserve=False) as change:
            yield change

    def change_with_reserve(self, action: Callable[[IndexChange], T]) -> T:
        """A durable transaction that works on a full device and in a full index: for deletes.

        `action` runs again, in another transaction, where the first did not fit. Raises
        `StorageFull` only when the reserve is used up.
        """
        try:
            with self._changing(durable=True, from_reserve=True) as change:
                return action(change)
        except StorageFull:
            self._reserve.release()
        with self._changing(durable=True, from_reserve=True) as change:
            return action(change)

    def refill_reserve(self) -> None:
        """Take the reserve again after a delete used it; stays without where there is no room."""
        self._reserve.take()

    @contextlib.contextmanager
    def _changing(self, *, durable: bool, from_reserve: bool) -> Generator[IndexChange, None, None]:
        with self._users.one(), translated_index("write", self._folder):
            with self._write_lock:
                self._latch.check()
                with self._transaction() as txn:
                    change = IndexChange(txn, self._databases)
                    yield change
                    change.drop_met()
                    if not from_reserve:
                        self._check_room(txn)
                self._lost |= change.lost
            if durable:
                self._sync()
        for name in change.dropped:
            self._on_damage(name, "its index row does not match its checksum")

    def take_lost(self) -> list[int]:
        """Numbers of the objects that were dropped as damaged since the last call. A number may be
        another object's by now.
        """
        if not self._lost:
            return []
        with self._write_lock:
            lost, self._lost = self._lost, set()
        return sorted(lost)

    def sync(self) -> None:
        """Make every commit so far durable."""
        with self._users.one(), translated_index("flush", self._folder):
            self._sync()

    @contextlib.contextmanager
    def _transaction(self) -> Generator[lmdb.Transaction[bytes], None, None]:
        """One that is committed at the block's end, and undone by an error in it."""
        try:
            txn = self._environment.begin(write=True)
        except lmdb.PanicError as error:  # after a page that says what is current was not written
            raise self._latch.end("the index", error) from error
        try:
            yield txn
        except BaseException:
            txn.abort()
            raise
        with self._flushes.one(self._is_failed_flush):
            txn.commit()

    def _is_failed_flush(self, error: Exception) -> bool:
        """Whether a commit that failed has lost what was written before it.

        One that found no room has not, where our own descriptor is told of no lost write either:
        the kernel tells each.
        """
        if not isinstance(error, lmdb.Error) or not is_no_room(error, self._folder):
            return True
        try:
            os.fdatasync(self._own_descriptor)
        except OSError:
            return True
        return False

    def _sync(self) -> None:
        """Flush unless somebody has since the last commit: commits of threads share a flush.

        By our own descriptor. LMDB writes what makes a commit current once its own flush has ended
        well, and one beside it by LMDB's descriptor could be told of its failure in its place.
        """
        commit = self._environment.info()["last_txnid"]
        with self._sync_lock:
            if self._synced_commit < commit:
                commit = self._environment.info()["last_txnid"]
                with self._flushes.one():
                    os.fdatasync(self._own_descriptor)
                self._synced_commit = commit
        self._latch.check()

    def _check_room(self, txn: lmdb.Transaction[bytes]) -> None:
        if _used_pages(txn, self._databases) > self._used_pages_max:
            raise full_index("write")


def _open(folder: Path, bytes_max: int) -> lmdb.Environment:
    if not (folder / LOCK_NAME).exists() and is_full(folder):
        # LMDB writes its file of readers through a mapping, which would end the process.
        raise no_room_for_index("open")
    environment = lmdb.open(
        str(folder),
        map_size=bytes_max // mmap.PAGESIZE * mmap.PAGESIZE,
        mode=0o600,
        metasync=False,  # see the head of this module
        max_dbs=len(dataclasses.fields(Databases)),
        max_readers=READERS_MAX,
        max_spare_txns=SPARE_TRANSACTIONS,
    )
    _fill_up(folder / DATA_NAME, environment)
    for directory in (folder, folder.parent):
        flush_directory(directory)
    return environment


def _fill_up(path: Path, environment: lmdb.Environment) -> None:
    """Give a file that lost its end zeros, which LMDB takes for damage; beyond its end a look-up
    would kill the process.
    """
    size_bytes = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    if path.stat().st_size < size_bytes:
        os.truncate(path, size_bytes)


def _prepare(environment: lmdb.Environment) -> Databases:
    """Create or open the databases, once the format is known to be ours."""
    names = [field.name for field in dataclasses.fields(Databases)]
    with environment.begin(write=True) as txn:
        meta = environment.open_db(b"meta", txn)
        stored = txn.get(FORMAT_KEY, PLAIN_FORMAT, db=meta)
        if stored not in (PLAIN_FORMAT, CODECLESS_FORMAT, ENCODED_FORMAT):
            found = stored.decode(errors="replace")
            raise Unavailable(f"the index has format {found}, not 1 to 3")
        txn.put(FORMAT_KEY, stored, db=meta)
        return Databases(**{name: environment.open_db(name.encode(), txn) for name in names})


def _used_pages_max(environment: lmdb.Environment) -> int:
    pages = environment.info()["map_size"] // environment.stat()["psize"]
    return int(pages * _FULL_FRACTION)


def _used_pages(txn: lmdb.Transaction[bytes], databases: Databases) -> int:
    """Pages that hold something now, in this transaction."""
    handles = (getattr(databases, field.name) for field in dataclasses.fields(databases))
    return sum(
        stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
        for stat in map(txn.stat, handles)
    )
