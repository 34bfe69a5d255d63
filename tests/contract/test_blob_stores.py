"""Every rule of the blob store contract, for every store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from objectcache_schemas.errors import Unavailable
from objectcache_storage_server.engines.blobs.blob_store import (
    BlobRead,
    BlobStore,
    LostBlob,
    OpenBlob,
    StoreTimeout,
)
from objectcache_storage_server.engines.disk.flush_latch import FlushLatch
from objectcache_storage_server.engines.files.folder_blobs import FolderBlobStore
from objectcache_storage_server.engines.memory.memory_blobs import MemoryBlobStore
from objectcache_storage_server.testing import (
    DelayingBlobStore,
    FaultyBlobStore,
    PassingBlobStore,
)
from tests.contract.engine_suite import content

NEVER_S = float("inf")
STORES: dict[str, Callable[[Path], BlobStore]] = {
    "memory": lambda _: MemoryBlobStore(),
    "folder": lambda folder: FolderBlobStore(folder, FlushLatch()),
    "passing": lambda _: PassingBlobStore(MemoryBlobStore()),
    "delaying": lambda _: DelayingBlobStore(MemoryBlobStore(), lambda: 0.001),
    "faulty": lambda _: FaultyBlobStore(MemoryBlobStore(), seed=0, fault_rate=0.0),
}


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BlobStore]:
    opened = STORES[request.param](tmp_path / "blobs")
    yield opened
    opened.close()


def stored(store: BlobStore, data: bytes) -> int:
    number = store.create(NEVER_S)
    store.write(number, 0, memoryview(data), NEVER_S)
    store.flush([number], NEVER_S)
    return number


def read(store: BlobStore, blob: OpenBlob, offset_bytes: int, length_bytes: int) -> bytes:
    landing = bytearray(length_bytes)
    store.begin_reads([BlobRead(blob, offset_bytes, memoryview(landing))], NEVER_S).result()
    return bytes(landing)


def test_bytes_written_anywhere_are_read_from_anywhere(store: BlobStore) -> None:
    data = content("blob", 10_000)
    number = store.create(NEVER_S)
    for begin in (4000, 0, 8000, 2000, 6000):
        store.write(number, begin, memoryview(data)[begin : begin + 2000], NEVER_S)
    store.flush([number], NEVER_S)
    blob = store.open(number)
    assert read(store, blob, 0, 10_000) == data
    assert read(store, blob, 1999, 4002) == data[1999:6001]
    store.release([blob])


def test_a_batch_fills_every_landing(store: BlobStore) -> None:
    contents = [content(i, 1000) for i in range(20)]
    blobs = [store.open(stored(store, data)) for data in contents]
    landing = bytearray(20_000)
    reads = [
        BlobRead(blob, 0, memoryview(landing)[1000 * i : 1000 * (i + 1)])
        for i, blob in enumerate(blobs)
    ]
    store.begin_reads(reads, NEVER_S).result()
    assert bytes(landing) == b"".join(contents)
    store.release(blobs)


def test_numbers_are_never_given_out_again(store: BlobStore) -> None:
    numbers = [stored(store, b"data") for _ in range(5)]
    store.delete(numbers, NEVER_S)
    assert set(numbers).isdisjoint(stored(store, b"data") for _ in range(5))


def test_a_read_past_the_end_is_lost_and_says_whose(store: BlobStore) -> None:
    blob = store.open(stored(store, b"short"))
    with pytest.raises(LostBlob, match="ends at byte 5") as caught:
        read(store, blob, 0, 6)
    assert caught.value.blob is blob
    store.release([blob])


def test_a_blob_that_is_not_there_is_lost(store: BlobStore) -> None:
    number = stored(store, b"data")
    store.delete([number, number], NEVER_S)
    with pytest.raises(LostBlob, match="missing"):
        store.open(number)


def test_what_is_open_is_read_after_it_was_deleted(store: BlobStore) -> None:
    number = stored(store, b"data")
    blob = store.open(number)
    store.delete([number], NEVER_S)
    assert read(store, blob, 0, 4) == b"data"
    store.release([blob])


def test_sizes_are_of_all_blobs_also_of_those_being_written(store: BlobStore) -> None:
    complete, begun = stored(store, b"data"), store.create(NEVER_S)
    store.write(begun, 0, memoryview(b"be"), NEVER_S)
    assert store.sizes() == {complete: 4, begun: 2}
    store.delete([begun], NEVER_S)
    assert store.sizes() == {complete: 4}


def test_a_read_that_is_not_answered_in_time_is_a_timeout_and_never_lands() -> None:
    store = DelayingBlobStore(MemoryBlobStore(), lambda: 3600.0)
    blob, landing = store.open(stored(store, b"data")), bytearray(4)
    future = store.begin_reads([BlobRead(blob, 0, memoryview(landing))], time.monotonic())
    with pytest.raises(StoreTimeout):
        future.result()
    assert landing == bytes(4)
    store.close()


def test_a_read_that_is_cancelled_never_lands() -> None:
    store = DelayingBlobStore(MemoryBlobStore(), lambda: 3600.0)
    blob, landing = store.open(stored(store, b"data")), bytearray(4)
    future = store.begin_reads([BlobRead(blob, 0, memoryview(landing))], NEVER_S)
    assert future.cancel()
    with pytest.raises(CancelledError):
        future.result()
    store.close()
    assert landing == bytes(4)


def test_no_landing_is_written_after_its_read_has_failed() -> None:
    inner = DelayingBlobStore(MemoryBlobStore(), lambda: 0.02)
    store = FaultyBlobStore(inner, seed=0, fault_rate=0.0)
    blob = store.open(stored(store, b"data"))
    store.fault_rate = 1.0
    landings = [bytearray(4) for _ in range(20)]
    seen: list[bytes] = []
    for landing in landings:
        future = store.begin_reads([BlobRead(blob, 0, memoryview(landing))], NEVER_S)
        assert isinstance(future.exception(), Unavailable)
        seen.append(bytes(landing))
    store.close()  # which ends every read
    assert [bytes(landing) for landing in landings] == seen
    assert set(seen) == {bytes(4), b"data"}  # some failed before they were begun, some after


def test_a_passing_store_has_every_method_of_the_contract() -> None:
    methods = {name for name in vars(BlobStore) if not name.startswith("_")}
    assert methods - {"capabilities"} <= vars(PassingBlobStore).keys()
