"""What a namespace and its controller say of themselves: Identify data, read into values. Pure.

Offsets are those of the NVMe base and NVM command set specifications, revision 2.0.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from objectcache_schemas.limits import KIB
from objectcache_storage_server.engines.local.direct.nvme.nvme_commands import DEALLOCATE_RANGES_MAX

LBA_BYTES_MIN, LBA_BYTES_MAX = 512, 4 * KIB  # a block of the volume is whole logical blocks
# MDTS counts the smallest memory pages that the controller knows (CAP.MPSMIN), which only its
# registers tell. Every controller that runs with 4 KiB pages, which x86 has no others than, can do
# with 4 KiB, so this never takes the limit for more than it is.
_MDTS_UNIT_BYTES = 4 * KIB
_UNLIMITED = (1 << 64) - 1


class UnsuitableNamespace(ValueError):
    """The namespace is formatted in a way that the store cannot use; the message says how."""


@dataclass(frozen=True, slots=True)
class DeallocateLimits:
    """What one Dataset Management command may hold."""

    ranges_max: int = DEALLOCATE_RANGES_MAX
    range_lbas_max: int = _UNLIMITED
    lbas_max: int = _UNLIMITED


@dataclass(frozen=True, slots=True)
class Controller:
    """A controller's capabilities, as far as the store uses them."""

    model: str
    serial_number: str
    transfer_bytes_max: int | None  # MDTS; `None` is no limit
    has_deallocate: bool
    has_write_cache: bool


@dataclass(frozen=True, slots=True)
class Namespace:
    """A namespace that the store can use."""

    nsid: int
    lba_bytes: int
    lba_count: int

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the namespace."""
        return self.lba_bytes * self.lba_count


def parse_controller(data: bytes) -> Controller:
    """Identify Controller (CNS 01h), `IDENTIFY_BYTES` bytes."""
    mdts = data[77]
    (optional_commands,) = struct.unpack_from("<H", data, 520)
    return Controller(
        model=_text(data[24:64]),
        serial_number=_text(data[4:24]),
        transfer_bytes_max=_MDTS_UNIT_BYTES << mdts if mdts else None,
        has_deallocate=bool(optional_commands & 1 << 2),
        has_write_cache=bool(data[525] & 1),
    )


def parse_namespace(nsid: int, data: bytes) -> Namespace:
    """Identify Namespace (CNS 00h), `IDENTIFY_BYTES` bytes; raises `UnsuitableNamespace`."""
    (lba_count,) = struct.unpack_from("<Q", data, 0)
    flbas, protection = data[26], data[29] & 0x7
    metadata_bytes, lba_shift = struct.unpack_from("<HB", data, 128 + 4 * _format_index(flbas))
    lba_bytes = 1 << lba_shift if lba_shift < 64 else 0
    if not lba_count:
        raise UnsuitableNamespace("it is inactive")
    if metadata_bytes or protection:
        raise UnsuitableNamespace("it is formatted with metadata or protection information")
    if not LBA_BYTES_MIN <= lba_bytes <= LBA_BYTES_MAX:
        raise UnsuitableNamespace(f"its logical blocks have {lba_bytes} bytes")
    return Namespace(nsid, lba_bytes, lba_count)


def parse_deallocate_limits(data: bytes) -> DeallocateLimits:
    """Identify Controller of the NVM command set (CNS 06h); 0 is no limit."""
    ranges, range_lbas, lbas = struct.unpack_from("<BIQ", data, 3)
    return DeallocateLimits(
        ranges or DEALLOCATE_RANGES_MAX, range_lbas or _UNLIMITED, lbas or _UNLIMITED
    )


def _format_index(flbas: int) -> int:
    """Which of up to 64 formats is in use: bits 0 to 3, and 5 and 6 above them."""
    return flbas & 0xF | (flbas >> 5 & 0x3) << 4


def _text(data: bytes) -> str:
    return data.decode("ascii", "replace").strip(" \0")
