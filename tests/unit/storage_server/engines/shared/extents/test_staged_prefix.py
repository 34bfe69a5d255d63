"""Chunks of a put on their way into objects of the store."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest

from objectcache_schemas.errors import Busy, StorageFull
from objectcache_storage_server.engines.base import PrefixShape
from objectcache_storage_server.engines.block_checksums import block_checksums
from objectcache_storage_server.engines.shared.extents.staged_prefix import SharedStagedPrefix
from objectcache_storage_server.engines.shared.extents.write_extents import ObjectWriter
from tests.contract.engine_suite import content
from tests.unit.storage_server.engines.shared.extents.extent_stores import (
    NotingStore,
    extent_bytes,
    writing_to,
)

BUCKET = "bucket"


def shape_of(
    chunk_count: int, num_layers: int, slice_bytes: int, *, layerwise: bool
) -> PrefixShape:
    return PrefixShape([f"{i}" for i in range(chunk_count)], num_layers, slice_bytes, layerwise)


def payload_of(shape: PrefixShape, seed: object = "payload") -> bytes:
    return content(seed, shape.total_bytes)


def rows_of(shape: PrefixShape, payload: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """uint8[num_layers, chunk_count, slice_bytes], whichever way the payload came."""
    data = np.frombuffer(payload, np.uint8)
    count, layers = len(shape.keys), shape.num_layers
    if shape.layerwise:
        return data.reshape(layers, count, shape.slice_bytes)
    return data.reshape(count, layers, shape.slice_bytes).transpose(1, 0, 2)


def check_stored(store: NotingStore, prefix: SharedStagedPrefix, payload: bytes) -> None:
    """Every extent lies in the store layer-major, and every chunk has its checksums."""
    rows = rows_of(prefix.shape, payload)
    first = 0
    places = [staged.place() for staged in prefix.chunks]
    assert [slot for _, slot in places] == [
        slot
        for _, group in itertools.groupby(places, key=lambda p: p[0])
        for slot, _ in enumerate(group)
    ]
    while first < len(places):
        shapes = prefix.chunks[first].shapes()
        ((name, shape),) = shapes.items()
        expected = rows[:, first : first + shape.slots].tobytes()
        assert extent_bytes(store, name, shape) == expected
        first += shape.slots
    for index, staged in enumerate(prefix.chunks):
        chunk = memoryview(rows[:, index].tobytes())
        assert staged.checksums().tolist() == block_checksums(chunk, staged.block_bytes)


def write_all(prefix: SharedStagedPrefix, payload: bytes, buffer_bytes: int) -> None:
    memory = bytearray(buffer_bytes)
    for begin in range(0, len(payload), buffer_bytes):
        piece = payload[begin : begin + buffer_bytes]
        memory[: len(piece)] = piece
        prefix.write(begin, memoryview(memory)[: len(piece)])
        memory[:] = bytes(len(memory))  # what was given is used again at once
    prefix.finish()


@pytest.mark.parametrize("layerwise", [True, False])
@pytest.mark.parametrize("buffer_slices", [1, 3, 7, 1000])
@pytest.mark.parametrize(
    ("chunk_count", "num_layers", "slice_bytes"),
    [(9, 5, 1000), (4, 3, 1024), (130, 3, 40), (1, 7, 600), (3, 2, 4096), (2, 3, 9000)],
)
def test_chunks_lie_layer_by_layer_whichever_way_they_come(
    layerwise: bool, buffer_slices: int, chunk_count: int, num_layers: int, slice_bytes: int
) -> None:
    store = NotingStore()
    shape = shape_of(chunk_count, num_layers, slice_bytes, layerwise=layerwise)
    payload = payload_of(shape)
    with writing_to(store) as writer:
        prefix = SharedStagedPrefix(writer, BUCKET, shape)
        write_all(prefix, payload, buffer_slices * slice_bytes)
        check_stored(store, prefix, payload)


def test_whole_rows_go_out_from_where_they_came() -> None:
    store = NotingStore(object_bytes_max=4096)
    shape = shape_of(8, 3, 1024, layerwise=True)  # two extents of 4 slots: a row is an object
    payload = np.frombuffer(payload_of(shape), np.uint8)
    with writing_to(store) as writer:
        prefix = SharedStagedPrefix(writer, BUCKET, shape)
        prefix.write(0, memoryview(payload))  # type: ignore[arg-type]
        prefix.finish()
        (name, *_), _ = prefix.chunks[4].place()
        (part,) = store.put_parts[name.object_name(1)]
    begin = 4096 * 3  # the second extent's second layer
    assert np.shares_memory(np.frombuffer(part, np.uint8), payload[begin : begin + 4096])


def gather_one_row(writer: ObjectWriter) -> SharedStagedPrefix:
    """A put that holds memory, and has not written anything."""
    prefix = SharedStagedPrefix(writer, BUCKET, shape_of(8, 3, 1024, layerwise=True))
    prefix.write(0, memoryview(bytes(1024)))
    return prefix


def test_a_put_without_memory_waits_for_others_and_then_says_that_the_server_is_busy() -> None:
    store = NotingStore()
    with writing_to(store, buffer_bytes_max=4096, call_s_max=0.05) as writer:
        holder = gather_one_row(writer)
        with pytest.raises(Busy, match="put_buffer_bytes_max"):
            gather_one_row(writer)
        holder.discard()
        gather_one_row(writer).discard()


def test_a_put_goes_on_with_the_memory_that_it_has_while_others_have_the_rest() -> None:
    store = NotingStore()
    shape = shape_of(8, 3, 1024, layerwise=True)
    payload = payload_of(shape)
    with writing_to(store, buffer_bytes_max=2 * 4096) as writer:
        holder = gather_one_row(writer)
        prefix = SharedStagedPrefix(writer, BUCKET, shape)
        write_all(prefix, payload, 1024)
        check_stored(store, prefix, payload)
        holder.discard()
        assert repr(writer.buffers) == "<PutBuffers 0/8192 bytes in use>"


def test_discarded_chunks_are_removed_from_the_store_and_from_memory() -> None:
    store = NotingStore()
    shape = shape_of(9, 3, 1024, layerwise=False)
    with writing_to(store) as writer:
        prefix = SharedStagedPrefix(writer, BUCKET, shape)
        prefix.write(0, memoryview(payload_of(shape)[:-1024]))
        prefix.discard()
        prefix.discard()
    assert store.put_parts
    assert store.names() == set()
    assert " 0/" in repr(writer.buffers)


def test_an_extent_stays_while_one_of_its_chunks_is_kept() -> None:
    store = NotingStore()
    shape = shape_of(8, 2, 1024, layerwise=True)
    with writing_to(store) as writer:
        prefix = SharedStagedPrefix(writer, BUCKET, shape)
        write_all(prefix, payload_of(shape), 1024)
        prefix.chunks[1].keep()
        prefix.discard()
        (kept,), _ = prefix.chunks[1].place()
    assert store.names() == {kept.object_name(number) for number in range(2)}


@pytest.mark.parametrize("layerwise", [True, False])
@pytest.mark.parametrize("buffer_slices", [1, 1000])
def test_a_failed_write_is_raised_and_nothing_of_the_put_stays(
    layerwise: bool, buffer_slices: int
) -> None:
    store = NotingStore()
    shape = shape_of(9, 5, 1000, layerwise=layerwise)
    with writing_to(store) as writer:
        prefix = SharedStagedPrefix(writer, BUCKET, shape)
        store.faults.is_full = True
        with pytest.raises(StorageFull):
            write_all(prefix, payload_of(shape), buffer_slices * 1000)
        prefix.discard()
        store.faults.is_full = False
    assert store.names() == set()
    assert " 0/" in repr(writer.buffers)


def test_what_is_discarded_while_it_is_written_is_removed_afterwards() -> None:
    store = NotingStore()
    shape = shape_of(4, 2, 1024, layerwise=True)
    with writing_to(store) as writer:
        prefix = SharedStagedPrefix(writer, BUCKET, shape)
        store.faults.hold()
        for begin in range(0, shape.total_bytes, 1024):
            prefix.write(begin, memoryview(bytes(1024)))
        prefix.discard()
        threading.Timer(0.01, store.faults.release).start()
    assert store.faults.calls["put"] > 0
    assert store.names() == set()
