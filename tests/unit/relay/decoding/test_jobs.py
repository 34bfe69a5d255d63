"""Pieces are cut into jobs that all workers share, and that leave out no byte."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from objectcache_relay.decoding.jobs import (
    JOB_BYTES_MAX,
    JOB_BYTES_MIN,
    JOB_ROWS_MAX,
    MESSAGE_BYTES_MAX,
    PiecePart,
    cut_rows,
)
from objectcache_relay.landing.landed_rows import LandedRow

ROWS = st.lists(
    st.builds(
        LandedRow,
        st.integers(0, 1000),
        st.integers(1, 40),
        st.integers(0, 1 << 30),
        st.integers(1, 1 << 20),
        st.sampled_from([1, 2]),
        st.integers(1, 1 << 20),
    ),
    min_size=1,
    max_size=5,
)


def places(rows: list[LandedRow]) -> list[tuple[int, int, int]]:
    """Of each slice: its chunk, where it lies, its length decoded."""
    return [
        (row.first_chunk + n, row.offset_bytes + n * row.pitch_bytes, row.slice_bytes)
        for row in rows
        for n in range(row.slice_count)
    ]


def decoded_bytes(part: PiecePart) -> int:
    return sum(row.decoded_bytes for row in part.rows)


@given(ROWS, st.integers(1, 16))
def test_jobs_are_the_piece_in_order(rows: list[LandedRow], workers: int) -> None:
    parts = list(cut_rows(rows, workers))
    assert places([row for part in parts for row in part.rows]) == places(rows)
    at = 0
    for part in parts:
        assert part.piece_offset_bytes == at
        at += decoded_bytes(part)
        slices = places(list(part.rows))
        assert len(slices) == 1 or decoded_bytes(part) <= JOB_BYTES_MAX
        assert [part.chunk(index) for index in range(len(slices))] == [one[0] for one in slices]
    assert at == sum(row.decoded_bytes for row in rows)


@given(st.integers(1, 400), st.integers(1, 16), st.integers(1, 1 << 16))
def test_rows_of_one_slice_share_jobs(count: int, workers: int, slice_bytes: int) -> None:
    rows = [LandedRow(n, 1, n * 70_000, 60_000 + n, 1, slice_bytes) for n in range(count)]
    parts = list(cut_rows(rows, workers))
    assert places([row for part in parts for row in part.rows]) == places(rows)
    for part in parts[:-1]:
        is_full = decoded_bytes(part) + slice_bytes > JOB_BYTES_MIN
        assert is_full or len(part.rows) == JOB_ROWS_MAX


def test_the_longest_job_fits_a_message() -> None:
    most = (1 << 63) - 1
    rows = [LandedRow(n, 1, most, most, 1, 1) for n in range(JOB_ROWS_MAX + 1)]
    first, second = cut_rows(rows, 1)
    assert (len(first.rows), len(second.rows)) == (JOB_ROWS_MAX, 1)
    job = first.job(most, most, most, most)
    assert len(msgspec.msgpack.encode(job)) <= MESSAGE_BYTES_MAX


@given(st.integers(1, 64 << 20), st.integers(1, 16), st.integers(0, 1 << 30))
def test_bytes_as_they_are_are_cut_anywhere(length: int, workers: int, offset: int) -> None:
    parts = list(cut_rows([LandedRow(0, 1, offset, length, 0, length)], workers))
    at = 0
    for part in parts:
        assert part.piece_offset_bytes == at
        (row,) = part.rows
        assert row.offset_bytes == offset + at
        assert row.pitch_bytes == row.slice_bytes <= JOB_BYTES_MAX
        at += row.decoded_bytes
    assert at == length
    assert all(decoded_bytes(part) >= JOB_BYTES_MIN for part in parts[:-1])
    assert len(parts) >= min(workers, length // JOB_BYTES_MIN)
