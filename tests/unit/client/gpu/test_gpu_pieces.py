"""Pieces however they are cut, joined or laid out are the same bytes, each of them once."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache.gpu.pieces import BlockPart, PagedBlocks, Pieces
from objectcache_schemas.errors import InvalidRequest


@st.composite
def some_pieces(draw: st.DrawFn) -> Pieces:
    """Few sizes and small gaps, so that neighbours and equal distances are found."""
    sizes = draw(st.lists(st.sampled_from([1, 16, 16, 16, 48]), min_size=0, max_size=24))
    gaps = st.sampled_from([0, 0, 0, 16, 32])
    host, device = 1000, 9000
    triples = []
    for size in sizes:
        host, device = host + draw(gaps), device + draw(gaps)
        triples.append((host, device, size))
        host, device = host + size, device + size
    return Pieces.of(draw(st.permutations(triples)))


def bytes_of(pieces: Pieces) -> list[tuple[int, int]]:
    """(host, device) address of every byte, in order."""
    return [
        (int(host) + index, int(device) + index)
        for host, device, size in zip(pieces.host, pieces.device, pieces.sizes_bytes, strict=True)
        for index in range(int(size))
    ]


@given(some_pieces())
def test_joining_keeps_every_byte_and_its_order(pieces: Pieces) -> None:
    joined = pieces.joined()
    assert bytes_of(joined) == bytes_of(pieces)
    follows = [
        side[1:] == side[:-1] + joined.sizes_bytes[:-1] for side in (joined.host, joined.device)
    ]
    assert not (follows[0] & follows[1]).any()


@given(some_pieces(), st.integers(1, 60))
def test_splitting_keeps_every_byte_and_its_order(pieces: Pieces, most: int) -> None:
    split = pieces.split(most)
    assert bytes_of(split) == bytes_of(pieces)
    assert all(0 < size <= most for size in split.sizes_bytes.tolist())


@given(some_pieces(), st.integers(1, 100), st.sampled_from([1, 2, 5, 10_000]))
def test_micro_tasks_are_all_bytes_in_order_and_no_two_would_fit_into_one(
    pieces: Pieces, task_bytes: int, pieces_max: int
) -> None:
    tasks = pieces.micro_tasks(task_bytes, pieces_max)
    assert [byte for task in tasks for byte in bytes_of(task)] == bytes_of(pieces)
    assert all(0 < task.total_bytes <= task_bytes for task in tasks)
    assert all(len(task) <= pieces_max for task in tasks)
    for task, following in itertools.pairwise(tasks):
        is_full = task.total_bytes + int(following.sizes_bytes[0]) > task_bytes
        assert is_full or len(task) == pieces_max


def test_a_long_piece_is_cut_into_full_tasks() -> None:
    tasks = Pieces.of([(0, 1000, 250)]).micro_tasks(100, 8)
    assert [bytes_of(task)[0] for task in tasks] == [(0, 1000), (100, 1100), (200, 1200)]
    assert [task.total_bytes for task in tasks] == [100, 100, 50]


@given(some_pieces())
def test_rows_are_the_same_bytes(pieces: Pieces) -> None:
    found = [
        (
            row.host + index * row.host_pitch_bytes + byte,
            row.device + index * row.device_pitch_bytes + byte,
        )
        for row in pieces.rows()
        for index in range(row.count)
        for byte in range(row.width_bytes)
    ]
    assert sorted(found) == sorted(bytes_of(pieces))
    assert all(
        row.width_bytes <= min(row.host_pitch_bytes, row.device_pitch_bytes)
        for row in pieces.rows()
    )


def test_blocks_in_order_with_k_and_v_apart_are_two_rectangles() -> None:
    slices = np.zeros((28, 64), np.uint8)
    blocks = PagedBlocks([BlockPart(1000, 32, 32), BlockPart(5000, 32, 32)], 30)
    pieces = blocks.pieces(range(2, 30), slices).joined()
    rows = pieces.rows()
    assert [(row.device, row.count, row.host_pitch_bytes) for row in rows] == [
        (1064, 28, 64),
        (5064, 28, 64),
    ]


@given(some_pieces())
def test_host_runs_cover_the_pieces_in_their_order(pieces: Pieces) -> None:
    runs = pieces.host_runs()
    hosts = [host + index for host, _, size in runs for index in range(size)]
    assert hosts == [host for host, _ in bytes_of(pieces)]
    sizes = [size for _, _, size in runs]
    assert [offset for _, offset, _ in runs] == [sum(sizes[:i]) for i in range(len(sizes))]


def test_blocks_that_are_not_there_and_slices_of_another_length_are_refused() -> None:
    blocks = PagedBlocks([BlockPart(0, 32, 32)], 4)
    for ids in ([4], [-1]):
        with pytest.raises(InvalidRequest, match="blocks must be within 4"):
            blocks.pieces(ids, np.zeros((1, 32), np.uint8))
    for shape in ((2, 32), (1, 31)):
        with pytest.raises(InvalidRequest, match="do not fill 1 blocks of 32 bytes"):
            blocks.pieces([0], np.zeros(shape, np.uint8))


def test_slices_of_a_strided_payload_are_found_where_they_lie() -> None:
    chunkwise = np.zeros((3, 2, 32), np.uint8).transpose(1, 0, 2)
    pieces = PagedBlocks([BlockPart(0, 32, 32)], 3).pieces([0, 1, 2], chunkwise[1])
    assert (pieces.host - np.uint64(chunkwise.ctypes.data)).tolist() == [32, 96, 160]


def test_slices_of_another_type_or_with_gaps_are_refused() -> None:
    blocks = PagedBlocks([BlockPart(0, 32, 32)], 4)
    wide: Any = np.zeros((1, 32), np.uint16)
    with pytest.raises(InvalidRequest, match="must be uint8, got uint16"):
        blocks.pieces([0], wide)
    for gaps, strides in (
        (np.zeros((1, 64), np.uint8)[:, ::2], 2),
        (np.zeros((32, 2), np.uint8).T, 2),
    ):
        with pytest.raises(InvalidRequest, match=f"contiguous, got a byte every {strides} bytes"):
            blocks.pieces(range(len(gaps)), gaps)
    backwards = np.zeros((1, 32), np.uint8)[:, ::-1]
    with pytest.raises(InvalidRequest, match="contiguous, got a byte every -1 bytes"):
        blocks.pieces([0], backwards)
    assert not len(blocks.pieces([], np.zeros((0, 64), np.uint8)[:, ::2]))
