"""Every rule of the engine contract, for every engine."""

from __future__ import annotations

import itertools
import re
import threading
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
import pytest

from objectcache_schemas.errors import (
    Conflict,
    InvalidRequest,
    NotFound,
    ObjectCacheError,
    PreconditionFailed,
    Unavailable,
    Unsupported,
)
from objectcache_schemas.limits import KIB, MIB
from objectcache_schemas.records import (
    BucketPolicy,
    Condition,
    Durability,
    ObjectAttributes,
    StoredEncoding,
    Verification,
)
from objectcache_storage_server.engines.base import (
    COPY_BYTES,
    Engine,
    OpenObjects,
    PrefixShape,
    Read,
    StagedPut,
)
from objectcache_storage_server.engines.block_checksums import block_checksums, slice_block_bytes
from objectcache_storage_server.engines.content_etags import content_etag
from objectcache_storage_server.engines.files.engine import FilesEngine
from objectcache_storage_server.engines.memory.engine import MemoryEngine
from objectcache_storage_server.testing import MeteredEngine, SlowEngine
from tests.contract.engine_suite import (
    BUCKET,
    LAYOUT,
    ODD_KEYS,
    content,
    opened_engine,
    put,
    put_batch,
    read,
    read_range,
    staged_put,
    stored_keys,
)
from tests.contract.opened_engines.blob_engines import delayed, files_over, memory_over
from tests.contract.opened_engines.local_engines import (
    encoding_local_engine,
    kernel_nvme_engine,
    nvme_local_engine,
    small_local_engine,
    two_path_nvme_engine,
)
from tests.contract.opened_engines.shared_engines import (
    DAOS,
    ByTurns,
    WriterAndReader,
    in_daos,
    in_folder,
    in_memory,
    one_server,
    two_servers,
)
from tests.hardware.nvme_namespaces import DEVICES

ENGINES: dict[str, Callable[[Path], Engine]] = {
    "memory": lambda _: MemoryEngine(),
    "files": lambda folder: FilesEngine(folder, open_objects_max=64),
    "files-uncached": lambda folder: FilesEngine(folder, open_objects_max=1),
    "local": lambda folder: small_local_engine(folder),
    "local-direct": lambda folder: small_local_engine(folder, page_cache_bytes=0),
    "local-threads": lambda folder: small_local_engine(
        folder, page_cache_bytes=0, direct_io="threads", overlap="cross"
    ),
    "local-encoded": lambda folder: encoding_local_engine(folder),
    "local-encoded-direct": lambda folder: encoding_local_engine(folder, page_cache_bytes=0),
    "local-nvme": lambda folder: nvme_local_engine(folder),
    "local-nvme-cached": lambda folder: two_path_nvme_engine(folder),
    "metered": lambda _: MeteredEngine(MemoryEngine()),
    "metered-local": lambda folder: MeteredEngine(small_local_engine(folder)),
    "delayed": lambda _: memory_over(delayed),
    "files-delayed": lambda folder: files_over(delayed, folder),
    "slow": lambda _: SlowEngine(MemoryEngine()),
    "shared": lambda folder: one_server(folder),
    "shared-small-objects": lambda folder: one_server(folder, 5000),
    "shared-writer-reader": lambda folder: two_servers(WriterAndReader, in_memory(), folder),
    "shared-by-turns": lambda folder: two_servers(ByTurns, in_folder(folder), folder),
    "shared-cached": lambda folder: one_server(folder, 5000, CACHE_SLOTS),
    "shared-cached-by-turns": lambda folder: two_servers(
        ByTurns, in_memory(64 * KIB), folder, cache_slots=CACHE_SLOTS
    ),
}
ENGINES |= {
    f"kernel-{Path(device).name}": partial(kernel_nvme_engine, path=Path(device))
    for device in DEVICES
}
CACHE_SLOTS = 12  # less than most tests read
if all(DAOS):
    ENGINES["shared-daos"] = lambda folder: two_servers(WriterAndReader, in_daos(), folder)
IMMUTABLE = Condition(immutable=True)
ABSENT = Condition(absent=True)
DEADLINE_S = 20.0
WITH_UPKEEP = ("local", "shared-memory", "shared-folder", "shared-daos")  # capabilities' names


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, store_of: Callable[[str], Path]) -> Iterator[Engine]:
    with opened_engine(ENGINES[request.param], store_of(request.param)) as opened:
        yield opened


def code_of(action: Callable[[], object]) -> str:
    with pytest.raises(ObjectCacheError) as caught:
        action()
    return caught.value.code


# --- buckets ---


def test_a_bucket_is_found_as_it_was_created(engine: Engine) -> None:
    assert engine.bucket(BUCKET.name) == BUCKET


def test_creating_a_bucket_twice_says_whose_it_is(engine: Engine) -> None:
    other = msgspec.structs.replace(BUCKET, owner="somebody else")
    assert code_of(lambda: engine.create_bucket(BUCKET)) == "BucketAlreadyOwnedByYou"
    assert code_of(lambda: engine.create_bucket(other)) == "BucketAlreadyExists"


def test_buckets_are_listed_by_name_without_the_servers_own(engine: Engine) -> None:
    for name in ("zebra", ".uploads", "alpha"):
        engine.create_bucket(msgspec.structs.replace(BUCKET, name=name))
    assert [bucket.name for bucket in engine.buckets()] == ["alpha", "bucket", "zebra"]
    assert [bucket.name for bucket in engine.buckets(limit=2)] == ["alpha", "bucket"]
    assert [bucket.name for bucket in engine.buckets("alpha", 1)] == ["bucket"]
    assert [bucket.name for bucket in engine.buckets("alphabet")] == ["bucket", "zebra"]
    assert engine.buckets("zebra", 1) == []
    assert [bucket.name for bucket in engine.each_bucket()] == ["alpha", "bucket", "zebra"]
    assert engine.bucket(".uploads").name == ".uploads"


def test_only_an_empty_bucket_is_deleted(engine: Engine) -> None:
    put(engine, "key", b"data")
    assert code_of(lambda: engine.delete_bucket(BUCKET.name)) == "BucketNotEmpty"
    engine.delete(BUCKET.name, ["key"])
    engine.delete_bucket(BUCKET.name)
    assert code_of(lambda: engine.bucket(BUCKET.name)) == "NoSuchBucket"


def test_a_bucket_created_again_is_empty(engine: Engine) -> None:
    put(engine, "key", b"data")
    read(engine, "key")
    engine.delete(BUCKET.name, ["key"])
    engine.delete_bucket(BUCKET.name)
    engine.create_bucket(BUCKET)
    assert read(engine, "key") is None


def test_every_method_says_that_a_bucket_does_not_exist(engine: Engine) -> None:
    calls: dict[str, Callable[[], object]] = {
        "bucket": lambda: engine.bucket("none"),
        "delete_bucket": lambda: engine.delete_bucket("none"),
        "set_layout": lambda: engine.set_layout("none", LAYOUT),
        "set_policy": lambda: engine.set_policy("none", BucketPolicy()),
        "stage": lambda: engine.stage("none", "key"),
        "stage_prefix": lambda: engine.stage_prefix(
            "none", PrefixShape(["key"], 1, 8, layerwise=True)
        ),
        "delete": lambda: engine.delete("none", ["key"]),
        "stat": lambda: engine.stat("none", "key"),
        "match": lambda: engine.match("none", ["key"]),
        "open_many": lambda: engine.open_many("none", ["key"]),
        "scan": lambda: engine.scan("none", "", "", 1),
    }
    said = {method: code_of(call) for method, call in calls.items()}
    assert said == dict.fromkeys(calls, "NoSuchBucket")


def test_a_commit_into_a_bucket_deleted_meanwhile_fails(engine: Engine) -> None:
    staged = staged_put(engine, "key", b"data")
    engine.delete_bucket(BUCKET.name)
    assert code_of(lambda: engine.commit([staged])) == "NoSuchBucket"


def test_buckets_do_not_share_keys(engine: Engine) -> None:
    engine.create_bucket(msgspec.structs.replace(BUCKET, name="second"))
    put(engine, "key", b"one")
    put(engine, "key", b"two", bucket="second")
    assert (read(engine, "key"), read(engine, "key", "second")) == (b"one", b"two")
    assert engine.delete("second", ["key"]) == 1
    assert read(engine, "key") == b"one"


# --- layouts ---


def test_a_layout_is_kept_and_may_be_given_again(engine: Engine) -> None:
    engine.set_layout(BUCKET.name, LAYOUT)
    engine.set_layout(BUCKET.name, LAYOUT)
    assert engine.bucket(BUCKET.name).layout == LAYOUT


def test_another_layout_is_a_conflict(engine: Engine) -> None:
    engine.set_layout(BUCKET.name, LAYOUT)
    other = msgspec.structs.replace(LAYOUT, fingerprint="other weights")
    assert code_of(lambda: engine.set_layout(BUCKET.name, other)) == "KvLayoutConflict"
    assert engine.bucket(BUCKET.name).layout == LAYOUT


def test_a_layout_conflicts_only_with_objects_of_another_size(engine: Engine) -> None:
    put(engine, "fits", content("fits", LAYOUT.chunk_bytes))
    put(engine, "too long", content("too long", LAYOUT.chunk_bytes + 1))
    assert code_of(lambda: engine.set_layout(BUCKET.name, LAYOUT)) == "KvLayoutConflict"
    engine.delete(BUCKET.name, ["too long"])
    engine.set_layout(BUCKET.name, LAYOUT)


def test_keys_of_a_bucket_with_a_layout_are_immutable(engine: Engine) -> None:
    engine.set_layout(BUCKET.name, LAYOUT)
    data = content("chunk", LAYOUT.chunk_bytes)
    assert not put(engine, "key", data).existed
    assert put(engine, "key", data).existed
    other = content("other", LAYOUT.chunk_bytes)
    assert code_of(lambda: put(engine, "key", other)) == "ContentConflict"
    assert read(engine, "key") == data


def test_a_bucket_with_a_layout_takes_no_object_of_another_size(engine: Engine) -> None:
    staged = staged_put(engine, "key", content("short", LAYOUT.chunk_bytes - 1))
    engine.set_layout(BUCKET.name, LAYOUT)
    assert code_of(lambda: engine.commit([staged])) == "DescriptorMismatch"
    assert read(engine, "key") is None


# --- policies ---

POLICY = BucketPolicy(
    durability=Durability.ASYNC,
    verification=Verification.SAMPLED,
    quota_bytes=10 * MIB,
    ttl_s=3600.0,
)


def test_a_bucket_begins_with_the_policy_that_loses_nothing(engine: Engine) -> None:
    assert engine.bucket(BUCKET.name).policy == BucketPolicy()
    engine.set_policy(BUCKET.name, BucketPolicy())
    assert engine.bucket(BUCKET.name) == BUCKET


def test_another_policy_is_kept_or_refused_with_the_engine_that_has_it(engine: Engine) -> None:
    engine.set_layout(BUCKET.name, LAYOUT)
    if engine.capabilities.name not in WITH_UPKEEP:
        with pytest.raises(Unsupported, match="local has"):
            engine.set_policy(BUCKET.name, POLICY)
        assert engine.bucket(BUCKET.name).policy == BucketPolicy()
        return
    engine.set_policy(BUCKET.name, POLICY)
    expected = msgspec.structs.replace(BUCKET, layout=LAYOUT, policy=POLICY)
    assert engine.bucket(BUCKET.name) == expected
    engine.set_policy(BUCKET.name, BucketPolicy())
    assert engine.bucket(BUCKET.name).policy == BucketPolicy()


def test_an_encoding_is_kept_or_refused_with_the_engine_that_has_it(engine: Engine) -> None:
    policy = BucketPolicy(encoding=StoredEncoding.PLANES_DEFLATE)
    if engine.capabilities.name != "local":
        with pytest.raises(Unsupported, match=f"engine {engine.capabilities.name} .*; local has"):
            engine.set_policy(BUCKET.name, policy)
        assert engine.bucket(BUCKET.name).policy == BucketPolicy()
        return
    engine.set_policy(BUCKET.name, policy)
    assert engine.bucket(BUCKET.name).policy == policy


def test_objects_are_pinned_and_counted_or_the_engine_says_that_it_evicts_nothing(
    engine: Engine,
) -> None:
    put_batch(engine, {"a": b"1", "b": b"2"})
    if engine.capabilities.name not in WITH_UPKEEP:
        with pytest.raises(Unsupported, match="local does"):
            engine.pin(BUCKET.name, ["a"], True)
        return
    assert engine.pin(BUCKET.name, ["a", "missing", "b"], True) == 2
    assert engine.pin(BUCKET.name, ["b"], False) == 1
    assert read(engine, "a") == b"1"


# --- reads begun and finished apart ---


def test_reads_that_are_begun_land_as_others_do_and_say_when(engine: Engine) -> None:
    objects = {f"{number}": content(number, 200_000) for number in range(8)}
    put_batch(engine, objects)
    with engine.open_many(BUCKET.name, list(objects)) as opened:
        landings = [bytearray(150_000) for _ in objects]
        begun = [
            opened.begin_reads(reads_of(opened, index, 33_333, 150_000), memoryview(landing))
            for index, landing in enumerate(landings)
        ]
        landed = [threading.Event() for _ in begun]
        for reads, event in zip(begun, landed, strict=True):
            reads.when_landed(event.set)
        for reads, event in zip(reversed(begun), reversed(landed), strict=True):
            reads.finish()
            assert event.wait(DEADLINE_S)
    wanted = [data[33_333:183_333] for data in objects.values()]
    assert [bytes(landing) for landing in landings] == wanted


def test_reads_that_are_cancelled_end_one_way_or_the_other(engine: Engine) -> None:
    data = content("cancelled", 200_000)
    put(engine, "key", data)
    landing = bytearray(len(data))
    with engine.open_many(BUCKET.name, ["key"]) as opened:
        reads = opened.begin_reads(reads_of(opened, 0, 0, len(data)), memoryview(landing))
        reads.cancel()
        try:
            reads.finish()
        except Unavailable:
            return
    assert landing == data


def reads_of(opened: OpenObjects, index: int, offset_bytes: int, length_bytes: int) -> list[Read]:
    """What reads a range of an object into the begin of a buffer."""
    place = opened.placements()[index]
    reads: list[Read] = []
    landing_bytes = 0
    for start_bytes, run_bytes in place.runs(offset_bytes, length_bytes):
        reads.append(Read(place.source, start_bytes, run_bytes, landing_bytes))
        landing_bytes += run_bytes
    return reads


# --- the engine itself ---


def test_the_status_names_the_engine_and_counts_what_it_knows(engine: Engine) -> None:
    status = engine.status()
    assert (status.engine, status.damaged) == (engine.capabilities.name, 0)
    put_batch(engine, {"a": b"1", "b": b"2"})
    after = engine.status()
    assert after.objects - status.objects in (0, 2)
    if after.capacity_bytes:
        assert after.objects - status.objects == 2
        assert 0 < after.live_bytes <= after.allocated_bytes <= after.capacity_bytes
        assert sum(one.bytes for one in after.extents) == after.allocated_bytes


def test_a_check_of_a_sound_store_finds_nothing(engine: Engine) -> None:
    put_batch(engine, {f"{i}": content(i, 100_000) for i in range(20)})
    if engine.capabilities.name not in WITH_UPKEEP:
        with pytest.raises(Unsupported, match="local has"):
            engine.check(False, lambda _: True)
        return
    report = engine.check(False, lambda _: True)
    assert (report.objects, report.bytes) == (20, 20 * 100_000)
    assert (report.damaged, report.misplaced, report.leaked_bytes) == (0, 0, 0)
    assert report.examples == ()


# --- writing ---


def test_an_object_reads_back_as_it_was_put(engine: Engine) -> None:
    for size_bytes in (0, 1, 65_535, 65_536, 65_537, 3 * 65_536, 1_000_003):
        key, data = f"key {size_bytes}", content(size_bytes, size_bytes)
        info = put(engine, key, data, etag="abc").info
        assert (info.key, info.size_bytes, info.etag) == (key, size_bytes, "abc")
        assert read(engine, key) == data


def test_attributes_are_kept(engine: Engine) -> None:
    attributes = ObjectAttributes(
        content_type="text/plain",
        user_metadata={"name": "v\u00e4lue", "empty": ""},
        checksums={"crc32": "AAAAAA=="},
        part_sizes_bytes=(5, 6),
    )
    info = put(engine, "key", b"data", attributes=attributes).info
    assert info.attributes == attributes
    assert engine.stat(BUCKET.name, "key") == info
    assert engine.scan(BUCKET.name, "", "", 1) == [info]
    with engine.open_many(BUCKET.name, ["key"]) as opened:
        assert opened.infos == [info]


def test_blocks_may_be_written_in_any_order(engine: Engine) -> None:
    block_bytes, data = 1000, content("blocks", 7 * 1000 + 321)
    for order in ([7, 0, 3, 1, 6, 2, 5, 4], [4, 5, 2, 6, 1, 3, 0, 7]):
        staged = engine.stage(BUCKET.name, f"key {order[0]}", block_bytes)
        for block in order:
            begin = block * block_bytes
            staged.write_at(begin, memoryview(data)[begin : begin + block_bytes])
        engine.commit([StagedPut(staged, "etag")])
        assert read(engine, staged.key) == data


def test_written_memory_may_be_used_again_at_once(engine: Engine) -> None:
    buffer = bytearray(b"first")
    staged = engine.stage(BUCKET.name, "key", 5)
    staged.write_at(0, memoryview(buffer))
    buffer[:] = b"other"
    engine.commit([StagedPut(staged, "etag")])
    assert read(engine, "key") == b"first"


def test_chunks_may_be_written_layer_after_layer(engine: Engine) -> None:
    layers, slice_bytes = LAYOUT.num_layers, LAYOUT.per_layer_chunk_bytes
    chunks = {f"chunk {i}": content(i, LAYOUT.chunk_bytes) for i in range(5)}
    staged = {key: engine.stage(BUCKET.name, key, slice_bytes) for key in chunks}
    for layer in range(layers):
        begin = layer * slice_bytes
        for key, data in chunks.items():
            staged[key].write_at(begin, memoryview(data)[begin : begin + slice_bytes])
    engine.commit([StagedPut(each, "etag") for each in staged.values()], IMMUTABLE)
    assert {key: read(engine, key) for key in chunks} == chunks


# --- the chunks of one put ---


def chunks_of(shape: PrefixShape) -> dict[str, bytes]:
    return {key: content(key, shape.chunk_bytes) for key in shape.keys}


def payload_of(shape: PrefixShape, chunks: dict[str, bytes]) -> bytes:
    """The chunks in the order in which a put sends them."""
    if not shape.layerwise:
        return b"".join(chunks.values())
    begins = range(0, shape.chunk_bytes, shape.slice_bytes)
    return b"".join(data[b : b + shape.slice_bytes] for b in begins for data in chunks.values())


def write_prefix(
    engine: Engine, shape: PrefixShape, payload: bytes, buffer_bytes: int
) -> list[StagedPut]:
    """Stage a put whose payload arrives in buffers of this size; one memory takes all of them."""
    prefix = engine.stage_prefix(BUCKET.name, shape)
    buffer = bytearray(buffer_bytes)
    for begin in range(0, len(payload), buffer_bytes):
        piece = payload[begin : begin + buffer_bytes]
        buffer[: len(piece)] = piece
        prefix.write(begin, memoryview(buffer)[: len(piece)])
    return [StagedPut(staged, "") for staged in prefix.staged]


@pytest.mark.parametrize(
    ("slice_bytes", "num_layers", "chunk_count", "buffer_blocks"),
    [
        (1000, 3, 7, 1),
        (1000, 3, 7, 5),
        (1000, 3, 7, 1000),
        (4096, 1, 9, 5),
        (8192, 2, 1, 1),
        (3 * MIB // 2, 2, 2, 3),
    ],
)
@pytest.mark.parametrize("layerwise", [True, False])
def test_the_chunks_of_a_put_read_back_as_they_were_sent(
    engine: Engine,
    layerwise: bool,
    slice_bytes: int,
    num_layers: int,
    chunk_count: int,
    buffer_blocks: int,
) -> None:
    keys = [f"chunk {i}" for i in range(chunk_count)]
    shape = PrefixShape(keys, num_layers, slice_bytes, layerwise)
    chunks = chunks_of(shape)
    payload = payload_of(shape, chunks)
    puts = write_prefix(engine, shape, payload, buffer_blocks * slice_block_bytes(slice_bytes))
    assert engine.match(BUCKET.name, keys) == 0
    committed = engine.commit(puts, IMMUTABLE)
    assert [one.info.key for one in committed] == keys
    assert [one.existed for one in committed] == [False] * chunk_count
    with engine.open_many(BUCKET.name, keys, are_prefix=True) as opened:
        for index, data in enumerate(chunks.values()):
            assert read_range(opened, index, 0, len(data)) == data
            middle = len(data) // 2
            assert read_range(opened, index, middle - 1, 3) == data[middle - 1 : middle + 2]


def test_chunks_of_a_put_and_single_objects_of_the_same_bytes_are_the_same(engine: Engine) -> None:
    shape = PrefixShape(["a", "b", "c"], 4, 1024, layerwise=True, parent_key="the one before")
    chunks = chunks_of(shape)
    first = put(engine, "b", chunks["b"], IMMUTABLE, etag="", block_bytes=shape.slice_bytes)
    committed = engine.commit(
        write_prefix(engine, shape, payload_of(shape, chunks), 2048), IMMUTABLE
    )
    assert [one.existed for one in committed] == [False, True, False]
    assert committed[1].info == first.info
    again = put(engine, "a", chunks["a"], IMMUTABLE, etag="", block_bytes=shape.slice_bytes)
    assert (again.existed, again.info) == (True, committed[0].info)


def test_a_put_of_chunks_that_conflicts_stores_none_of_them(engine: Engine) -> None:
    shape = PrefixShape(["a", "b", "c"], 4, 1024, layerwise=False)
    put(engine, "b", b"other")
    puts = write_prefix(engine, shape, payload_of(shape, chunks_of(shape)), 4096)
    assert code_of(lambda: engine.commit(puts, IMMUTABLE)) == "ContentConflict"
    assert stored_keys(engine) == ["b"]


def test_discarded_chunks_are_forgotten(engine: Engine) -> None:
    shape = PrefixShape(["a", "b", "c"], 4, 1024, layerwise=True)
    prefix = engine.stage_prefix(BUCKET.name, shape)
    prefix.write(0, memoryview(bytes(5 * 1024)))
    prefix.discard()
    prefix.discard()
    assert stored_keys(engine) == []
    put(engine, "a", b"data")
    assert read(engine, "a") == b"data"


def test_discarding_chunks_after_the_commit_changes_nothing(engine: Engine) -> None:
    shape = PrefixShape(["a", "b"], 4, 1024, layerwise=True)
    chunks = chunks_of(shape)
    prefix = engine.stage_prefix(BUCKET.name, shape)
    prefix.write(0, memoryview(payload_of(shape, chunks)))
    engine.commit([StagedPut(staged, "") for staged in prefix.staged], IMMUTABLE)
    prefix.discard()
    assert {key: read(engine, key) for key in chunks} == chunks


def test_a_chunk_is_read_in_slices_of_any_size(engine: Engine) -> None:
    shape = PrefixShape([f"{i}" for i in range(5)], 6, 1000, layerwise=True)
    chunks = chunks_of(shape)
    engine.commit(write_prefix(engine, shape, payload_of(shape, chunks), 3000), IMMUTABLE)
    with engine.open_many(BUCKET.name, shape.keys) as opened:
        for place, data in zip(opened.placements(), chunks.values(), strict=True):
            for slice_bytes in (500, 750, 1000, 3000, 6000):
                buffer, reads = bytearray(len(data)), list[Read]()
                for begin in range(0, len(data), slice_bytes):
                    landing = begin
                    for start, length in place.runs(begin, slice_bytes):
                        reads.append(Read(place.source, start, length, landing))
                        landing += length
                opened.read_many(reads, memoryview(buffer))
                assert buffer == data


def test_the_answer_is_the_same_whether_keys_are_said_to_be_a_prefix(engine: Engine) -> None:
    put_batch(engine, {"a": b"1", "c": b"3"})
    keys = ["a", "missing", "c"]
    for are_prefix in (True, False):
        with engine.open_many(BUCKET.name, keys, are_prefix=are_prefix) as opened:
            assert [info and info.key for info in opened.infos] == ["a", None, "c"]


def test_nothing_is_visible_before_the_commit(engine: Engine) -> None:
    staged = staged_put(engine, "key", b"data")
    assert read(engine, "key") is None
    assert engine.match(BUCKET.name, ["key"]) == 0
    assert stored_keys(engine) == []
    engine.commit([staged])
    assert read(engine, "key") == b"data"


def test_a_discarded_object_is_forgotten(engine: Engine) -> None:
    staged = engine.stage(BUCKET.name, "key")
    staged.write_at(0, memoryview(b"data"))
    staged.discard()
    staged.discard()
    assert read(engine, "key") is None


def test_discarding_after_the_commit_changes_nothing(engine: Engine) -> None:
    staged = staged_put(engine, "key", b"data")
    engine.commit([staged])
    staged.staged.discard()
    assert read(engine, "key") == b"data"


def test_an_empty_commit_does_nothing(engine: Engine) -> None:
    assert engine.commit([]) == []


def test_an_overwrite_replaces_bytes_etag_and_attributes(engine: Engine) -> None:
    put(engine, "key", b"old", etag="1", attributes=ObjectAttributes(content_type="a/b"))
    assert read(engine, "key") == b"old"
    committed = put(engine, "key", b"newer", etag="2")
    assert not committed.existed
    assert read(engine, "key") == b"newer"
    assert engine.stat(BUCKET.name, "key") == committed.info
    assert stored_keys(engine) == ["key"]


# --- ETags of the content ---


def test_a_put_without_an_etag_gets_one_of_its_content(engine: Engine) -> None:
    data = content("chunk", 10_007)
    same = [put(engine, key, data, etag="", block_bytes=1000).info.etag for key in ("a", "b")]
    others = [
        put(engine, "c", other, etag="", block_bytes=1000).info.etag
        for other in (b"", data[:-1], data[:-1] + b"x", data[1000:2000], data + bytes(1))
    ]
    assert same[0] == same[1] == engine.stat(BUCKET.name, "a").etag
    assert len({same[0], *others}) == 6
    assert all(re.fullmatch("[0-9a-f]{32}-1", etag) for etag in (same[0], *others))


def test_the_etag_of_the_content_is_the_same_in_every_engine(engine: Engine) -> None:
    assert put(engine, "empty", b"", etag="").info.etag == content_etag(0, array("Q"))
    for unit_bytes, block_bytes in ((1000, 1000), (3 * MIB // 2, 3 * MIB // 4)):
        data = content(unit_bytes, 2 * unit_bytes + 1)
        checksums = block_checksums(memoryview(data), block_bytes)
        etag = put(engine, "key", data, etag="", block_bytes=unit_bytes).info.etag
        assert etag == content_etag(len(data), array("Q", checksums))


def test_an_overwrite_changes_the_etag_of_the_content(engine: Engine) -> None:
    first, other, again = (
        put(engine, "key", data, etag="").info.etag for data in (b"one", b"two", b"one")
    )
    assert first == again != other
    assert engine.stat(BUCKET.name, "key").etag == again


def test_an_immutable_object_keeps_the_etag_it_was_stored_with(engine: Engine) -> None:
    put(engine, "key", b"data", etag="given")
    kept = put(engine, "key", b"data", IMMUTABLE, etag="")
    assert (kept.existed, kept.info.etag) == (True, "given")


# --- conditions ---


def test_absent_refuses_a_stored_key(engine: Engine) -> None:
    put(engine, "key", b"old", ABSENT)
    with pytest.raises(PreconditionFailed):
        put(engine, "key", b"old", ABSENT)
    engine.delete(BUCKET.name, ["key"])
    put(engine, "key", b"new", ABSENT)
    assert read(engine, "key") == b"new"


def test_an_etag_condition_compares_with_what_is_stored(engine: Engine) -> None:
    assert code_of(lambda: put(engine, "key", b"x", Condition(etag="1"))) == "NoSuchKey"
    assert code_of(lambda: put(engine, "key", b"x", Condition(etag="*"))) == "NoSuchKey"
    put(engine, "key", b"one", etag="1")
    assert code_of(lambda: put(engine, "key", b"x", Condition(etag="2"))) == "PreconditionFailed"
    put(engine, "key", b"two", Condition(etag="1"), etag="2")
    put(engine, "key", b"three", Condition(etag="*"), etag="3")
    assert read(engine, "key") == b"three"


def test_a_put_may_ask_not_to_replace_one_etag(engine: Engine) -> None:
    put(engine, "key", b"one", Condition(not_etag="1"), etag="1")  # nothing is stored yet
    refused = Condition(not_etag="1")
    assert code_of(lambda: put(engine, "key", b"x", refused)) == "PreconditionFailed"
    put(engine, "key", b"two", Condition(not_etag="2"), etag="2")
    assert read(engine, "key") == b"two"


def test_an_immutable_put_of_the_same_bytes_keeps_what_is_stored(engine: Engine) -> None:
    first = put(engine, "key", b"data", IMMUTABLE, etag="1")
    second = put(engine, "key", b"data", IMMUTABLE, etag="2")
    assert (first.existed, second.existed) == (False, True)
    assert second.info == first.info == engine.stat(BUCKET.name, "key")


def test_an_immutable_put_of_other_bytes_is_a_conflict(engine: Engine) -> None:
    put(engine, "key", b"data")
    for other in (b"dat", b"datas", b"Data", b""):
        with pytest.raises(ObjectCacheError) as caught:
            put(engine, "key", other, IMMUTABLE)
        assert caught.value.code == "ContentConflict"
        assert read(engine, "key") == b"data"


def test_the_same_bytes_are_the_same_in_blocks_of_any_size(engine: Engine) -> None:
    data = content("same", 10_007)
    other = data[:-1] + bytes([data[-1] ^ 1])
    for first, second in ((1000, 64), (64, 1000), (1, 4096), (4096, 3)):
        key = f"key {first}"
        put(engine, key, data, block_bytes=first)
        assert put(engine, key, data, IMMUTABLE, block_bytes=second).existed
        with pytest.raises(Conflict):
            put(engine, key, other, IMMUTABLE, block_bytes=second)


@pytest.mark.parametrize(
    ("condition", "code"),
    [(ABSENT, "PreconditionFailed"), (IMMUTABLE, "ContentConflict")],
)
def test_one_refused_key_stores_nothing_of_the_commit(
    engine: Engine, condition: Condition, code: str
) -> None:
    put(engine, "b", b"stored")
    batch = {"a": b"1", "b": b"other", "c": b"3"}
    assert code_of(lambda: put_batch(engine, batch, condition)) == code
    assert stored_keys(engine) == ["b"]
    assert read(engine, "b") == b"stored"


def test_a_commit_tells_new_objects_from_existing_ones(engine: Engine) -> None:
    put_batch(engine, {"a": b"1", "c": b"3"})
    committed = put_batch(engine, {"a": b"1", "b": b"2", "c": b"3", "d": b"4"}, IMMUTABLE)
    assert [each.existed for each in committed] == [True, False, True, False]
    assert [each.info.key for each in committed] == ["a", "b", "c", "d"]
    assert stored_keys(engine) == ["a", "b", "c", "d"]


# --- deleting ---


def test_delete_counts_what_was_stored(engine: Engine) -> None:
    put_batch(engine, {"a": b"1", "b": b"2", "c": b"3"})
    assert engine.delete(BUCKET.name, ["a", "missing", "c"]) == 2
    assert engine.delete(BUCKET.name, ["a", "c"]) == 0
    assert engine.delete(BUCKET.name, []) == 0
    assert stored_keys(engine) == ["b"]


def test_many_keys_are_deleted_at_once(engine: Engine) -> None:
    keys = [f"{i:04}" for i in range(700)]
    put_batch(engine, dict.fromkeys(keys, b""))
    assert engine.delete(BUCKET.name, keys[1:]) == 699
    assert stored_keys(engine) == keys[:1]


# --- reading ---


def test_stat_of_a_missing_key_names_it(engine: Engine) -> None:
    with pytest.raises(NotFound, match="missing") as caught:
        engine.stat(BUCKET.name, "missing")
    assert (caught.value.code, caught.value.details.key) == ("NoSuchKey", "missing")


def test_match_counts_leading_keys_only(engine: Engine) -> None:
    put_batch(engine, {f"{i:04}": b"" for i in range(1500) if i != 1234})
    keys = [f"{i:04}" for i in range(1500)]
    assert engine.match(BUCKET.name, keys) == 1234
    assert engine.match(BUCKET.name, keys[1235:]) == 265
    assert engine.match(BUCKET.name, keys[:15]) == 15
    assert engine.match(BUCKET.name, keys[1234:]) == 0
    assert engine.match(BUCKET.name, []) == 0
    assert engine.match(BUCKET.name, ["0000", "0000", "0001"]) == 3


def test_open_objects_keep_the_order_asked_and_say_what_is_missing(engine: Engine) -> None:
    put_batch(engine, {"a": b"1", "b": b"22"})
    with engine.open_many(BUCKET.name, ["b", "missing", "a", "b"]) as opened:
        sizes = [info and info.size_bytes for info in opened.infos]
    assert sizes == [2, None, 1, 2]


def test_many_objects_open_at_once(engine: Engine) -> None:
    objects = {f"{i}": content(i, 10 + i) for i in range(600)}
    put_batch(engine, objects)
    for keys in (list(objects), list(reversed(objects))):
        with engine.open_many(BUCKET.name, keys) as opened:
            assert len(opened.placements()) == 600
            for index, key in enumerate(keys):
                assert read_range(opened, index, 0, len(objects[key])) == objects[key]


def test_reads_land_where_they_are_told(engine: Engine) -> None:
    slice_bytes, layers, count = 1024, 4, 3
    chunks = [content(i, layers * slice_bytes) for i in range(count)]
    for i, data in enumerate(chunks):
        put(engine, f"{i}", data, block_bytes=slice_bytes)
    expected = b"".join(
        chunk[layer * slice_bytes : (layer + 1) * slice_bytes]
        for layer in range(layers)
        for chunk in chunks
    )
    with engine.open_many(BUCKET.name, ["0", "1", "2"]) as opened:
        reads: list[Read] = []
        for layer, (index, place) in itertools.product(
            range(layers), enumerate(opened.placements())
        ):
            landing = (layer * count + index) * slice_bytes
            for offset_bytes, length_bytes in place.runs(layer * slice_bytes, slice_bytes):
                reads.append(Read(place.source, offset_bytes, length_bytes, landing))
                landing += length_bytes
        buffer = bytearray(len(expected) + 10)
        opened.read_many(reads, memoryview(buffer))
    assert buffer == expected + bytes(10)


def test_ragged_ranges_are_exact_at_every_alignment(engine: Engine) -> None:
    data = content("ragged", 237)
    for block_bytes in (1, 7, 64, 100, 1000):
        put(engine, "key", data, block_bytes=block_bytes)
        around_a_block = (block_bytes - 1, block_bytes, block_bytes + 1)
        with engine.open_many(BUCKET.name, ["key"]) as opened:
            for begin in (*range(0, len(data) + 1, 11), *around_a_block):
                for end in range(begin, len(data) + 1, 3):
                    assert read_range(opened, 0, begin, end - begin) == data[begin:end]


@pytest.mark.parametrize("block_bytes", [65_536, 300_000, 1 << 20, 3 << 20, (1 << 20) + 7])
def test_ragged_ranges_of_large_blocks_are_exact(engine: Engine, block_bytes: int) -> None:
    data = content("large", 2 * block_bytes + block_bytes // 3)
    put(engine, "key", data, block_bytes=block_bytes)
    edges = [0, 1, block_bytes - 1, block_bytes, block_bytes + 1, 2 * block_bytes, len(data)]
    with engine.open_many(BUCKET.name, ["key"]) as opened:
        for begin, end in itertools.combinations(edges, 2):
            assert read_range(opened, 0, begin, end - begin) == data[begin:end]


def test_slices_of_another_size_than_the_blocks_are_exact(engine: Engine) -> None:
    data = content("slices", 12_000)
    for block_bytes, slice_bytes in ((1000, 600), (600, 1000), (500, 2000), (12_000, 750)):
        put(engine, "key", data, block_bytes=block_bytes)
        with engine.open_many(BUCKET.name, ["key"]) as opened:
            (place,) = opened.placements()
            reads = [
                Read(place.source, place.base_bytes + begin, slice_bytes, begin)
                for begin in range(0, len(data), slice_bytes)
            ]
            buffer = bytearray(len(data))
            opened.read_many(reads, memoryview(buffer))
        assert buffer == data


def test_an_object_on_its_own_lies_in_one_run(engine: Engine) -> None:
    put(engine, "key", b"data")
    with engine.open_many(BUCKET.name, ["key"]) as opened:
        (place,) = opened.placements()
    assert place.runs(0, 4) == [(place.base_bytes, 4)]
    assert place.runs(1, 0) == []


def test_open_objects_survive_overwrite_and_delete(engine: Engine) -> None:
    first, second = content(1, 100_000), content(2, 50_000)
    put(engine, "key", first)
    before = engine.open_many(BUCKET.name, ["key"])
    put(engine, "key", second)
    between = engine.open_many(BUCKET.name, ["key"])
    engine.delete(BUCKET.name, ["key"])
    assert read_range(before, 0, 0, len(first)) == first
    assert read_range(between, 0, 0, len(second)) == second
    assert read(engine, "key") is None
    for opened in (before, between):
        opened.close()
        opened.close()


# --- keys and scans ---


def test_odd_keys_are_ordinary_keys(engine: Engine) -> None:
    put_batch(engine, {key: key.encode() for key in ODD_KEYS})
    assert stored_keys(engine) == sorted(ODD_KEYS, key=str.encode)
    assert engine.match(BUCKET.name, ODD_KEYS) == len(ODD_KEYS)
    for key in ODD_KEYS:
        assert read(engine, key) == key.encode()
        assert engine.stat(BUCKET.name, key).key == key
    assert engine.delete(BUCKET.name, ODD_KEYS) == len(ODD_KEYS)
    assert stored_keys(engine) == []


def test_a_key_that_is_not_unicode_text_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="Unicode"):
        engine.stage(BUCKET.name, "lone surrogate \ud800")


def test_scans_are_in_byte_order_with_prefix_start_and_limit(engine: Engine) -> None:
    prefixes = ("", "a", "a/", "\ud7ff", "\ue000", "\U0010ffff", "\x7f", "\u00e9", "none")
    tails = ("", "/", "0", "a", "\x7f", "\u00e9", "\ud7ff", "\ue000", "\uffff", "\U0010ffff")
    heads = ("a", "a/", "b", "\u00e9", "\ud7ff", "\ue000", "\U0010ffff", "\x7f")
    keys = sorted({head + tail for head in heads for tail in tails}, key=str.encode)
    put_batch(engine, dict.fromkeys(keys, b""))
    for prefix in prefixes:
        bounds = ("", prefix, prefix + "/", prefix + "\U0010ffff", "0", "\U0010ffff" * 3)
        for start_after, limit in itertools.product((*bounds, *keys[::7]), (0, 1, 3, 1000)):
            expected = [
                key
                for key in keys
                if key.startswith(prefix) and key.encode() > start_after.encode()
            ][:limit]
            found = engine.scan(BUCKET.name, prefix, start_after, limit)
            assert [info.key for info in found] == expected


# --- copying ---


def test_copy_takes_whole_objects_and_ranges(engine: Engine) -> None:
    data = content("copy", 2 * COPY_BYTES + 12_345)
    put(engine, "source", data, etag="e")
    for begin, end in ((0, len(data)), (0, 0), (5, 5 + COPY_BYTES), (COPY_BYTES - 1, len(data))):
        staged = engine.stage(BUCKET.name, "target")
        copied = engine.copy(BUCKET.name, "source", staged, begin, end - begin, "e")
        engine.commit([StagedPut(staged, "etag")])
        assert copied == end - begin
        assert read(engine, "target") == data[begin:end]


def test_copy_checks_the_source(engine: Engine) -> None:
    put(engine, "source", b"data", etag="e")
    staged = engine.stage(BUCKET.name, "target")
    assert code_of(lambda: engine.copy(BUCKET.name, "missing", staged)) == "NoSuchKey"
    with pytest.raises(PreconditionFailed):
        engine.copy(BUCKET.name, "source", staged, source_etag="other")
    staged.discard()


# --- threads ---


def run_together(count: int, action: Callable[[int], object]) -> list[object]:
    """Start `count` threads at the same moment; results, or the errors they ended with."""
    barrier = threading.Barrier(count)

    def run(number: int) -> object:
        barrier.wait()
        try:
            return action(number)
        except ObjectCacheError as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def put_absent(engine: Engine, key: str, number: int) -> None:
    put(engine, key, b"%d" % number, ABSENT)


def test_one_of_many_absent_puts_wins(engine: Engine) -> None:
    for attempt in range(5):
        key = f"key {attempt}"
        results = run_together(6, partial(put_absent, engine, key))
        winners = [i for i, result in enumerate(results) if not isinstance(result, Exception)]
        assert len(winners) == 1
        assert all(
            isinstance(result, PreconditionFailed)
            for i, result in enumerate(results)
            if i not in winners
        )
        assert read(engine, key) == b"%d" % winners[0]


def test_one_of_many_etag_puts_wins(engine: Engine) -> None:
    put(engine, "key", b"first", etag="0")
    results = run_together(
        6, lambda i: put(engine, "key", b"%d" % i, Condition(etag="0"), etag=f"{i + 1}")
    )
    assert sum(isinstance(result, PreconditionFailed) for result in results) == 5


def test_equal_immutable_puts_all_succeed_and_one_stores(engine: Engine) -> None:
    batch = {f"{i}": content(i, 5000) for i in range(10)}
    results = run_together(4, lambda _: put_batch(engine, batch, IMMUTABLE))
    stored = [[not each.existed for each in result] for result in results]  # type: ignore[attr-defined]
    assert [sum(column) for column in zip(*stored, strict=True)] == [1] * 10


def test_readers_see_whole_versions_during_overwrites_and_deletes(engine: Engine) -> None:
    versions = [content(i, 20_000 + i) for i in range(4)]
    put(engine, "key", versions[0])
    done = threading.Event()

    def write() -> None:
        try:
            for i in range(60):
                if i % 5 == 4:
                    engine.delete(BUCKET.name, ["key"])
                put(engine, "key", versions[i % 4])
        finally:
            done.set()

    def check(_: int) -> int:
        count = 0
        while not done.is_set():
            assert read(engine, "key") in (None, *versions)
            count += 1
        return count

    with ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(check, i) for i in range(2)]
        pool.submit(write).result()
        assert all(reader.result() >= 0 for reader in readers)
    assert read(engine, "key") == versions[59 % 4]
    assert engine.damaged_count == 0


def test_a_commit_is_seen_whole_or_not_at_all(engine: Engine) -> None:
    keys = [f"{i:03}" for i in range(40)]
    done = threading.Event()

    def write() -> None:
        try:
            for i in range(12):
                put_batch(engine, dict.fromkeys(keys, b"%d" % i))
                if i % 3 == 2:
                    engine.delete(BUCKET.name, keys)
        finally:
            done.set()

    def check(number: int) -> None:
        while not done.is_set():
            if number:  # so that the other reader's look-ups find part of the keys cached
                read(engine, keys[number * 7])
                continue
            assert engine.match(BUCKET.name, keys) in (0, len(keys))
            assert len(engine.scan(BUCKET.name, "", "", 100)) in (0, len(keys))
            with engine.open_many(BUCKET.name, keys) as opened:
                seen = {
                    read_range(opened, index, 0, info.size_bytes) if info else None
                    for index, info in enumerate(opened.infos)
                }
            assert len(seen) == 1

    with ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(check, i) for i in range(2)]
        pool.submit(write).result()
        for reader in readers:
            reader.result()
