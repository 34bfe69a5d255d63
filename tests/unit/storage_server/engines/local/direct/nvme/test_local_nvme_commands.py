"""NVMe commands: translation, chunking, packing, identify data and statuses, all pure."""

from __future__ import annotations

import errno
import re
import shutil
import struct
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache_schemas.limits import GIB, KIB, MIB
from objectcache_storage_server.engines.local.direct.nvme.nvme_commands import (
    COMMAND_LBAS_MAX,
    DEALLOCATE_RANGES_MAX,
    Identify,
    LbaRange,
    Opcode,
    deallocate_command,
    deallocate_lists,
    flush_command,
    identify_command,
    lba_range,
    lbas_per_command,
    pack_command,
    pack_ranges,
    transfer_commands,
)
from objectcache_storage_server.engines.local.direct.nvme.nvme_identify import (
    DeallocateLimits,
    UnsuitableNamespace,
    parse_controller,
    parse_deallocate_limits,
    parse_namespace,
)
from objectcache_storage_server.engines.local.direct.nvme.nvme_kernel import (
    IOCTL_ADMIN_CMD,
    IOCTL_ID,
    URING_CMD_IO,
    block_name,
    generic_name,
    system_bytes_max,
)
from objectcache_storage_server.engines.local.direct.nvme.nvme_status import (
    as_os_error,
    is_worth_repeating,
)
from objectcache_storage_server.engines.local.space.extent_geometry import Geometry
from tests.unit.storage_server.engines.local.emulated_nvme import Command

LBA_SIZES = st.sampled_from([512, 1024, 4096])
HEADER = Path("/usr/include/linux/nvme_ioctl.h")


# --- translation (eq. 3 to 6, algorithm 2) ---


@given(LBA_SIZES, st.integers(0, 1 << 40), st.integers(0, 1 << 20))
def test_a_range_of_whole_blocks_is_the_blocks_it_covers(
    lba_bytes: int, first: int, count: int
) -> None:
    assert lba_range(first * lba_bytes, count * lba_bytes, lba_bytes) == LbaRange(first, count)


@given(LBA_SIZES, st.integers(0, 1 << 20), st.integers(0, 1 << 20), st.integers(1, 511))
def test_a_range_of_parts_of_blocks_is_refused(
    lba_bytes: int, first: int, count: int, excess: int
) -> None:
    begin, length = first * lba_bytes, count * lba_bytes
    with pytest.raises(ValueError, match="no whole"):
        lba_range(begin + excess, length, lba_bytes)
    with pytest.raises(ValueError, match="no whole"):
        lba_range(begin, length + excess, lba_bytes)


def algorithm_2(
    lba_start: int,
    target_shape: tuple[int, int, int],
    index: tuple[int, int, int],
    source_shape: tuple[int, int, int],
    element_bytes: int,
    lba_bytes: int,
) -> tuple[int, int]:
    """The paper's algorithm, line by line: start LBA and bytes of a slice of a tensor."""
    _, d1, d2 = target_shape
    i0, j0, k0 = index
    offset_bytes = ((i0 * d1 + j0) * d2 + k0) * element_bytes
    f0, f1, f2 = source_shape
    return lba_start + offset_bytes // lba_bytes, f0 * f1 * f2 * element_bytes


@given(
    LBA_SIZES,
    st.integers(1, 20),
    st.integers(1, 16),
    st.integers(1, 8),
    st.integers(0, 1 << 20),
    st.data(),
)
def test_a_slice_of_an_extent_translates_as_algorithm_2_says(
    lba_bytes: int, layers: int, slots: int, slice_blocks: int, base_block: int, data: st.DataObject
) -> None:
    geometry = Geometry(slots, layers, slice_blocks * 4 * KIB)
    layer = data.draw(st.integers(0, layers - 1))
    slot = data.draw(st.integers(0, slots - 1))
    count = data.draw(st.integers(1, slots - slot))  # neighbours, read as one
    base_bytes = base_block * 4 * KIB
    elements = geometry.slice_bytes // 2  # FP16
    found = lba_range(
        base_bytes + geometry.slice_offset_bytes(slot, layer),
        count * geometry.slice_bytes,
        lba_bytes,
    )
    slba, request_bytes = algorithm_2(
        base_bytes // lba_bytes,
        (layers, slots, elements),
        (layer, slot, 0),
        (1, count, elements),
        2,
        lba_bytes,
    )
    assert found == LbaRange(slba, request_bytes // lba_bytes)


@given(
    LBA_SIZES, st.lists(st.tuples(st.integers(1, 8), st.integers(1, 40)), min_size=1, max_size=20)
)
def test_extents_bound_one_after_the_other_are_disjoint_and_contiguous(
    lba_bytes: int, shapes: list[tuple[int, int]]
) -> None:
    position, bound = 1 * MIB, []
    for slots, slice_sectors in shapes:
        length_bytes = Geometry(slots, 4, slice_sectors * 512).extent_bytes
        bound.append(lba_range(position, length_bytes, lba_bytes))
        position += length_bytes
    for one, following in pairwise(bound):
        assert following.start_lba == one.start_lba + one.lba_count  # eq. 6
    assert sum(each.lba_count for each in bound) * lba_bytes == position - 1 * MIB  # eq. 5


# --- chunking (eq. 7 to 11) ---


@given(LBA_SIZES, st.integers(4 * KIB, 512 * MIB))
def test_a_chunk_is_as_many_blocks_as_a_command_may_carry(lba_bytes: int, mdts_bytes: int) -> None:
    found = lbas_per_command(mdts_bytes, lba_bytes)
    assert found == min(mdts_bytes // lba_bytes, 65536)
    assert found >= 1


@given(
    LBA_SIZES,
    st.integers(0, (1 << 50) - 1),
    st.integers(1, 3000),
    st.integers(12, 22).map(lambda shift: 1 << shift),
    st.integers(1, 1 << 46).map(lambda number: number * 4),
)
def test_chunks_follow_equations_7_to_11(
    lba_bytes: int, start: int, count: int, mdts_bytes: int, address: int
) -> None:
    blocks_max = lbas_per_command(mdts_bytes, lba_bytes)
    commands = [
        Command(raw)
        for raw in transfer_commands(
            Opcode.READ, 7, LbaRange(start, count), address, lba_bytes, blocks_max
        )
    ]
    assert len(commands) == -(-count // blocks_max)  # eq. 8
    for number, command in enumerate(commands):
        remaining = count - number * blocks_max
        assert command.start == start + number * blocks_max  # eq. 9
        assert command.dwords[2] == min(blocks_max, remaining) - 1  # eq. 10: counts from 0
        assert command.address == address + number * blocks_max * lba_bytes  # eq. 11
        assert command.data_bytes == command.count * lba_bytes <= mdts_bytes
        assert (command.opcode, command.nsid) == (0x02, 7)
        assert not command.has_reserved_bits()


def test_no_command_carries_more_blocks_than_its_16_bits_count() -> None:
    blocks_max = lbas_per_command(1 * GIB, 512)
    commands = transfer_commands(
        Opcode.WRITE, 1, LbaRange(0, COMMAND_LBAS_MAX + 1), 4096, 512, blocks_max
    )
    assert [Command(raw).count for raw in commands] == [65536, 1]


def test_an_empty_range_takes_no_command() -> None:
    assert not list(transfer_commands(Opcode.READ, 1, LbaRange(5, 0), 4096, 512, 256))


# --- packing ---


def test_a_write_is_packed_bit_by_bit() -> None:
    (raw,) = transfer_commands(
        Opcode.WRITE, 0x11223344, LbaRange(0x1_8000_0002, 16), 0x7FFF_1234_5000, 512, 256
    )
    assert raw.hex() == (
        "01 00 0000 44332211 00000000 00000000 0000000000000000 00503412ff7f0000 00000000 00200000"
        " 02000080 01000000 0f000000 00000000 00000000 00000000 00000000 00000000"
    ).replace(" ", "")


def test_flush_and_deallocate_and_identify_name_what_they_need() -> None:
    assert struct.unpack_from("<B3xI", flush_command(9)) == (0x00, 9)
    assert not any(flush_command(9)[8:])
    trim = Command(deallocate_command(9, 256, 0x1000))
    assert (trim.opcode, trim.dwords[:2], trim.data_bytes) == (0x09, (255, 4), 4096)
    identify = identify_command(0, Identify.NVM_CONTROLLER, 0x2000)
    assert struct.unpack_from("<B3xI", identify) == (0x06, 0)
    assert struct.unpack_from("<II", identify, 36) == (4096, 6)


def test_every_field_of_the_command_has_its_own_place() -> None:
    raw = pack_command(
        0xA1, 0xB1B2B3B4, address=1 << 63, length_bytes=1 << 31, cdw10=10, cdw11=11, cdw12=12
    )
    assert struct.unpack("<BBHIIIQQII6III", raw) == (
        *(0xA1, 0, 0, 0xB1B2B3B4, 0, 0, 0, 1 << 63, 0, 1 << 31),
        *(10, 11, 12, 0, 0, 0, 0, 0),
    )


PROBE = """
#include <stddef.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <linux/nvme_ioctl.h>
#define AT(field) printf(#field " %zu\\n", offsetof(struct nvme_uring_cmd, field));
int main(void) {
  AT(opcode) AT(flags) AT(nsid) AT(metadata) AT(addr) AT(metadata_len) AT(data_len)
  AT(cdw10) AT(cdw11) AT(cdw12) AT(timeout_ms)
  printf("size %zu\\n", sizeof(struct nvme_uring_cmd));
  printf("admin_size %zu\\n", sizeof(struct nvme_passthru_cmd));
  printf("admin_data_len %zu\\n", offsetof(struct nvme_passthru_cmd, data_len));
  printf("id %u\\n", (unsigned)NVME_IOCTL_ID);
  printf("admin %u\\n", (unsigned)NVME_IOCTL_ADMIN_CMD);
  printf("io %u\\n", (unsigned)NVME_URING_CMD_IO);
  return 0;
}
"""


def test_the_layout_is_that_of_the_kernel_header(tmp_path: Path) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or not HEADER.exists():
        pytest.skip("needs a C compiler and linux/nvme_ioctl.h")
    if "NVME_URING_CMD_IO" not in HEADER.read_text():
        pytest.skip("linux/nvme_ioctl.h is older than Linux 5.19")
    (tmp_path / "probe.c").write_text(PROBE)
    subprocess.run([compiler, "-o", tmp_path / "probe", tmp_path / "probe.c"], check=True)
    printed = subprocess.run([tmp_path / "probe"], capture_output=True, text=True, check=True)
    found = {name: int(value) for name, value in re.findall(r"(\w+) (\d+)", printed.stdout)}
    assert found == {
        "opcode": 0,
        "flags": 1,
        "nsid": 4,
        "metadata": 16,
        "addr": 24,
        "metadata_len": 32,
        "data_len": 36,
        "cdw10": 40,
        "cdw11": 44,
        "cdw12": 48,
        "timeout_ms": 64,
        "size": 72,
        "admin_size": 72,
        "admin_data_len": 36,
        "id": IOCTL_ID,
        "admin": IOCTL_ADMIN_CMD,
        "io": URING_CMD_IO,
    }


# --- deallocate ---


def test_a_range_list_is_16_bytes_a_range() -> None:
    listed = pack_ranges([LbaRange(0x1_0000_0000, 8), LbaRange(5, 1)])
    assert struct.unpack("<IIQIIQ", listed) == (0, 8, 0x1_0000_0000, 0, 1, 5)


@given(
    st.integers(0, 1 << 40),
    st.integers(0, 5000),
    st.integers(1, 700),
    st.integers(1, DEALLOCATE_RANGES_MAX),
    st.integers(1, 2000),
)
def test_deallocated_ranges_cover_the_range_once_within_all_limits(
    start: int, count: int, range_max: int, ranges_max: int, lbas_max: int
) -> None:
    position = start
    for listed in deallocate_lists(LbaRange(start, count), range_max, ranges_max, lbas_max):
        ranges = [(each[2], each[1]) for each in struct.iter_unpack("<IIQ", listed)]
        assert 1 <= len(ranges) <= ranges_max
        assert sum(length for _, length in ranges) <= lbas_max
        for begin, length in ranges:
            assert begin == position
            assert 1 <= length <= range_max
            position += length
    assert position == start + count


def test_without_limits_a_whole_segment_is_one_range() -> None:
    limits = DeallocateLimits()
    lists = list(
        deallocate_lists(
            LbaRange(2048, 1 << 21), limits.range_lbas_max, limits.ranges_max, limits.lbas_max
        )
    )
    assert [struct.unpack("<IIQ", each) for each in lists] == [(0, 1 << 21, 2048)]


# --- identify ---


def identified_namespace(
    *, blocks: int = 1000, shift: int = 12, metadata: int = 0, protection: int = 0, index: int = 0
) -> bytes:
    data = bytearray(4096)
    struct.pack_into("<Q", data, 0, blocks)
    data[26] = index & 0xF | (index >> 4) << 5
    data[29] = protection
    struct.pack_into("<HBB", data, 128 + 4 * index, metadata, shift, 0)
    return bytes(data)


@pytest.mark.parametrize("index", [0, 1, 15, 16, 63])
@pytest.mark.parametrize("shift", [9, 12])
def test_the_format_in_use_gives_the_block_size(index: int, shift: int) -> None:
    found = parse_namespace(3, identified_namespace(index=index, shift=shift))
    assert (found.nsid, found.lba_bytes, found.capacity_bytes) == (3, 1 << shift, 1000 << shift)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (identified_namespace(blocks=0), "inactive"),
        (identified_namespace(metadata=8), "metadata"),
        (identified_namespace(protection=1), "protection"),
        (identified_namespace(shift=16), "65536 bytes"),
        (identified_namespace(shift=0), "1 bytes"),
        (identified_namespace(shift=255), "0 bytes"),
    ],
)
def test_a_namespace_that_the_store_cannot_use_says_why(data: bytes, words: str) -> None:
    with pytest.raises(UnsuitableNamespace, match=words):
        parse_namespace(1, data)


def identified_controller(mdts: int, oncs: int = 0b100, vwc: int = 1) -> bytes:
    data = bytearray(4096)
    data[4:24] = b"S4EVNF0M".ljust(20)
    data[24:64] = b"A drive".ljust(40)
    data[77] = mdts
    struct.pack_into("<H", data, 520, oncs)
    data[525] = vwc
    return bytes(data)


def test_a_controller_tells_its_limits_and_capabilities() -> None:
    found = parse_controller(identified_controller(mdts=6))
    assert (found.model, found.serial_number) == ("A drive", "S4EVNF0M")
    assert found.transfer_bytes_max == 256 * KIB
    assert found.has_deallocate
    assert found.has_write_cache
    plain = parse_controller(identified_controller(mdts=0, oncs=0b1011, vwc=0b110))
    assert plain.transfer_bytes_max is None
    assert not plain.has_deallocate
    assert not plain.has_write_cache


def test_deallocate_limits_of_zero_are_none() -> None:
    data = bytearray(4096)
    assert parse_deallocate_limits(bytes(data)) == DeallocateLimits()
    struct.pack_into("<BIQ", data, 3, 8, 0x10000, 0x20000)
    assert parse_deallocate_limits(bytes(data)) == DeallocateLimits(8, 0x10000, 0x20000)


# --- status ---


@pytest.mark.parametrize(
    ("result", "number", "words"),
    [
        (0x281, errno.EIO, "unrecovered read error"),
        (0x4281, errno.EIO, "unrecovered read error"),
        (0x080, errno.EIO, "LBA out of range"),
        (0x081, errno.ENOSPC, "capacity exceeded"),
        (0x020, errno.EROFS, "write protected"),
        (0x182, errno.EROFS, "read-only range"),
        (0x002, errno.EIO, "invalid field"),
        (0x302, errno.EIO, "path to the device lost"),
        (0x7FF, errno.EIO, "unknown status"),
        (-errno.ENODEV, errno.ENODEV, "No such device"),
    ],
)
def test_a_status_is_the_error_that_it_means(result: int, number: int, words: str) -> None:
    error = as_os_error(result, "NVMe read")
    assert error.errno == number
    assert words in str(error)
    assert "NVMe read" in str(error)


@given(st.one_of(st.integers(1, (1 << 15) - 1), st.integers(-133, -1)))
def test_every_result_is_an_error_with_a_number_and_words(result: int) -> None:
    error = as_os_error(result, "NVMe read")
    assert error.errno
    assert error.strerror


def test_only_what_may_pass_is_worth_repeating() -> None:
    assert is_worth_repeating(0x082)  # namespace not ready
    assert is_worth_repeating(0x303)  # a path error
    assert is_worth_repeating(-errno.EAGAIN)
    assert not is_worth_repeating(0x4082)  # the controller says not to
    assert not is_worth_repeating(0x281)
    assert not is_worth_repeating(-errno.ENODEV)


# --- the device's surroundings ---


def test_the_block_device_has_the_number_of_the_character_device() -> None:
    assert block_name("ng12n3") == "nvme12n3"


@pytest.mark.parametrize("path", ["/dev/null", "/dev/ptmx", "/etc/hostname", "/dev"])
def test_what_is_no_namespace_is_not_even_opened(path: str) -> None:
    with pytest.raises(OSError, match="no character device of an NVMe namespace") as caught:
        generic_name(Path(path))
    assert caught.value.errno == errno.ENOTTY


@pytest.mark.parametrize(
    ("kib", "segments", "found_bytes"),
    [(512, 127, 256 * KIB), (128, 127, 128 * KIB), (8192, 2, 4 * KIB), (8192, 1025, 4 * MIB)],
)
def test_what_the_system_maps_at_once_is_a_power_of_two_within_its_limits(
    tmp_path: Path, kib: int, segments: int, found_bytes: int
) -> None:
    queue = tmp_path / "nvme0n1" / "queue"
    queue.mkdir(parents=True)
    (queue / "max_hw_sectors_kb").write_text(f"{kib}\n")
    (queue / "max_segments").write_text(f"{segments}\n")
    assert system_bytes_max("ng0n1", tmp_path) == found_bytes


def test_a_system_that_does_not_say_gets_small_commands(tmp_path: Path) -> None:
    assert system_bytes_max("ng0n1", tmp_path) == 128 * KIB
