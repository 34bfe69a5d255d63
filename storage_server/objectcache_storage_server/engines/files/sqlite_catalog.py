"""The files engine's catalog: an SQLite database of buckets and object versions.

One connection writes, another reads, so that look-ups do not wait for a commit's flush. A
transaction is durable when it has ended (WAL, synchronous=FULL): every commit flushes what it has
written, and a checkpoint whose flush fails counts for nothing, its pages being written again.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from objectcache_schemas.errors import ObjectCacheError, StorageFull, Unavailable
from objectcache_schemas.limits import MIB
from objectcache_schemas.records import BucketInfo, ObjectInfo
from objectcache_storage_server.engines.base import BucketTotals
from objectcache_storage_server.engines.blobs.blob_catalog import (
    BlobCatalog,
    BlobChange,
    BlobVersion,
    BlobVersionName,
    BlobView,
)
from objectcache_storage_server.engines.catalog import BucketRow
from objectcache_storage_server.engines.disk.flush_latch import FlushLatch, forget_cached
from objectcache_storage_server.engines.disk.space_reserve import SpaceReserve
from objectcache_storage_server.engines.disk.system_errors import translated
from objectcache_storage_server.engines.files.catalog_rows import (
    RowRecord,
    row_of_version,
    seal_bucket,
    unseal_bucket,
    version_of_row,
)
from objectcache_storage_server.engines.key_order import key_bytes, key_raw, key_text, scan_bounds

T = TypeVar("T")

log = logging.getLogger("objectcache.storage_server.engines.files_index")

SCHEMA_VERSION = 1
LOOKUP_KEYS = 256  # keys of one statement; fewer are padded, so that one statement is prepared
MATCH_KEYS_FIRST = 16  # of a match's first look-up; each later one is four times as large
RESERVE_BYTES = 8 * MIB  # freed on a full device, so that deletes can be written down

# The key lies in the same b-tree cell as what it names, so that `record` can vouch for both.
_SCHEMA = """
CREATE TABLE buckets (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL UNIQUE,
    info BLOB NOT NULL
);
CREATE TABLE objects (
    bucket INTEGER NOT NULL,
    key BLOB NOT NULL,
    id INTEGER NOT NULL,
    size_bytes INTEGER NOT NULL,
    record BLOB NOT NULL,
    checksums BLOB NOT NULL,
    PRIMARY KEY (bucket, key)
) WITHOUT ROWID;
"""
# Totals follow the rows whoever changes them, within the same transaction. What an insert replaces
# is subtracted before it, as no delete trigger runs for it.
_USAGE_SCHEMA = """
CREATE TABLE usage (
    bucket INTEGER PRIMARY KEY,
    object_count INTEGER NOT NULL,
    stored_bytes INTEGER NOT NULL
);
CREATE TRIGGER usage_before_insert BEFORE INSERT ON objects BEGIN
    INSERT INTO usage SELECT NEW.bucket, 0, 0
        WHERE NOT EXISTS (SELECT 1 FROM usage WHERE bucket = NEW.bucket);
    UPDATE usage SET
        object_count = object_count - 1,
        stored_bytes = stored_bytes
            - (SELECT size_bytes FROM objects WHERE bucket = NEW.bucket AND key = NEW.key)
        WHERE bucket = NEW.bucket
            AND EXISTS (SELECT 1 FROM objects WHERE bucket = NEW.bucket AND key = NEW.key);
END;
CREATE TRIGGER usage_after_insert AFTER INSERT ON objects BEGIN
    UPDATE usage SET
        object_count = object_count + 1, stored_bytes = stored_bytes + NEW.size_bytes
        WHERE bucket = NEW.bucket;
END;
CREATE TRIGGER usage_after_delete AFTER DELETE ON objects BEGIN
    UPDATE usage SET
        object_count = object_count - 1, stored_bytes = stored_bytes - OLD.size_bytes
        WHERE bucket = OLD.bucket;
END;
INSERT INTO usage SELECT bucket, COUNT(*), SUM(size_bytes) FROM objects GROUP BY bucket;
"""
_SELECT_TOTALS = "SELECT object_count, stored_bytes FROM usage WHERE bucket = ?"
_SELECT_USAGE_TABLE = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'usage'"
_SELECT_BUCKETS = (
    "SELECT info FROM buckets WHERE name > ? AND name NOT LIKE '.%' ORDER BY name LIMIT ?"
)
_SELECT_BUCKET = "SELECT id, info FROM buckets WHERE name = ?"
_KEY_MARKS = ", ".join("?" * LOOKUP_KEYS)
_SELECT_VERSIONS = (
    "SELECT key, id, size_bytes, record, checksums FROM objects "  # noqa: S608
    f"WHERE bucket = ? AND key IN ({_KEY_MARKS})"
)
_SELECT_STORED_KEYS = f"SELECT key FROM objects WHERE bucket = ? AND key IN ({_KEY_MARKS})"  # noqa: S608
_SELECT_RANGE = (
    "SELECT key, id, size_bytes, record FROM objects "
    "WHERE bucket = ? AND key >= ? AND key < ? ORDER BY key"
)
_SELECT_ROW = "SELECT id, size_bytes, record, checksums FROM objects WHERE bucket = ? AND key = ?"
# Rot may turn a value into one of another type.
_SELECT_FILES = (
    "SELECT bucket, key, id, size_bytes FROM objects "
    "WHERE typeof(key) = 'blob' AND typeof(id) = 'integer'"
)
_INSERT = "INSERT OR REPLACE INTO objects VALUES (?, ?, ?, ?, ?, ?)"
_DELETE = "DELETE FROM objects WHERE bucket = ? AND key = ? AND id = ?"


class SqliteCatalog(BlobCatalog):
    """Buckets and object versions. Safe to use from any thread."""

    def __init__(
        self, path: Path, on_damage: Callable[[str, str], None], latch: FlushLatch
    ) -> None:
        """Open or create it, as the device has it. `on_damage` takes the key of each row that was
        dropped, and why.
        """
        self._path = path
        self._latch = latch
        self._on_damage = on_damage
        self._reserve = SpaceReserve(path.with_name("reserve"), RESERVE_BYTES)
        self._write_lock = threading.Lock()
        self._read_lock = threading.Lock()
        _create_private(path)
        with translated("open the index", path):
            for name in (path.name, f"{path.name}-wal"):
                forget_cached(path.with_name(name))
        with contextlib.ExitStack() as opened, self._translated("open"):
            self._writer = opened.enter_context(contextlib.closing(_connect(path)))
            _tune(self._writer)
            self._prepare()
            self._reader = opened.enter_context(contextlib.closing(_connect(path)))
            _tune(self._reader)
            self._reader.execute("PRAGMA query_only = 1")
            opened.pop_all()

    def close(self) -> None:
        """Close both connections; the write-ahead log is folded into the database."""
        with self._read_lock, self._write_lock, self._translated("close"):
            self._reader.close()
            self._writer.close()

    # --- transactions ---

    @contextlib.contextmanager
    def reading(self) -> Generator[SqliteView, None, None]:
        """One consistent view: all its look-ups see the same commits."""
        view = SqliteView(self._reader)
        with self._read_lock, self._translated("read"):
            self._reader.execute("BEGIN")
            try:
                yield view
            finally:
                _roll_back(self._reader)
        if view.damaged_rows and not self._latch.failure:
            self.change_with_reserve(lambda change: change.drop_damaged(view.damaged_rows))

    @contextlib.contextmanager
    def writing(self) -> Generator[SqliteChange, None, None]:
        """One transaction, durable when the block ends; an error in the block undoes it.

        Raises `StorageFull`.
        """
        change = SqliteChange(self._writer)
        with self._write_lock, self._translated("write"):
            self._latch.check()
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield change
                self._latch.check()
                self._commit()
            except BaseException:
                _roll_back(self._writer)
                raise
        self._latch.check()
        for key in change.dropped_keys:
            self._on_damage(key, "its index row does not match its checksum")

    def _commit(self) -> None:
        try:
            self._writer.execute("COMMIT")
        except sqlite3.Error as error:
            if _code_of(error) != sqlite3.SQLITE_IOERR:
                raise
            raise self._latch.end("the index", error) from error

    def change_with_reserve(self, act: Callable[[SqliteChange], T]) -> T:
        try:
            with self.writing() as change:
                return act(change)
        except StorageFull:
            self._reserve.release()
        with self.writing() as change:
            return act(change)

    def refill_reserve(self) -> None:
        self._reserve.take()

    # --- opening ---

    def _prepare(self) -> None:
        self._writer.execute("PRAGMA journal_mode = WAL")
        (version,) = self._writer.execute("PRAGMA user_version").fetchone()
        if version == 0:
            self._writer.executescript(
                f"BEGIN; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
            )
        elif version != SCHEMA_VERSION:
            raise Unavailable(f"{self._path} has format {version}, not {SCHEMA_VERSION}")
        if self._writer.execute(_SELECT_USAGE_TABLE).fetchone() is None:
            # Also in a store that was written before there were totals: it is counted here, once.
            self._writer.executescript(f"BEGIN; {_USAGE_SCHEMA} COMMIT;")

    @contextlib.contextmanager
    def _translated(self, operation: str) -> Generator[None, None, None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._as_our_error(error, operation) from error

    def _as_our_error(self, error: sqlite3.Error, operation: str) -> ObjectCacheError:
        log.warning("%s %s: %s", operation, self._path, error)  # clients are not told the path
        what = f"{operation} the index: {error}"
        code = _code_of(error)
        if code == sqlite3.SQLITE_FULL:
            return StorageFull(f"{what}; delete objects or add space")
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return Unavailable(
                f"{what}; the index is damaged: stop the server and remove index.sqlite3 and "
                f"objects in its data directory (server.data_dir) to start with no objects; "
                f"accounts stay"
            )
        return Unavailable(what)


class SqliteView(BlobView):
    """Look-ups of one transaction. Rows that do not match their checksum count as missing."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.damaged_rows: set[tuple[int, str]] = set()  # bucket number and key
        self._connection = connection

    def find_bucket(self, name: str) -> BucketRow | None:
        row = self._connection.execute(_SELECT_BUCKET, (name,)).fetchone()
        return None if row is None else BucketRow(row[0], unseal_bucket(row[1]))

    def buckets(self, after: str = "", limit: int | None = None) -> list[BucketInfo]:
        count = -1 if limit is None else limit
        rows = self._connection.execute(_SELECT_BUCKETS, (after, count))
        return [unseal_bucket(stored) for (stored,) in rows]

    def versions(self, bucket_number: int, keys: Iterable[str]) -> dict[str, BlobVersion]:
        found: dict[str, BlobVersion] = {}
        raw_keys = map(key_bytes, keys)
        for key, *row in self._rows_of(_SELECT_VERSIONS, bucket_number, raw_keys):
            version = version_of_row(bucket_number, key, *row)
            if version is None:
                self._add_damaged(bucket_number, key)
            else:
                found[version.info.key] = version
        return found

    def match(self, bucket_number: int, keys: Sequence[str]) -> int:
        matched, batch_keys = 0, MATCH_KEYS_FIRST
        while matched < len(keys):
            batch = [key_bytes(key) for key in keys[matched : matched + batch_keys]]
            stored = {row[0] for row in self._rows_of(_SELECT_STORED_KEYS, bucket_number, batch)}
            leading = sum(1 for _ in itertools.takewhile(stored.__contains__, batch))
            matched += leading
            if leading < len(batch):
                break
            batch_keys *= 4
        return matched

    def scan(
        self, bucket_number: int, prefix: str, start_after: str, limit: int
    ) -> list[ObjectInfo]:
        found: list[ObjectInfo] = []
        bounds = scan_bounds(prefix, start_after)
        with contextlib.closing(
            self._connection.execute(_SELECT_RANGE, (bucket_number, *bounds))
        ) as rows:
            while len(found) < limit and (row := rows.fetchone()) is not None:
                record = RowRecord.from_row(bucket_number, *row)
                if record is None:
                    self._add_damaged(bucket_number, row[0])
                else:
                    found.append(record.info)
        return found

    def is_empty(self, bucket_number: int) -> bool:
        row = self._connection.execute(
            "SELECT 1 FROM objects WHERE bucket = ? LIMIT 1", (bucket_number,)
        ).fetchone()
        return row is None

    def key_of_other_size(self, bucket_number: int, size_bytes: int) -> str | None:
        row = self._connection.execute(
            "SELECT key FROM objects WHERE bucket = ? AND size_bytes != ? LIMIT 1",
            (bucket_number, size_bytes),
        ).fetchone()
        return None if row is None else key_text(row[0])

    def totals(self, bucket_number: int) -> BucketTotals:
        row = self._connection.execute(_SELECT_TOTALS, (bucket_number,)).fetchone()
        return BucketTotals(0, 0) if row is None else BucketTotals(*row)

    def blob_sizes(self) -> Iterator[tuple[BlobVersionName, int]]:
        for bucket_number, key, object_id, size_bytes in self._connection.execute(_SELECT_FILES):
            yield BlobVersionName(bucket_number, key_text(key), object_id), size_bytes

    def _add_damaged(self, bucket_number: int, key: bytes) -> None:
        self.damaged_rows.add((bucket_number, key_text(key)))

    def _rows_of(
        self, statement: str, bucket_number: int, keys: Iterable[bytes]
    ) -> Iterator[tuple[Any, ...]]:
        remaining = iter(keys)
        while batch := list(itertools.islice(remaining, LOOKUP_KEYS)):
            batch += batch[-1:] * (LOOKUP_KEYS - len(batch))
            yield from self._connection.execute(statement, (bucket_number, *batch))


class SqliteChange(SqliteView, BlobChange):
    """Look-ups and changes of one transaction. A look-up drops the damaged rows that it meets."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        super().__init__(connection)
        self.dropped_keys: list[str] = []  # of damaged rows

    def versions(self, bucket_number: int, keys: Iterable[str]) -> dict[str, BlobVersion]:
        found = super().versions(bucket_number, keys)
        self.drop_damaged(self.damaged_rows)
        self.damaged_rows.clear()
        return found

    def add_bucket(self, info: BucketInfo) -> int:
        cursor = self._connection.execute(
            "INSERT INTO buckets (name, info) VALUES (?, ?)",
            (info.name, seal_bucket(info)),
        )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def replace_bucket(self, number: int, info: BucketInfo) -> None:
        self._connection.execute(
            "UPDATE buckets SET info = ? WHERE id = ?",
            (seal_bucket(info), number),
        )

    def remove_bucket(self, number: int) -> None:
        self._connection.execute("DELETE FROM buckets WHERE id = ?", (number,))
        self._connection.execute("DELETE FROM usage WHERE bucket = ?", (number,))

    def add(self, versions: Iterable[BlobVersion]) -> None:
        self._connection.executemany(
            _INSERT,
            map(row_of_version, versions),
        )

    def delete(self, names: Iterable[BlobVersionName]) -> int:
        cursor = self._connection.executemany(
            _DELETE, [(name.bucket_number, key_raw(name.key), name.blob_number) for name in names]
        )
        return max(0, cursor.rowcount)  # -1 where there were no names

    def drop_damaged(self, rows: Iterable[tuple[int, str]]) -> None:
        """Delete those of the rows (bucket number, key) that do not match their checksum."""
        for bucket_number, key in rows:
            where = (bucket_number, key_raw(key))
            row = self._connection.execute(_SELECT_ROW, where).fetchone()
            if row is not None and version_of_row(*where, *row) is None:
                self._connection.execute("DELETE FROM objects WHERE bucket = ? AND key = ?", where)
                self.dropped_keys.append(key)


def _create_private(path: Path) -> None:
    """Create the database's file where it is missing; SQLite gives its other files the same mode.

    To be called before any connection: closing a descriptor of the file would drop SQLite's locks.
    """
    with translated("create the index", path):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))


def _code_of(error: sqlite3.Error) -> int:
    """The primary code, which is the low byte; an error of the module itself has none."""
    return int(getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)) & 0xFF


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, check_same_thread=False, isolation_level=None)


def _tune(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA cache_size = -32768")  # KiB


def _roll_back(connection: sqlite3.Connection) -> None:
    if connection.in_transaction:
        connection.execute("ROLLBACK")
