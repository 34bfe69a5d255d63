"""Reads of opened objects: which reads of the store they become, and what a fault does."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import pytest

from objectcache_schemas.errors import DamagedData, NotFound, Unavailable
from objectcache_schemas.records import ObjectInfo, Verification
from objectcache_storage_server.engines.base import PrefixShape, Read
from objectcache_storage_server.engines.shared.extents.open_extents import (
    ExtentReader,
    SharedOpenObjects,
)
from objectcache_storage_server.engines.shared.extents.read_sources import lay_out
from objectcache_storage_server.engines.shared.extents.staged_objects import (
    JoinedExtents,
    SharedStaged,
    StagedAlone,
    can_join,
)
from objectcache_storage_server.engines.shared.extents.staged_prefix import SharedStagedPrefix
from objectcache_storage_server.engines.shared.versions import (
    ExtentName,
    ExtentShape,
    SharedVersion,
)
from objectcache_storage_server.engines.verify_blocks import SAMPLE_BLOCKS
from tests.contract.engine_suite import content, read_range
from tests.unit.storage_server.engines.shared.extents.extent_stores import (
    NotingStore,
    writing_to,
)

SLICE = 1024
LAYERS = 3
SHAPE = PrefixShape([f"{i}" for i in range(6)], LAYERS, SLICE, layerwise=False)
CHUNKS = {key: content(key, SHAPE.chunk_bytes) for key in SHAPE.keys}


class OpenedReader(ExtentReader):
    """Drops what a test says the index still has."""

    def __init__(self, store: NotingStore) -> None:
        self.store = store
        self.is_indexed = True
        self.dropped: list[str] = []

    def deadline_s(self) -> float:
        return 1e12

    def drop_damaged(self, versions: Iterable[SharedVersion], reason: str) -> Exception:
        self.dropped = [version.info.key for version in versions]
        return DamagedData(reason) if self.is_indexed else NotFound(reason)


def version_of(staged: SharedStaged) -> SharedVersion:
    extents, slot = staged.place()
    info = ObjectInfo(key=staged.key, size_bytes=staged.size_bytes(), etag="", modified_s=0.0)
    return SharedVersion(
        bucket_number=1,
        info=info,
        serial=1,
        block_bytes=staged.block_bytes,
        checksums=array("Q", staged.checksums()),
        extents=extents,
        slot=slot,
        is_evictable=False,
        parent_hash=0,
    )


class Opening:
    """A store with the chunks of one put, two extents of 4 and 2 slots, and one object."""

    def __init__(self, store: NotingStore) -> None:
        self.store = store
        self.reader = OpenedReader(store)
        self.shapes: dict[ExtentName, ExtentShape] = {}
        with writing_to(store) as writer:
            prefix = SharedStagedPrefix(writer, "bucket", SHAPE)
            prefix.write(0, memoryview(b"".join(CHUNKS.values())))
            prefix.finish()
            self.alone = content("alone", 10_000)
            alone = StagedAlone(writer, "bucket", "alone", 1000)
            alone.write_at(0, memoryview(self.alone))
            alone.finish()
            staged: list[SharedStaged] = [*prefix.chunks, alone]
            for each in staged:
                self.shapes.update(each.shapes())
            self.versions = [version_of(each) for each in staged]

    def open(
        self, *indices: int, verification: Verification = Verification.FULL, sample: int = 0
    ) -> SharedOpenObjects:
        versions = [self.versions[index] for index in indices or range(len(self.versions))]
        sources, placements = lay_out(versions, self.shapes)
        return SharedOpenObjects(self.reader, versions, sources, placements, verification, sample)

    def object_of(self, index: int, number: int) -> str:
        return self.versions[index].extents[0].object_name(number)


@pytest.fixture
def opening() -> Opening:
    return Opening(NotingStore(object_bytes_max=4096))


def test_neighbours_of_a_layer_are_one_read_of_one_object(opening: Opening) -> None:
    opened = opening.open()
    first, second = opened.placements()[0], opened.placements()[4]
    assert (first.source, second.source) == (0, 1)
    assert first.stride_bytes == 4 * SLICE
    landing = bytearray(6 * SLICE)
    reads = [
        Read(0, 4 * SLICE, 4 * SLICE, 0),  # layer 1 of the first four chunks
        Read(1, 2 * SLICE, 2 * SLICE, 4 * SLICE),
    ]
    opened.read_many(reads, memoryview(landing))
    assert landing == b"".join(data[SLICE : 2 * SLICE] for data in CHUNKS.values())
    ((one, two),) = opening.store.batches
    assert (one.name, one.offset_bytes, len(one.landing)) == (opening.object_of(0, 1), 0, 4096)
    assert (two.name, two.offset_bytes, len(two.landing)) == (opening.object_of(4, 0), 2048, 2048)
    assert one.landing.obj is landing  # no copy


def test_a_read_over_objects_of_the_store_is_a_read_of_each(opening: Opening) -> None:
    opened = opening.open(6)
    assert read_range(opened, 0, 500, 9000) == opening.alone[500:9500]
    (reads,) = opening.store.batches
    # Blocks of 1000 bytes, 4 of them an object; the ragged ends come with their blocks.
    assert [(read.offset_bytes, len(read.landing)) for read in reads] == [
        (0, 1000), (1000, 3000), (0, 4000), (0, 1000), (1000, 1000),
    ]  # fmt: skip


def test_joined_objects_are_read_as_one(opening: Opening) -> None:
    with writing_to(opening.store) as writer:
        parts = [content(f"part {i}", size) for i, size in enumerate((9000, 4000, 77))]
        staged = [StagedAlone(writer, "parts", f"{i}", 1000) for i in range(3)]
        for each, data in zip(staged, parts, strict=True):
            each.write_at(0, memoryview(data))
            each.finish()
            opening.shapes.update(each.shapes())
    sources = [version_of(each) for each in staged]
    assert can_join(sources, opening.shapes, 1000) is False  # among them are extents with slots
    own = {name: opening.shapes[name] for source in sources for name in source.extents}
    assert can_join(sources, own, 1000)
    assert not can_join(sources, own, 500)
    assert not can_join(sources[::-1], own, 1000)
    opening.versions.append(version_of(JoinedExtents("bucket", "joined", 1000, sources)))
    whole = b"".join(parts)
    opened = opening.open(7)
    for begin, end in ((0, len(whole)), (8500, 9500), (12_999, 13_001), (13_000, len(whole))):
        assert read_range(opened, 0, begin, end - begin) == whole[begin:end]


def test_reading_nothing_asks_nobody(opening: Opening) -> None:
    opening.open(6).read_many([], memoryview(bytearray(1)))
    assert opening.store.batches == []


# --- damage ---


@pytest.mark.parametrize("verification", [Verification.FULL, Verification.SAMPLED])
def test_a_block_that_is_wrong_twice_drops_its_owner_alone(
    opening: Opening, verification: Verification
) -> None:
    opening.store.faults.flip(opening.object_of(0, 2), 2 * SLICE + 5)  # layer 2 of chunk 2
    block = 2 * 4 + 2
    opened = opening.open(verification=verification, sample=block % SAMPLE_BLOCKS)
    with pytest.raises(DamagedData):
        opened.read_many([Read(0, 8 * SLICE, 4 * SLICE, 0)], memoryview(bytearray(4 * SLICE)))
    assert opening.reader.dropped == ["2"]


def test_a_block_that_is_wrong_once_is_read_again(opening: Opening) -> None:
    opening.store.faults.flip(opening.object_of(0, 0), 5, read_count=1)
    assert read_range(opening.open(0), 0, 0, SLICE) == CHUNKS["0"][:SLICE]
    assert len(opening.store.batches) == 2
    assert opening.reader.dropped == []


@pytest.mark.parametrize(
    ("verification", "sample"), [(Verification.OFF, 0), (Verification.SAMPLED, 1)]
)
def test_what_a_policy_does_not_compare_is_not_compared(
    opening: Opening, verification: Verification, sample: int
) -> None:
    opening.store.faults.flip(opening.object_of(0, 0), 5)
    opened = opening.open(verification=verification, sample=sample)
    assert read_range(opened, 0, 0, SLICE) != CHUNKS["0"][:SLICE]


def test_a_lost_object_of_the_store_drops_those_that_it_was_read_for(opening: Opening) -> None:
    opening.store.faults.lose(opening.object_of(0, 1))
    opened = opening.open()
    assert read_range(opened, 0, 0, SLICE) == CHUNKS["0"][:SLICE]
    reads = [Read(0, SLICE, SLICE, 0), Read(0, 4 * SLICE, 2 * SLICE, SLICE)]
    with pytest.raises(DamagedData):
        opened.read_many(reads, memoryview(bytearray(3 * SLICE)))
    assert opening.reader.dropped == ["0", "1"]


def test_a_lost_object_that_the_index_does_not_name_any_more_is_missing(opening: Opening) -> None:
    opening.reader.is_indexed = False
    opening.store.faults.lose(opening.object_of(6, 1))
    with pytest.raises(NotFound):
        read_range(opening.open(6), 0, 0, 10_000)


def test_only_the_part_in_a_lost_object_has_an_owner_to_drop(opening: Opening) -> None:
    opening.store.faults.lose(opening.object_of(0, 2))
    opened = opening.open(0, 1, 2, 3)
    with pytest.raises(DamagedData):
        # The last slice of layer 1, and the first of layer 2 in the next object.
        opened.read_many([Read(0, 7 * SLICE, 2 * SLICE, 0)], memoryview(bytearray(2 * SLICE)))
    assert opening.reader.dropped == ["0"]


@pytest.mark.parametrize("is_again", [False, True])
def test_a_store_that_cannot_be_asked_has_damaged_nothing(opening: Opening, is_again: bool) -> None:
    faults = opening.store.faults
    if is_again:
        faults.flip(opening.object_of(0, 0), 5, read_count=1)
    opened = opening.open(0)
    landing = memoryview(bytearray(SLICE))
    if not is_again:
        faults.time_out("begin_reads", is_carried_out=False)
    begun = opened.begin_reads([Read(0, 0, SLICE, 0)], landing)
    if is_again:
        opening.store.batches.clear()
        while faults.calls["begin_reads"] == 0:
            pass
        faults.time_out("begin_reads", is_carried_out=False)
    with pytest.raises(Unavailable):
        begun.finish()
    assert opening.reader.dropped == []
    assert read_range(opened, 0, 0, SLICE) == CHUNKS["0"][:SLICE]
