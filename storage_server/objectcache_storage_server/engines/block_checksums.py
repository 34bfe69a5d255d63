"""Checksums of an object's blocks: xxh3_64 of every `block_bytes` bytes, the last block shorter.

They find rot, not forgery. Pure: bytes in, numbers out.
"""

from __future__ import annotations

from array import array

import xxhash

from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.limits import KIB, MIB

BLOCK_BYTES_MIN = 4 * KIB  # smaller blocks cost more per byte; used only where a caller asks
BLOCK_BYTES_MAX = 1 * MIB  # a read of one byte verifies a whole block

block_checksum = xxhash.xxh3_64_intdigest


def block_bytes_within(unit_bytes: int) -> int | None:
    """The block size for what is written and read in units of `unit_bytes`.

    The unit itself, or where that is over BLOCK_BYTES_MAX its largest divisor from BLOCK_BYTES_MIN
    to BLOCK_BYTES_MAX, so that a unit is whole blocks; None where it has no such divisor.
    """
    assert unit_bytes > 0
    if unit_bytes <= BLOCK_BYTES_MAX:
        return unit_bytes
    fewest = -(-unit_bytes // BLOCK_BYTES_MAX)
    for count in range(fewest, unit_bytes // BLOCK_BYTES_MIN + 1):
        if unit_bytes % count == 0:
            return unit_bytes // count
    return None


def slice_block_bytes(slice_bytes: int) -> int:
    """Checksum block for chunks of such slices: `block_bytes_within` a slice, so that a slice is
    whole blocks and can be verified alone.

    Raises `InvalidRequest` for a slice that cannot be divided.
    """
    block_bytes = block_bytes_within(slice_bytes)
    if block_bytes is not None:
        return block_bytes
    raise InvalidRequest(
        f"per_layer_chunk_bytes is {slice_bytes}; above {BLOCK_BYTES_MAX} it must have a "
        f"divisor from {BLOCK_BYTES_MIN} to {BLOCK_BYTES_MAX}; pad the slice",
        code="InvalidDescriptor",
    )


def stored_block_bytes(checksum_block_bytes: int) -> int:
    """The block size to store for objects that are written in multiples of `checksum_block_bytes`:
    `block_bytes_within` it, or itself where it cannot be divided.
    """
    return block_bytes_within(checksum_block_bytes) or checksum_block_bytes


def block_count(size_bytes: int, block_bytes: int) -> int:
    """Blocks of an object; none for an empty one."""
    return -(-size_bytes // block_bytes)


def block_checksums(data: memoryview, block_bytes: int) -> list[int]:
    """Checksums of `data`, which begins at a block's begin."""
    if len(data) <= block_bytes:
        return [block_checksum(data)] if data else []
    return [
        block_checksum(data[begin : begin + block_bytes])
        for begin in range(0, len(data), block_bytes)
    ]


class BlockHasher:
    """Checksums of bytes that arrive in order, in pieces of any length."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._open_bytes = 0  # of the block that is not complete
        self._hasher = xxhash.xxh3_64()
        self._complete = array("Q")

    def update(self, data: memoryview) -> None:
        """Take the next bytes."""
        while data:
            part = data[: self._block_bytes - self._open_bytes]
            self._hasher.update(part)
            self._open_bytes += len(part)
            data = data[len(part) :]
            if self._open_bytes == self._block_bytes:
                self._end_block()

    def finish(self) -> array[int]:
        """The checksums of all blocks; the last one may be short."""
        if self._open_bytes:
            self._end_block()
        return self._complete

    def _end_block(self) -> None:
        self._complete.append(self._hasher.intdigest())
        self._hasher.reset()
        self._open_bytes = 0
