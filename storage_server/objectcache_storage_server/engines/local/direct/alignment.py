"""What a device asks of offsets and memory, as arithmetic. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from objectcache_schemas.limits import KIB

# A ragged transfer of which less than this lies in whole blocks is copied as a whole: the copy is
# cheaper than the second and third request.
IN_PLACE_BYTES_MIN = 64 * KIB


class AlignedParts(NamedTuple):
    """A transfer in three lengths: what is copied, what is done in place, what is copied."""

    head_bytes: int
    whole_bytes: int
    tail_bytes: int


@dataclass(frozen=True, slots=True)
class Alignment:
    """Multiples, powers of two, in which the direct path reads and writes."""

    offset_bytes: int  # of offsets and lengths
    memory_bytes: int  # of addresses

    def __post_init__(self) -> None:
        for unit in (self.offset_bytes, self.memory_bytes):
            assert unit > 0, "an alignment is a power of two"
            assert unit & (unit - 1) == 0, "an alignment is a power of two"

    def parts(self, offset_bytes: int, address: int, length_bytes: int) -> AlignedParts:
        """How much of a transfer can be done in place, and what is left of it at either end."""
        head_bytes = -offset_bytes % self.offset_bytes
        tail_bytes = (offset_bytes + length_bytes) % self.offset_bytes
        whole_bytes = length_bytes - head_bytes - tail_bytes
        is_ragged = head_bytes > 0 or tail_bytes > 0
        if whole_bytes <= 0 or (address + head_bytes) % self.memory_bytes:
            return AlignedParts(length_bytes, 0, 0)
        if is_ragged and whole_bytes < IN_PLACE_BYTES_MIN:
            return AlignedParts(length_bytes, 0, 0)
        return AlignedParts(head_bytes, whole_bytes, tail_bytes)

    def covering(self, offset_bytes: int, length_bytes: int) -> tuple[int, int]:
        """The least aligned range (offset, length) that covers this one."""
        begin = offset_bytes - offset_bytes % self.offset_bytes
        end = offset_bytes + length_bytes
        return begin, end + -end % self.offset_bytes - begin


PAGE_ALIGNMENT = Alignment(4 * KIB, 4 * KIB)  # enough for every device that we know of


def split_at(offset_bytes: int, length_bytes: int, unit_bytes: int) -> Iterator[tuple[int, int]]:
    """The range, cut at every multiple of `unit_bytes`: (offset, length)."""
    end = offset_bytes + length_bytes
    while offset_bytes < end:
        next_bytes = min(end, offset_bytes - offset_bytes % unit_bytes + unit_bytes)
        yield offset_bytes, next_bytes - offset_bytes
        offset_bytes = next_bytes
