"""Look-ups and changes of one transaction of the local engine's index."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import lmdb
import numpy as np
import numpy.typing as npt

from objectcache_schemas.records import BucketInfo
from objectcache_storage_server.engines.catalog import BucketRow, CatalogChange
from objectcache_storage_server.engines.key_order import key_bytes, key_raw, key_text, raw_hash
from objectcache_storage_server.engines.lmdb_spaces.bucket_rows import seal_bucket
from objectcache_storage_server.engines.lmdb_spaces.long_keys import FIRST_SEGMENT
from objectcache_storage_server.engines.lmdb_spaces.object_spaces import raw_space
from objectcache_storage_server.engines.lmdb_spaces.seals import seal, unseal
from objectcache_storage_server.engines.local.index.index_errors import damaged_index
from objectcache_storage_server.engines.local.index.index_rows import (
    KEY_AT,
    STORED_OBJECT,
    bucket_of_row,
    extent_bodies,
    pinned_row,
    row_bodies,
    uses_of,
)
from objectcache_storage_server.engines.local.index.index_view import (
    Damage,
    Databases,
    IndexView,
    raw_number,
)
from objectcache_storage_server.engines.local.records import (
    Record,
    Version,
    VersionName,
    seal_version,
    version_of,
)
from objectcache_storage_server.engines.local.space.dense_tables import DenseTable

_BUCKETS, _SEGMENTS = b"last bucket", b"last segment"  # counters
_FIRST_BUCKET = 1
FORMAT_KEY = b"format"
# Of an index that ever named an extent whose slices went to a codec, or a bucket whose policy has
# an encoding, which older programs do not know.
ENCODED_FORMAT = b"3"
NO_PITCHES: Mapping[int, tuple[int, ...]] = MappingProxyType({})


class IndexChange(IndexView, CatalogChange[Version]):
    """Look-ups and changes of one transaction. Damage that a look-up meets is dropped."""

    def __init__(self, txn: lmdb.Transaction[bytes], databases: Databases) -> None:
        super().__init__(txn, databases)
        self.dropped: list[str] = []  # keys of damaged rows, and what else was damaged
        self.lost: set[int] = set()  # numbers of the objects among them
        self.serial = txn.id()

    def versions(self, bucket_number: int, keys: Iterable[str]) -> dict[str, Version]:
        found = super().versions(bucket_number, keys)
        self.drop_met()
        return found

    # --- buckets ---

    def add_bucket(self, info: BucketInfo) -> int:
        number = self._next_number(_BUCKETS, _FIRST_BUCKET)
        self.replace_bucket(number, info)
        return number

    def replace_bucket(self, number: int, info: BucketInfo) -> None:
        """Store a bucket's changed info; its name does not change."""
        if info.policy.encoding is not None:
            self._txn.put(FORMAT_KEY, ENCODED_FORMAT, db=self._databases.meta)
        row = BucketRow(number, info)
        self._txn.put(key_bytes(info.name), seal_bucket(row), db=self._databases.buckets)

    def remove_bucket(self, number: int) -> None:
        """Remove a bucket that holds no objects."""
        for row in self.bucket_rows():
            if row.number == number:
                self._txn.delete(key_bytes(row.info.name), db=self._databases.buckets)

    # --- objects ---

    def add(self, versions: Sequence[Version], rows: npt.NDArray[np.void]) -> None:
        """Add versions of distinct keys, in place of what is stored under them.

        `rows`: their rows of the object table, in the same order; gets this commit's serial, as
        what is stored does.
        """
        rows["serial"] = self.serial
        for version in versions:
            self._forget_row(version.bucket_number, version.info.key)
        self.drop_met()
        self._put_versions(versions, rows)

    def delete(self, names: Iterable[VersionName]) -> list[Version]:
        """Delete these very versions; returns those that were there."""
        deleted: list[Version] = []
        for name in names:
            record = self._record_of(name)
            if record is not None:
                self._spaces.delete(name.bucket_number, key_raw(name.key))
                self._txn.delete(raw_number(record.number), db=self._databases.rows)
                deleted.append(version_of(record, name.bucket_number, name.key))
        self.drop_met()
        return deleted

    def move(self, old: VersionName, new: Version, row: npt.NDArray[np.void] | np.void) -> bool:
        """Replace this very version by one that lies elsewhere; false where it is gone.

        `row` is the new version's of the object table, and gets this commit's serial.
        """
        assert (old.bucket_number, old.key) == (new.bucket_number, new.info.key)
        record = self._record_of(old)
        self.drop_met()
        if record is None:
            return False
        row["serial"] = self.serial
        self._txn.delete(raw_number(record.number), db=self._databases.rows)
        self._put_versions([new], np.atleast_1d(row))
        return True

    def set_pinned(self, numbers: Sequence[int], pinned: bool) -> None:
        """Mark objects, by number, as pinned by an operator, or as not."""
        for number in numbers:
            raw = raw_number(number)
            stored = self._txn.get(raw, db=self._databases.rows)
            changed = None if stored is None else pinned_row(stored, number, pinned)
            if changed is not None:
                self._txn.put(raw, changed, db=self._databases.rows)

    def store_uses(self, table: DenseTable, block: int) -> None:
        """Store recency and parents of the objects from number `block` * USES_ROWS on."""
        self._txn.put(raw_number(block), uses_of(table, block), db=self._databases.uses)

    # --- extents ---

    def add_extents(
        self,
        numbers: Sequence[int],
        rows: npt.NDArray[np.void],
        pitches: Mapping[int, tuple[int, ...]] = NO_PITCHES,
    ) -> None:
        """Add extents. `rows`: their rows of the extent table, in the same order; `pitches`: those
        of the extents among them whose slices are encoded.
        """
        bodies = extent_bodies(rows, [pitches.get(number, ()) for number in numbers])
        self._put_sealed(self._databases.extents, numbers, bodies)
        if pitches or rows["codec"].any():
            self._txn.put(FORMAT_KEY, ENCODED_FORMAT, db=self._databases.meta)

    def remove_extents(self, numbers: Iterable[int]) -> None:
        """Remove extents, which are not unflushed either from then on."""
        for number in numbers:
            self._txn.delete(raw_number(number), db=self._databases.extents)
            self._txn.delete(raw_number(number), db=self._databases.unflushed)

    def mark_unflushed(self, numbers: Iterable[int]) -> None:
        """Extents whose bytes may not be on the device yet."""
        items = [(raw_number(number), b"") for number in numbers]
        self._txn.cursor(self._databases.unflushed).putmulti(items)

    def unmark_unflushed(self, numbers: Iterable[int]) -> None:
        """Extents whose bytes are on the device."""
        for number in numbers:
            self._txn.delete(raw_number(number), db=self._databases.unflushed)

    # --- damage ---

    def drop(self, damage: Damage) -> None:
        """Delete what of `damage` still does not match its checksum, and what it belongs to."""
        self._drop_objects(damage.rows)
        gone = {
            each for each in damage.numbers if self._drop_if_damaged(self._databases.rows, each)
        }
        self.lost |= gone
        if gone:
            self._drop_objects(
                (version.bucket_number, version.info.key)
                for version in list(self._versions_behind(None))
                if version.number in gone
            )
        for number in damage.extents:
            if self._drop_if_damaged(self._databases.extents, number):
                self.dropped.append(f"extent {number}")

    def drop_met(self) -> None:
        """Drop the damage that look-ups met so far."""
        if self.damage:
            met, self.damage = self.damage, Damage()
            self.drop(met)

    def _drop_objects(self, names: Iterable[tuple[int, str]]) -> None:
        gone = {name for name in names if not self._is_whole(*name)}
        for bucket_number, key in gone:
            self._spaces.delete(bucket_number, key_raw(key))
            self.dropped.append(key)
        if gone:
            self._delete_rows_of(gone)

    def _is_whole(self, bucket_number: int, key: str) -> bool:
        """Whether a record and its row match their checksums, or there is neither."""
        raw = raw_space(bucket_number) + key_raw(key)
        if self._spaces.get(raw) is None:
            return True
        record = self._record(bucket_number, key, raw)
        return record is not None and self.name_of(record.number) == (bucket_number, key)

    def _delete_rows_of(self, names: set[tuple[int, str]]) -> None:
        """Delete the rows of objects whose record no longer tells their number: looks at all."""
        found = [
            raw
            for raw, stored in self._txn.cursor(self._databases.rows)
            if len(stored) >= KEY_AT and (bucket_of_row(stored), key_text(stored[KEY_AT:])) in names
        ]
        for raw in found:
            self._txn.delete(raw, db=self._databases.rows)
            self.lost.add(int.from_bytes(raw, "big"))

    def _drop_if_damaged(self, database: Any, number: int) -> bool:
        stored = self._txn.get(raw_number(number), db=database)
        if stored is None or unseal(stored, number) is not None:
            return False
        return self._txn.delete(raw_number(number), db=database)

    # --- records and rows ---

    def _record_of(self, name: VersionName) -> Record | None:
        """The record of this very version."""
        raw = raw_space(name.bucket_number) + key_raw(name.key)
        record = self._record(name.bucket_number, name.key, raw)
        return record if record is not None and record.serial == name.serial else None

    def _forget_row(self, bucket_number: int, key: str) -> None:
        raw = raw_space(bucket_number) + key_bytes(key)
        record = self._record(bucket_number, key, raw)
        if record is not None:
            self._txn.delete(raw_number(record.number), db=self._databases.rows)

    def _put_versions(self, versions: Sequence[Version], rows: npt.NDArray[np.void]) -> None:
        raw_keys = [key_bytes(version.info.key) for version in versions]
        self._spaces.put_many(
            (
                (version.bucket_number, raw_key, self._sealed_version(version, raw_key))
                for version, raw_key in zip(versions, raw_keys, strict=True)
            ),
            lambda: self._next_number(_SEGMENTS, FIRST_SEGMENT),
        )
        bodies = row_bodies(rows, STORED_OBJECT)
        self._put_sealed(
            self._databases.rows,
            [version.number for version in versions],
            [body + raw_key for body, raw_key in zip(bodies, raw_keys, strict=True)],
        )

    def _sealed_version(self, version: Version, raw_key: bytes) -> bytes:
        own_hash = raw_hash(raw_space(version.bucket_number) + raw_key)
        return seal_version(version, self.serial, own_hash)

    def _put_sealed(self, database: Any, numbers: Sequence[int], bodies: Sequence[bytes]) -> None:
        """Store what belongs to numbers; behind the last number pages are filled to the end."""
        cursor = self._txn.cursor(database)
        last = cursor.key() if cursor.last() else b""
        items = sorted(
            (raw_number(number), seal(body, number))
            for number, body in zip(numbers, bodies, strict=True)
        )
        cursor.putmulti([item for item in items if item[0] <= last])
        cursor.putmulti([item for item in items if item[0] > last], append=True)

    def _next_number(self, counter: bytes, first: int) -> int:
        """The next number of a counter, which counts on over restarts."""
        stored = self._txn.get(counter, db=self._databases.meta)
        number = first
        if stored is not None:
            body = unseal(stored, 0)
            if body is None:
                raise damaged_index("a counter does not match its checksum")
            number = int.from_bytes(body, "big") + 1
        self._txn.put(counter, seal(raw_number(number), 0), db=self._databases.meta)
        return number
