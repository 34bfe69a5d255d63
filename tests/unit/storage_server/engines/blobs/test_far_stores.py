"""A store that is far, or away for a while: nothing waits in turn, is lost or taken for damaged."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from objectcache_schemas.errors import Unavailable
from objectcache_storage_server.engines.base import PrefixShape, StagedPut
from objectcache_storage_server.engines.blobs.blob_engine import BlobEngine
from objectcache_storage_server.engines.blobs.blob_store import BlobStore
from objectcache_storage_server.testing import FaultyBlobStore, PassingBlobStore
from tests.contract.engine_suite import BUCKET, content, put, read, stored_keys
from tests.contract.opened_engines.blob_engines import delayed, files_over, memory_over

Open = Callable[[Callable[[BlobStore], BlobStore], Path], BlobEngine]
OPENINGS: dict[str, Open] = {
    "memory": lambda wrap, _: memory_over(wrap),
    "files": files_over,
}


def faulty(engine: BlobEngine) -> FaultyBlobStore:
    assert isinstance(engine.store, FaultyBlobStore)
    return engine.store


def work(engine: BlobEngine, rng: random.Random, steps: int) -> dict[str, bytes]:
    """Put, read and delete; returns what was acknowledged last of every key."""
    acknowledged: dict[str, bytes] = {}
    for step in range(steps):
        key = f"key {rng.randrange(8)}"
        data = content(step, rng.choice([0, 10, 5000, 200_000]))
        action = rng.choice(["put", "put", "read", "read", "delete"])
        try:
            if action == "put":
                put(engine, key, data)
                acknowledged[key] = data
            elif action == "delete":
                engine.delete(BUCKET.name, [key])
                acknowledged.pop(key, None)
            else:
                assert read(engine, key) == acknowledged.get(key)
        except Unavailable:
            continue
    return acknowledged


@pytest.mark.parametrize("is_delayed", [False, True])
@pytest.mark.parametrize("kind", OPENINGS)
@pytest.mark.parametrize("seed", range(4))
def test_nothing_acknowledged_is_lost_and_nothing_is_taken_for_damaged(
    kind: str, seed: int, is_delayed: bool, tmp_path: Path
) -> None:
    def wrap(store: BlobStore) -> BlobStore:
        return FaultyBlobStore(delayed(store) if is_delayed else store, seed, fault_rate=0.0)

    engine = OPENINGS[kind](wrap, tmp_path / "store")
    engine.create_bucket(BUCKET)
    faulty(engine).fault_rate = 0.2
    acknowledged = work(engine, random.Random(seed), 200)
    assert faulty(engine).fault_count > 20
    faulty(engine).fault_rate = 0.0
    assert engine.damaged_count == 0
    assert stored_keys(engine) == sorted(acknowledged)
    assert {key: read(engine, key) for key in acknowledged} == acknowledged
    engine.close()


def test_blobs_that_could_not_be_deleted_are_swept_when_the_engine_opens(tmp_path: Path) -> None:
    engine = files_over(lambda store: FaultyBlobStore(store, 1, fault_rate=0.0), tmp_path)
    engine.create_bucket(BUCKET)
    put(engine, "kept", b"data")
    for number in range(20):
        put(engine, f"{number}", b"gone")
    faulty(engine).fault_rate = 1.0
    assert engine.delete(BUCKET.name, [f"{number}" for number in range(20)]) == 20
    engine.close()
    again = files_over(lambda store: store, tmp_path)
    assert len(again.store.sizes()) == 1
    assert read(again, "kept") == b"data"
    again.close()


# --- puts to a store that is far away ---

CHUNKS = 16
SHAPE = PrefixShape([f"chunk {number}" for number in range(CHUNKS)], 4, 1000, layerwise=True)


class MeetingStore(PassingBlobStore):
    """A write ends when `depth` of them are under way, and not before."""

    def __init__(self, inner: BlobStore, depth: int) -> None:
        super().__init__(inner)
        self.capabilities = replace(inner.capabilities, queue_depth=depth)
        self._meeting = threading.Barrier(depth)

    def write(self, number: int, offset_bytes: int, data: memoryview, deadline_s: float) -> None:
        self._meeting.wait(60.0)
        super().write(number, offset_bytes, data, deadline_s)


@pytest.mark.parametrize("depth", [1, 4, 16])
def test_a_layer_of_a_put_is_written_to_its_chunks_at_once(depth: int) -> None:
    engine = memory_over(lambda store: MeetingStore(store, depth))
    engine.create_bucket(BUCKET)
    payload = content("layers", SHAPE.total_bytes)
    prefix = engine.stage_prefix(BUCKET.name, SHAPE)
    layer_bytes = CHUNKS * SHAPE.slice_bytes
    for begin in range(0, len(payload), layer_bytes):
        prefix.write(begin, memoryview(payload)[begin : begin + layer_bytes])
    engine.commit([StagedPut(staged, "etag") for staged in prefix.staged])
    layers = [payload[begin : begin + 1000] for begin in range(0, len(payload), layer_bytes)]
    assert read(engine, "chunk 0") == b"".join(layers)
    engine.close()


def test_a_write_that_fails_is_told_when_none_of_its_call_is_under_way() -> None:
    engine = memory_over(lambda store: FaultyBlobStore(delayed(store), seed=3, fault_rate=0.0))
    engine.create_bucket(BUCKET)
    prefix = engine.stage_prefix(BUCKET.name, SHAPE)
    faulty(engine).fault_rate = 0.5
    with pytest.raises(Unavailable, match="injected into write"):
        prefix.write(0, memoryview(bytes(CHUNKS * SHAPE.slice_bytes)))
    faulty(engine).fault_rate = 0.0
    prefix.discard()
    assert stored_keys(engine) == []
    assert engine.store.sizes() == {}
    engine.close()
