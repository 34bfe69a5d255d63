"""Both paths to one namespace, behind the kernel's driver and its page cache.

Runs where NVME_TEST_DEVICES names character devices, as `test_nvme_namespace.py` does.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from objectcache_schemas.errors import DamagedData, Unavailable
from objectcache_schemas.limits import KIB, MIB
from objectcache_storage_server.engines.local.direct.batches import address_of
from objectcache_storage_server.engines.local.direct.nvme.nvme_commands import (
    Opcode,
    lba_range,
    transfer_commands,
)
from objectcache_storage_server.engines.local.engine import LocalEngine
from objectcache_storage_server.engines.local.volumes.nvme_superblock import HEADER_BYTES
from objectcache_storage_server.engines.local.volumes.nvme_volume import (
    AUTO,
    NvmeVolume,
    open_nvme_volume,
)
from objectcache_storage_server.engines.local.volumes.volume import BLOCK_BYTES, IoPath, Transfer
from tests.contract.engine_suite import BUCKET, content, put, read
from tests.contract.opened_engines.local_engines import kernel_nvme_engine
from tests.crash.test_rot import fill, live_ranges
from tests.hardware.nvme_namespaces import DEVICES, WHY_NOT, block_device, block_path, wipe
from tests.unit.storage_server.engines.local.volumes.volume_model import Disagreement, run_model

SEGMENT_BYTES = 16 * MIB
DEPTH = 16
SIZES = [3000, 70_000, 5000, 400_000, 900_000]  # of objects that are moved
pytestmark = pytest.mark.skipif(not DEVICES, reason=WHY_NOT)


@pytest.fixture(params=DEVICES)
def device_path(request: pytest.FixtureRequest) -> Path:
    """A blank namespace."""
    path = Path(request.param)
    wipe(path)
    return path


@pytest.fixture
def volume(device_path: Path, tmp_path: Path) -> Iterator[NvmeVolume]:
    opened = open_nvme_volume(device_path, tmp_path, SEGMENT_BYTES, DEPTH, AUTO)
    yield opened
    opened.close()


@pytest.fixture
def engine(device_path: Path, tmp_path: Path) -> Iterator[LocalEngine]:
    with contextlib.closing(
        kernel_nvme_engine(tmp_path, device_path, page_cache_bytes=8 * MIB)
    ) as opened:
        opened.create_bucket(BUCKET)
        yield opened


def someone_else(path: Path, seed: int) -> Callable[[], None]:
    """Reads through the page cache what it likes, and has neighbours read along."""
    chance = random.Random(seed)
    file_descriptor = os.open(block_path(path), os.O_RDONLY | os.O_CLOEXEC)

    def stir() -> None:
        os.pread(file_descriptor, 8 * KIB, HEADER_BYTES + chance.randrange(600 * KIB))

    return stir


# --- which block device it is ---


def test_the_block_device_is_found_and_said(volume: NvmeVolume, device_path: Path) -> None:
    assert volume.paths == frozenset(IoPath)
    assert volume.cache_path.startswith(f"{block_path(device_path)}, pages known by ")
    print(volume.cache_path)


def test_it_may_be_named_also_by_another_name(device_path: Path, tmp_path: Path) -> None:
    link = tmp_path / "by-id"
    link.symlink_to(block_path(device_path))
    opened = open_nvme_volume(device_path, tmp_path, SEGMENT_BYTES, DEPTH, str(link))
    with contextlib.closing(opened):
        assert opened.paths == frozenset(IoPath)
        with (
            pytest.raises(OSError, match="busy"),
            block_device(device_path, os.O_RDONLY | os.O_EXCL),
        ):
            pass


def test_another_block_device_is_refused_by_name(tmp_path: Path) -> None:
    device = Path(DEVICES[0])
    file = tmp_path / "disk"
    file.write_bytes(b"precious")
    wrong = {
        str(file): "is no block device",
        str(tmp_path / "missing"): "No such file",
    }
    for other in Path("/dev").glob("nvme*n1"):
        if other != block_path(device):
            wrong[str(other)] = f"{other} is {other.name}; the block device of {device} is"
    for name, reason in wrong.items():
        with pytest.raises(Unavailable, match=reason):
            open_nvme_volume(device, tmp_path, SEGMENT_BYTES, DEPTH, name)
    assert file.read_bytes() == b"precious"


# --- no stale page ---


def test_a_stale_page_of_the_kernel_is_dropped_before_it_is_read(
    volume: NvmeVolume, device_path: Path
) -> None:
    old, new = (random.Random(seed).randbytes(256 * KIB) for seed in (1, 2))
    volume.write([Transfer(0, memoryview(old))], IoPath.DIRECT)
    with block_device(device_path, os.O_RDONLY) as elsewhere:
        assert os.pread(elsewhere, len(old), HEADER_BYTES) == old  # the pages are there
        volume.write([Transfer(0, memoryview(new))], IoPath.DIRECT)
        assert os.pread(elsewhere, len(old), HEADER_BYTES) == old  # and stale
        found = bytearray(len(new))
        volume.read([Transfer(0, memoryview(found))], IoPath.PAGE_CACHE)
        assert found == new
        assert volume.enter_cache(0, len(new))
        assert os.pread(elsewhere, len(old), HEADER_BYTES) == new
        assert volume.read_resident(Transfer(0, memoryview(found)))
        assert found == new


@pytest.mark.parametrize("seed", [1, 2])
def test_any_order_of_paths_agrees_with_plain_memory(
    volume: NvmeVolume, device_path: Path, seed: int
) -> None:
    run_model(volume, seed, steps=400, stir=someone_else(device_path, seed))


def test_without_invalidation_the_model_finds_stale_pages(
    volume: NvmeVolume, device_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model can fail on this kernel: here nothing is dropped, and all that enters is fresh."""
    assert volume._block_device is not None
    monkeypatch.setattr(volume._block_device, "drop", lambda offset, length: True)
    monkeypatch.setattr(volume._block_device, "forget", lambda offset, length: None)
    with pytest.raises(Disagreement):
        run_model(volume, seed=1, steps=2000, stir=someone_else(device_path, 1))


# --- the engine over both ---


def rot(engine: LocalEngine, offset_bytes: int) -> None:
    """Change a bit on the device alone, by commands that no page cache notices."""
    volume = engine.volume
    assert isinstance(volume, NvmeVolume)
    namespace = volume._device.namespace
    block = memoryview(bytearray(BLOCK_BYTES))
    begin = HEADER_BYTES + offset_bytes - offset_bytes % BLOCK_BYTES
    lbas = lba_range(begin, BLOCK_BYTES, namespace.lba_bytes)

    def run(opcode: Opcode) -> None:
        volume._device.run(
            list(
                transfer_commands(
                    opcode, namespace.nsid, lbas, address_of(block), namespace.lba_bytes, 256
                )
            ),
            opcode.name,
        )

    run(Opcode.READ)
    block[offset_bytes % BLOCK_BYTES] ^= 0x10
    run(Opcode.WRITE)


@pytest.mark.parametrize("page_cache_bytes", [16 * MIB, 0], ids=["page cache", "direct"])
def test_rot_on_the_device_is_found_and_takes_nothing_else(
    device_path: Path, tmp_path: Path, page_cache_bytes: int
) -> None:
    chance = random.Random(page_cache_bytes)
    with contextlib.closing(
        kernel_nvme_engine(tmp_path, device_path, page_cache_bytes=page_cache_bytes)
    ) as engine:
        engine.create_bucket(BUCKET)
        stored = fill(engine)
        assert {key: read(engine, key) for key in stored} == stored
        for count in range(1, 7):
            live = live_ranges(engine)
            key = chance.choice(sorted(live))
            begin, end = chance.choice(live[key])
            rot(engine, chance.randrange(begin, end))
            for first, last in live[key]:
                engine.volume.drop_cache(first, last - first)
            with pytest.raises(DamagedData):
                read(engine, key)
            del stored[key]
            assert {key: read(engine, key) for key in stored} == stored
            status = engine.status()
            assert (status.damaged, status.stale_reads) == (count, 0)


def bring_into_memory(engine: LocalEngine) -> None:
    """Have the page cache hold the extents of its path, and wait until it does."""
    extents = engine.holdings.extents.used
    cached = extents[extents["is_used"] & (extents["path"] == IoPath.PAGE_CACHE)]
    for begin, length in zip(cached["offset_bytes"], cached["length_bytes"], strict=True):
        engine.volume.prefetch(int(begin), int(length))
        memory = memoryview(bytearray(int(length)))
        engine.volume.read([Transfer(int(begin), memory)], IoPath.PAGE_CACHE)


def test_a_page_that_is_wrong_is_dropped_and_not_the_object(
    engine: LocalEngine, device_path: Path
) -> None:
    """It came into the cache while the device had other bytes, behind the store's back."""
    data = content("key", 64 * KIB)
    put(engine, "key", data)
    bring_into_memory(engine)
    ((begin, end),) = live_ranges(engine)["key"]
    rot(engine, begin + 100)
    with block_device(device_path, os.O_RDONLY) as elsewhere:
        os.posix_fadvise(elsewhere, 0, 0, os.POSIX_FADV_DONTNEED)
        assert os.pread(elsewhere, end - begin, HEADER_BYTES + begin) != data
    rot(engine, begin + 100)  # which puts it right
    assert read(engine, "key") == data
    status = engine.status()
    assert (status.damaged, status.stale_reads) == (0, 1)


def test_the_planner_moves_extents_between_the_paths(engine: LocalEngine) -> None:
    def resident_bytes(budget_bytes: int, now_s: float) -> int:
        engine.upkeep.settings = msgspec.structs.replace(
            engine.settings, page_cache_bytes=budget_bytes
        )
        engine.upkeep.round(time.monotonic() + now_s)
        (cached,) = (path for path in engine.status().paths if path.name == "page_cache")
        return cached.extent_bytes

    stored = {f"key {number}": content(number, 1 * MIB) for number in range(8)}
    for key, data in stored.items():
        put(engine, key, data)
        assert read(engine, key) == data
    for number, budget_bytes in enumerate((8 * MIB, 3 * MIB, 0, 4 * MIB, 8 * MIB)):
        assert resident_bytes(budget_bytes, 10.0 * number) == budget_bytes
        assert {key: read(engine, key) for key in stored} == stored
        bring_into_memory(engine)
        hits_before = engine.path_use.counts[IoPath.PAGE_CACHE].hit_bytes
        assert {key: read(engine, key) for key in stored} == stored
        found_bytes = engine.path_use.counts[IoPath.PAGE_CACHE].hit_bytes - hits_before
        assert found_bytes == budget_bytes
    assert engine.status().stale_reads == 0


def test_extents_move_under_load_and_every_byte_is_right(
    engine: LocalEngine, device_path: Path
) -> None:
    """Puts, deletes, evictions, moves to and fro, somebody else who reads along, and three readers
    that compare all they get.
    """
    keys = [f"key {number}" for number in range(12)]
    bodies = [content(number, size) for number, size in enumerate(SIZES)]
    versions: dict[str, int] = {}
    wrong: list[str] = []
    done = threading.Event()
    reads = [0]

    def body(key: str, version: int) -> bytes:
        return bodies[(keys.index(key) + version) % len(bodies)]

    def read_on(seed: int) -> None:
        chance, stir = random.Random(seed), someone_else(device_path, seed)
        while not done.is_set():
            key = chance.choice(keys)
            before = versions.get(key, -1)
            try:
                found = read(engine, key)
            except DamagedData as error:
                wrong.append(str(error))
                continue
            finally:
                stir()
            after = versions.get(key, -1)
            possible = [body(key, version) for version in range(max(before, 0), after + 2)]
            if found is not None and found not in possible:
                wrong.append(f"{key}: {len(found)} bytes of no version {before} to {after}")
            reads[0] += 1

    readers = [threading.Thread(target=read_on, args=(seed,)) for seed in range(3)]
    for reader in readers:
        reader.start()
    chance = random.Random(5)
    for turn in range(25):
        key = chance.choice(keys)
        version = versions.get(key, -1) + 1
        put(engine, key, body(key, version))
        versions[key] = version
        if chance.random() < 0.3:
            engine.delete(BUCKET.name, [chance.choice(keys)])
        budget_bytes = chance.choice([0, 1 * MIB, 8 * MIB])
        engine.upkeep.settings = msgspec.structs.replace(
            engine.settings, page_cache_bytes=budget_bytes
        )
        engine.upkeep.round(time.monotonic() + 10 * turn)
    done.set()
    for reader in readers:
        reader.join()
    assert not wrong
    status = engine.status()
    print(reads[0], [(path.name, path.read_bytes, path.hit_bytes) for path in status.paths])
    assert (status.damaged, status.stale_reads) == (0, 0)
    assert all(path.read_bytes for path in status.paths)
    assert engine.check(False, lambda report: True).damaged == 0
