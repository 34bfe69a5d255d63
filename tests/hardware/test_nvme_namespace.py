"""The NVMe volume on namespaces behind the kernel's driver.

Runs where NVME_TEST_DEVICES names character devices (/dev/ng0n1, separated by colons)
of which **everything on them may be overwritten**: in the emulated machine of
`test_nvme_machine.py`, or on a drive of your own. What was written is checked through the block
device, which knows nothing of passed-through commands. Here the volume has the direct path alone.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from objectcache_schemas.errors import Unavailable
from objectcache_schemas.limits import KIB, MIB
from objectcache_storage_server.engines.local.direct.batches import address_of
from objectcache_storage_server.engines.local.direct.nvme.nvme_commands import (
    LbaRange,
    Opcode,
    flush_command,
    transfer_commands,
)
from objectcache_storage_server.engines.local.direct.nvme.nvme_kernel import KernelNvmeDevice
from objectcache_storage_server.engines.local.volumes.nvme_superblock import HEADER_BYTES
from objectcache_storage_server.engines.local.volumes.nvme_volume import (
    OFF,
    NvmeVolume,
    open_nvme_volume,
)
from objectcache_storage_server.engines.local.volumes.volume import BLOCK_BYTES, IoPath, Transfer
from tests.hardware.nvme_namespaces import DEVICES, WHY_NOT, block_device, block_path, wipe

SEGMENT_BYTES = 16 * MIB
DEPTH = 16
QUEUE_LIMITS = ("max_hw_sectors_kb", "max_segments")

pytestmark = pytest.mark.skipif(not DEVICES, reason=WHY_NOT)


@pytest.fixture(params=DEVICES)
def device_path(request: pytest.FixtureRequest) -> Path:
    """A blank namespace."""
    path = Path(request.param)
    wipe(path)
    return path


@pytest.fixture
def volume(device_path: Path, tmp_path: Path) -> Iterator[NvmeVolume]:
    opened = open_nvme_volume(device_path, tmp_path, SEGMENT_BYTES, DEPTH, OFF)
    yield opened
    opened.close()


def through_the_block_device(path: Path, offset_bytes: int, length_bytes: int) -> bytes:
    with block_device(path, os.O_RDONLY) as file_descriptor:
        # What it has cached is from before the commands that passed it by.
        os.posix_fadvise(file_descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        return os.pread(file_descriptor, length_bytes, HEADER_BYTES + offset_bytes)


def write(volume: NvmeVolume, offset_bytes: int, data: bytes) -> None:
    volume.write([Transfer(offset_bytes, memoryview(data))], IoPath.DIRECT)


def read(volume: NvmeVolume, offset_bytes: int, length_bytes: int) -> bytes:
    data = bytearray(length_bytes)
    volume.read([Transfer(offset_bytes, memoryview(data))], IoPath.DIRECT)
    return bytes(data)


def noise(length_bytes: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(length_bytes)


def test_the_controller_tells_what_it_is(device_path: Path) -> None:
    device = KernelNvmeDevice(device_path, DEPTH)
    with block_device(device_path, os.O_RDONLY) as file_descriptor:
        assert device.namespace.capacity_bytes == os.lseek(file_descriptor, 0, os.SEEK_END)
    queue = Path("/sys/block") / block_path(device_path).name / "queue"
    assert device.namespace.lba_bytes == int((queue / "logical_block_size").read_text())
    if device.controller.transfer_bytes_max is not None:
        assert device.transfer_bytes_max <= device.controller.transfer_bytes_max
    print(repr(device), device.controller, device.namespace, device.deallocate_limits)
    limits = {name: (queue / name).read_text().strip() for name in QUEUE_LIMITS}
    print(f"{device.transfer_bytes_max} bytes a command; {limits}")
    device.close()


@pytest.mark.parametrize("length_bytes", [1, 4 * KIB, 1 * MIB, 3 * MIB + 5])
def test_what_was_written_is_where_it_belongs(
    volume: NvmeVolume, device_path: Path, length_bytes: int
) -> None:
    data = noise(length_bytes)
    write(volume, 2 * MIB, data)
    volume.flush([(2 * MIB, length_bytes)])
    padded = data + bytes(-length_bytes % BLOCK_BYTES)
    assert through_the_block_device(device_path, 2 * MIB, len(padded)) == padded
    assert read(volume, 2 * MIB, length_bytes) == data


@pytest.mark.parametrize("skew", [0, 1, 2, 4, 64, 511, 4092])
def test_memory_of_any_alignment_will_do(volume: NvmeVolume, skew: int) -> None:
    data = noise(skew + 700 * KIB)
    volume.write([Transfer(0, memoryview(data)[skew:])], IoPath.DIRECT)
    target = bytearray(skew + 700 * KIB)
    volume.read([Transfer(0, memoryview(target)[skew:])], IoPath.DIRECT)
    assert target[skew:] == data[skew:]
    assert not any(target[:skew])


def scattered_memory(length_bytes: int) -> memoryview:
    """Pages that were first touched in no order, so that hardly two lie side by side."""
    memory = memoryview(mmap.mmap(-1, length_bytes))
    pages = list(range(0, length_bytes, mmap.PAGESIZE))
    random.Random(3).shuffle(pages)
    for page in pages:
        memory[page] = 1
    return memory


def test_the_largest_command_takes_the_most_scattered_memory(device_path: Path) -> None:
    with contextlib.closing(KernelNvmeDevice(device_path, DEPTH)) as device:
        nsid, lba_bytes = device.namespace.nsid, device.namespace.lba_bytes
        memory = scattered_memory(4 * MIB)

        lbas = LbaRange(0, device.transfer_bytes_max // lba_bytes)
        address = address_of(memory) + 4  # touches a page more
        commands = transfer_commands(Opcode.READ, nsid, lbas, address, lba_bytes, lbas.lba_count)
        assert device.execute(list(commands)) == [0]


def test_any_parts_in_any_order_agree_with_plain_memory(volume: NvmeVolume) -> None:
    chance = random.Random(7)
    model = bytearray(noise(8 * MIB))
    write(volume, 0, bytes(model))
    for _ in range(30):
        begin = chance.randrange(0, 7 * MIB) // BLOCK_BYTES * BLOCK_BYTES
        data = noise(chance.randrange(1, 400 * KIB), begin)
        write(volume, begin, data)
        padded = data + bytes(-len(data) % BLOCK_BYTES)
        model[begin : begin + len(padded)] = padded
        ranges = [(chance.randrange(0, 7 * MIB), chance.randrange(1, MIB)) for _ in range(4)]
        targets = [bytearray(length) for _, length in ranges]
        volume.read(
            [
                Transfer(offset, memoryview(target))
                for (offset, _), target in zip(ranges, targets, strict=True)
            ],
            IoPath.DIRECT,
        )
        for (offset, length), target in zip(ranges, targets, strict=True):
            assert target == model[offset : offset + length]


def test_threads_have_rings_of_their_own(volume: NvmeVolume) -> None:
    failures: list[int] = []

    def work(number: int) -> None:
        data = noise(2 * MIB, number)
        write(volume, number * 2 * MIB, data)
        if read(volume, number * 2 * MIB, len(data)) != data:
            failures.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_discarded_range_may_be_written_again(volume: NvmeVolume) -> None:
    data = noise(4 * MIB)
    write(volume, 0, data)
    volume.discard(1 * MIB, 2 * MIB)
    assert read(volume, 0, 1 * MIB) == data[: 1 * MIB]
    assert read(volume, 3 * MIB, 1 * MIB) == data[3 * MIB :]
    write(volume, 1 * MIB, data[:BLOCK_BYTES])
    assert read(volume, 1 * MIB, BLOCK_BYTES) == data[:BLOCK_BYTES]
    volume.remove(1)
    assert volume.extend() == 1


def test_the_volume_is_found_again(device_path: Path, tmp_path: Path) -> None:
    with contextlib.closing(
        open_nvme_volume(device_path, tmp_path, SEGMENT_BYTES, DEPTH, OFF)
    ) as one:
        write(one, 0, b"kept")
        one.flush([(0, 4)])
    with contextlib.closing(
        open_nvme_volume(device_path, tmp_path, SEGMENT_BYTES, DEPTH, OFF)
    ) as again:
        assert read(again, 0, 4) == b"kept"
    (tmp_path / "other").mkdir()
    with pytest.raises(Unavailable, match="another store"):
        open_nvme_volume(device_path, tmp_path / "other", SEGMENT_BYTES, DEPTH, OFF)


def test_a_namespace_that_holds_something_is_refused(device_path: Path, tmp_path: Path) -> None:
    with block_device(device_path, os.O_RDWR) as file_descriptor:
        os.pwrite(file_descriptor, b"\x53\xef", 1080)  # as ext4 has it
        os.fsync(file_descriptor)
    with pytest.raises(Unavailable, match="holds something else"):
        open_nvme_volume(device_path, tmp_path, SEGMENT_BYTES, DEPTH, OFF)


def test_a_namespace_in_use_is_refused(device_path: Path, tmp_path: Path) -> None:
    """A mounted file system claims its device in the same way."""
    with (
        block_device(device_path, os.O_RDONLY | os.O_EXCL),
        pytest.raises(Unavailable, match="mounted, or another process"),
    ):
        open_nvme_volume(device_path, tmp_path, SEGMENT_BYTES, DEPTH, OFF)


def test_nobody_mounts_it_while_the_store_has_it(
    volume: NvmeVolume, device_path: Path, tmp_path: Path
) -> None:
    with (
        pytest.raises(OSError, match="busy"),
        block_device(device_path, os.O_RDONLY | os.O_EXCL),
    ):
        pass
    with pytest.raises(Unavailable, match="another process"):
        open_nvme_volume(device_path, tmp_path, SEGMENT_BYTES, DEPTH, OFF)


def test_the_controllers_refusals_arrive_as_errors(device_path: Path) -> None:
    with contextlib.closing(KernelNvmeDevice(device_path, DEPTH)) as device:
        namespace = device.namespace
        memory = memoryview(bytearray(namespace.lba_bytes))

        def read_at(lba: int, nsid: int = namespace.nsid) -> list[bytes]:
            lbas = LbaRange(lba, 1)
            address = address_of(memory)
            return list(transfer_commands(Opcode.READ, nsid, lbas, address, namespace.lba_bytes, 1))

        device.run(read_at(namespace.lba_count - 1), "read")
        with pytest.raises(OSError, match="LBA out of range") as caught:
            device.run(read_at(namespace.lba_count), "read")
        assert caught.value.errno == errno.EIO
        with pytest.raises(OSError, match="read"):  # the driver compares it before it sends it
            device.run(read_at(0, nsid=namespace.nsid + 1), "read")
        good, bad = read_at(0)[0], read_at(namespace.lba_count)[0]
        results = device.execute([good, bad, flush_command(namespace.nsid)] * 3 * DEPTH)
        assert [bool(result) for result in results] == [False, True, False] * 3 * DEPTH


def test_the_block_device_is_no_character_device(device_path: Path, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="name the character device"):
        open_nvme_volume(block_path(device_path), tmp_path, SEGMENT_BYTES, DEPTH, OFF)
