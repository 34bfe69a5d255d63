"""Long keys in a sorted store: every scan is what sorting the keys themselves gives."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import example, given
from hypothesis import strategies as st

from objectcache_schemas.limits import KEY_BYTES_MAX
from objectcache_storage_server.engines.key_order import scan_bounds
from objectcache_storage_server.engines.lmdb_spaces.long_keys import (
    DIRECT_BYTES,
    FIRST_SEGMENT,
    is_pointer,
    locate,
    pointer_to,
    pointers_on_way,
    walk,
)

BUCKET = 7
# Pieces whose sums lie at, just below and just above one and two times DIRECT_BYTES.
PIECES = [
    "a",
    "b",
    "\0",
    "é",
    "\U0010ffff",
    "a" * 100,
    "a" * (DIRECT_BYTES - 1),
    "a" * DIRECT_BYTES,
    "é" * (DIRECT_BYTES // 2),
    "b" * (DIRECT_BYTES + 1),
]


def cut(key: str) -> str:
    """As much of it as a key may have."""
    return key.encode()[:KEY_BYTES_MAX].decode(errors="ignore")


TEXTS = st.lists(st.sampled_from(PIECES), max_size=5).map(lambda pieces: cut("".join(pieces)))
KEYS = st.sets(TEXTS.filter(bool), max_size=25)


class SortedSpaces:
    """Spaces as dictionaries; a value is its key, a pointer's is its segment."""

    def __init__(self, keys: set[str]) -> None:
        self.spaces: dict[int, dict[bytes, bytes]] = {BUCKET: {}}
        self.seen: list[bytes] = []  # what scans met
        for key in keys:
            self._put(key.encode())

    def _put(self, key: bytes) -> None:
        space, rest = BUCKET, key
        while is_pointer(rest):
            segment = self.segment(space, pointer_to(rest))
            if segment is None:
                segment = FIRST_SEGMENT + len(self.spaces)
                self.spaces[segment] = {}
                self.spaces[space][pointer_to(rest)] = segment.to_bytes(4, "big")
            space, rest = segment, rest[DIRECT_BYTES:]
        self.spaces[space][rest] = key

    def segment(self, space: int, pointer: bytes) -> int | None:
        stored = self.spaces[space].get(pointer)
        return None if stored is None else int.from_bytes(stored, "big")

    def items(self, space: int, first: bytes) -> Iterator[tuple[bytes, bytes]]:
        for text, value in sorted(self.spaces[space].items()):
            if text >= first:
                self.seen.append(text)
                yield text, value


def expected_range(keys: set[str], prefix: str, start_after: str) -> list[bytes]:
    raw = sorted(key.encode() for key in keys)
    after = start_after.encode()
    return [key for key in raw if key.startswith(prefix.encode()) and (not after or key > after)]


@given(KEYS, TEXTS, TEXTS)
@example({"a" * DIRECT_BYTES, "a" * (DIRECT_BYTES + 1)}, "a" * DIRECT_BYTES, "a" * DIRECT_BYTES)
def test_a_scan_is_what_sorting_gives(keys: set[str], prefix: str, start_after: str) -> None:
    spaces = SortedSpaces(keys)
    edges = {"", *keys} | {key[: DIRECT_BYTES - 1] for key in keys} | {key[:-1] for key in keys}
    ranges = {(prefix, edge) for edge in edges} | {(edge, start_after) for edge in edges}
    ranges |= {(edge, edge) for edge in edges}
    for bounds in ranges:
        found = list(walk(spaces, BUCKET, *scan_bounds(*bounds)))
        assert found == [(key, key) for key in expected_range(keys, *bounds)], bounds


@given(KEYS)
def test_no_text_is_longer_than_the_store_takes_and_a_pointer_is_no_key(keys: set[str]) -> None:
    spaces = SortedSpaces(keys)
    for texts in spaces.spaces.values():
        assert all(len(text) <= DIRECT_BYTES + 1 for text in texts)
        assert all(text.endswith(b"\0") for text in texts if is_pointer(text))


@given(KEYS, TEXTS.filter(bool))
def test_a_key_is_located_where_it_was_stored(keys: set[str], other: str) -> None:
    spaces = SortedSpaces(keys)
    for key in {*keys, other}:
        located = locate(spaces, BUCKET, key.encode())
        found = None if located is None else spaces.spaces[located[0]].get(located[1])
        assert found == (key.encode() if key in keys else None)


@given(KEYS)
def test_the_way_to_a_key_ends_at_its_segment(keys: set[str]) -> None:
    spaces = SortedSpaces(keys)
    for key in keys:
        raw = key.encode()
        way = pointers_on_way(spaces, BUCKET, raw)
        assert len(way) == (len(raw) - 1) // DIRECT_BYTES
        innermost = way[-1][2] if way else BUCKET
        assert locate(spaces, BUCKET, raw) == (innermost, raw[len(way) * DIRECT_BYTES :])


def test_a_scan_meets_nothing_outside_of_its_bounds() -> None:
    beginning = "a" * DIRECT_BYTES
    keys = {f"{beginning}{number:03}" for number in range(300)} | {f"{n:03}" for n in range(300)}
    spaces = SortedSpaces(keys)
    found = list(walk(spaces, BUCKET, *scan_bounds(f"{beginning}15", "")))
    assert len(found) == 10
    assert len(spaces.seen) <= 10 + 2  # the pointer, and the first text behind the range
