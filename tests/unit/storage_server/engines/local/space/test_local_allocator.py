"""Free space of a volume, against a bitmap."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from objectcache_storage_server.engines.local.space.free_space import Allocator
from objectcache_storage_server.engines.local.volumes.volume import BLOCK_BYTES
from tests.unit.examples import examples

SEGMENT_BLOCKS = 16
SEGMENT_BYTES = SEGMENT_BLOCKS * BLOCK_BYTES
SEGMENTS_MAX = 4


def runs_of(free: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Runs (offset, length in bytes) of a bitmap bool[SEGMENTS_MAX, SEGMENT_BLOCKS]."""
    runs: list[tuple[int, int]] = []
    for segment, blocks in enumerate(free):
        padded = np.concatenate([[False], blocks, [False]])
        edges = np.flatnonzero(padded[1:] != padded[:-1]).reshape(-1, 2)
        runs += [((segment * SEGMENT_BLOCKS + int(a)), int(b - a)) for a, b in edges]
    return [(begin * BLOCK_BYTES, blocks * BLOCK_BYTES) for begin, blocks in runs]


class AgainstABitmap(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.allocator = Allocator(SEGMENT_BYTES)
        self.free = np.zeros((SEGMENTS_MAX, SEGMENT_BLOCKS), np.bool_)
        self.segments: set[int] = set()
        self.taken: list[tuple[int, int]] = []

    def blocks(self, offset_bytes: int, length_bytes: int) -> npt.NDArray[np.bool_]:
        begin = offset_bytes // BLOCK_BYTES
        return self.free.reshape(-1)[begin : begin + length_bytes // BLOCK_BYTES]

    @initialize()
    def first_segment(self) -> None:
        self.add(1)

    @precondition(lambda self: len(self.segments) < SEGMENTS_MAX)
    @rule()
    def add_one(self) -> None:
        self.add(min(set(range(SEGMENTS_MAX)) - self.segments))

    def add(self, number: int) -> None:
        self.allocator.add_segment(number)
        self.segments.add(number)
        self.free[number] = True

    @rule(number=st.integers(0, SEGMENTS_MAX - 1))
    def remove_one_that_is_free(self, number: int) -> None:
        if number not in self.segments:
            return
        assert self.allocator.segment_is_free(number) == self.free[number].all()
        if self.free[number].all():
            self.allocator.remove_segment(number)
            self.segments.remove(number)
            self.free[number] = False

    @rule(blocks=st.integers(1, SEGMENT_BLOCKS + 1))
    def allocate(self, blocks: int) -> None:
        length_bytes = blocks * BLOCK_BYTES
        fitting = [run for run in runs_of(self.free) if run[1] >= length_bytes]
        offset_bytes = self.allocator.allocate(length_bytes)
        if offset_bytes is None:
            assert not fitting
            return
        best = min(fitting, key=lambda run: (run[1], run[0]))
        assert offset_bytes == best[0]
        assert self.blocks(offset_bytes, length_bytes).all()
        self.blocks(offset_bytes, length_bytes)[:] = False
        self.taken.append((offset_bytes, length_bytes))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def free_one_or_its_end(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.taken) - 1))
        offset_bytes, length_bytes = self.taken.pop(number)
        kept_bytes = data.draw(st.integers(0, length_bytes // BLOCK_BYTES - 1)) * BLOCK_BYTES
        self.allocator.free(offset_bytes + kept_bytes, length_bytes - kept_bytes)
        self.blocks(offset_bytes + kept_bytes, length_bytes - kept_bytes)[:] = True
        if kept_bytes:
            self.taken.append((offset_bytes, kept_bytes))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def open_again(self, data: st.DataObject) -> None:
        taken = np.array(data.draw(st.permutations(self.taken)), np.uint64).reshape(-1, 2)
        self.allocator = Allocator(SEGMENT_BYTES)
        for number in self.segments:
            self.allocator.add_segment(number)
        self.allocator.take_all(taken[:, 0], taken[:, 1])

    @precondition(lambda self: self.free.any())
    @rule(data=st.data())
    def freeing_twice_is_noticed(self, data: st.DataObject) -> None:
        runs = runs_of(self.free)
        offset_bytes, length_bytes = runs[data.draw(st.integers(0, len(runs) - 1))]
        skipped = data.draw(st.integers(0, length_bytes // BLOCK_BYTES - 1)) * BLOCK_BYTES
        with pytest.raises(AssertionError, match="free already"):
            self.allocator.free(offset_bytes + skipped, BLOCK_BYTES)

    @invariant()
    def agrees(self) -> None:
        runs = runs_of(self.free)
        assert list(self.allocator.free_runs()) == runs
        assert self.allocator.free_bytes == sum(length for _, length in runs)
        assert self.allocator.largest_free_bytes == max((run[1] for run in runs), default=0)


TestAgainstABitmap = AgainstABitmap.TestCase
TestAgainstABitmap.settings = settings(
    max_examples=examples(25), stateful_step_count=40, deadline=None
)


def opened(*segments: int) -> Allocator:
    allocator = Allocator(SEGMENT_BYTES)
    for number in segments:
        allocator.add_segment(number)
    return allocator


def take(allocator: Allocator, *ranges: tuple[int, int]) -> None:
    """Ranges in blocks."""
    columns = np.array(ranges, np.uint64).reshape(-1, 2) * np.uint64(BLOCK_BYTES)
    allocator.take_all(columns[:, 0], columns[:, 1])


def test_no_extents_leave_every_segment_free() -> None:
    allocator = opened(0, 2)
    take(allocator)
    assert list(allocator.free_runs()) == [
        (0, SEGMENT_BYTES),
        (2 * SEGMENT_BYTES, SEGMENT_BYTES),
    ]


def test_free_space_never_joins_across_a_segments_end() -> None:
    allocator = opened(0, 1)
    assert allocator.free_bytes == 2 * SEGMENT_BYTES
    assert allocator.allocate(SEGMENT_BYTES + BLOCK_BYTES) is None
    offsets = [allocator.allocate(SEGMENT_BYTES) for _ in range(2)]
    assert offsets == [0, SEGMENT_BYTES]
    allocator.free(0, SEGMENT_BYTES)
    allocator.free(SEGMENT_BYTES, SEGMENT_BYTES)
    assert allocator.largest_free_bytes == SEGMENT_BYTES


@pytest.mark.parametrize(
    ("ranges", "named"),
    [
        (
            [(0, 4), (8, 4), (3, 2), (9, 1)],
            f"{2 * BLOCK_BYTES} bytes at {3 * BLOCK_BYTES} overlaps",
        ),
        ([(5, 1), (5, 1)], f"at {5 * BLOCK_BYTES} overlaps"),
        ([(15, 2)], f"{2 * BLOCK_BYTES} bytes at {15 * BLOCK_BYTES} is not within"),
        ([(16, 1)], f"at {16 * BLOCK_BYTES} is not within"),
        ([(0, 0)], "0 bytes at 0 is not within"),
        ([(0, 17)], "is not within"),
        ([((1 << 52) - 1, 1)], "is not within"),
        ([(32, (1 << 52) - 1)], "is not within"),
    ],
)
def test_an_index_that_names_impossible_extents_is_refused(
    ranges: list[tuple[int, int]], named: str
) -> None:
    allocator = opened(0, 2)
    with pytest.raises(ValueError, match=named):
        take(allocator, *ranges)
    assert allocator.free_bytes == 2 * SEGMENT_BYTES


def test_an_extent_that_is_not_whole_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="512 bytes at 4096 is not within a segment"):
        opened(0).take_all(np.array([4096], np.uint64), np.array([512], np.uint64))


@given(st.lists(st.booleans(), min_size=2 * SEGMENT_BLOCKS, max_size=2 * SEGMENT_BLOCKS))
def test_what_no_extent_covers_is_free(taken: list[bool]) -> None:
    allocator = opened(0, 1)
    take(allocator, *[(block, 1) for block, is_taken in enumerate(taken) if is_taken])
    free = ~np.array(taken).reshape(2, SEGMENT_BLOCKS)
    assert list(allocator.free_runs()) == runs_of(free)


def test_a_segment_in_use_cannot_be_removed() -> None:
    allocator = opened(0)
    offset_bytes = allocator.allocate(BLOCK_BYTES)
    assert offset_bytes is not None
    with pytest.raises(AssertionError):
        allocator.remove_segment(0)
    allocator.free(offset_bytes, BLOCK_BYTES)
    allocator.remove_segment(0)
    assert allocator.allocate(BLOCK_BYTES) is None
    assert allocator.free_bytes == allocator.largest_free_bytes == 0
