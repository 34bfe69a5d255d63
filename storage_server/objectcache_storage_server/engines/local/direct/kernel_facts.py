"""What the kernel says of an open file, and asks it to do, that Python has no call for."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from pathlib import Path

from objectcache_schemas.limits import KIB, MIB
from objectcache_storage_server.engines.local.direct.alignment import (
    PAGE_ALIGNMENT,
    Alignment,
    split_at,
)

PIECE_BYTES_DEFAULT = 1 * MIB  # where the device does not say what it takes at once
PIECE_BYTES_MAX = 4 * MIB  # more in one request gains nothing, and must fit a bounce buffer
_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000  # Linux 6.1
_STATX_BYTES = 256
_STATX_DIO_OFFSET = 0x98  # stx_dio_mem_align and stx_dio_offset_align
_SYNC_FILE_RANGE_WRITE = 2
_SYNC_FILE_RANGE_WRITE_AND_WAIT = 1 | 2 | 4

_libc = ctypes.CDLL(None, use_errno=True)


def direct_alignment(file_descriptor: int) -> Alignment | None:
    """What reads past the page cache ask of this file; None where there are none, and pages where
    the kernel does not say.
    """
    found = ctypes.create_string_buffer(_STATX_BYTES)
    if not hasattr(_libc, "statx"):
        return PAGE_ALIGNMENT
    if _libc.statx(file_descriptor, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, found) != 0:
        return PAGE_ALIGNMENT
    return parse_alignment(found.raw)


def parse_alignment(statx: bytes) -> Alignment | None:
    """The alignment in a struct statx, as `direct_alignment` says it."""
    (mask,) = struct.unpack_from("=I", statx)
    memory_bytes, offset_bytes = struct.unpack_from("=II", statx, _STATX_DIO_OFFSET)
    if not mask & _STATX_DIOALIGN:
        return PAGE_ALIGNMENT
    return Alignment(offset_bytes, memory_bytes) if offset_bytes and memory_bytes else None


def piece_bytes_max(path: Path) -> int:
    """The most that the device under `path` takes in one request, whole pages; from sysfs.

    Less than that gains nothing: rows of 1 MiB cut into 512 or 256 KiB reach 0.96 of the rate.
    """
    device = path.stat().st_dev
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    for queue in (block / "queue", block.parent / "queue"):  # of a disk, or of its partition
        with contextlib.suppress(OSError, ValueError):
            found = int((queue / "max_sectors_kb").read_text()) * KIB
            return min(PIECE_BYTES_MAX, max(4 * KIB, found - found % (4 * KIB)))
    return PIECE_BYTES_DEFAULT


def read_ahead(
    file_descriptor: int, offset_bytes: int, length_bytes: int, piece_bytes: int = 128 * KIB
) -> None:
    """Have the page cache begin to read a range; raises `OSError`. A piece is to be no longer than
    what the device takes in one request, since the kernel leaves out what is beyond that.
    """
    for begin, length in split_at(offset_bytes, length_bytes, piece_bytes):
        os.posix_fadvise(file_descriptor, begin, length, os.POSIX_FADV_WILLNEED)


def start_write_back(file_descriptor: int, offset_bytes: int, length_bytes: int) -> None:
    """Ask for the range's dirty pages to be written soon. A hint: what fails, `fdatasync` says."""
    _libc.sync_file_range(
        ctypes.c_int(file_descriptor),
        ctypes.c_int64(offset_bytes),
        ctypes.c_int64(length_bytes),
        ctypes.c_uint(_SYNC_FILE_RANGE_WRITE),
    )


def wait_for_write_back(file_descriptor: int, offset_bytes: int, length_bytes: int) -> None:
    """Return when no page of the range is dirty or being written; a device's own write cache may
    still have it. Raises `OSError`, and then this descriptor is not told of that error again.
    """
    failed = _libc.sync_file_range(
        ctypes.c_int(file_descriptor),
        ctypes.c_int64(offset_bytes),
        ctypes.c_int64(length_bytes),
        ctypes.c_uint(_SYNC_FILE_RANGE_WRITE_AND_WAIT),
    )
    if failed:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
