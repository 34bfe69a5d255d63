"""Look-ups of one moment of the replayed index."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Iterator, Sequence

import lmdb

from objectcache_schemas.records import BucketInfo, ObjectInfo
from objectcache_storage_server.engines.base import BucketTotals
from objectcache_storage_server.engines.catalog import BucketRow
from objectcache_storage_server.engines.key_order import (
    BUCKET_BYTES,
    key_bytes,
    key_raw,
    raw_hash,
    scan_bounds,
)
from objectcache_storage_server.engines.lmdb_spaces.bucket_rows import unseal_bucket
from objectcache_storage_server.engines.lmdb_spaces.long_keys import DIRECT_BYTES, END_OF_SPACE
from objectcache_storage_server.engines.lmdb_spaces.object_spaces import ObjectSpaces, raw_space
from objectcache_storage_server.engines.lmdb_spaces.seals import seal
from objectcache_storage_server.engines.shared.index.extent_rows import (
    BuriedExtent,
    ExtentRow,
    extent_name,
    raw_extent,
)
from objectcache_storage_server.engines.shared.index.index_state import IndexState
from objectcache_storage_server.engines.shared.index.index_tables import (
    IndexDamage,
    IndexTables,
    opened_row,
    raw_number,
)
from objectcache_storage_server.engines.shared.index.version_rows import (
    check_row,
    is_pinned,
    name_of,
    unpack_version,
)
from objectcache_storage_server.engines.shared.index.writer_rows import WriterRow
from objectcache_storage_server.engines.shared.shared_catalog import Moment, SharedView
from objectcache_storage_server.engines.shared.versions import (
    ExtentName,
    ExtentShape,
    SharedVersion,
    SharedVersionName,
)

NAME_BYTES_MAX = 511  # LMDB's maximum of a key
_NAME_END_BYTES = BUCKET_BYTES + DIRECT_BYTES
_TOTALS = struct.Struct("<QQ")


class ReplayedView(SharedView):
    """Look-ups of one transaction; each raises `IndexDamage` for a row that is not what was stored.

    Beside what engines ask for, what the upkeep of the store wants to know.
    """

    def __init__(self, txn: lmdb.Transaction[bytes], databases: IndexTables) -> None:
        self._txn = txn
        self._databases = databases
        self._spaces = ObjectSpaces(txn, databases.objects)

    @property
    def moment(self) -> Moment:
        return Moment(self.state.end, 0)

    @property
    def state(self) -> IndexState:
        """How far the index has come."""
        return IndexState.get(self._txn, self._databases.meta)

    # --- buckets ---

    def find_bucket(self, name: str) -> BucketRow | None:
        raw = key_bytes(name)
        if not raw or len(raw) > NAME_BYTES_MAX:
            return None
        stored = self._txn.get(raw, db=self._databases.buckets)
        return None if stored is None else _bucket_row(raw, stored)

    def buckets(self, after: str = "", limit: int | None = None) -> list[BucketInfo]:
        cursor = self._txn.cursor(self._databases.buckets)
        if not cursor.set_range(key_bytes(after) + b"\0"):
            return []
        rows = (_bucket_row(name, stored) for name, stored in cursor if not name.startswith(b"."))
        return [row.info for row in itertools.islice(rows, limit)]

    def totals(self, bucket_number: int) -> BucketTotals:
        stored = self._txn.get(raw_space(bucket_number), db=self._databases.totals)
        if stored is None:
            return BucketTotals(0, 0)
        body = opened_row(stored, bucket_number, f"the totals of bucket {bucket_number}")
        return BucketTotals(*_TOTALS.unpack(body))

    def all_totals(self) -> BucketTotals:
        """What all buckets hold together."""
        count = size_bytes = 0
        for raw, stored in self._txn.cursor(self._databases.totals):
            body = opened_row(stored, int.from_bytes(raw, "big"), "the totals of a bucket")
            of_bucket = BucketTotals(*_TOTALS.unpack(body))
            count += of_bucket.object_count
            size_bytes += of_bucket.stored_bytes
        return BucketTotals(count, size_bytes)

    def bucket_rows(self) -> list[BucketRow]:
        """All buckets, also those whose name begins with a dot."""
        return [_bucket_row(raw, row) for raw, row in self._txn.cursor(self._databases.buckets)]

    # --- objects ---

    def versions(self, bucket_number: int, keys: Iterable[str]) -> dict[str, SharedVersion]:
        head = raw_space(bucket_number)
        names = {head + key_bytes(key): key for key in keys}
        found = self._serials(names)
        rows = self._txn.cursor(self._databases.versions).getmulti([raw for _, raw in found])
        if len(rows) != len(found):
            raise IndexDamage(f"versions of bucket {bucket_number} are not there")
        versions: dict[str, SharedVersion] = {}
        for (name, _), (raw, stored) in zip(found, rows, strict=True):
            _check_name(stored, name)
            versions[names[name]] = unpack_version(stored, int.from_bytes(raw, "big"))
        return versions

    def _serials(self, names: Iterable[bytes]) -> list[tuple[bytes, bytes]]:
        """Those of `names` that are stored, with the serial under each."""
        short = [name for name in names if len(name) <= _NAME_END_BYTES]
        found = self._txn.cursor(self._databases.objects).getmulti(short)
        for name in names:
            if len(name) > _NAME_END_BYTES and (raw := self._spaces.get(name)) is not None:
                found.append((name, raw))
        return found

    def match(self, bucket_number: int, keys: Sequence[str]) -> int:
        head = raw_space(bucket_number)
        is_stored = self._txn.cursor(self._databases.objects).set_key
        for count, key in enumerate(keys):
            name = head + key_bytes(key)
            if len(name) > _NAME_END_BYTES:
                if self._spaces.get(name) is None:
                    return count
            elif not is_stored(name):
                return count
        return len(keys)

    def scan(
        self, bucket_number: int, prefix: str, start_after: str, limit: int
    ) -> list[ObjectInfo]:
        found = self._walk(bucket_number, *scan_bounds(prefix, start_after))
        return [version.info for version in itertools.islice(found, limit)]

    def is_empty(self, bucket_number: int) -> bool:
        return self._spaces.is_empty(bucket_number)

    def key_of_other_size(self, bucket_number: int, size_bytes: int) -> str | None:
        for version in self._walk(bucket_number):
            if version.info.size_bytes != size_bytes:
                return version.info.key
        return None

    def every_version(self, after: tuple[int, str] | None, limit: int) -> list[SharedVersion]:
        return list(itertools.islice(self._versions_behind(after), limit))

    def pinned(self, names: Iterable[SharedVersionName]) -> set[SharedVersionName]:
        return {name for name in names if (row := self.row_of(name)) is not None and is_pinned(row)}

    def stored_rows(self, first_serial: int = 0) -> Iterator[tuple[int, bytes]]:
        """Serials and rows of all versions from one on, in the order in which they were stored;
        the rows are not checked.
        """
        cursor = self._txn.cursor(self._databases.versions)
        if cursor.set_range(raw_number(first_serial)):
            for raw, stored in cursor:
                yield int.from_bytes(raw, "big"), stored

    def stored_row(self, serial: int) -> bytes | None:
        """The row of this serial; None where the version is gone."""
        stored = self._txn.get(raw_number(serial), db=self._databases.versions)
        if stored is not None:
            check_row(stored, serial)
        return stored

    def check_versions(self) -> None:
        """Read every version's row. Raises `IndexDamage` for one that is not what was stored."""
        for raw, row in self._txn.cursor(self._databases.versions):
            check_row(row, int.from_bytes(raw, "big"))

    def row_of(self, name: SharedVersionName) -> bytes | None:
        """The row of this very version; None where it is not there."""
        raw_name = raw_space(name.bucket_number) + key_raw(name.key)
        stored = self._spaces.get(raw_name)
        if stored is None or int.from_bytes(stored, "big") != name.serial:
            return None
        row = self._row(name.serial)
        _check_name(row, raw_name)
        return row

    def _versions_behind(self, after: tuple[int, str] | None) -> Iterator[SharedVersion]:
        number, key = after or (0, "")
        first = key_raw(key) + b"\0" if after else b""
        bucket = self._spaces.bucket_from(number)
        while bucket is not None:
            yield from self._walk(bucket, first if bucket == number else b"")
            bucket = self._spaces.bucket_from(bucket + 1)

    def _walk(
        self, bucket_number: int, first: bytes = b"", end: bytes = END_OF_SPACE
    ) -> Iterator[SharedVersion]:
        head = raw_space(bucket_number)
        for raw_key, raw in self._spaces.walk(bucket_number, first, end):
            serial = int.from_bytes(raw, "big")
            row = self._row(serial)
            _check_name(row, head + raw_key)
            yield unpack_version(row, serial)

    def _row(self, serial: int) -> bytes:
        row = self._txn.get(raw_number(serial), db=self._databases.versions)
        if row is None:
            raise IndexDamage(f"version {serial} is not there")
        check_row(row, serial)
        return row

    # --- extents ---

    def shapes(self, extents: Iterable[ExtentName]) -> dict[ExtentName, ExtentShape]:
        found = ((name, self.extent(name)) for name in dict.fromkeys(extents))
        return {name: row.shape for name, row in found if row is not None}

    def extent(self, name: ExtentName) -> ExtentRow | None:
        """What is stored of an extent that some version names."""
        raw = raw_extent(name)
        stored = self._txn.get(raw, db=self._databases.extents)
        return None if stored is None else ExtentRow.unpack(raw, stored)

    def extents(self, after: ExtentName | None, limit: int) -> list[tuple[ExtentName, ExtentRow]]:
        """Extents that some version names, behind one of them, in the order of their names."""
        items = self._behind(self._databases.extents, after)
        return [
            (extent_name(raw), ExtentRow.unpack(raw, stored))
            for raw, stored in itertools.islice(items, limit)
        ]

    def versions_in(self, name: ExtentName) -> list[SharedVersion]:
        """The versions that name an extent, in the order in which they were stored."""
        row = self.extent(name)
        found: dict[int, SharedVersion] = {}
        for first, last in row.serials if row is not None else ():
            cursor = self._txn.cursor(self._databases.versions)
            if not cursor.set_range(raw_number(first)):
                continue
            for raw, stored in cursor:
                serial = int.from_bytes(raw, "big")
                if serial > last:
                    break
                version = unpack_version(stored, serial)
                if name in version.extents:
                    found[serial] = version
        return list(found.values())

    def graveyard(self, after: ExtentName | None, limit: int) -> list[BuriedExtent]:
        """Extents that no version names any more, behind one of them, in order of their names."""
        items = self._behind(self._databases.graveyard, after)
        return [BuriedExtent.unpack(raw, stored) for raw, stored in itertools.islice(items, limit)]

    def is_buried(self, name: ExtentName) -> bool:
        """Whether an extent is in the graveyard."""
        return self._txn.get(raw_extent(name), db=self._databases.graveyard) is not None

    def _behind(self, database: object, after: ExtentName | None) -> Iterator[tuple[bytes, bytes]]:
        cursor = self._txn.cursor(database)  # type: ignore[arg-type]
        first = b"" if after is None else raw_extent(after) + b"\0"
        return iter(cursor) if cursor.set_range(first) else iter(())

    # --- documents, writers ---

    def document(self, name: str) -> bytes | None:
        raw = key_bytes(name)
        stored = self._txn.get(raw, db=self._databases.documents)
        return None if stored is None else opened_row(stored, raw_hash(raw), f"document {name}")

    def writer_row(self, writer: int) -> WriterRow | None:
        """What the log says of a writer."""
        stored = self._txn.get(raw_number(writer), db=self._databases.writers)
        return None if stored is None else WriterRow.unpack(writer, stored)

    def writers(self) -> dict[int, WriterRow]:
        """All writers that are not forgotten, also fenced ones."""
        rows = self._txn.cursor(self._databases.writers)
        numbers = ((int.from_bytes(raw, "big"), stored) for raw, stored in rows)
        return {number: WriterRow.unpack(number, stored) for number, stored in numbers}


def sealed_totals(bucket_number: int, totals: BucketTotals) -> bytes:
    """A bucket's totals as they are stored."""
    return seal(_TOTALS.pack(totals.object_count, totals.stored_bytes), bucket_number)


def _check_name(row: bytes, name: bytes) -> None:
    if name_of(row) != name:
        raise IndexDamage("a key leads to another key's version")


def _bucket_row(name: bytes, stored: bytes) -> BucketRow:
    row = unseal_bucket(name, stored)
    if row is None:
        raise IndexDamage("a bucket's row does not match its checksum")
    return row
