"""Compute profiles: the paper's table A8 as it is, what lies between its rows, and broken files."""

from __future__ import annotations

import contextlib
import logging
import os
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache_schemas.errors import InvalidRequest
from objectcache_storage_server.scheduling.windows.compute_profile import (
    ROWS_MAX,
    ComputeProfile,
    ProfileRow,
    parse_profile,
)
from objectcache_storage_server.scheduling.windows.read_profiles import (
    FILE_BYTES_MAX,
    PROFILES_MAX,
    ProfileFiles,
)

TABLE_A8 = """context,hit_rate,cached_tokens,t_total_ms,t_layer_ms,required_gbytes_per_s
4K,0.500,2048,185.31,5.79,1.45
4K,0.875,3584,63.47,1.98,7.41
16K,0.500,8192,955.89,29.87,1.12
16K,0.875,14336,281.76,8.80,6.67
32K,0.500,16384,2589.25,80.91,0.83
32K,0.875,28672,763.19,23.85,4.92
64K,0.500,32768,8672.79,271.02,0.50
64K,0.875,57344,2423.90,75.75,3.10
"""
HEADER, *ROWS = TABLE_A8.splitlines()
A8 = parse_profile(TABLE_A8)
CONTEXTS = (4096, 16384, 32768, 65536)
KIB_TOKENS = 1024


@pytest.mark.parametrize("row", ROWS)
def test_a_measured_row_is_reproduced(row: str) -> None:
    context, _, cached, _, layer_ms, _ = row.split(",")
    context_tokens = int(context.removesuffix("K")) * KIB_TOKENS
    assert A8.window_s(context_tokens, int(cached)) == pytest.approx(
        float(layer_ms) / 1e3, rel=1e-12
    )


@given(st.integers(4096, 65536), st.integers(4096, 65536), st.floats(0.5, 0.875))
def test_a_longer_context_at_the_same_hit_rate_computes_longer(
    one: int, other: int, hit_rate: float
) -> None:
    shorter, longer = sorted((one, other))
    windows = [A8.window_s(tokens, int(tokens * hit_rate)) for tokens in (shorter, longer)]
    # A whole token of rounding of the cached part moves the hit rate by this much at most.
    assert windows[0] <= windows[1] * (1 + 8 / shorter)


@given(st.sampled_from(CONTEXTS), st.floats(0.4, 0.95), st.floats(0.4, 0.95))
def test_more_cached_computes_less(context_tokens: int, one: float, other: float) -> None:
    lower, higher = sorted((one, other))
    assert A8.window_s(context_tokens, int(context_tokens * higher)) <= A8.window_s(
        context_tokens, int(context_tokens * lower)
    )


@given(st.integers(4096, 65536), st.floats(0.5, 0.875))
def test_what_lies_between_rows_is_between_their_times(tokens: int, hit_rate: float) -> None:
    below, above = next(pair for pair in pairwise(CONTEXTS) if pair[0] <= tokens <= pair[1])
    window_s = A8.window_s(tokens, round(tokens * hit_rate))
    assert A8.window_s(below, int(below * 0.875)) <= window_s * (1 + 1e-9)
    assert window_s <= A8.window_s(above, above // 2) * (1 + 1e-9)


def test_between_two_rows_the_logarithms_are_interpolated() -> None:
    profile = ComputeProfile([ProfileRow(1000, 0, 0.008), ProfileRow(4000, 0, 0.032)])
    assert profile.window_s(2000, 0) == pytest.approx(0.016)  # linear in tokens, as both are
    # Half of the context cached, a quarter and an eighth left: the geometric middle.
    profile = ComputeProfile([ProfileRow(1024, 512, 0.009), ProfileRow(1024, 960, 0.001)])
    share = (1 / 2 * 1 / 16) ** 0.5
    assert profile.window_s(1 << 20, round((1 << 20) * (1 - share))) == pytest.approx(
        0.003, rel=1e-4
    )


@pytest.mark.parametrize(
    ("asked", "nearest"),
    [
        ((1024, 512), (4096, 2048)),  # a shorter context than any
        ((131072, 65536), (65536, 32768)),  # a longer one
        ((4096, 0), (4096, 2048)),  # less cached
        ((4096, 4096), (4096, 3584)),  # nothing left to compute
        ((4096, 8192), (4096, 3584)),  # more cached than the context holds
    ],
)
def test_beyond_the_outermost_rows_the_nearest_holds(
    asked: tuple[int, int], nearest: tuple[int, int]
) -> None:
    assert A8.window_s(*asked) == pytest.approx(A8.window_s(*nearest), rel=1e-12)


def test_contexts_may_have_other_hit_rates_each() -> None:
    profile = parse_profile(
        f"{HEADER}\n1000,0,0,1,8,1\n1000,0.9,900,1,1,1\n4K,0.5,2048,1,16,1\n1000000,0.2,200000,9,9,0"
    )
    assert profile.window_s(1000, 0) == pytest.approx(0.008)
    assert profile.window_s(4096, 1000) == pytest.approx(0.016)  # its only row
    assert 0.008 < profile.window_s(2000, 500) < 0.016


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "line 1 must be context,hit_rate"),
        ("context,hit_rate\n", "line 1 must be"),
        (HEADER, "no row"),
        (f"{HEADER}\n4K,0.5,2048,185,5.79\n", "line 2: 5 cells"),
        (f"{HEADER}\n{ROWS[0]}\n4M,0.5,2048,185,5.79,1\n", "line 3: context is '4M'"),
        (f"{HEADER}\n0,0,0,1,1,1\n", "context is '0'"),
        (f"{HEADER}\n4K,0.5,2048,185,fast,1\n", "t_layer_ms is 'fast'"),
        (f"{HEADER}\n4K,0.5,2048,185,nan,1\n", "t_layer_ms is 'nan'"),
        (f"{HEADER}\n4K,0.5,2048,185,0,1\n", "t_layer_ms is 0"),
        (f"{HEADER}\n4K,0.9,2048,185,5,1\n", "cached_tokens over context is 0.500"),
        (f"{HEADER}\n4K,1.0,4096,185,5,1\n", "below the context, 4096"),
        (f"{HEADER}\n4K,-0.5,-2048,185,5,1\n", "hit_rate is '-0.5'"),
        (f"{HEADER}\n{ROWS[0]}\n{ROWS[0]}\n", "same context and hit rate, 0.500"),
        (f"{HEADER}\n" + f"{ROWS[0]}\n" * (ROWS_MAX + 1), f"more than {ROWS_MAX} rows"),
    ],
)
def test_a_broken_profile_is_refused_with_its_line(text: str, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        parse_profile(text)


@given(st.text(max_size=200), st.booleans())
def test_any_text_is_a_profile_or_is_refused(text: str, has_header: bool) -> None:
    tried = f"{HEADER}\n{text}" if has_header else text
    with contextlib.suppress(InvalidRequest):
        assert parse_profile(tried).window_s(4096, 2048) > 0


def test_a_cell_without_an_end_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no CSV file"):
        parse_profile(f'{HEADER}\n"{"4" * 200_000}')


@pytest.fixture
def files(tmp_path: Path) -> ProfileFiles:
    (tmp_path / "llama.csv").write_text(TABLE_A8)
    return ProfileFiles(tmp_path)


def test_a_file_is_read_once_and_again_when_it_changes(files: ProfileFiles) -> None:
    first = files.find("llama")
    assert first is not None
    assert files.find("llama") is first
    files.path("llama").write_text(f"{HEADER}\n4K,0.5,2048,1,1.5,1\n")
    changed = files.find("llama")
    assert changed is not None
    assert changed.window_s(4096, 2048) == pytest.approx(0.0015)
    files.path("llama").unlink()
    assert files.find("llama") is None


@pytest.mark.parametrize("name", ["", "mistral", "../llama", "/etc/passwd", ".llama", "a/b", "x\0"])
def test_names_without_a_file_and_names_that_are_no_file_names_have_no_profile(
    files: ProfileFiles, name: str
) -> None:
    assert files.find(name) is None


def test_a_directory_that_is_not_there_has_no_profiles(tmp_path: Path) -> None:
    assert ProfileFiles(tmp_path / "none").find("llama") is None


def test_a_broken_file_is_logged_once_and_read_again_when_mended(
    files: ProfileFiles, caplog: pytest.LogCaptureFixture
) -> None:
    files.path("broken").write_text(f"{HEADER}\n4K,0.5,2048,185,x,1\n")
    with caplog.at_level(logging.ERROR):
        assert [files.find("broken") for _ in range(3)] == [None] * 3
    assert [record.getMessage() for record in caplog.records] == [
        f"compute profile {files.path('broken')} is not used: line 2: t_layer_ms is 'x', "
        "it must be a number, 0 or more"
    ]
    files.path("broken").write_text(TABLE_A8)
    assert files.find("broken") is not None


def test_what_is_no_text_too_large_or_no_file_is_not_used(
    files: ProfileFiles, caplog: pytest.LogCaptureFixture
) -> None:
    files.path("binary").write_bytes(b"\xff\xfe\x00")
    files.path("large").write_bytes(b" " * (FILE_BYTES_MAX + 1))
    files.path("folder").mkdir()
    os.mkfifo(files.path("pipe"))  # opening it would never return
    names = ["binary", "large", "folder", "pipe"]
    assert [files.find(name) for name in names] == [None] * len(names)
    assert len(caplog.records) == len(names)


def test_profiles_in_memory_are_bounded(files: ProfileFiles) -> None:
    for number in range(PROFILES_MAX + 10):
        files.path(f"model-{number}").write_text(TABLE_A8)
        assert files.find(f"model-{number}") is not None
    assert repr(files).startswith(f"<ProfileFiles {PROFILES_MAX} of ")
