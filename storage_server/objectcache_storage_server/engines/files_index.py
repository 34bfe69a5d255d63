"""The files engine's index: an SQLite database of buckets and object versions.

One connection writes, another reads, so that look-ups do not wait for a commit's flush. A
transaction is durable when it has ended (WAL, synchronous=FULL).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sqlite3
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from objectcache_schemas.errors import ObjectCacheError, StorageFull, Unavailable
from objectcache_schemas.limits import MIB
from objectcache_schemas.messages import BucketInfo, ObjectAttributes, ObjectInfo
from objectcache_storage_server.engines.base import NO_ATTRIBUTES
from objectcache_storage_server.engines.bucket_rules import no_such_bucket
from objectcache_storage_server.engines.keys import key_bytes, scan_bounds

T = TypeVar("T")

SCHEMA_VERSION = 1
LOOKUP_KEYS = 256  # keys of one statement; fewer are padded, so that one statement is prepared
MATCH_KEYS_FIRST = 16  # of a match's first look-up; each later one is four times as large
RESERVE_BYTES = 8 * MIB  # freed on a full device, so that deletes can be written down

_SCHEMA = """
CREATE TABLE buckets (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL UNIQUE,
    info BLOB NOT NULL
);
CREATE TABLE objects (
    id INTEGER PRIMARY KEY,
    bucket INTEGER NOT NULL REFERENCES buckets (id),
    key BLOB NOT NULL,
    size_bytes INTEGER NOT NULL,
    etag TEXT NOT NULL,
    modified_s REAL NOT NULL,
    attributes BLOB,
    block_bytes INTEGER NOT NULL,
    checksums BLOB NOT NULL
);
CREATE UNIQUE INDEX objects_by_key ON objects (bucket, key);
"""
_INFO_COLUMNS = "key, size_bytes, etag, modified_s, attributes"
_SELECT_BUCKET = "SELECT id, info FROM buckets WHERE name = ?"
_KEY_MARKS = ", ".join("?" * LOOKUP_KEYS)
_SELECT_VERSIONS = (
    f"SELECT {_INFO_COLUMNS}, id, block_bytes, checksums FROM objects "  # noqa: S608
    f"WHERE bucket = ? AND key IN ({_KEY_MARKS})"
)
_SELECT_STORED_KEYS = f"SELECT key FROM objects WHERE bucket = ? AND key IN ({_KEY_MARKS})"  # noqa: S608
_SELECT_RANGE = (
    f"SELECT {_INFO_COLUMNS} FROM objects "  # noqa: S608
    "WHERE bucket = ? AND key >= ? AND key < ? ORDER BY key LIMIT ?"
)
_INSERT = "INSERT INTO objects VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"

_attributes_decoder = msgspec.msgpack.Decoder(ObjectAttributes)
_bucket_decoder = msgspec.msgpack.Decoder(BucketInfo)


@dataclass(frozen=True, slots=True)
class Version:
    """One stored version of an object; `object_id` names its file."""

    object_id: int
    info: ObjectInfo
    block_bytes: int
    checksums: array[int]  # xxh3_64 of each block


@dataclass(frozen=True, slots=True)
class BucketRow:
    """A bucket and the number under which its objects are stored."""

    number: int
    info: BucketInfo


class FilesIndex:
    """Buckets and object versions. Safe to use from any thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reserve = SpaceReserve(path.with_name("reserve"), RESERVE_BYTES)
        self._write_lock = threading.Lock()
        self._read_lock = threading.Lock()
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
    def reading(self) -> Iterator[IndexView]:
        """One consistent view: all its look-ups see the same commits."""
        with self._read_lock, self._translated("read"):
            self._reader.execute("BEGIN")
            try:
                yield IndexView(self._reader)
            finally:
                _roll_back(self._reader)

    @contextlib.contextmanager
    def writing(self) -> Iterator[IndexChange]:
        """One transaction, durable when the block ends; an error in the block undoes it.

        Raises `StorageFull`.
        """
        with self._write_lock, self._translated("write"):
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield IndexChange(self._writer)
                self._writer.execute("COMMIT")
            except BaseException:
                _roll_back(self._writer)
                raise

    def delete(self, bucket_number: int, keys: Sequence[str]) -> list[Version]:
        """Delete what is stored of `keys` in one transaction, and return it.

        Works on a full device, from a reserve; raises `StorageFull` only when that is used up.
        """

        def change_index(change: IndexChange) -> list[Version]:
            versions = list(change.versions(bucket_number, keys).values())
            change.delete(version.object_id for version in versions)
            return versions

        return self._with_reserve(change_index)

    def delete_versions(self, object_ids: Sequence[int]) -> int:
        """Delete these very versions in one transaction, and count those that were there.

        Works on a full device, as `delete` does.
        """
        return self._with_reserve(lambda change: change.delete(object_ids))

    def refill_reserve(self) -> None:
        """Take the reserve again after a delete used it; stays without where there is no room."""
        self._reserve.take()

    def _with_reserve(self, change_index: Callable[[IndexChange], T]) -> T:
        try:
            with self.writing() as change:
                return change_index(change)
        except StorageFull:
            self._reserve.release()
        with self.writing() as change:
            return change_index(change)

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

    @contextlib.contextmanager
    def _translated(self, operation: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._as_our_error(error, operation) from error

    def _as_our_error(self, error: sqlite3.Error, operation: str) -> ObjectCacheError:
        code = getattr(error, "sqlite_errorcode", None)
        if code == sqlite3.SQLITE_FULL:
            return StorageFull(f"{operation} {self._path}: {error}; delete objects or add space")
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return Unavailable(
                f"{operation} {self._path}: {error}; the index is damaged: remove "
                f"{self._path.parent} to start empty"
            )
        return Unavailable(f"{operation} {self._path}: {error}")


class IndexView:
    """Look-ups of one transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def find_bucket(self, name: str) -> BucketRow | None:
        """The bucket of this name."""
        row = self._connection.execute(_SELECT_BUCKET, (name,)).fetchone()
        return None if row is None else BucketRow(row[0], _bucket_decoder.decode(row[1]))

    def bucket(self, name: str) -> BucketRow:
        """The bucket of this name; raises `NotFound` (NoSuchBucket)."""
        found = self.find_bucket(name)
        if found is None:
            raise no_such_bucket(name)
        return found

    def buckets(self) -> list[BucketInfo]:
        """All buckets by name."""
        rows = self._connection.execute("SELECT info FROM buckets ORDER BY name")
        return [_bucket_decoder.decode(info) for (info,) in rows]

    def versions(self, bucket_number: int, keys: Iterable[str]) -> dict[str, Version]:
        """What is stored of `keys`."""
        rows = self._rows_of(_SELECT_VERSIONS, bucket_number, map(key_bytes, keys))
        found = map(_version, rows)
        return {version.info.key: version for version in found}

    def match(self, bucket_number: int, keys: Sequence[str]) -> int:
        """How many leading keys are stored."""
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
        """Objects of a key range, by UTF-8 bytes of the key."""
        bounds = scan_bounds(prefix, start_after)
        rows = self._connection.execute(_SELECT_RANGE, (bucket_number, *bounds, limit))
        return [_info(row) for row in rows]

    def is_empty(self, bucket_number: int) -> bool:
        """Whether the bucket holds no object."""
        return not self.scan(bucket_number, "", "", 1)

    def file_sizes(self) -> dict[int, int]:
        """Size in bytes of every version, by id."""
        return dict(self._connection.execute("SELECT id, size_bytes FROM objects"))

    def _rows_of(
        self, statement: str, bucket_number: int, keys: Iterable[bytes]
    ) -> Iterator[tuple[Any, ...]]:
        remaining = iter(keys)
        while batch := list(itertools.islice(remaining, LOOKUP_KEYS)):
            batch += batch[-1:] * (LOOKUP_KEYS - len(batch))
            yield from self._connection.execute(statement, (bucket_number, *batch))


class IndexChange(IndexView):
    """Look-ups and changes of one transaction."""

    def add_bucket(self, info: BucketInfo) -> None:
        """Add a bucket; its name must be free."""
        self._connection.execute(
            "INSERT INTO buckets (name, info) VALUES (?, ?)",
            (info.name, msgspec.msgpack.encode(info)),
        )

    def replace_bucket(self, number: int, info: BucketInfo) -> None:
        """Store a bucket's changed info."""
        self._connection.execute(
            "UPDATE buckets SET info = ? WHERE id = ?", (msgspec.msgpack.encode(info), number)
        )

    def remove_bucket(self, bucket_number: int) -> None:
        """Remove a bucket that holds no objects."""
        self._connection.execute("DELETE FROM buckets WHERE id = ?", (bucket_number,))

    def key_of_other_size(self, bucket_number: int, size_bytes: int) -> str | None:
        """Any key whose object has another size."""
        row = self._connection.execute(
            "SELECT key FROM objects WHERE bucket = ? AND size_bytes != ? LIMIT 1",
            (bucket_number, size_bytes),
        ).fetchone()
        return None if row is None else row[0].decode()

    def add(self, bucket_number: int, versions: Iterable[Version]) -> None:
        """Add versions; what was stored under their keys must be deleted before."""
        self._connection.executemany(_INSERT, (_row(bucket_number, each) for each in versions))

    def delete(self, object_ids: Iterable[int]) -> int:
        """Delete versions by id, and count those that were there."""
        cursor = self._connection.executemany(
            "DELETE FROM objects WHERE id = ?", [(object_id,) for object_id in object_ids]
        )
        return max(0, cursor.rowcount)  # -1 where there were no ids


class SpaceReserve:
    """A file that holds space back, to be given up when the device is full."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._path = path
        self._size_bytes = size_bytes
        self._is_held = False
        self.take()

    def take(self) -> None:
        """Hold the space, where there is room for it."""
        if self._is_held:
            return
        try:
            with open(self._path, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, self._size_bytes)
            self._is_held = True
        except OSError:
            self.release()

    def release(self) -> None:
        """Give the space back to the device."""
        with contextlib.suppress(OSError):
            os.truncate(self._path, 0)
        self._is_held = False


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, check_same_thread=False, isolation_level=None)


def _tune(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA cache_size = -32768")  # KiB


def _roll_back(connection: sqlite3.Connection) -> None:
    if connection.in_transaction:
        connection.execute("ROLLBACK")


def _info(row: tuple[Any, ...]) -> ObjectInfo:
    key, size_bytes, etag, modified_s, attributes = row[:5]
    return ObjectInfo(
        key=key.decode(),
        size_bytes=size_bytes,
        etag=etag,
        modified_s=modified_s,
        attributes=_attributes_decoder.decode(attributes) if attributes else NO_ATTRIBUTES,
    )


def _version(row: tuple[Any, ...]) -> Version:
    return Version(row[5], _info(row), row[6], array("Q", row[7]))


def _row(bucket_number: int, version: Version) -> tuple[Any, ...]:
    info = version.info
    plain = info.attributes == NO_ATTRIBUTES
    return (
        version.object_id,
        bucket_number,
        key_bytes(info.key),
        info.size_bytes,
        info.etag,
        info.modified_s,
        None if plain else msgspec.msgpack.encode(info.attributes),
        version.block_bytes,
        version.checksums.tobytes(),
    )
