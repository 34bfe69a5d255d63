"""Look-ups of one transaction of the local engine's index."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import lmdb
import numpy as np

from objectcache_schemas.records import BucketInfo, ObjectInfo
from objectcache_storage_server.engines.catalog import BucketRow, CatalogView
from objectcache_storage_server.engines.key_order import (
    key_bytes,
    key_raw,
    key_text,
    raw_hash,
    scan_bounds,
)
from objectcache_storage_server.engines.lmdb_spaces.bucket_rows import unseal_bucket
from objectcache_storage_server.engines.lmdb_spaces.object_spaces import ObjectSpaces, raw_space
from objectcache_storage_server.engines.lmdb_spaces.seals import unseal
from objectcache_storage_server.engines.local.index.index_errors import damaged_index
from objectcache_storage_server.engines.local.index.index_rows import (
    KEY_AT,
    STORED_EXTENT,
    STORED_OBJECT,
    bucket_of_row,
    codec_of_body,
    fill_table,
    overlay_uses,
    pitches_of_body,
    rows_of_bodies,
)
from objectcache_storage_server.engines.local.records import (
    Record,
    Version,
    info_of,
    unseal_record,
    version_of,
)
from objectcache_storage_server.engines.local.space.dense_tables import DenseTable

NUMBER_BYTES = 4  # of an object's, extent's or block's number, big-endian


@dataclass(frozen=True, slots=True)
class Databases:
    """Handles of LMDB's named databases, whose type has no public name."""

    buckets: Any  # name: bucket
    objects: Any  # see `object_spaces`
    rows: Any  # object number: its row, bucket and key
    extents: Any  # extent number: its row
    uses: Any  # block of object numbers: what each was used last
    unflushed: Any  # extent number: nothing
    meta: Any  # format, counters


@dataclass(slots=True)
class Damage:
    """What look-ups met that does not match its checksum."""

    rows: set[tuple[int, str]] = field(default_factory=set)  # bucket number and key
    numbers: set[int] = field(default_factory=set)  # of object rows
    extents: set[int] = field(default_factory=set)
    buckets: set[str] = field(default_factory=set)  # stay, for their objects' sake: not in the bool

    def __bool__(self) -> bool:
        return bool(self.rows or self.numbers or self.extents)


class IndexView(CatalogView[Version]):
    """Look-ups of one transaction. Rows that do not match their checksum count as missing."""

    def __init__(self, txn: lmdb.Transaction[bytes], databases: Databases) -> None:
        self.damage = Damage()
        self._txn = txn
        self._databases = databases
        self._spaces = ObjectSpaces(txn, databases.objects)

    # --- buckets ---

    def find_bucket(self, name: str) -> BucketRow | None:
        raw = key_bytes(name)
        if not raw or len(raw) > 511:
            return None
        stored = self._txn.get(raw, db=self._databases.buckets)
        return None if stored is None else _bucket_row(raw, stored)

    def bucket_rows(self) -> list[BucketRow]:
        """All buckets by name, hidden ones too. What is damaged is left out, and in `damage`."""
        rows: list[BucketRow] = []
        for name, stored in self._txn.cursor(self._databases.buckets):
            row = unseal_bucket(name, stored)
            if row is None:
                self.damage.buckets.add(key_text(name))
            else:
                rows.append(row)
        return rows

    def buckets(self, after: str = "", limit: int | None = None) -> list[BucketInfo]:
        """Buckets after this name, by name, without those that begin with a dot. What is damaged
        is left out, and in `damage`.
        """
        found: list[BucketInfo] = []
        first = key_bytes(after) + b"\0"
        cursor = self._txn.cursor(self._databases.buckets)
        if not cursor.set_range(first):
            return found
        for name, stored in cursor:
            if limit is not None and len(found) >= limit:
                break
            if name.startswith(b"."):
                continue
            row = unseal_bucket(name, stored)
            if row is None:
                self.damage.buckets.add(key_text(name))
            else:
                found.append(row.info)
        return found

    # --- objects by key ---

    def versions(self, bucket_number: int, keys: Iterable[str]) -> dict[str, Version]:
        found: dict[str, Version] = {}
        get, head = self._spaces.get, raw_space(bucket_number)
        for key in keys:
            raw = head + key_bytes(key)
            stored = get(raw)
            if stored is None:
                continue
            record = unseal_record(stored, raw_hash(raw))
            if record is None:
                self.damage.rows.add((bucket_number, key))
            else:
                found[key] = version_of(record, bucket_number, key)
        return found

    def match(self, bucket_number: int, keys: Sequence[str]) -> int:
        """How many leading keys are stored. Looks at one key more than that."""
        get, head = self._spaces.get, raw_space(bucket_number)
        for count, key in enumerate(keys):
            if get(head + key_bytes(key)) is None:
                return count
        return len(keys)

    def scan(
        self, bucket_number: int, prefix: str, start_after: str, limit: int
    ) -> list[ObjectInfo]:
        records = self._records(bucket_number, *scan_bounds(prefix, start_after))
        return [info_of(record, key) for key, record in itertools.islice(records, limit)]

    def is_empty(self, bucket_number: int) -> bool:
        return self._spaces.is_empty(bucket_number)

    def key_of_other_size(self, bucket_number: int, size_bytes: int) -> str | None:
        """Any key whose object has another size. Reads all where there is none."""
        for key, record in self._records(bucket_number):
            if record.size_bytes != size_bytes:
                return key
        return None

    def every_version(self, after: tuple[int, str] | None, limit: int) -> list[Version]:
        """Versions of all buckets behind a bucket number and key, in that order."""
        return list(itertools.islice(self._versions_behind(after), limit))

    def _versions_behind(self, after: tuple[int, str] | None) -> Iterator[Version]:
        number, key = after or (0, "")
        first = key_raw(key) + b"\0" if after else b""
        bucket = self._spaces.bucket_from(number)
        while bucket is not None:
            for key, record in self._records(bucket, first if bucket == number else b""):
                yield version_of(record, bucket, key)
            bucket = self._spaces.bucket_from(bucket + 1)

    # --- objects and extents by number ---

    def name_of(self, number: int) -> tuple[int, str] | None:
        """Bucket number and key of an object number."""
        stored = self._txn.get(raw_number(number), db=self._databases.rows)
        if stored is None:
            return None
        if unseal(stored, number) is None:
            self.damage.numbers.add(number)
            return None
        return bucket_of_row(stored), key_text(stored[KEY_AT:])

    def load_objects(self, table: DenseTable) -> None:
        """Fill the columns of an empty table from the stored rows.

        Objects whose row is damaged are left out, and dropped when the view ends: their numbers are
        given out again.
        """
        numbers, bodies = array("I"), list[bytes]()
        for number, body in self._sealed(self._databases.rows, self.damage.numbers):
            numbers.append(number)
            bodies.append(body[: STORED_OBJECT.itemsize])
        fill_table(table, np.array(numbers, np.intp), rows_of_bodies(bodies, STORED_OBJECT))

    def load_extents(self, table: DenseTable) -> dict[int, tuple[int, ...]]:
        """Fill the columns of an empty table from the stored extents; returns the pitches of those
        whose slices are encoded.
        """
        found = list(self._sealed(self._databases.extents, self.damage.extents))
        numbers = np.array([number for number, _ in found], np.intp)
        row_bytes = STORED_EXTENT.itemsize
        rows = rows_of_bodies((body[:row_bytes] for _, body in found), STORED_EXTENT)
        fill_table(table, numbers, rows)
        pitches: dict[int, tuple[int, ...]] = {}
        for number, body in found:
            if len(body) > row_bytes:
                table.rows["codec"][number] = codec_of_body(body)
                of_body = pitches_of_body(body)
                if of_body:
                    pitches[number] = of_body
        table.rows["is_encoded"][list(pitches)] = True
        return pitches

    def load_uses(self, table: DenseTable) -> None:
        """Overlay `last_used` and `parent_hash`, where a stored use is of the same object."""
        for raw, stored in self._txn.cursor(self._databases.uses):
            overlay_uses(table, int.from_bytes(raw, "big"), stored)

    def unflushed(self) -> list[int]:
        """Numbers of extents that may not be on the device yet."""
        cursor = self._txn.cursor(self._databases.unflushed)
        return [int.from_bytes(raw, "big") for raw in cursor.iternext(keys=True, values=False)]

    # --- records ---

    def _record(self, bucket_number: int, key: str, raw: bytes) -> Record | None:
        """The record of a key, whose bytes follow its bucket's in `raw`."""
        stored = self._spaces.get(raw)
        if stored is None:
            return None
        record = unseal_record(stored, raw_hash(raw))
        if record is None:
            self.damage.rows.add((bucket_number, key))
        return record

    def _records(
        self, bucket_number: int, first: bytes = b"", end: bytes = b"\xff"
    ) -> Iterator[tuple[str, Record]]:
        head = raw_space(bucket_number)
        for raw_key, stored in self._spaces.walk(bucket_number, first, end):
            record = unseal_record(stored, raw_hash(head + raw_key))
            if record is None:
                self.damage.rows.add((bucket_number, key_text(raw_key)))
            else:
                yield key_text(raw_key), record

    def _sealed(self, database: Any, damaged: set[int]) -> Iterator[tuple[int, bytes]]:
        """Numbers and what was sealed for them; adds the number of what is damaged to `damaged`."""
        for raw, stored in self._txn.cursor(database):
            number = int.from_bytes(raw, "big")
            body = unseal(stored, number)
            if body is None:
                damaged.add(number)
            else:
                yield number, body


def raw_number(number: int) -> bytes:
    """A number as a key."""
    return number.to_bytes(NUMBER_BYTES, "big")


def _bucket_row(name: bytes, stored: bytes) -> BucketRow:
    row = unseal_bucket(name, stored)
    if row is None:
        raise damaged_index("a bucket's row does not match its checksum")
    return row
