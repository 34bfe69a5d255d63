"""The NVMe volume over an emulated namespace: bytes, durability, errors, and whose it is."""

from __future__ import annotations

import errno
import random
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objectcache_schemas.errors import Unavailable
from objectcache_schemas.limits import KIB, MIB
from objectcache_storage_server.engines.local.direct.nvme.nvme_device import ATTEMPTS_MAX
from objectcache_storage_server.engines.local.direct.nvme.nvme_identify import DeallocateLimits
from objectcache_storage_server.engines.local.volumes.nvme_store_id import (
    BEGUN_NAME,
    FINISHED_NAME,
)
from objectcache_storage_server.engines.local.volumes.nvme_superblock import (
    HEADER_BYTES,
    STORE_ID_BYTES,
    Superblock,
)
from objectcache_storage_server.engines.local.volumes.nvme_volume import (
    NvmeVolume,
    open_nvme_volume,
)
from objectcache_storage_server.engines.local.volumes.volume import BLOCK_BYTES, IoPath, Transfer
from tests.unit.examples import examples
from tests.unit.storage_server.engines.local.emulated_nvme import (
    CAPACITY_EXCEEDED,
    DATASET_MANAGEMENT,
    DEALLOCATED_BYTE,
    FLUSH,
    NAMESPACE_NOT_READY,
    READ,
    UNRECOVERED_READ_ERROR,
    WRITE,
    EmulatedNvme,
)

SEGMENT_BYTES = 1 * MIB
DEVICES = [(512, 8 * KIB), (512, 200 * 512), (4096, 256 * KIB)]


@pytest.fixture(params=DEVICES, ids=lambda each: f"lba {each[0]}, {each[1]} a command")
def device(request: pytest.FixtureRequest) -> EmulatedNvme:
    lba_bytes, transfer_bytes_max = request.param
    return EmulatedNvme(lba_bytes=lba_bytes, transfer_bytes_max=transfer_bytes_max)


@pytest.fixture
def volume(device: EmulatedNvme, tmp_path: Path) -> Iterator[NvmeVolume]:
    opened = NvmeVolume(device, tmp_path, SEGMENT_BYTES)
    device.executed.clear()
    yield opened
    opened.close()


def write(volume: NvmeVolume, offset_bytes: int, data: bytes) -> None:
    volume.write([Transfer(offset_bytes, memoryview(data))], IoPath.DIRECT)


def read(volume: NvmeVolume, offset_bytes: int, length_bytes: int) -> bytes:
    data = bytearray(length_bytes)
    assert volume.read([Transfer(offset_bytes, memoryview(data))], IoPath.DIRECT) == 0
    return bytes(data)


def noise(length_bytes: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(length_bytes)


# --- bytes ---


def test_what_was_written_is_read_back(volume: NvmeVolume) -> None:
    data = noise(300 * KIB)
    write(volume, 1 * MIB, data)
    assert read(volume, 1 * MIB, len(data)) == data


def test_any_part_can_be_read(volume: NvmeVolume) -> None:
    data = noise(200 * KIB)
    write(volume, 0, data)
    for begin, length in [(0, 1), (1, 511), (511, 2), (4095, 70_000), (18 * KIB, 18 * KIB), (7, 0)]:
        assert read(volume, begin, length) == data[begin : begin + length]


def test_the_last_block_of_a_write_is_filled_up_with_zeros(volume: NvmeVolume) -> None:
    write(volume, 0, noise(2 * BLOCK_BYTES))
    write(volume, 0, b"abc")
    assert read(volume, 0, BLOCK_BYTES) == b"abc".ljust(BLOCK_BYTES, b"\0")
    assert read(volume, BLOCK_BYTES, BLOCK_BYTES) == noise(2 * BLOCK_BYTES)[BLOCK_BYTES:]


def test_the_volume_lies_behind_the_superblock(volume: NvmeVolume, device: EmulatedNvme) -> None:
    header = bytes(device.blocks[:HEADER_BYTES])
    write(volume, 0, b"\xaa" * BLOCK_BYTES)
    assert device.blocks[HEADER_BYTES : HEADER_BYTES + BLOCK_BYTES] == b"\xaa" * BLOCK_BYTES
    assert device.blocks[:HEADER_BYTES] == header


def test_many_transfers_go_to_the_device_at_once(volume: NvmeVolume) -> None:
    rows = [noise(64 * KIB, seed) for seed in range(8)]
    volume.write(
        [Transfer(index * 64 * KIB, memoryview(row)) for index, row in enumerate(rows)],
        IoPath.DIRECT,
    )
    targets = [bytearray(64 * KIB) for _ in rows]
    volume.read(
        [Transfer(index * 64 * KIB, memoryview(each)) for index, each in enumerate(targets)],
        IoPath.DIRECT,
    )
    assert targets == rows


MODEL_BYTES = 2 * MIB
OFFSET = st.one_of(
    st.integers(0, MODEL_BYTES - 1),
    st.integers(0, MODEL_BYTES // BLOCK_BYTES - 1).map(lambda block: block * BLOCK_BYTES),
)
LENGTH = st.one_of(
    st.integers(0, 300 * KIB), st.integers(0, 80).map(lambda blocks: blocks * BLOCK_BYTES)
)
STEP = st.tuples(st.sampled_from(["write", "read", "discard", "flush"]), OFFSET, LENGTH)


@settings(max_examples=examples(15), deadline=None)
@given(st.sampled_from(DEVICES), st.lists(STEP, max_size=12), st.integers(0, 99), st.integers(0, 5))
def test_any_sequence_of_operations_agrees_with_plain_memory(
    shape: tuple[int, int], steps: list[tuple[str, int, int]], seed: int, skew: int
) -> None:
    """Bytes of which the content is nobody's are left out of the comparison."""
    lba_bytes, transfer_bytes_max = shape
    device = EmulatedNvme(
        4 * MIB,
        lba_bytes=lba_bytes,
        transfer_bytes_max=transfer_bytes_max,
        deallocate_limits=DeallocateLimits(2, 100, 150),
    )
    with tempfile.TemporaryDirectory() as folder:
        volume = NvmeVolume(device, Path(folder), SEGMENT_BYTES)
        model, known = bytearray(MODEL_BYTES), bytearray(b"\1") * (MODEL_BYTES)
        for number, (action, offset, wanted) in enumerate(steps):
            length = min(wanted, MODEL_BYTES - offset)
            if action == "write":
                begin = offset - offset % BLOCK_BYTES
                data = noise(skew + length, seed + number)
                volume.write([Transfer(begin, memoryview(data)[skew:])], IoPath.DIRECT)
                padded = length + -length % BLOCK_BYTES
                model[begin : begin + padded] = data[skew:].ljust(padded, b"\0")
                known[begin : begin + padded] = b"\1" * padded
            elif action == "discard":
                volume.discard(offset, length)
                known[offset : offset + length] = bytes(length)
            elif action == "flush":
                volume.flush([(offset, length)])
            else:
                target = bytearray(skew + length)
                volume.read([Transfer(offset, memoryview(target)[skew:])], IoPath.DIRECT)
                compare(bytes(target[skew:]), model, known, offset)
        compare(read(volume, 0, MODEL_BYTES), model, known, 0)


def compare(found: bytes, model: bytearray, known: bytearray, offset: int) -> None:
    expected = model[offset : offset + len(found)]
    certain = known[offset : offset + len(found)]
    is_known = np.frombuffer(certain, np.uint8).astype(bool)
    differs = np.frombuffer(found, np.uint8) != np.frombuffer(expected, np.uint8)
    assert not np.any(differs & is_known)


def test_threads_read_and_write_their_own_ranges_at_once(volume: NvmeVolume) -> None:
    failures: list[int] = []

    def work(number: int) -> None:
        for turn in range(5):
            data = noise(130 * KIB + number, number * 10 + turn)
            write(volume, number * MIB, data)
            if read(volume, number * MIB + 5, len(data) - 5) != data[5:]:
                failures.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_large_range_takes_as_few_commands_as_the_controller_allows(tmp_path: Path) -> None:
    device = EmulatedNvme(lba_bytes=512, transfer_bytes_max=128 * KIB)
    volume = NvmeVolume(device, tmp_path, SEGMENT_BYTES)
    device.executed.clear()
    write(volume, 0, noise(1 * MIB))
    assert [count for _, _, count in device.executed] == [256] * 8
    assert [start for _, start, _ in device.executed] == list(range(2048, 4096, 256))


# --- space ---


def test_all_segments_are_there_from_the_start(volume: NvmeVolume) -> None:
    assert list(volume.segments()) == list(range(7))  # 8 MiB less the superblock's
    assert volume.room_bytes() == 0
    with pytest.raises(OSError, match="no more segments") as caught:
        volume.extend()
    assert caught.value.errno == errno.ENOSPC


def test_a_removed_segment_can_be_added_again(volume: NvmeVolume, device: EmulatedNvme) -> None:
    write(volume, 3 * MIB, noise(1 * MIB))
    volume.remove(3)
    assert 3 not in volume.segments()
    assert volume.room_bytes() == SEGMENT_BYTES
    assert read(volume, 3 * MIB, 100) == DEALLOCATED_BYTE * 100
    assert volume.extend() == 3
    assert volume.room_bytes() == 0


def test_a_discard_deallocates_whole_blocks_alone(volume: NvmeVolume, device: EmulatedNvme) -> None:
    data = noise(10 * BLOCK_BYTES)
    write(volume, 0, data)
    volume.discard(BLOCK_BYTES + 1, 3 * BLOCK_BYTES)
    volume.discard(9 * BLOCK_BYTES + 1, 100)
    found = read(volume, 0, len(data))
    gone = DEALLOCATED_BYTE * (2 * BLOCK_BYTES)
    assert found == data[: 2 * BLOCK_BYTES] + gone + data[4 * BLOCK_BYTES :]


def test_a_controller_without_deallocate_is_not_asked(tmp_path: Path) -> None:
    device = EmulatedNvme(has_deallocate=False)
    volume = NvmeVolume(device, tmp_path, SEGMENT_BYTES)
    volume.discard(0, 1 * MIB)
    assert DATASET_MANAGEMENT not in [opcode for opcode, _, _ in device.executed]


# --- durability ---


@pytest.mark.parametrize("seed", range(5))
def test_what_was_flushed_survives_a_power_loss(tmp_path: Path, seed: int) -> None:
    device = EmulatedNvme()
    volume = NvmeVolume(device, tmp_path, SEGMENT_BYTES)
    data = noise(500 * KIB, seed)
    write(volume, 0, data)
    volume.flush([(0, len(data))])
    write(volume, 2 * MIB, data)
    device.lose_power(seed)
    again = NvmeVolume(device, tmp_path, SEGMENT_BYTES)
    assert read(again, 0, len(data)) == data
    assert read(again, 2 * MIB, len(data)) != data, f"seed {seed}: nothing was volatile"


def test_a_controller_without_write_cache_needs_no_flush(tmp_path: Path) -> None:
    device = EmulatedNvme(has_write_cache=False)
    volume = NvmeVolume(device, tmp_path, SEGMENT_BYTES)
    write(volume, 0, b"x")
    volume.flush([(0, 1)])
    assert FLUSH not in [opcode for opcode, _, _ in device.executed]


def test_flushing_nothing_asks_nothing(volume: NvmeVolume, device: EmulatedNvme) -> None:
    volume.flush([])
    assert device.executed == []


# --- errors ---


def fail(device: EmulatedNvme, opcode: int, status: int, times: int) -> None:
    left = [times]

    def fault(found: int, start: int, count: int) -> int:
        if found != opcode or not left[0]:
            return 0
        left[0] -= 1
        return status

    device.faults = fault


def test_a_block_that_cannot_be_read_is_an_io_error(
    volume: NvmeVolume, device: EmulatedNvme
) -> None:
    fail(device, READ, UNRECOVERED_READ_ERROR, 1)
    with pytest.raises(OSError, match="unrecovered read error") as caught:
        read(volume, 0, 500 * KIB)
    assert caught.value.errno == errno.EIO
    assert len(read(volume, 0, 500 * KIB)) == 500 * KIB


def test_a_full_device_is_no_space(volume: NvmeVolume, device: EmulatedNvme) -> None:
    fail(device, WRITE, CAPACITY_EXCEEDED, 1)
    with pytest.raises(OSError, match="capacity exceeded") as caught:
        write(volume, 0, b"x")
    assert caught.value.errno == errno.ENOSPC


def test_what_is_transient_is_repeated_alone(volume: NvmeVolume, device: EmulatedNvme) -> None:
    data = noise(64 * KIB)
    write(volume, 0, data)
    device.executed.clear()
    read(volume, 0, len(data))
    undisturbed = len(device.executed)
    device.executed.clear()
    fail(device, READ, NAMESPACE_NOT_READY, 1)
    assert read(volume, 0, len(data)) == data
    assert len(device.executed) == undisturbed + 1


def test_what_stays_transient_is_an_error_in_the_end(
    volume: NvmeVolume, device: EmulatedNvme
) -> None:
    fail(device, READ, NAMESPACE_NOT_READY, 1000)
    with pytest.raises(OSError, match="not ready"):
        read(volume, 0, BLOCK_BYTES)
    assert len(device.executed) <= ATTEMPTS_MAX * (BLOCK_BYTES // device.namespace.lba_bytes)


def test_a_range_beyond_the_volume_is_an_io_error(volume: NvmeVolume) -> None:
    with pytest.raises(OSError, match="not in the volume") as caught:
        read(volume, 7 * MIB - 1, 2)
    assert caught.value.errno == errno.EIO
    with pytest.raises(OSError, match="not in the volume"):
        write(volume, 7 * MIB, b"x")
    with pytest.raises(OSError, match="not in the volume"):
        volume.discard(7 * MIB, 1 * MIB)


def test_a_closed_volume_refuses(device: EmulatedNvme, tmp_path: Path) -> None:
    volume = NvmeVolume(device, tmp_path, SEGMENT_BYTES)
    volume.close()
    for action in (
        lambda: read(volume, 0, 1),
        lambda: write(volume, 0, b"x"),
        lambda: volume.flush([(0, 1)]),
        volume.extend,
    ):
        with pytest.raises(OSError, match="closed"):
            action()
    volume.discard(0, BLOCK_BYTES)  # a reader may leave last


def test_a_deallocation_that_fails_is_no_error(
    volume: NvmeVolume, device: EmulatedNvme, caplog: pytest.LogCaptureFixture
) -> None:
    device.faults = lambda opcode, *_: CAPACITY_EXCEEDED if opcode == DATASET_MANAGEMENT else 0
    volume.discard(0, 1 * MIB)
    assert "were not deallocated" in caplog.text


# --- whose namespace it is ---


def test_a_blank_namespace_is_formatted_and_opened_again(
    device: EmulatedNvme, tmp_path: Path
) -> None:
    first = NvmeVolume(device, tmp_path, SEGMENT_BYTES)
    write(first, 0, b"kept")
    again = NvmeVolume(device, tmp_path, 2 * MIB)
    assert again.segment_bytes == SEGMENT_BYTES  # as it was formatted
    assert read(again, 0, 4) == b"kept"


@pytest.mark.parametrize("where", [0, 510, 1080, 65_600, 1 * MIB - 1, -1, -512, -1 * MIB])
def test_a_namespace_that_holds_something_is_refused_and_left_alone(
    device: EmulatedNvme, tmp_path: Path, where: int
) -> None:
    device.blocks[where] = 0x53
    before = bytes(device.blocks)
    with pytest.raises(Unavailable, match=r"holds something else.*erase it"):
        NvmeVolume(device, tmp_path, SEGMENT_BYTES)
    assert device.blocks[:] == before
    assert not list(tmp_path.iterdir())


def test_another_stores_namespace_is_refused(device: EmulatedNvme, tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    NvmeVolume(device, tmp_path / "one", SEGMENT_BYTES)
    before = bytes(device.blocks)
    with pytest.raises(Unavailable, match="belongs to another store"):
        NvmeVolume(device, tmp_path / "other", SEGMENT_BYTES)
    NvmeVolume(EmulatedNvme(), tmp_path / "other", SEGMENT_BYTES)
    with pytest.raises(Unavailable, match="belongs to another store"):
        NvmeVolume(device, tmp_path / "other", SEGMENT_BYTES)
    assert device.blocks[:] == before


def test_a_store_whose_namespace_was_erased_is_refused(
    device: EmulatedNvme, tmp_path: Path
) -> None:
    NvmeVolume(device, tmp_path, SEGMENT_BYTES)
    device.blocks[:] = bytes(len(device.blocks))
    with pytest.raises(Unavailable, match=r"was erased.*remove the index folder"):
        NvmeVolume(device, tmp_path, SEGMENT_BYTES)


def test_a_crash_before_the_superblock_is_written_is_no_erased_namespace(
    device: EmulatedNvme, tmp_path: Path
) -> None:
    fail(device, WRITE, UNRECOVERED_READ_ERROR, 1)
    with pytest.raises(Unavailable):
        NvmeVolume(device, tmp_path, SEGMENT_BYTES)
    assert [path.name for path in tmp_path.iterdir()] == [BEGUN_NAME]
    NvmeVolume(device, tmp_path, SEGMENT_BYTES)
    assert [path.name for path in tmp_path.iterdir()] == [FINISHED_NAME]


def test_a_crash_after_the_superblock_is_written_opens(
    device: EmulatedNvme, tmp_path: Path
) -> None:
    write(NvmeVolume(device, tmp_path, SEGMENT_BYTES), 0, b"kept")
    (tmp_path / FINISHED_NAME).rename(tmp_path / BEGUN_NAME)
    assert read(NvmeVolume(device, tmp_path, SEGMENT_BYTES), 0, 4) == b"kept"
    assert [path.name for path in tmp_path.iterdir()] == [FINISHED_NAME]


def test_a_superblock_whose_flush_failed_is_written_again(
    device: EmulatedNvme, tmp_path: Path
) -> None:
    fail(device, FLUSH, UNRECOVERED_READ_ERROR, 1)
    with pytest.raises(Unavailable):
        NvmeVolume(device, tmp_path, SEGMENT_BYTES)
    device.executed.clear()
    NvmeVolume(device, tmp_path, SEGMENT_BYTES)
    written = [opcode for opcode, start, _ in device.executed if opcode != READ]
    assert written == [WRITE, FLUSH]
    device.lose_power(1)
    NvmeVolume(device, tmp_path, SEGMENT_BYTES)


def test_a_damaged_superblock_is_refused(device: EmulatedNvme, tmp_path: Path) -> None:
    NvmeVolume(device, tmp_path, SEGMENT_BYTES)
    device.blocks[30] ^= 1
    with pytest.raises(Unavailable, match="superblock is damaged"):
        NvmeVolume(device, tmp_path, SEGMENT_BYTES)


def test_a_superblock_of_another_version_is_refused(device: EmulatedNvme, tmp_path: Path) -> None:
    NvmeVolume(device, tmp_path, SEGMENT_BYTES)
    device.blocks[16] = 9
    with pytest.raises(Unavailable, match="format 9, not 1"):
        NvmeVolume(device, tmp_path, SEGMENT_BYTES)


def test_a_namespace_that_shrank_is_refused(tmp_path: Path) -> None:
    device = EmulatedNvme()
    NvmeVolume(device, tmp_path, SEGMENT_BYTES)
    smaller = EmulatedNvme(4 * MIB)
    smaller.blocks[:] = device.blocks[: 4 * MIB]
    with pytest.raises(Unavailable, match="when it was formatted"):
        NvmeVolume(smaller, tmp_path, SEGMENT_BYTES)


@pytest.mark.parametrize("capacity_bytes", [1 * MIB, 4 * MIB])
def test_a_namespace_below_a_segment_is_refused(tmp_path: Path, capacity_bytes: int) -> None:
    with pytest.raises(Unavailable, match=f"{capacity_bytes} bytes"):
        NvmeVolume(EmulatedNvme(capacity_bytes), tmp_path, 4 * MIB)
    assert not list(tmp_path.iterdir())


def test_a_store_id_that_is_none_is_refused(device: EmulatedNvme, tmp_path: Path) -> None:
    (tmp_path / FINISHED_NAME).write_text("abcd")
    with pytest.raises(Unavailable, match="no store id"):
        NvmeVolume(device, tmp_path, SEGMENT_BYTES)


@given(st.binary(min_size=STORE_ID_BYTES, max_size=STORE_ID_BYTES), st.integers(1, 2**60))
def test_a_superblock_survives_being_written(store_id: bytes, number: int) -> None:
    superblock = Superblock(store_id, number, number + 1)
    assert Superblock.from_bytes(superblock.to_bytes()) == superblock


# --- what is no NVMe namespace ---


@pytest.mark.parametrize("path", ["/dev/null", "/etc/passwd", "/dev/ng99n1"])
def test_what_is_no_namespace_is_refused_with_a_remedy(tmp_path: Path, path: str) -> None:
    with pytest.raises(Unavailable, match="cannot be opened"):
        open_nvme_volume(Path(path), tmp_path, SEGMENT_BYTES, depth=8)


def test_the_volume_says_how_it_reaches_the_device(volume: NvmeVolume) -> None:
    assert volume.device_path.startswith("nvme: commands of at most")
    assert "7 of 1048576 bytes" in repr(volume)
    assert volume.paths == {IoPath.DIRECT}
