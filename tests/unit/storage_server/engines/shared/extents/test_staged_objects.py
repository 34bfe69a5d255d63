"""Objects on their own on their way into the store."""

from __future__ import annotations

import random
import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objectcache_schemas.errors import Busy, InvalidRequest, StorageFull, Unavailable
from objectcache_storage_server.engines.block_checksums import block_checksums
from objectcache_storage_server.engines.shared.extents.staged_objects import StagedAlone
from objectcache_storage_server.engines.shared.extents.write_extents import REST_BYTES
from tests.contract.engine_suite import content
from tests.unit.examples import examples
from tests.unit.storage_server.engines.shared.extents.extent_stores import (
    NotingStore,
    extent_bytes,
    writing_to,
)


def stored_bytes(store: NotingStore, staged: StagedAlone) -> bytes:
    (name,), slot = staged.place()
    assert slot == 0
    return extent_bytes(store, name, staged.shapes()[name])


def write_whole(staged: StagedAlone, data: bytes) -> None:
    staged.write_at(0, memoryview(data))
    staged.finish()


@settings(max_examples=examples(15), deadline=None)
@given(
    block_bytes=st.sampled_from([1, 100, 1000, 4096, 5000]),
    blocks=st.integers(1, 12),
    tail=st.booleans(),
    run=st.integers(1, 4),
    seed=st.integers(0, 100),
)
def test_blocks_in_any_order_lie_in_objects_in_order(
    block_bytes: int, blocks: int, tail: bool, run: int, seed: int
) -> None:
    store = NotingStore(object_bytes_max=4096)
    data = content(seed, blocks * block_bytes + (block_bytes // 2 if tail else 0))
    begins = list(range(0, len(data), run * block_bytes))
    random.Random(seed).shuffle(begins)
    with writing_to(store) as writer:
        staged = StagedAlone(writer, "bucket", "key", block_bytes)
        # The end may come before what is missing, only as the end.
        for begin in begins:
            staged.write_at(begin, memoryview(data)[begin : begin + run * block_bytes])
        staged.finish()
        assert staged.size_bytes() == len(data)
        assert stored_bytes(store, staged) == data
        sums = block_checksums(memoryview(data), staged.block_bytes)
        assert staged.checksums().tolist() == sums
        staged.keep()
        assert " 0/" in repr(writer.buffers)


def test_an_empty_object_has_no_extent() -> None:
    store = NotingStore()
    with writing_to(store) as writer:
        staged = StagedAlone(writer, "bucket", "key", 1000)
        staged.write_at(0, memoryview(b""))
        staged.finish()
        assert (staged.place(), staged.shapes(), staged.size_bytes()) == (((), 0), {}, 0)
    assert store.names() == set()


def test_whole_objects_go_out_from_where_they_came_and_pieces_are_copied() -> None:
    store = NotingStore(object_bytes_max=4096)
    data = np.frombuffer(content("data", 10_000), np.uint8)
    with writing_to(store) as writer:
        staged = StagedAlone(writer, "bucket", "key", 1024)
        staged.write_at(0, memoryview(data))  # type: ignore[arg-type]
        staged.finish()
        (name,), _ = staged.place()
    shares = [
        np.shares_memory(np.frombuffer(part, np.uint8), data)
        for number in range(3)
        for part in store.put_parts[name.object_name(number)]
    ]
    assert shares == [True, True, False]


def test_an_object_without_memory_for_a_piece_is_refused_in_time() -> None:
    store = NotingStore(object_bytes_max=4096)
    with writing_to(store, buffer_bytes_max=3000, call_s_max=0.05) as writer:
        holder = StagedAlone(writer, "bucket", "holder", 1000)
        holder.write_at(0, memoryview(bytes(2000)))
        staged = StagedAlone(writer, "bucket", "key", 1000)
        with pytest.raises(Busy, match="put_buffer_bytes_max"):
            staged.write_at(0, memoryview(bytes(2000)))
        holder.discard()
        staged.discard()
        again = StagedAlone(writer, "bucket", "key", 1000)
        again.write_at(0, memoryview(bytes(2000)))
        again.discard()


def test_what_completes_an_object_needs_no_memory() -> None:
    store = NotingStore(object_bytes_max=4000)
    data = content("data", 4000)
    with writing_to(store, buffer_bytes_max=2000, call_s_max=0.05) as writer:
        staged = StagedAlone(writer, "bucket", "key", 1000)
        for begin in (0, 2000):
            staged.write_at(begin, memoryview(data)[begin : begin + 2000])
        staged.finish()
        assert stored_bytes(store, staged) == data


def test_an_object_of_more_blocks_than_a_record_can_name_is_refused_at_once() -> None:
    store = NotingStore()
    store.capabilities = replace(store.capabilities, record_bytes_max=REST_BYTES + 10 * 8)
    with writing_to(store) as writer:
        staged = StagedAlone(writer, "bucket", "key", 100)
        staged.write_at(0, memoryview(bytes(1000)))
        with pytest.raises(InvalidRequest) as caught:
            staged.write_at(1000, memoryview(b"x"))
        assert caught.value.code == "EntityTooLarge"
        staged.discard()


@pytest.mark.parametrize("size_bytes", [100, 4096, 9000])
def test_what_the_store_has_no_room_for_is_refused_and_leaves_nothing(size_bytes: int) -> None:
    store = NotingStore(object_bytes_max=4096)
    with writing_to(store) as writer:
        staged = StagedAlone(writer, "bucket", "key", 1024)
        store.faults.is_full = True
        with pytest.raises(StorageFull):
            write_whole(staged, bytes(size_bytes))
        staged.discard()
        store.faults.is_full = False
    assert store.names() == set()
    assert " 0/" in repr(writer.buffers)


def test_a_put_that_timed_out_and_was_carried_out_is_removed_with_the_object() -> None:
    store = NotingStore(object_bytes_max=4096)
    with writing_to(store) as writer:
        staged = StagedAlone(writer, "bucket", "key", 1024)
        store.faults.time_out("put", is_carried_out=True)
        with pytest.raises(Unavailable):
            staged.write_at(0, memoryview(bytes(5000)))
        assert store.names()
        staged.discard()
    assert store.names() == set()


def test_discarding_does_not_wait_for_a_store_that_does_not_answer() -> None:
    store = NotingStore(object_bytes_max=4096)
    with writing_to(store) as writer:
        staged = StagedAlone(writer, "bucket", "key", 1024)
        staged.write_at(0, memoryview(bytes(5000)))
        store.faults.hold()
        staged.discard()
        threading.Timer(0.01, store.faults.release).start()
    assert store.names() == set()
