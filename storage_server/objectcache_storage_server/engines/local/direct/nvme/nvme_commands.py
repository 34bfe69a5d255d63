"""NVMe commands as bytes: from ranges of a namespace to what the kernel passes through. Pure.

The layouts are those of `linux/nvme_ioctl.h` (`struct nvme_uring_cmd`, `struct nvme_passthru_cmd`)
and of the NVM command set specification; the names of equations are those of Dual-Blade (IV-B).
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

COMMAND_BYTES = 72  # struct nvme_uring_cmd, and struct nvme_passthru_cmd
COMMAND_LBAS_MAX = 1 << 16  # the block count of a command has 16 bits and counts from 0
DEALLOCATE_RANGES_MAX = 256  # of one command: the range count has 8 bits and counts from 0
DEALLOCATE_RANGE_BYTES = 16
IDENTIFY_BYTES = 4096

# Both structs agree in all that is set here: they differ in what the last four bytes mean.
_COMMAND = struct.Struct("<BBHIIIQQII6III")
_DEALLOCATE_RANGE = struct.Struct("<IIQ")
_RANGE_LBAS_MAX = (1 << 32) - 1
_DEALLOCATE = 1 << 2  # "attribute - deallocate" of Dataset Management


class Opcode(enum.IntEnum):
    """Of the NVM command set."""

    FLUSH = 0x00
    WRITE = 0x01
    READ = 0x02
    DATASET_MANAGEMENT = 0x09


class AdminOpcode(enum.IntEnum):
    """Of the admin queue."""

    IDENTIFY = 0x06


class Identify(enum.IntEnum):
    """What an Identify command asks for (CNS)."""

    NAMESPACE = 0x00
    CONTROLLER = 0x01
    NVM_CONTROLLER = 0x06  # limits of the NVM command set; unknown to controllers before NVMe 2.0


class LbaRange(NamedTuple):
    """Logical blocks [start_lba, start_lba + lba_count) of a namespace (eq. 4)."""

    start_lba: int
    lba_count: int


def lba_range(offset_bytes: int, length_bytes: int, lba_bytes: int) -> LbaRange:
    """The blocks of a range in bytes (eq. 5, and lines 7 and 8 of algorithm 2).

    Raises `ValueError` where the range is not whole blocks: reading more than was asked for would
    land in memory that is another's.
    """
    if offset_bytes % lba_bytes or length_bytes % lba_bytes:
        raise ValueError(
            f"{length_bytes} bytes at {offset_bytes} are no whole {lba_bytes} B blocks"
        )
    return LbaRange(offset_bytes // lba_bytes, length_bytes // lba_bytes)


def lbas_per_command(transfer_bytes_max: int, lba_bytes: int) -> int:
    """Most blocks that one command may transfer (eq. 7 and 8)."""
    return min(transfer_bytes_max // lba_bytes, COMMAND_LBAS_MAX)


def transfer_commands(
    opcode: Opcode, nsid: int, lbas: LbaRange, address: int, lba_bytes: int, lbas_max: int
) -> Iterator[bytes]:
    """Packed reads or writes of `lbas` from or to the memory at `address`, of at most `lbas_max`
    blocks each (eq. 9 to 11).
    """
    for done in range(0, lbas.lba_count, lbas_max):
        count = min(lbas_max, lbas.lba_count - done)
        start = lbas.start_lba + done
        yield pack_command(
            opcode,
            nsid,
            address=address + done * lba_bytes,
            length_bytes=count * lba_bytes,
            cdw10=start & 0xFFFF_FFFF,
            cdw11=start >> 32,
            cdw12=count - 1,
        )


def flush_command(nsid: int) -> bytes:
    """Makes durable what was written before."""
    return pack_command(Opcode.FLUSH, nsid)


def deallocate_command(nsid: int, range_count: int, address: int) -> bytes:
    """Dataset Management: the ranges listed at `address` hold nothing any more."""
    return pack_command(
        Opcode.DATASET_MANAGEMENT,
        nsid,
        address=address,
        length_bytes=range_count * DEALLOCATE_RANGE_BYTES,
        cdw10=range_count - 1,
        cdw11=_DEALLOCATE,
    )


def identify_command(nsid: int, what: Identify, address: int) -> bytes:
    """Identify, into `IDENTIFY_BYTES` of memory at `address`."""
    return pack_command(
        AdminOpcode.IDENTIFY, nsid, address=address, length_bytes=IDENTIFY_BYTES, cdw10=what
    )


def deallocate_lists(
    lbas: LbaRange, range_lbas_max: int, ranges_max: int, command_lbas_max: int
) -> Iterator[bytes]:
    """Range lists that cover `lbas`, one a command, within a controller's three limits."""
    range_lbas_max = min(range_lbas_max, command_lbas_max, _RANGE_LBAS_MAX)
    command_lbas_max = min(command_lbas_max, ranges_max * range_lbas_max)
    for part in _split(lbas, command_lbas_max):
        yield pack_ranges(list(_split(part, range_lbas_max)))


def pack_ranges(ranges: Sequence[LbaRange]) -> bytes:
    """A Dataset Management range list: 16 bytes each, of context 0."""
    return b"".join(_DEALLOCATE_RANGE.pack(0, each.lba_count, each.start_lba) for each in ranges)


def pack_command(
    opcode: int,
    nsid: int,
    *,
    address: int = 0,
    length_bytes: int = 0,
    cdw10: int = 0,
    cdw11: int = 0,
    cdw12: int = 0,
) -> bytes:
    """The 72 bytes of a command; a timeout of 0 is the driver's own."""
    return _COMMAND.pack(
        opcode, 0, 0, nsid, 0, 0, 0, address, 0, length_bytes, cdw10, cdw11, cdw12, 0, 0, 0, 0, 0
    )


def _split(lbas: LbaRange, lbas_max: int) -> Iterator[LbaRange]:
    for done in range(0, lbas.lba_count, lbas_max):
        yield LbaRange(lbas.start_lba + done, min(lbas_max, lbas.lba_count - done))
