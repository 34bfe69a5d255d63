"""Applying a record's operations to the index, by whoever made the record and by all who read it.

What the operations say must fit what is stored: an index in which a version is missing that a
record deletes is not what the records made, and is made again.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import lmdb
import msgspec
import numpy as np

from objectcache_storage_server.engines.base import BucketTotals
from objectcache_storage_server.engines.catalog import BucketRow
from objectcache_storage_server.engines.key_order import BUCKET_BYTES, key_bytes, raw_hash
from objectcache_storage_server.engines.lmdb_spaces.bucket_rows import seal_bucket
from objectcache_storage_server.engines.lmdb_spaces.long_keys import FIRST_SEGMENT
from objectcache_storage_server.engines.lmdb_spaces.object_spaces import ObjectSpaces, raw_space
from objectcache_storage_server.engines.lmdb_spaces.seals import seal
from objectcache_storage_server.engines.shared import operations as op
from objectcache_storage_server.engines.shared.index.extent_rows import (
    BuriedExtent,
    ExtentRow,
    extent_name,
    joined_names,
    raw_extent,
)
from objectcache_storage_server.engines.shared.index.index_state import IndexState
from objectcache_storage_server.engines.shared.index.index_tables import (
    IndexDamage,
    IndexTables,
    raw_number,
    raw_numbers,
)
from objectcache_storage_server.engines.shared.index.replayed_view import (
    ReplayedView,
    sealed_totals,
)
from objectcache_storage_server.engines.shared.index.version_rows import (
    Heads,
    check_row,
    extents_of,
    heads_of,
    name_of,
    names_of,
    size_of,
    with_attributes,
    with_pin,
)
from objectcache_storage_server.engines.shared.index.writer_rows import WriterRow
from objectcache_storage_server.engines.shared.versions import ExtentName, ExtentShape


@dataclass(slots=True)
class Touched:
    """What records changed that others watch."""

    documents: set[str] = field(default_factory=set)  # names
    buckets: set[str] = field(default_factory=set)  # names, of those made, changed or removed
    turn_s: float | None = None  # that a record's writer asks the others to wait
    fenced: list[int] = field(default_factory=list)  # writers
    is_everything: bool = False  # what was replayed is not known one by one

    def __bool__(self) -> bool:
        return bool(self.documents or self.buckets or self.fenced or self.is_everything)

    def add(self, other: Touched) -> None:
        """Count in what other records changed."""
        self.documents |= other.documents
        self.buckets |= other.buckets
        self.fenced += other.fenced
        self.is_everything |= other.is_everything


class _Growth:
    """By how much a table of extents grew."""

    def __init__(self) -> None:
        self.count = self.size_bytes = 0

    def add(self, shape: ExtentShape, count: int) -> None:
        self.count += count
        self.size_bytes += count * shape.size_bytes


class RecordApplier:
    """Applies the operations of one record, in a transaction that sees the records before it."""

    def __init__(self, txn: lmdb.Transaction[bytes], databases: IndexTables, writer: int) -> None:
        self.txn = txn
        self.databases = databases
        self.writer = writer
        self.touched = Touched()
        self.state = IndexState.get(txn, databases.meta)
        self.view = ReplayedView(txn, databases)
        self._spaces = ObjectSpaces(txn, databases.objects)
        self._emptied: set[ExtentName] = set()
        self._extents, self._buried = _Growth(), _Growth()  # by this record
        self._document: bytes | None = None  # of the record's writer, where it says one
        self._appliers: dict[type[op.Operation], Callable[[Any], None]] = {
            op.PutBucket: self._put_bucket,
            op.RemoveBucket: self._remove_bucket,
            op.AddVersions: self._add_versions,
            op.DeleteVersions: self._delete_versions,
            op.ChangeAttributes: self._replace_attributes,
            op.SetPinned: self._set_pinned,
            op.PutDocument: self._put_document,
            op.Heartbeat: self._heartbeat,
            op.FenceWriter: self._fence,
            op.ForgetWriter: self._forget,
            op.TakeUpkeep: self._take_upkeep,
            op.Bury: self._bury,
            op.NameCheckpoint: self._name_checkpoint,
            op.AskForTurn: self._ask_for_turn,
        }

    @property
    def number(self) -> int:
        """The record's."""
        return self.state.end

    def apply(self, operation: op.Operation) -> None:
        """One operation, after those before it. Raises `IndexDamage`."""
        self._appliers[type(operation)](operation)

    def finish(self, sequence: int, checksum: int, size_bytes: int) -> None:
        """What follows from all of the record, and that the index has come to its end."""
        for name in sorted(self._emptied):
            row = self.view.extent(name)
            if row is not None and not row.live_count:
                self.txn.delete(raw_extent(name), db=self.databases.extents)
                buried = BuriedExtent(name, row.shape, self.number)
                self.txn.put(raw_extent(name), buried.pack(), db=self.databases.graveyard)
                self._extents.add(row.shape, -1)
                self._buried.add(row.shape, 1)
        self._count_writer(sequence)
        self._change_state(
            end=self.number + 1,
            checksum=checksum,
            log_bytes=self.state.log_bytes + size_bytes,
            extent_count=self.state.extent_count + self._extents.count,
            extent_bytes=self.state.extent_bytes + self._extents.size_bytes,
            buried_count=self.state.buried_count + self._buried.count,
            buried_bytes=self.state.buried_bytes + self._buried.size_bytes,
        )
        self.state.put(self.txn, self.databases.meta)

    def _change_state(self, **changes: Any) -> None:
        self.state = msgspec.structs.replace(self.state, **changes)

    # --- buckets ---

    def _put_bucket(self, operation: op.PutBucket) -> None:
        row = BucketRow(operation.number, operation.info)
        name = operation.info.name
        self.txn.put(key_bytes(name), seal_bucket(row), db=self.databases.buckets)
        self._change_state(bucket_count=max(self.state.bucket_count, operation.number))
        self.touched.buckets.add(name)

    def _remove_bucket(self, operation: op.RemoveBucket) -> None:
        self.txn.delete(key_bytes(operation.name), db=self.databases.buckets)
        self.txn.delete(raw_space(operation.number), db=self.databases.totals)
        self.touched.buckets.add(operation.name)

    # --- versions ---

    def _add_versions(self, operation: op.AddVersions) -> None:
        first, rows = operation.first_serial, operation.rows
        heads = heads_of(rows)
        raw_serials = raw_numbers(first, len(rows))
        replaced = self._spaces.exchange_many(
            list(zip(names_of(rows, heads), raw_serials, strict=True)), self._new_segment
        )
        for raw in replaced:
            self._remove_row(int.from_bytes(raw, "big"))
        versions = self.txn.cursor(self.databases.versions)
        versions.putmulti(list(zip(raw_serials, rows, strict=True)), append=True)
        size_bytes = int(heads["size_bytes"].sum())
        self._add_totals(operation.bucket_number, len(rows), size_bytes)
        shapes = {
            ExtentName(writer, number): ExtentShape(*shape)
            for writer, number, *shape in operation.shapes
        }
        self._name_extents(_named_extents(rows, heads, first), shapes)

    def _name_extents(
        self, named: dict[ExtentName, _Named], shapes: dict[ExtentName, ExtentShape]
    ) -> None:
        for name, (times, first, last) in named.items():
            row = self.view.extent(name)
            if row is None:
                if name not in shapes:
                    raise IndexDamage(f"extent {name} is not there")
                row = ExtentRow(shapes[name], 0, 0, ())
                self._extents.add(row.shape, 1)
            serials = (*row.serials, (first, last))
            self._put_extent(
                name, ExtentRow(row.shape, row.live_count + times, self.number, serials)
            )

    def _delete_versions(self, operation: op.DeleteVersions) -> None:
        for serial in operation.serials:
            row = self._remove_row(serial)
            name = name_of(row)
            if self._spaces.get(name) != raw_number(serial):
                raise IndexDamage(f"no key leads to version {serial}")
            bucket_number = int.from_bytes(name[:BUCKET_BYTES], "big")
            self._spaces.delete(bucket_number, name[BUCKET_BYTES:])

    def _remove_row(self, serial: int) -> bytes:
        """A version's row goes, and what it counts for; not its key."""
        row = self._row(serial)
        self.txn.delete(raw_number(serial), db=self.databases.versions)
        bucket_number = int.from_bytes(name_of(row)[:BUCKET_BYTES], "big")
        self._add_totals(bucket_number, -1, -size_of(row))
        for name, count in Counter(extents_of(row)).items():
            extent = self.view.extent(name)
            if extent is None or extent.live_count < count:
                raise IndexDamage(f"extent {name} is not there")
            left = extent.live_count - count
            self._put_extent(name, ExtentRow(extent.shape, left, extent.last_used, extent.serials))
            if not left:
                self._emptied.add(name)
        return row

    def _replace_attributes(self, operation: op.ChangeAttributes) -> None:
        row = self._row(operation.serial)
        self._put_row(
            operation.serial, with_attributes(row, operation.serial, operation.attributes)
        )

    def _set_pinned(self, operation: op.SetPinned) -> None:
        for serial in operation.serials:
            self._put_row(serial, with_pin(self._row(serial), serial, operation.is_pinned))

    def _row(self, serial: int) -> bytes:
        row = self.txn.get(raw_number(serial), db=self.databases.versions)
        if row is None:
            raise IndexDamage(f"version {serial} is not there")
        check_row(row, serial)
        return row

    def _put_row(self, serial: int, row: bytes) -> None:
        self.txn.put(raw_number(serial), row, db=self.databases.versions)

    def _add_totals(self, bucket_number: int, object_count: int, size_bytes: int) -> None:
        before = self.view.totals(bucket_number)
        totals = BucketTotals(before.object_count + object_count, before.stored_bytes + size_bytes)
        if min(totals) < 0:
            raise IndexDamage(f"bucket {bucket_number} holds less than nothing")
        raw = raw_space(bucket_number)
        self.txn.put(raw, sealed_totals(bucket_number, totals), db=self.databases.totals)

    def _new_segment(self) -> int:
        self._change_state(segment_count=self.state.segment_count + 1)
        return FIRST_SEGMENT + self.state.segment_count

    # --- extents ---

    def _put_extent(self, name: ExtentName, row: ExtentRow) -> None:
        raw = raw_extent(name)
        self.txn.put(raw, row.pack(raw), db=self.databases.extents)

    def _bury(self, operation: op.Bury) -> None:
        for raw in joined_names(operation.extents):
            stored = self.txn.get(raw, db=self.databases.graveyard)
            if stored is not None:
                self._buried.add(BuriedExtent.unpack(raw, stored).shape, -1)
                self.txn.delete(raw, db=self.databases.graveyard)

    # --- documents ---

    def _put_document(self, operation: op.PutDocument) -> None:
        raw, document = key_bytes(operation.name), operation.document
        if document is None:
            self.txn.delete(raw, db=self.databases.documents)
        else:
            self.txn.put(raw, seal(document, raw_hash(raw)), db=self.databases.documents)
        self.touched.documents.add(operation.name)

    # --- writers ---

    def _heartbeat(self, operation: op.Heartbeat) -> None:
        self._document = operation.document
        for raw in joined_names(operation.used):
            name = extent_name(raw)
            row = self.view.extent(name)
            if row is not None:
                self._put_extent(
                    name, ExtentRow(row.shape, row.live_count, self.number, row.serials)
                )

    def _count_writer(self, sequence: int) -> None:
        row = self.view.writer_row(self.writer) or WriterRow(self.number, sequence)
        document = row.document if self._document is None else self._document
        self._put_writer(self.writer, WriterRow(self.number, sequence, document, row.fenced_by))

    def _fence(self, operation: op.FenceWriter) -> None:
        writer = operation.writer
        row = self.view.writer_row(writer) or WriterRow(self.number, 0)
        self._put_writer(writer, msgspec.structs.replace(row, fenced_by=self.number))
        self.touched.fenced.append(writer)
        if self.state.upkeep_holder == writer:
            self._change_state(upkeep_holder=None)

    def _forget(self, operation: op.ForgetWriter) -> None:
        self.txn.delete(raw_number(operation.writer), db=self.databases.writers)

    def _put_writer(self, writer: int, row: WriterRow) -> None:
        self.txn.put(raw_number(writer), row.pack(writer), db=self.databases.writers)

    def _take_upkeep(self, operation: op.TakeUpkeep) -> None:
        self._change_state(upkeep_holder=self.writer)

    def _name_checkpoint(self, operation: op.NameCheckpoint) -> None:
        self._change_state(
            checkpoint=operation.number,
            checkpoint_before=self.state.checkpoint,
            checkpoint_log_bytes=self.state.log_bytes,
        )

    def _ask_for_turn(self, operation: op.AskForTurn) -> None:
        self.touched.turn_s = operation.wanted_ms / 1000


class _Named(NamedTuple):
    """How often the rows of an operation name an extent, and by which serials."""

    times: int
    first: int
    last: int


def _named_extents(
    rows: Sequence[bytes], heads: Heads, first_serial: int
) -> dict[ExtentName, _Named]:
    """The extents that rows name, whose serials begin with `first_serial`."""
    named: dict[ExtentName, _Named] = {}
    if (heads["extent_count"] == 1).all():  # as of chunks: rows of one extent stand together
        writers, extents = heads["writer"], heads["extent"]
        is_next = (writers[1:] != writers[:-1]) | (extents[1:] != extents[:-1])
        begins = [0, *(np.flatnonzero(is_next) + 1).tolist(), len(rows)]
        for begin, end in itertools.pairwise(begins):
            name = ExtentName(int(writers[begin]), int(extents[begin]))
            _count_named(named, name, first_serial + begin, end - begin)
    else:
        for serial, row in enumerate(rows, first_serial):
            for name in extents_of(row):
                _count_named(named, name, serial, 1)
    return named


def _count_named(
    named: dict[ExtentName, _Named], name: ExtentName, serial: int, times: int
) -> None:
    before = named.get(name)
    last = serial + times - 1
    if before is None:
        named[name] = _Named(times, serial, last)
    else:
        named[name] = _Named(before.times + times, before.first, last)
