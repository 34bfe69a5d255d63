"""Extents whose slices are stored as frames: fewer bytes, and nothing else is seen of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import lmdb
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objectcache_encodings import ENCODINGS, SliceCodec, SliceEncoder
from objectcache_schemas.errors import (
    Busy,
    Conflict,
    DamagedData,
    ObjectCacheError,
    StorageFull,
)
from objectcache_schemas.limits import KIB, MIB
from objectcache_schemas.operators.engine_status import CheckReport
from objectcache_schemas.records import (
    BucketPolicy,
    Condition,
    Durability,
    StoredEncoding,
    Verification,
)
from objectcache_storage_server.engines.base import PrefixShape, Read, StagedPut
from objectcache_storage_server.engines.lmdb_spaces.seals import seal, unseal
from objectcache_storage_server.engines.local.engine import LocalEngine
from objectcache_storage_server.engines.local.puts.encode_extents import RowEncoder
from objectcache_storage_server.engines.local.reads import decoded_reads
from objectcache_storage_server.engines.local.reads.decoded_reads import DecodingOpenObjects
from objectcache_storage_server.engines.local.reads.path_use import QUIET_S
from objectcache_storage_server.engines.local.space.extent_geometry import EncodedRows, Geometry
from objectcache_storage_server.engines.local.upkeep.find_misplaced import place_fault
from objectcache_storage_server.engines.local.upkeep.move_chunks import Compactor
from objectcache_storage_server.engines.local.volumes.volume import BLOCK_BYTES, IoPath, Transfer
from objectcache_storage_server.engines.puts.put_buffers import Bytes
from tests.contract.engine_suite import BUCKET, LAYOUT, content, put, read
from tests.contract.opened_engines.local_engines import small_local_engine
from tests.unit.examples import examples

Open = Callable[..., LocalEngine]
ENCODED = BucketPolicy(encoding=StoredEncoding.PLANES_ZSTD)
IMMUTABLE = Condition(immutable=True)
LAYERS, SLICE_BYTES = 4, 4 * KIB
CHUNK_BYTES = LAYERS * SLICE_BYTES


def numbers(seed: int, count: int) -> bytes:
    """bf16 numbers of a normal distribution, as a cache of keys and values has them."""
    words = np.random.default_rng(seed).standard_normal(count).astype("<f4").view("<u4") >> 16
    return words.astype("<u2").tobytes()


def chunk_of(key: str) -> bytes:
    return numbers(sum(key.encode()), CHUNK_BYTES // 2)


@pytest.fixture
def open_engine(tmp_path: Path) -> Iterator[Open]:
    """Opens the same store again and again, whose one bucket has an encoding."""
    engines: list[LocalEngine] = []

    def reopen(**changes: object) -> LocalEngine:
        if engines:
            engines[-1].close()
        engines.append(small_local_engine(tmp_path / "data", **changes))  # type: ignore[arg-type]
        if not engines[-1].buckets():
            engines[-1].create_bucket(BUCKET)
            engines[-1].set_policy(BUCKET.name, ENCODED)
        return engines[-1]

    yield reopen
    engines[-1].close()


def put_chunks(engine: LocalEngine, shape: PrefixShape, payload: bytes) -> list[bool]:
    """Store a payload; returns which chunks existed."""
    prefix = engine.stage_prefix(BUCKET.name, shape)
    try:
        prefix.write(0, memoryview(payload))
        puts = [StagedPut(staged, "") for staged in prefix.staged]
    except BaseException:
        prefix.discard()
        raise
    return [each.existed for each in engine.commit(puts, IMMUTABLE)]


def put_keys(engine: LocalEngine, keys: Sequence[str]) -> list[bool]:
    shape = PrefixShape(keys, LAYERS, SLICE_BYTES, layerwise=False)
    return put_chunks(engine, shape, b"".join(map(chunk_of, keys)))


def keys_of(name: str, count: int) -> list[str]:
    return [f"{name}-{index:03}" for index in range(count)]


def frame_place(engine: LocalEngine, key: str, layer: int) -> tuple[int, int]:
    """Where a chunk's frame lies in the volume, and its pitch."""
    with engine.index.reading() as view:
        version = view.versions(view.bucket(BUCKET.name).number, [key])[key]
    (extent,) = version.extents
    row = engine.holdings.extents.rows[extent]
    rows = EncodedRows.of(int(row["slots"]), engine.holdings.pitches[extent])
    offset = int(row["offset_bytes"]) + rows.row_offset_bytes(layer)
    return offset + version.slot * rows.pitches[layer], rows.pitches[layer]


def damage(engine: LocalEngine, offset_bytes: int) -> None:
    """Flip a byte of the volume on the device and in the page cache."""
    path = next(iter(engine.volume.paths))
    block = memoryview(bytearray(BLOCK_BYTES))
    begin = offset_bytes - offset_bytes % BLOCK_BYTES
    engine.volume.read([Transfer(begin, block)], path)
    block[offset_bytes - begin] ^= 0x20
    engine.volume.write([Transfer(begin, block)], path)
    engine.volume.flush([(begin, BLOCK_BYTES)])
    engine.volume.drop_cache(begin, BLOCK_BYTES)


# --- fewer bytes ---


def test_gaussian_bf16_takes_at_most_1_of_1_42_of_its_bytes(open_engine: Open) -> None:
    engine = open_engine(extent_row_bytes=128 * KIB)
    shape = PrefixShape(keys_of("a", 16), 4, 16 * KIB, layerwise=True)
    put_chunks(engine, shape, numbers(1, shape.total_bytes // 2))
    status = engine.status()
    assert status.decoded_bytes == status.live_bytes == shape.total_bytes
    assert status.encoded_bytes == status.allocated_bytes
    assert status.encoded_bytes * 1.42 <= shape.total_bytes
    assert engine.usage(BUCKET.name).stored_bytes == shape.total_bytes


def test_a_bucket_tells_what_its_live_chunks_take_as_frames(
    open_engine: Open, now_s: list[float]
) -> None:
    engine = open_compacting(open_engine, now_s)
    keys = keys_of("a", 8)
    put_keys(engine, keys)
    put(engine, "object", bytes(5000))
    numbers_of = {
        key: sum(frame_place(engine, key, layer)[1] for layer in range(4)) for key in keys
    }
    for gone in (keys[:1], keys[1:3], []):
        engine.delete(BUCKET.name, gone)
        keys = [key for key in keys if key not in gone]
        taken_bytes = sum(numbers_of[key] for key in keys)
        totals = engine.usage(BUCKET.name)
        expected = (taken_bytes, len(keys) * CHUNK_BYTES)
        assert (totals.encoded_bytes, totals.decoded_bytes) == expected
        assert totals.stored_bytes == expected[1] + 5000
        engine = open_compacting(open_engine, now_s)  # counted from the tables
        assert engine.usage(BUCKET.name) == totals
    engine.set_policy(BUCKET.name, BucketPolicy())
    compact(engine, now_s)
    assert engine.usage(BUCKET.name) == (6, 5 * CHUNK_BYTES + 5000, 0, 0)
    engine.delete(BUCKET.name, keys)
    assert engine.usage(BUCKET.name) == (1, 5000, 0, 0)


def test_a_policy_has_the_encodings_that_there_are() -> None:
    assert [each.value for each in StoredEncoding] == list(ENCODINGS)


def test_what_is_encoded_has_the_etag_that_it_has_plain(open_engine: Open) -> None:
    engine = open_engine()
    keys = keys_of("a", 4)
    put_keys(engine, keys)
    encoded = engine.scan(BUCKET.name, "", "", 10)
    engine.delete(BUCKET.name, keys)
    engine.set_policy(BUCKET.name, BucketPolicy())
    put_keys(engine, keys)
    assert engine.status().encoded_bytes == engine.status().decoded_bytes == 0
    plain = engine.scan(BUCKET.name, "", "", 10)
    assert [(info.key, info.etag, info.size_bytes) for info in encoded] == [
        (info.key, info.etag, info.size_bytes) for info in plain
    ]


@pytest.mark.parametrize("policies", [(ENCODED, BucketPolicy()), (BucketPolicy(), ENCODED)])
def test_the_same_bytes_are_the_same_chunk_however_they_are_stored(
    open_engine: Open, policies: tuple[BucketPolicy, BucketPolicy]
) -> None:
    engine = open_engine()
    keys = keys_of("a", 4)
    engine.set_policy(BUCKET.name, policies[0])
    assert put_keys(engine, keys) == [False] * 4
    engine.set_policy(BUCKET.name, policies[1])
    assert put_keys(engine, keys) == [True] * 4
    shape = PrefixShape(keys, LAYERS, SLICE_BYTES, layerwise=False)
    other = bytearray(b"".join(map(chunk_of, keys)))
    other[-1] ^= 1
    with pytest.raises(Conflict):
        put_chunks(engine, shape, bytes(other))


def test_space_of_frames_comes_back_with_the_last_chunk(open_engine: Open) -> None:
    engine = open_engine()
    keys = keys_of("a", 4)
    put_keys(engine, keys)
    taken = engine.status().encoded_bytes
    assert taken > 0
    engine.delete(BUCKET.name, keys[1:])
    assert engine.status().encoded_bytes == taken
    engine.delete(BUCKET.name, keys[:1])
    status = engine.status()
    assert (status.encoded_bytes, status.decoded_bytes, status.allocated_bytes) == (0, 0, 0)
    assert engine.holdings.pitches == {}


def test_a_put_that_is_given_up_leaves_nothing(open_engine: Open) -> None:
    engine = open_engine()
    keys = keys_of("a", 8)
    for layerwise in (True, False):
        shape = PrefixShape(keys, LAYERS, SLICE_BYTES, layerwise=layerwise)
        prefix = engine.stage_prefix(BUCKET.name, shape)
        prefix.write(0, memoryview(bytes(5 * CHUNK_BYTES)))
        prefix.discard()
        assert engine.status().allocated_bytes == 0
        assert engine.holdings.pitches == {}


# --- what readers get ---


@settings(deadline=None, max_examples=examples(40))
@given(data=st.data())
def test_any_reads_of_any_chunks_get_what_was_put(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    sizes = [1, 3, 64, 1000, 4096, 5000, 12 * KIB, 20_000, 64 * KIB]
    slice_bytes = data.draw(st.sampled_from(sizes))
    layers, count = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 12))
    layerwise, has_numbers = data.draw(st.booleans()), data.draw(st.booleans())
    keys = keys_of("a", count)
    shape = PrefixShape(keys, layers, slice_bytes, layerwise=layerwise)
    payload = numbers(count, shape.total_bytes)[: shape.total_bytes]
    if not has_numbers:
        payload = content((count, layers), shape.total_bytes)
    chunks = [bytearray(shape.chunk_bytes) for _ in keys]
    position = 0
    while position < len(payload):
        chunk, offset, length = shape.locate(position)
        chunks[chunk][offset : offset + length] = payload[position : position + length]
        position += length
    cuts = data.draw(st.lists(st.integers(0, len(payload) // slice_bytes), max_size=6))
    page_cache_bytes = data.draw(st.sampled_from([-1, 0]))
    folder = tmp_path_factory.mktemp("store", numbered=True)
    engine = small_local_engine(
        folder, page_cache_bytes=page_cache_bytes, extent_row_bytes=48 * KIB
    )
    try:
        engine.create_bucket(BUCKET)
        engine.set_policy(BUCKET.name, ENCODED)
        prefix = engine.stage_prefix(BUCKET.name, shape)
        ends = [cut * slice_bytes for cut in sorted(cuts)]
        for begin, end in pairwise([0, *ends, len(payload)]):
            prefix.write(begin, memoryview(payload)[begin:end])
        engine.commit([StagedPut(staged, "") for staged in prefix.staged], IMMUTABLE)
        is_long = slice_bytes >= 16 * KIB  # enough for a row of one
        assert (engine.status().encoded_bytes > 0) == (count > 1 or is_long)
        with engine.open_many(BUCKET.name, keys) as opened:
            for _ in range(4):
                index = data.draw(st.integers(0, count - 1))
                begin = data.draw(st.integers(0, shape.chunk_bytes))
                end = data.draw(st.integers(begin, shape.chunk_bytes))
                memory = memoryview(bytearray(end - begin))
                opened.read_into(index, begin, memory)
                assert memory == chunks[index][begin:end]
            # Whole rows of neighbours, as deliveries read them: slots that lie together joined.
            places = opened.placements()
            reads, expected, landing = list[Read](), bytearray(), 0
            for layer in range(layers):
                for place, chunk_bytes in zip(places, chunks, strict=True):
                    [(offset, length)] = place.runs(layer * slice_bytes, slice_bytes)
                    expected += chunk_bytes[layer * slice_bytes :][:slice_bytes]
                    last_end = reads[-1].offset_bytes + reads[-1].length_bytes if reads else -1
                    if last_end == offset and reads[-1].source == place.source:
                        joined = reads[-1].length_bytes + length
                        reads[-1] = reads[-1]._replace(length_bytes=joined)
                    else:
                        reads.append(Read(place.source, offset, length, landing))
                    landing += length
            memory = memoryview(bytearray(landing))
            opened.read_many(reads, memory)
            assert memory == expected
    finally:
        engine.close()


def test_frames_that_do_not_fit_a_threads_memory_are_read_in_turns(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(extent_row_bytes=64 * KIB)
    keys = keys_of("a", 40)
    put_keys(engine, keys)
    monkeypatch.setattr(decoded_reads, "SCRATCH_BYTES", 10_000)
    with engine.open_many(BUCKET.name, keys) as opened:
        geometry = Geometry(16, LAYERS, SLICE_BYTES)
        reads = [
            Read(0, layer * geometry.row_stride_bytes + 100, 60_000, layer * 60_000)
            for layer in range(LAYERS)
        ]
        memory = memoryview(bytearray(LAYERS * 60_000))
        opened.read_many(reads, memory)
    for layer in range(LAYERS):
        row = b"".join(chunk_of(key)[layer * SLICE_BYTES :][:SLICE_BYTES] for key in keys[:16])
        assert memory[layer * 60_000 :][:60_000] == row[100:60_100]


def test_plain_and_encoded_chunks_are_opened_and_read_together(open_engine: Open) -> None:
    engine = open_engine()
    keys = keys_of("a", 8)
    put_keys(engine, keys[:4])
    engine.set_policy(BUCKET.name, BucketPolicy())
    put_keys(engine, keys[4:])
    put(engine, "object", content("object", 100_000))
    engine = open_engine()
    with engine.open_many(BUCKET.name, [*keys, "object"]) as opened:
        reads = list[Read]()
        for place in opened.placements():
            for offset, length in place.runs(3, 1000):
                reads.append(Read(place.source, offset, length, len(reads) * 1000))
        memory = memoryview(bytearray(9 * 1000))
        opened.read_many(reads, memory)
    whole = [*map(chunk_of, keys), content("object", 100_000)]
    assert memory == b"".join(data[3:1003] for data in whole)


# --- rot ---


@pytest.mark.parametrize("verification", list(Verification))
def test_a_damaged_frame_is_found_whatever_is_compared(
    open_engine: Open, verification: Verification
) -> None:
    engine = open_engine(page_cache_bytes=0)
    engine.set_policy(BUCKET.name, msgspec.structs.replace(ENCODED, verification=verification))
    keys = keys_of("a", 4)
    put_keys(engine, keys)
    offset, _ = frame_place(engine, keys[2], 1)
    damage(engine, offset + 100)
    with engine.open_many(BUCKET.name, keys) as opened:
        row = memoryview(bytearray(4 * SLICE_BYTES))
        stride = Geometry(4, LAYERS, SLICE_BYTES).row_stride_bytes
        with pytest.raises(DamagedData) as caught:
            opened.read_many([Read(0, stride, len(row), 0)], row)
    assert caught.value.details.key == keys[2]
    assert [read(engine, key) for key in keys] == [
        None if key == keys[2] else chunk_of(key) for key in keys
    ]


def test_a_wrong_page_costs_a_second_read_and_no_object(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine()
    engine.set_policy(BUCKET.name, msgspec.structs.replace(ENCODED, verification=Verification.OFF))
    keys = keys_of("a", 4)
    put_keys(engine, keys)
    read_resident = engine.path_use.volume.read_resident

    def read_wrong(transfer: Transfer) -> bool:
        if not read_resident(transfer):
            engine.volume.read([transfer], next(iter(engine.volume.paths)))
        transfer.memory[50] ^= 1
        return True

    monkeypatch.setattr(engine.path_use.volume, "read_resident", read_wrong)
    assert [read(engine, key) for key in keys] == [chunk_of(key) for key in keys]
    assert engine.status().stale_reads == 4 * LAYERS
    assert engine.damaged_count == 0


def test_a_check_finds_and_drops_damaged_frames_alone(open_engine: Open) -> None:
    engine = open_engine(page_cache_bytes=0)
    keys = keys_of("a", 8)
    put_keys(engine, keys)
    whole = engine.check(False, lambda _: True)
    assert (whole.objects, whole.damaged, whole.misplaced, whole.leaked_bytes) == (8, 0, 0, 0)
    offset, pitch = frame_place(engine, keys[5], 3)
    damage(engine, offset + pitch - 1)  # behind the frame: it belongs to its checksum
    report = engine.check(True, lambda _: True)
    assert (report.damaged, report.dropped) == (1, 1)
    assert engine.match(BUCKET.name, keys) == 5


def test_what_is_encoded_and_lacks_checksums_of_frames_is_misplaced_and_never_read(
    open_engine: Open,
) -> None:
    engine = open_engine()
    put_keys(engine, keys_of("a", 2))
    with engine.index.reading() as view:
        version = view.versions(view.bucket(BUCKET.name).number, ["a-001"])["a-001"]
    assert place_fault(version, engine.holdings.extents.used) is None
    plain = msgspec.structs.replace(version, frame_checksums=None)
    fault = place_fault(plain, engine.holdings.extents.used)
    assert fault == "it has checksums of 0 frames, and 4 frames"
    with engine.stored.changing:
        opened = engine.stored.open_versions([plain])
    with opened, pytest.raises(DamagedData):
        opened.read_into(0, 0, memoryview(bytearray(10)))


# --- stores that open again ---


def test_encoded_chunks_outlive_a_restart(open_engine: Open) -> None:
    engine = open_engine()
    keys = keys_of("a", 7)
    put_keys(engine, keys)
    before = engine.status()
    engine = open_engine()
    after = engine.status()
    assert (after.encoded_bytes, after.decoded_bytes, after.allocated_bytes) == (
        before.encoded_bytes,
        before.decoded_bytes,
        before.allocated_bytes,
    )
    assert [read(engine, key) for key in keys] == [chunk_of(key) for key in keys]


def stored_format(folder: Path) -> bytes | None:
    """The format that a closed store's index says it has."""
    with lmdb.open(str(folder / "data" / "index"), max_dbs=1) as environment:
        meta = environment.open_db(b"meta")
        with environment.begin() as txn:
            return txn.get(b"format", db=meta)


def test_only_a_store_with_an_encoding_is_refused_by_those_who_do_not_know_any(
    open_engine: Open, tmp_path: Path
) -> None:
    engine = small_local_engine(tmp_path / "data")
    engine.create_bucket(BUCKET)
    engine.set_policy(BUCKET.name, BucketPolicy(ttl_s=3600.0))
    put_keys(engine, ["alone"])
    engine.close()
    assert stored_format(tmp_path) == b"1"
    engine = open_engine()
    engine.set_policy(BUCKET.name, ENCODED)  # before a chunk is encoded: its row says so already
    engine.close()
    assert stored_format(tmp_path) == b"3"
    engine = open_engine()
    engine.set_policy(BUCKET.name, BucketPolicy())
    engine.close()
    assert stored_format(tmp_path) == b"3"
    assert read(open_engine(), "alone") == chunk_of("alone")


def codecs_of(engine: LocalEngine, keys: Sequence[str]) -> set[SliceCodec | None]:
    """What opened chunks say that their frames were made by."""
    with engine.open_many(BUCKET.name, keys) as opened:
        assert isinstance(opened, DecodingOpenObjects)
        return {each.codec for each in opened._encoded.values()}


@pytest.mark.parametrize("encoding", list(StoredEncoding))
def test_what_encoded_an_extent_is_known_without_reading_it(
    open_engine: Open, encoding: StoredEncoding
) -> None:
    engine = open_engine()
    engine.set_policy(BUCKET.name, BucketPolicy(encoding=encoding))
    keys = keys_of("a", 4)
    put_keys(engine, keys)
    assert codecs_of(engine, keys) == {ENCODINGS[encoding.value]}
    assert codecs_of(open_engine(), keys) == {ENCODINGS[encoding.value]}


def test_a_store_of_frames_that_do_not_say_what_made_them_opens(
    open_engine: Open, tmp_path: Path
) -> None:
    engine = open_engine()
    keys = keys_of("a", 4)
    put_keys(engine, keys)
    engine.close()
    with lmdb.open(str(tmp_path / "data" / "index"), max_dbs=2) as environment:
        meta, extents = environment.open_db(b"meta"), environment.open_db(b"extents")
        with environment.begin(write=True) as txn:
            txn.put(b"format", b"2", db=meta)
            for raw, stored in list(txn.cursor(extents)):
                number = int.from_bytes(raw, "big")
                body = unseal(stored, number)
                assert body is not None
                txn.put(raw, seal(body[:-1], number), db=extents)
    engine = open_engine()
    assert codecs_of(engine, keys) == {None}
    assert [read(engine, key) for key in keys] == [chunk_of(key) for key in keys]
    engine.close()
    assert stored_format(tmp_path) == b"2"  # as long as nothing is encoded
    engine = open_engine()
    put_keys(engine, keys_of("b", 4))
    engine.close()
    assert stored_format(tmp_path) == b"3"
    assert codecs_of(open_engine(), [*keys, *keys_of("b", 4)]) == {None, SliceCodec.PLANES_ZSTD}


def test_unflushed_frames_are_verified_when_the_store_opens(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine()
    engine.set_policy(BUCKET.name, msgspec.structs.replace(ENCODED, durability=Durability.ASYNC))
    monkeypatch.setattr(engine.stored.flusher, "flush", lambda: None)  # as if the power went first
    keys = keys_of("a", 4)
    put_keys(engine, keys)
    damage(engine, frame_place(engine, keys[1], 0)[0] + 17)
    engine = open_engine()
    assert engine.damaged_count == 1
    assert engine.match(BUCKET.name, [keys[1]]) == 0
    assert [read(engine, key) for key in keys if key != keys[1]] == [
        chunk_of(key) for key in keys if key != keys[1]
    ]


def encode_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = SliceEncoder.encode_slice
    monkeypatch.setattr(
        SliceEncoder,
        "encode_slice",
        lambda self, data, checksum=None: encode(self, np.bitwise_xor(data, 1), checksum),
    )


def test_what_does_not_decode_to_what_was_put_is_refused(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine()
    encode_wrongly(monkeypatch)
    with pytest.raises(ObjectCacheError, match="do not decode to what was encoded"):
        put_keys(engine, keys_of("a", 4))
    assert engine.match(BUCKET.name, keys_of("a", 4)) == 0
    assert engine.status().allocated_bytes == 0


def test_of_sampled_puts_one_that_is_looked_at_is_refused(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine()
    policy = msgspec.structs.replace(ENCODED, verification=Verification.SAMPLED)
    engine.set_policy(BUCKET.name, policy)
    encode_wrongly(monkeypatch)
    refused = 0
    for number in range(200):  # rows of which each is looked at with a probability of 1/16
        try:
            put_keys(engine, keys_of(str(number), 4))
        except ObjectCacheError:
            refused += 1
    assert 0 < refused < 200


def test_what_was_encoded_wrongly_and_not_looked_at_is_never_read(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine()
    engine.set_policy(BUCKET.name, msgspec.structs.replace(ENCODED, verification=Verification.OFF))
    encode_wrongly(monkeypatch)
    keys = keys_of("a", 4)
    put_keys(engine, keys)
    for key in keys:
        with pytest.raises(ObjectCacheError):
            read(engine, key)


# --- compaction ---


def compactor_of(engine: LocalEngine, now_s: list[float]) -> Compactor:
    own = engine.upkeep.compactor
    return Compactor(
        engine.stored,
        own.space,
        engine.settings,
        own.extent_bytes_max,
        lambda: now_s[0],
        engine.row_encoder,
    )


def compact(engine: LocalEngine, now_s: list[float]) -> None:
    run(compactor_of(engine, now_s), now_s)


def run(compactor: Compactor, now_s: list[float]) -> None:
    for _ in range(8):
        now_s[0] += 1000.0
        compactor.round(now_s[0])


@pytest.fixture
def now_s() -> list[float]:
    return [time.monotonic() + 1000.0]  # later than any read


def open_compacting(open_engine: Open, now_s: list[float], **changes: object) -> LocalEngine:
    engine = open_engine(
        compaction_bytes_per_s=1 << 40, compaction_idle_s=30.0, clock=lambda: now_s[0], **changes
    )
    engine.upkeep.close()  # so that nobody else moves anything
    return engine


def test_chunks_that_came_alone_are_encoded_when_they_are_moved_together(
    open_engine: Open, now_s: list[float]
) -> None:
    engine = open_compacting(open_engine, now_s)
    engine.set_layout(BUCKET.name, LAYOUT)
    keys = keys_of("a", 16)
    data = {key: numbers(index, LAYOUT.chunk_bytes // 2) for index, key in enumerate(keys)}
    for key in keys:
        put(engine, key, data[key], block_bytes=1024)
    touch = engine.open_many(BUCKET.name, keys, are_prefix=True)
    touch.close()
    infos = engine.scan(BUCKET.name, "", "", 100)
    assert engine.status().encoded_bytes == 0
    compact(engine, now_s)
    status = engine.status()
    assert [each.slots for each in status.extents] == [16]
    assert status.encoded_bytes == status.allocated_bytes > 0
    assert engine.scan(BUCKET.name, "", "", 100) == infos
    assert {key: read(engine, key) for key in keys} == data
    assert engine.check(False, lambda _: True).damaged == 0
    engine = open_engine()
    assert {key: read(engine, key) for key in keys} == data


def test_encoded_extents_are_joined_like_plain_ones_and_as_the_policy_says_then(
    open_engine: Open, now_s: list[float]
) -> None:
    engine = open_compacting(open_engine, now_s)
    keys = keys_of("a", 4)
    put_keys(engine, keys[:2])
    put_keys(engine, keys[2:])
    engine.open_many(BUCKET.name, keys, are_prefix=True).close()
    assert [(each.slots, each.count) for each in engine.status().extents] == [(2, 2)]
    compact(engine, now_s)
    status = engine.status()
    assert [(each.slots, each.count) for each in status.extents] == [(4, 1)]
    assert status.encoded_bytes == status.allocated_bytes
    put_keys(engine, ["b-000", "b-001"])
    engine.set_policy(BUCKET.name, BucketPolicy())
    put_keys(engine, ["b-002", "b-003"])
    engine.open_many(BUCKET.name, [f"b-00{n}" for n in range(4)], are_prefix=True).close()
    compact(engine, now_s)
    after = engine.status()
    assert [(each.slots, each.count) for each in after.extents] == [(4, 2)]
    assert after.encoded_bytes == 0
    every = [*keys, *(f"b-00{n}" for n in range(4))]
    assert [read(engine, key) for key in every] == [chunk_of(key) for key in every]


# --- what is stored and lies well ---


def bytes_to_encode(engine: LocalEngine, compactor: Compactor) -> tuple[int, int]:
    """Waiting, and done since the start."""
    return compactor.waiting_bytes, compactor.reencoded_bytes


def full_extents(engine: LocalEngine, count: int) -> list[str]:
    """Extents of four slots, as many as fit a row: nothing of them could lie better."""
    keys = keys_of("a", 4 * count)
    put_keys(engine, keys)
    assert [(each.slots, each.count) for each in engine.status().extents] == [(4, count)]
    return keys


@pytest.mark.parametrize("encoding", list(StoredEncoding))
def test_chunks_that_lie_well_get_what_the_policy_says_now_and_are_then_left_alone(
    open_engine: Open, now_s: list[float], encoding: StoredEncoding
) -> None:
    engine = open_compacting(open_engine, now_s)
    engine.set_policy(BUCKET.name, BucketPolicy())
    keys = full_extents(engine, 3)
    infos = engine.scan(BUCKET.name, "", "", 100)
    total_bytes = 12 * CHUNK_BYTES
    compactor = compactor_of(engine, now_s)
    run(compactor, now_s)
    assert bytes_to_encode(engine, compactor) == (0, 0)
    done_bytes = 0
    for policy in (
        BucketPolicy(encoding=encoding),
        BucketPolicy(),
        ENCODED,
        BucketPolicy(encoding=StoredEncoding.PLANES_DEFLATE),
    ):
        engine.set_policy(BUCKET.name, policy)
        run(compactor, now_s)
        done_bytes += total_bytes
        assert bytes_to_encode(engine, compactor) == (0, done_bytes)
        status = engine.status()
        assert status.allocated_bytes == (status.encoded_bytes or status.live_bytes)
        assert bool(status.encoded_bytes) == (policy.encoding is not None)
        codecs = {ENCODINGS[policy.encoding.value]} if policy.encoding else set()
        if codecs:
            assert codecs_of(engine, keys) == codecs
        assert [read(engine, key) for key in keys] == [chunk_of(key) for key in keys]
    assert compactor.moved_bytes == 0
    assert engine.scan(BUCKET.name, "", "", 100) == infos
    engine = open_engine()
    assert codecs_of(engine, keys) == {SliceCodec.PLANES_DEFLATE}
    assert [read(engine, key) for key in keys] == [chunk_of(key) for key in keys]
    assert engine.check(False, lambda _: True) == msgspec.structs.replace(
        CheckReport(), objects=12, bytes=total_bytes
    )


def test_what_does_not_get_shorter_stays_plain_and_is_tried_once(
    open_engine: Open, now_s: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_compacting(open_engine, now_s)
    engine.set_policy(BUCKET.name, BucketPolicy())
    shape = PrefixShape(keys_of("a", 4), LAYERS, SLICE_BYTES, layerwise=False)
    payload = content("random", shape.total_bytes)
    put_chunks(engine, shape, payload)
    full_extent_bytes = engine.status().allocated_bytes
    encoded_rows: list[int] = []
    encode = RowEncoder.encode

    def counted(self: RowEncoder, slices: Bytes, checksums: Sequence[int] | None) -> list[bytes]:
        encoded_rows.append(len(slices))
        return encode(self, slices, checksums)

    monkeypatch.setattr(RowEncoder, "encode", counted)
    engine.set_policy(BUCKET.name, ENCODED)
    compactor = compactor_of(engine, now_s)
    run(compactor, now_s)
    assert 1 <= len(encoded_rows) <= LAYERS
    tried = encoded_rows.copy()
    put(engine, "another", b"something else to plan for")
    run(compactor, now_s)
    assert bytes_to_encode(engine, compactor) == (0, 0)
    status = engine.status()
    assert (status.encoded_bytes, status.live_bytes) == (0, len(payload) + 26)
    assert status.allocated_bytes == full_extent_bytes + BLOCK_BYTES
    engine = open_compacting(open_engine, now_s)
    run(compactor_of(engine, now_s), now_s)
    assert encoded_rows == tried  # a restart does not forget it
    assert read(engine, "a-001") == payload[CHUNK_BYTES : 2 * CHUNK_BYTES]
    engine.set_policy(BUCKET.name, BucketPolicy(encoding=StoredEncoding.PLANES_DEFLATE))
    run(compactor_of(engine, now_s), now_s)
    assert len(encoded_rows) > len(tried)


def test_chunks_wait_while_they_are_young_or_read_or_a_reader_uses_the_device(
    open_engine: Open, now_s: list[float]
) -> None:
    engine = open_compacting(open_engine, now_s)
    engine.set_policy(BUCKET.name, BucketPolicy())
    keys = full_extents(engine, 1)
    engine.set_policy(BUCKET.name, ENCODED)
    compactor = compactor_of(engine, now_s)
    compactor.round(now_s[0])
    assert bytes_to_encode(engine, compactor) == (4 * CHUNK_BYTES, 0)  # young
    with engine.open_many(BUCKET.name, keys[:1]):
        run(compactor, now_s)
    assert bytes_to_encode(engine, compactor) == (4 * CHUNK_BYTES, 0)
    with engine.path_use.fragment(1, IoPath.PAGE_CACHE):
        run(compactor, now_s)
    assert bytes_to_encode(engine, compactor) == (4 * CHUNK_BYTES, 0)
    run(compactor, now_s)
    assert bytes_to_encode(engine, compactor) == (0, 4 * CHUNK_BYTES)


def test_chunks_wait_while_a_put_writes_to_the_device(
    open_engine: Open, now_s: list[float]
) -> None:
    engine = open_compacting(open_engine, now_s)
    engine.set_policy(BUCKET.name, BucketPolicy())
    full_extents(engine, 1)
    engine.set_policy(BUCKET.name, ENCODED)
    compactor = compactor_of(engine, now_s)
    begun_s = time.monotonic()
    put(engine, "another", b"something else")
    now_s[0] += 3600.0  # all chunks are old, by the objects' clock
    compactor.round(begun_s)
    compactor.round(begun_s + QUIET_S)  # the put wrote after it had begun
    assert bytes_to_encode(engine, compactor) == (4 * CHUNK_BYTES, 0)
    compactor.round(time.monotonic() + QUIET_S)
    assert bytes_to_encode(engine, compactor) == (0, 4 * CHUNK_BYTES)


def test_dead_slots_go_when_the_rest_of_an_extent_is_encoded(
    open_engine: Open, now_s: list[float]
) -> None:
    engine = open_compacting(open_engine, now_s, extent_row_bytes=64 * KIB)
    engine.set_policy(BUCKET.name, BucketPolicy())
    keys = keys_of("a", 16)
    put_keys(engine, keys)
    engine.delete(BUCKET.name, keys[1:2])
    engine.set_policy(BUCKET.name, ENCODED)
    run(compactor_of(engine, now_s), now_s)
    status = engine.status()
    assert [(each.slots, each.live_slots) for each in status.extents] == [(15, 15)]
    assert status.encoded_bytes < status.decoded_bytes == 15 * CHUNK_BYTES
    rest = [keys[0], *keys[2:]]
    assert [read(engine, key) for key in rest] == [chunk_of(key) for key in rest]


def test_an_object_that_is_a_chunk_on_its_own_is_encoded_where_slices_are_long(
    open_engine: Open, now_s: list[float]
) -> None:
    engine = open_compacting(open_engine, now_s)
    layout = msgspec.structs.replace(LAYOUT, per_layer_chunk_bytes=32 * KIB)
    engine.set_layout(BUCKET.name, layout)
    data = numbers(3, layout.chunk_bytes // 2)
    put(engine, "alone", data, block_bytes=32 * KIB)
    assert engine.status().encoded_bytes == 0
    (before,) = engine.scan(BUCKET.name, "", "", 10)
    run(compactor_of(engine, now_s), now_s)
    status = engine.status()
    assert status.encoded_bytes == status.allocated_bytes <= layout.chunk_bytes * 7 / 8
    assert engine.scan(BUCKET.name, "", "", 10) == [before]
    assert read(engine, "alone") == data
    with engine.open_many(BUCKET.name, ["alone"]) as opened:
        some = memoryview(bytearray(40_000))
        opened.read_into(0, 20_000, some)
    assert some == data[20_000:60_000]
    # Frames are no run that another object could take over.
    assert engine.stage_joined(BUCKET.name, "joined", BUCKET.name, [before], 32 * KIB) is None
    assert engine.read_small(BUCKET.name, "alone", 1 << 30) is None
    report = engine.check(False, lambda _: True)
    assert (report.damaged, report.misplaced, report.leaked_bytes) == (0, 0, 0)
    assert read(open_engine(), "alone") == data


def test_a_full_store_does_not_encode_again_and_again_in_vain(
    open_engine: Open, now_s: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_compacting(open_engine, now_s)
    engine.set_policy(BUCKET.name, BucketPolicy())
    full_extents(engine, 3)
    engine.set_policy(BUCKET.name, ENCODED)
    calls: list[int] = []

    def no_room(length_bytes: int, geometry: object) -> int:
        calls.append(length_bytes)
        raise StorageFull("no room")

    compactor = compactor_of(engine, now_s)
    monkeypatch.setattr(compactor.space, "allocate", no_room)
    now_s[0] += 100.0
    for _ in range(10):
        now_s[0] += 6.0  # a plan each time
        compactor.round(now_s[0])
    assert len(calls) == 1
    assert compactor.waiting_bytes == 12 * CHUNK_BYTES
    monkeypatch.undo()
    run(compactor, now_s)
    assert bytes_to_encode(engine, compactor) == (0, 12 * CHUNK_BYTES)


@pytest.mark.parametrize("put_buffer_bytes_max", [4 * MIB, 1])
def test_a_layerwise_put_does_without_memory_for_its_frames(
    open_engine: Open, put_buffer_bytes_max: int
) -> None:
    engine = open_engine(put_buffer_bytes_max=put_buffer_bytes_max)
    shape = PrefixShape(keys_of("a", 4), LAYERS, SLICE_BYTES, layerwise=True)
    payload = numbers(5, shape.total_bytes // 2)
    put_chunks(engine, shape, payload)
    rows = [payload[begin : begin + 4 * SLICE_BYTES] for begin in range(0, len(payload), 4 * 4096)]
    for slot, key in enumerate(shape.keys):
        slices = [row[slot * SLICE_BYTES :][:SLICE_BYTES] for row in rows]
        assert read(engine, key) == b"".join(slices)
    status = engine.status()
    assert status.encoded_bytes == status.allocated_bytes < status.decoded_bytes


def test_chunks_that_no_memory_is_left_for_are_refused_for_now(open_engine: Open) -> None:
    engine = open_engine(put_buffer_bytes_max=1)
    keys = keys_of("a", 4)
    prefix = engine.stage_prefix(
        BUCKET.name, PrefixShape(keys, LAYERS, SLICE_BYTES, layerwise=False)
    )
    with pytest.raises(Busy):  # they come one by one, and would have to be gathered
        prefix.write(0, memoryview(chunk_of(keys[0])))
    prefix.discard()
    assert engine.status().allocated_bytes == 0
    put_keys(engine, keys)
    assert [read(engine, key) for key in keys] == [chunk_of(key) for key in keys]
    assert engine.status().encoded_bytes < 4 * CHUNK_BYTES


def test_eviction_makes_room_for_frames(open_engine: Open) -> None:
    engine = open_engine(capacity_bytes=8 * MIB)
    for turn in range(6):
        put_keys(engine, keys_of(f"turn {turn}", 150))
        assert engine.match(BUCKET.name, keys_of(f"turn {turn}", 150)) == 150
    status = engine.status()
    assert status.evicted_objects > 0
    assert status.encoded_bytes <= status.allocated_bytes <= 8 * MIB
    assert status.live_bytes > 1.1 * 8 * MIB  # more than a store of plain chunks can hold
    assert [read(engine, key) for key in keys_of("turn 5", 150)] == [
        chunk_of(key) for key in keys_of("turn 5", 150)
    ]
