"""What is not what was stored is read once more, before anything is dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest

from objectcache_schemas.errors import DamagedData
from objectcache_storage_server.engines.base import Read
from objectcache_storage_server.engines.blobs.blob_engine import BlobEngine
from objectcache_storage_server.engines.blobs.blob_store import (
    BlobRead,
    BlobStore,
    LostBlob,
    failed,
)
from objectcache_storage_server.testing import PassingBlobStore
from tests.contract.engine_suite import BUCKET, content, put, stored_keys
from tests.contract.opened_engines.blob_engines import delayed, files_over

BLOCK_BYTES = 64 * 1024
READS = {  # of an object of three blocks and a half
    "a block": (BLOCK_BYTES, BLOCK_BYTES),
    "blocks": (0, 3 * BLOCK_BYTES),
    "all": (0, 7 * BLOCK_BYTES // 2),
    "within a block": (100, 1000),
}
DATA = content("twice", 7 * BLOCK_BYTES // 2)


class OverwrittenStore(PassingBlobStore):
    """The client writes to its memory whenever something was read into it."""

    target = bytearray()

    def begin_reads(self, reads: Sequence[BlobRead], deadline_s: float) -> Future[None]:
        future = super().begin_reads(reads, deadline_s)
        future.result()
        for each in reads:
            if each.landing.obj is self.target:
                each.landing[0] ^= 1
        return future


class UnreadableStore(PassingBlobStore):
    """The device fails so many times."""

    failures_left = 0

    def begin_reads(self, reads: Sequence[BlobRead], deadline_s: float) -> Future[None]:
        if self.failures_left:
            self.failures_left -= 1
            return failed(LostBlob(reads[0].blob, "the device cannot read it at byte 0"))
        return super().begin_reads(reads, deadline_s)


def landed(engine: BlobEngine, target: bytearray, offset_bytes: int) -> bytearray:
    """`target`, filled from the object."""
    with engine.open_many(BUCKET.name, ["key"]) as opened:
        opened.read_many([Read(0, offset_bytes, len(target), 0)], memoryview(target))
    return target


def holding(wrap: Callable[[BlobStore], BlobStore], folder: Path) -> BlobEngine:
    engine = files_over(wrap, folder / "store")
    engine.create_bucket(BUCKET)
    put(engine, "key", DATA)
    return engine


@pytest.mark.parametrize("is_far", [False, True])
@pytest.mark.parametrize("what", READS)
def test_a_client_that_writes_to_the_memory_being_filled_loses_no_object(
    what: str, is_far: bool, tmp_path: Path
) -> None:
    inner: list[OverwrittenStore] = []

    def wrap(store: BlobStore) -> BlobStore:
        inner.append(OverwrittenStore(store))
        return delayed(inner[0]) if is_far else inner[0]

    engine = holding(wrap, tmp_path)
    offset_bytes, length_bytes = READS[what]
    inner[0].target = bytearray(length_bytes)
    found = landed(engine, inner[0].target, offset_bytes)
    assert found == DATA[offset_bytes : offset_bytes + length_bytes]
    assert engine.damaged_count == 0
    assert stored_keys(engine) == ["key"]
    engine.close()


@pytest.mark.parametrize("is_far", [False, True])
@pytest.mark.parametrize("failures", [1, 2])
@pytest.mark.parametrize("what", READS)
def test_a_device_may_fail_once_and_not_twice(
    what: str, failures: int, is_far: bool, tmp_path: Path
) -> None:
    inner: list[UnreadableStore] = []

    def wrap(store: BlobStore) -> BlobStore:
        inner.append(UnreadableStore(store))
        return delayed(inner[0]) if is_far else inner[0]

    engine = holding(wrap, tmp_path)
    offset_bytes, length_bytes = READS[what]
    target = bytearray(length_bytes)
    inner[0].failures_left = failures
    if failures == 1:
        assert landed(engine, target, offset_bytes) == DATA[offset_bytes:][:length_bytes]
    else:
        with pytest.raises(DamagedData, match="cannot read"):
            landed(engine, target, offset_bytes)
    assert engine.damaged_count == failures - 1
    engine.close()
