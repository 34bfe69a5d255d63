"""A store on a namespace whose power is cut: what runs in the machine, and who looks afterwards.

`python -m tests.hardware.nvme_power /dev/ng2n1 /dev/nvme3n1` puts and deletes objects on the first
drive until the machine is gone. After each operation that was acknowledged it copies the index to
the second, which loses nothing, and says so. What that copy names has to be on the first drive,
whatever part of what was not flushed it has lost.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import xxhash

from objectcache_schemas.limits import MIB
from objectcache_storage_server.engines.base import PrefixShape, StagedPut
from objectcache_storage_server.engines.local.engine import LocalEngine
from objectcache_storage_server.engines.local.volumes.nvme_store_id import FINISHED_NAME
from tests.contract.engine_suite import BUCKET, content, put, read
from tests.contract.opened_engines.local_engines import kernel_nvme_engine, nvme_local_engine
from tests.unit.storage_server.engines.local.emulated_nvme import EmulatedNvme

SAVED = "saved"  # begins a line of the console
HALF_BYTES = 16 * MIB  # of the second drive: copies take turns, so that one is always whole
PAGE_CACHE_BYTES = 4 * MIB  # so that there are extents on both paths
KEYS = 24


class Saved(msgspec.Struct):
    """A copy of the index, and what it has to find."""

    number: int
    index: bytes
    store_id: bytes
    stored: dict[str, int]  # size by key
    going: list[str]  # that were about to be deleted, and may be there or not


def work(device: Path, copies: Path) -> None:
    """Until the power is gone."""
    chance = random.Random(1)
    folder = Path(tempfile.mkdtemp())
    engine = kernel_nvme_engine(folder, device, page_cache_bytes=PAGE_CACHE_BYTES)
    engine.create_bucket(BUCKET)
    stored: dict[str, int] = {}
    saver = Saver(engine, folder, copies)
    for number in range(10_000):
        if len(stored) > KEYS:
            gone = chance.sample(sorted(stored), KEYS // 3)
            for key in gone:
                del stored[key]
            saver.save(stored, gone)  # their space is discarded before the next copy is there
            engine.delete(BUCKET.name, gone)
        elif chance.random() < 0.5:
            key, size = f"object {number}", chance.choice([300, 70_000, 300_000, 1_200_000])
            put(engine, key, content(key, size))
            stored[key] = size
        else:
            stored |= put_chunks(engine, number)
        engine.upkeep.round(time.monotonic() + 3 * number)
        saver.save(stored, [])


def put_chunks(engine: LocalEngine, number: int) -> dict[str, int]:
    """Four chunks of one put."""
    keys = [f"chunk {number} {index}" for index in range(4)]
    shape = PrefixShape(keys, 4, 16 * 1024, layerwise=False)
    prefix = engine.stage_prefix(BUCKET.name, shape)
    payload = b"".join(content(key, shape.chunk_bytes) for key in keys)
    prefix.write(0, memoryview(payload))
    engine.commit([StagedPut(staged, "etag") for staged in prefix.staged])
    return dict.fromkeys(keys, shape.chunk_bytes)


class Saver:
    """Writes copies of a store's index to a drive."""

    def __init__(self, engine: LocalEngine, folder: Path, copies: Path) -> None:
        self._engine = engine
        self._index = folder / "index"
        self._file_descriptor = os.open(copies, os.O_RDWR | os.O_SYNC)
        self._number = 0

    def save(self, stored: dict[str, int], going: list[str]) -> None:
        """Copy, and say so."""
        self._number += 1
        with tempfile.TemporaryDirectory() as folder:
            self._engine.index._environment.copy(folder, compact=True)
            index = Path(folder, "data.mdb").read_bytes()
        store_id = (self._index / FINISHED_NAME).read_bytes()
        saved = msgspec.msgpack.encode(Saved(self._number, index, store_id, stored, going))
        head = len(saved).to_bytes(8, "little") + xxhash.xxh3_64_digest(saved)
        os.pwrite(self._file_descriptor, head + saved, self._number % 2 * HALF_BYTES)
        print(SAVED, self._number, flush=True)


def last_saved(copies: Path) -> Saved:
    """The last copy that is whole."""
    found: list[Saved] = []
    with copies.open("rb") as file:
        for half in range(2):
            file.seek(half * HALF_BYTES)
            head = file.read(16)
            saved = file.read(int.from_bytes(head[:8], "little"))
            if saved and xxhash.xxh3_64_digest(saved) == head[8:]:
                found.append(msgspec.msgpack.decode(saved, type=Saved))
    return max(found, key=lambda saved: saved.number)


def lost(drive: bytes, saved: Saved, folder: Path) -> list[str]:
    """Keys that the copy names and the drive does not have as they were put."""
    device = EmulatedNvme(len(drive), lba_bytes=4096)
    device.blocks[:] = drive
    index = folder / "index"
    index.mkdir(parents=True)
    (index / "data.mdb").write_bytes(saved.index)
    (index / FINISHED_NAME).write_bytes(saved.store_id)
    with contextlib.closing(nvme_local_engine(folder, device)) as engine:
        return [
            key
            for key, size_bytes in saved.stored.items()
            if read_or_none(engine, key) != content(key, size_bytes)
        ]


def read_or_none(engine: LocalEngine, key: str) -> bytes | None:
    """What can be read."""
    with contextlib.suppress(Exception):
        return read(engine, key)
    return None


if __name__ == "__main__":
    work(*map(Path, sys.argv[1:]))
