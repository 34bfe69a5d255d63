"""Keys of any length in a sorted store whose own keys have a maximum, in byte order. Pure.

A key of up to DIRECT_BYTES bytes is stored as it is. Of a longer one the first DIRECT_BYTES bytes
lead to a *segment*: a space of its own, which holds the rest by the same rule. The pointer to it is
one zero byte longer than those bytes. No key is stored under so long a text, and it sorts right
after the key of exactly those bytes, which is where the keys that go on from there belong. So a
scan stays in order and meets nothing outside of its bounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeVar

DIRECT_BYTES = 506  # 511, LMDB's maximum, less the number of the space and the pointer's own byte
FIRST_SEGMENT = 1 << 31  # spaces below are the buckets'
END_OF_SPACE = b"\xff"  # no UTF-8 text holds this byte

V_co = TypeVar("V_co", covariant=True)


class Spaces(Protocol[V_co]):
    """Sorted spaces by number; a text is a key, or a part of one, or a pointer."""

    def segment(self, space: int, pointer: bytes) -> int | None:
        """The segment that a pointer leads to; None where there is no such pointer."""
        ...

    def items(self, space: int, first: bytes) -> Iterator[tuple[bytes, V_co]]:
        """What the space holds from the text `first` on, pointers too, in byte order."""
        ...


def pointer_to(key: bytes) -> bytes:
    """The text that leads to the segment of a long key."""
    return key[:DIRECT_BYTES] + b"\0"


def is_pointer(text: bytes) -> bool:
    """Whether a text leads to a segment."""
    return len(text) > DIRECT_BYTES


def locate(spaces: Spaces[object], space: int, key: bytes) -> tuple[int, bytes] | None:
    """The space and the text under which a key is stored; None where no segment leads there."""
    while is_pointer(key):
        segment = spaces.segment(space, pointer_to(key))
        if segment is None:
            return None
        space, key = segment, key[DIRECT_BYTES:]
    return space, key


def pointers_on_way(spaces: Spaces[object], space: int, key: bytes) -> list[tuple[int, bytes, int]]:
    """Space, text and segment of each pointer that leads to a stored key, outermost first."""
    found: list[tuple[int, bytes, int]] = []
    while is_pointer(key):
        pointer = pointer_to(key)
        segment = spaces.segment(space, pointer)
        if segment is None:
            return found
        found.append((space, pointer, segment))
        space, key = segment, key[DIRECT_BYTES:]
    return found


def walk(
    spaces: Spaces[V_co], space: int, first: bytes, end: bytes = END_OF_SPACE
) -> Iterator[tuple[bytes, V_co]]:
    """Keys from `first` to below `end`, and their values, in byte order."""
    begin = pointer_to(first) if is_pointer(first) else first
    for text, value in spaces.items(space, begin):
        if is_pointer(text):
            beginning = text[:DIRECT_BYTES]
            if beginning >= end:
                return
            yield from _walk_segment(spaces, space, beginning, first, end)
        elif text >= end:
            return
        else:
            yield text, value


def _walk_segment(
    spaces: Spaces[V_co], space: int, beginning: bytes, first: bytes, end: bytes
) -> Iterator[tuple[bytes, V_co]]:
    """The keys of a range that go on from `beginning`."""
    segment = spaces.segment(space, beginning + b"\0")
    if segment is None:
        return
    # A bound that does not begin so leaves out none of them.
    rest_first = first[DIRECT_BYTES:] if first.startswith(beginning) else b""
    rest_end = end[DIRECT_BYTES:] if end.startswith(beginning) else END_OF_SPACE
    for rest, value in walk(spaces, segment, rest_first, rest_end):
        yield beginning + rest, value
