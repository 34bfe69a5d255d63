"""A change of the index that becomes part of a record."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from objectcache_schemas.errors import Unavailable
from objectcache_schemas.records import BucketInfo, ObjectAttributes
from objectcache_storage_server.engines.key_order import BUCKET_BYTES
from objectcache_storage_server.engines.shared import operations as op
from objectcache_storage_server.engines.shared.index.apply_record import RecordApplier
from objectcache_storage_server.engines.shared.index.extent_rows import raw_extent
from objectcache_storage_server.engines.shared.index.index_state import IndexState
from objectcache_storage_server.engines.shared.index.replayed_index import ReplayedIndex
from objectcache_storage_server.engines.shared.index.replayed_view import ReplayedView
from objectcache_storage_server.engines.shared.index.version_rows import (
    sealed_row,
    unpack_version,
)
from objectcache_storage_server.engines.shared.shared_catalog import Moment, SharedChange
from objectcache_storage_server.engines.shared.versions import (
    ExtentName,
    ExtentShape,
    NewRow,
    SharedVersion,
    SharedVersionName,
)

PLACE_BITS = 20  # of a serial: the version's place in its record; the record's number is above
_GROWING = (op.PutBucket, op.AddVersions, op.PutDocument)


class DoesNotFit(Exception):
    """The record would be longer than the store takes. `size_bytes` is what it would have."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(size_bytes)
        self.size_bytes = size_bytes


class RecordDraft:
    """The operations that a record will hold, applied to the index as they come."""

    def __init__(
        self,
        applier: RecordApplier,
        index: ReplayedIndex,
        body_bytes_max: int,
    ) -> None:
        """`index` is the one that the applier changes."""
        self.applier = applier
        self.encoded: list[bytes] = []
        self.size_bytes = 0
        self._body_bytes_max = body_bytes_max
        self._index = index
        self._place = 0

    def add(self, operation: op.Operation) -> None:
        """One more operation; raises `DoesNotFit`, `StorageFull`."""
        encoded = op.encode_operation(operation)
        self.size_bytes += len(encoded)
        if self.size_bytes > self._body_bytes_max:
            raise DoesNotFit(self.size_bytes)
        self._index.take_room(self.size_bytes)
        if isinstance(operation, _GROWING):
            self._index.check_room(self.applier.txn)
        self.applier.apply(operation)
        self.encoded.append(encoded)

    def take_serials(self, count: int) -> int:
        """The first of `count` serials, which are given out once."""
        if self._place + count > 1 << PLACE_BITS:
            raise DoesNotFit(self._body_bytes_max + 1)
        first = self.applier.number << PLACE_BITS | self._place
        self._place += count
        return first


class ReplayedChange(ReplayedView, SharedChange):
    """Look-ups and changes; what is changed is seen by the look-ups that follow.

    Beside what engines ask for, what the upkeep of the store does by records.
    """

    def __init__(self, draft: RecordDraft) -> None:
        applier = draft.applier
        super().__init__(applier.txn, applier.databases)
        self._draft = draft
        self.writer = applier.writer  # whose record it will be

    @property
    def moment(self) -> Moment:
        return Moment(self.state.end, len(self._draft.encoded))

    @property
    def state(self) -> IndexState:
        return self._draft.applier.state

    # --- buckets ---

    def add_bucket(self, info: BucketInfo) -> int:
        number = self.state.bucket_count + 1
        self.replace_bucket(number, info)
        return number

    def replace_bucket(self, number: int, info: BucketInfo) -> None:
        self._draft.add(op.PutBucket(number, info))

    def remove_bucket(self, number: int) -> None:
        for info in self._every_bucket():
            row = self.find_bucket(info)
            if row is not None and row.number == number:
                self._draft.add(op.RemoveBucket(number, info))

    def _every_bucket(self) -> list[str]:
        cursor = self._txn.cursor(self._databases.buckets)
        return [raw.decode() for raw in cursor.iternext(keys=True, values=False)]

    # --- versions ---

    def add(self, rows: Sequence[NewRow], shapes: Mapping[ExtentName, ExtentShape]) -> None:
        if not rows:
            return
        bucket_number = int.from_bytes(rows[0].name[:BUCKET_BYTES], "big")
        new = self._new_extents({name for row in rows for name in row.extents}, shapes)
        first = self._draft.take_serials(len(rows))
        sealed = [sealed_row(row.body, serial) for serial, row in enumerate(rows, first)]
        self._draft.add(op.AddVersions(bucket_number, first, sealed, new))

    def _new_extents(
        self, named: Collection[ExtentName], shapes: Mapping[ExtentName, ExtentShape]
    ) -> list[tuple[int, int, int, int, int, int]]:
        new: list[tuple[int, int, int, int, int, int]] = []
        for name in sorted(named):
            if self.extent(name) is not None:
                continue
            self._check_kept(name)
            shape = shapes[name]
            new.append(
                (
                    name.writer,
                    name.number,
                    shape.slots,
                    shape.num_layers,
                    shape.slice_bytes,
                    shape.object_bytes,
                )
            )
        return new

    def _check_kept(self, name: ExtentName) -> None:
        """Raise `Unavailable` where the objects of a new extent may be deleted by now."""
        row = self.writer_row(name.writer)
        is_alive = name.writer == self.writer or (row is not None and row.fenced_by is None)
        if not is_alive:
            raise Unavailable(
                "this server was silent for longer than storage.writer_lease_s, and others took it "
                "for dead: what it was storing meanwhile is given up, nothing was stored; try again"
            )
        if self.is_buried(name):
            raise Unavailable(
                "what was staged lies in an extent whose objects were all deleted meanwhile, "
                "nothing was stored; try again"
            )

    def delete(self, names: Iterable[SharedVersionName]) -> list[SharedVersion]:
        deleted: list[SharedVersion] = []
        for name in dict.fromkeys(names):
            row = self.row_of(name)
            if row is not None:
                deleted.append(unpack_version(row, name.serial))
        if deleted:
            self._draft.add(op.DeleteVersions([version.serial for version in deleted]))
        return deleted

    def replace_attributes(self, name: SharedVersionName, attributes: ObjectAttributes) -> None:
        assert self.row_of(name) is not None, f"{name} is not stored"
        self._draft.add(op.ChangeAttributes(name.serial, attributes))

    def set_pinned(self, names: Iterable[SharedVersionName], pinned: bool) -> int:
        there = [name.serial for name in dict.fromkeys(names) if self.row_of(name) is not None]
        if there:
            self._draft.add(op.SetPinned(there, pinned))
        return len(there)

    # --- documents ---

    def put_document(self, name: str, document: bytes | None) -> None:
        self._draft.add(op.PutDocument(name, document))

    # --- upkeep ---

    def heartbeat(self, document: bytes | None, used: Iterable[ExtentName]) -> None:
        """Say that the writer lives, and which extents were read. Without a document, what others
        know of this server stays.
        """
        self._draft.add(op.Heartbeat(document, b"".join(map(raw_extent, used))))

    def fence(self, writer: int) -> None:
        """Take another writer for dead, from this record on."""
        assert writer != self.writer, "a writer does not fence itself"
        self._draft.add(op.FenceWriter(writer))

    def forget_writer(self, writer: int) -> None:
        """Forget a fenced writer, whose leftovers are deleted."""
        row = self.writer_row(writer)
        assert row is None or row.fenced_by is not None, f"writer {writer:x} is not fenced"
        self._draft.add(op.ForgetWriter(writer))

    def take_upkeep(self) -> None:
        """Hold the upkeep lease, which must be nobody's."""
        assert self.state.upkeep_holder is None, "the upkeep lease is another's"
        self._draft.add(op.TakeUpkeep())

    def bury(self, extents: Iterable[ExtentName]) -> None:
        """Forget extents of the graveyard, whose objects are deleted."""
        self._draft.add(op.Bury(b"".join(map(raw_extent, extents))))

    def name_checkpoint(self, number: int) -> None:
        """Say that there is a whole checkpoint of the index before record `number`."""
        self._draft.add(op.NameCheckpoint(number))

    def ask_for_turn(self, wanted_s: float) -> None:
        """Ask the other servers to wait so long for this one's next record."""
        self._draft.add(op.AskForTurn(int(wanted_s * 1000)))
