"""The compute window of a delivery: whose word counts, and what is learned from consumption."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache_schemas.compute_windows import WindowSource
from objectcache_schemas.descriptor import Descriptor
from objectcache_schemas.errors import NotFound
from objectcache_storage_server.scheduling.windows.find_windows import (
    Window,
    WindowFinder,
    shape_of,
)
from objectcache_storage_server.scheduling.windows.learn_windows import (
    OUTLIER_FACTOR,
    SHAPES_MAX,
    TIMES_KEPT,
    TIMES_MIN,
    WINDOW_MIN_S,
    LearnedWindows,
    delivery_shape,
)
from tests.unit.storage_server.scheduling.windows.test_compute_profiles import HEADER, TABLE_A8

CHUNK_TOKENS, CHUNKS, CONTEXT_TOKENS = 64, 32, 4096  # half of the context is cached
PLAIN = Descriptor(("k",), 32, CHUNK_TOKENS, 4096 * CHUNK_TOKENS)
MINE, BUCKET = "alice", "bucket"
SHAPE = delivery_shape(BUCKET, "", 32, 2048, 2048)
LAYER_BYTES = CHUNKS * PLAIN.per_layer_chunk_bytes
DISBELIEVED = WindowSource.DISBELIEVED
NOBODY_KNOWS = Window(None, WindowSource.NONE)


@pytest.fixture
def finder(tmp_path: Path) -> WindowFinder:
    (tmp_path / "llama.csv").write_text(TABLE_A8)
    return WindowFinder(tmp_path)


def find(finder: WindowFinder, descriptor: Descriptor, fingerprint: str = "") -> Window:
    return finder.find(descriptor, BUCKET, MINE, fingerprint, CHUNKS)


def learn(finder: WindowFinder, descriptor: Descriptor, compute_s: float, count: int) -> None:
    for _ in range(count):
        finder.learn(MINE, shape_of(descriptor, BUCKET, CHUNKS), compute_s)


def test_the_descriptors_window_counts_before_all_others(finder: WindowFinder) -> None:
    asked = replace(PLAIN, compute_window_s=0.003, model="llama", context_tokens=CONTEXT_TOKENS)
    learn(finder, asked, 0.001, TIMES_MIN)
    assert find(finder, asked, "llama") == Window(0.003, WindowSource.DESCRIPTOR)


def test_a_window_of_nothing_says_that_the_whole_is_wanted(finder: WindowFinder) -> None:
    asked = replace(PLAIN, compute_window_s=0.0, model="llama", context_tokens=CONTEXT_TOKENS)
    learn(finder, asked, 0.001, TIMES_MIN)
    assert find(finder, asked, "llama") == Window(None, WindowSource.WHOLE)


@pytest.mark.parametrize(
    ("told_s", "is_believed"),
    [(1e-9, False), (LAYER_BYTES / 50e9, True), (LAYER_BYTES / 20e12, True)],
    ids=["nonsense", "64K of context with 99 % of it cached", "the fastest memory"],
)
def test_a_told_window_is_believed_down_to_the_speed_of_a_devices_memory(
    finder: WindowFinder, told_s: float, is_believed: bool
) -> None:
    found = find(finder, replace(PLAIN, compute_window_s=told_s))
    expected = (told_s, WindowSource.DESCRIPTOR) if is_believed else (None, DISBELIEVED)
    assert found == Window(*expected)


def test_what_was_learned_is_believed_where_it_is_slower_than_a_copy(finder: WindowFinder) -> None:
    learn(finder, PLAIN, LAYER_BYTES / 12.6e9, TIMES_MIN)  # a memcpy, as it was seen
    assert find(finder, PLAIN) == Window(None, DISBELIEVED)
    learn(finder, PLAIN, LAYER_BYTES / 2e9, TIMES_KEPT)
    assert find(finder, PLAIN) == Window(LAYER_BYTES / 2e9, WindowSource.LEARNED)


def test_the_profile_of_the_model_counts_before_that_of_the_layout(
    finder: WindowFinder, tmp_path: Path
) -> None:
    (tmp_path / "layout.csv").write_text(f"{HEADER}\n4K,0.5,2048,185,7,1\n")
    asked = replace(PLAIN, context_tokens=CONTEXT_TOKENS)
    for model, window_s in (("llama", 0.00579), (None, 0.007)):
        found_s, source = find(finder, replace(asked, model=model), "layout")
        assert found_s == pytest.approx(window_s)
        assert source is WindowSource.PROFILE
    assert find(finder, asked, "another") == NOBODY_KNOWS


def test_the_requests_fingerprint_leads_to_a_profile_where_there_is_one(
    finder: WindowFinder, tmp_path: Path
) -> None:
    (tmp_path / "layout.csv").write_text(f"{HEADER}\n4K,0.5,2048,185,7,1\n")
    asked = replace(PLAIN, context_tokens=CONTEXT_TOKENS, fingerprint="llama")
    assert find(finder, asked).compute_window_s == pytest.approx(0.00579)
    assert find(finder, asked, "layout").compute_window_s == pytest.approx(0.00579)
    unknown = replace(asked, fingerprint="mistral-tp8")
    assert find(finder, unknown) == NOBODY_KNOWS
    assert find(finder, unknown, "layout").compute_window_s == pytest.approx(0.007)


def test_a_profile_is_asked_for_what_the_step_computes(finder: WindowFinder) -> None:
    asked = replace(PLAIN, context_tokens=CONTEXT_TOKENS, model="llama", computed_tokens=512)
    assert find(finder, asked).compute_window_s == pytest.approx(0.00198)


def test_what_two_models_of_one_bucket_taught_is_kept_apart(finder: WindowFinder) -> None:
    small, large = (replace(PLAIN, fingerprint=name) for name in ("small", "large"))
    learn(finder, small, 0.1, TIMES_MIN)
    learn(finder, large, 0.4, TIMES_MIN)
    assert find(finder, small).compute_window_s == 0.1
    assert find(finder, large).compute_window_s == 0.4
    assert find(finder, PLAIN) == NOBODY_KNOWS


def test_a_profile_counts_before_what_was_learned(finder: WindowFinder) -> None:
    asked = replace(PLAIN, context_tokens=CONTEXT_TOKENS)
    learn(finder, asked, 0.01, TIMES_MIN)
    assert find(finder, asked) == Window(0.01, WindowSource.LEARNED)
    assert find(finder, asked, "llama").source is WindowSource.PROFILE


def test_a_profile_says_nothing_without_the_context(finder: WindowFinder) -> None:
    asked = replace(PLAIN, model="llama")
    assert find(finder, asked) == NOBODY_KNOWS
    learn(finder, asked, 0.02, TIMES_MIN)
    assert find(finder, asked).source is WindowSource.LEARNED


def test_the_profile_is_asked_for_the_chunks_that_are_delivered(finder: WindowFinder) -> None:
    asked = replace(PLAIN, model="llama", context_tokens=CONTEXT_TOKENS)
    fewer, more = (finder.find(asked, BUCKET, MINE, "", chunks) for chunks in (32, 56))
    assert fewer.compute_window_s == pytest.approx(0.00579)
    assert more.compute_window_s == pytest.approx(0.00198)


@pytest.mark.parametrize("broken", [False, True])
def test_a_model_without_a_usable_profile_is_not_found(
    finder: WindowFinder, tmp_path: Path, broken: bool
) -> None:
    if broken:
        (tmp_path / "mistral.csv").write_text("no profile")
    with pytest.raises(NotFound, match=r"mistral\.csv.*scheduler\.profiles_dir") as caught:
        find(finder, replace(PLAIN, model="mistral"))
    assert caught.value.code == "NoSuchComputeProfile"


def test_nothing_is_claimed_before_enough_layers_were_seen() -> None:
    windows = LearnedWindows()
    for seen in range(TIMES_MIN):
        assert windows.window_s(MINE, SHAPE) is None, seen
        windows.learn(MINE, SHAPE, 0.004)
    assert windows.window_s(MINE, SHAPE) == 0.004


@given(
    st.integers(TIMES_MIN, TIMES_KEPT),
    st.floats(0.001, 1.0),
    st.floats(0.0, 0.35),
    st.integers(0, 2**32),
)
def test_outliers_do_not_move_what_was_learned(
    count: int, true_s: float, outlier_share: float, seed: int
) -> None:
    rng = random.Random(seed)
    outliers = int(count * outlier_share)
    times_s = [true_s * rng.uniform(0.95, 1.05) for _ in range(count - outliers)]
    times_s += [true_s * OUTLIER_FACTOR * rng.uniform(2, 100) for _ in range(outliers)]
    rng.shuffle(times_s)
    windows = LearnedWindows()
    for compute_s in times_s:
        windows.learn(MINE, SHAPE, compute_s)
    assert windows.window_s(MINE, SHAPE) == pytest.approx(true_s, rel=0.05)


def test_the_latest_layers_count() -> None:
    windows = LearnedWindows()
    for compute_s in [0.001] * TIMES_KEPT + [0.002] * TIMES_KEPT:
        windows.learn(MINE, SHAPE, compute_s)
    assert windows.window_s(MINE, SHAPE) == 0.002


@pytest.mark.parametrize("compute_s", [math.nan, math.inf, -0.001, 1e9])
def test_what_is_no_time_teaches_nothing(compute_s: float) -> None:
    windows = LearnedWindows()
    for taught_s in [compute_s] * TIMES_KEPT + [0.004] * TIMES_MIN:
        windows.learn(MINE, SHAPE, taught_s)
    assert windows.window_s(MINE, SHAPE) == 0.004


def test_layers_that_were_only_copied_are_no_pace() -> None:
    windows = LearnedWindows()
    for _ in range(TIMES_MIN):
        windows.learn(MINE, SHAPE, WINDOW_MIN_S / 2)
    assert windows.window_s(MINE, SHAPE) is None


@pytest.mark.parametrize(
    "other",
    [
        delivery_shape("other", "", 32, 2048, 2048),
        delivery_shape(BUCKET, "", 64, 2048, 2048),
        delivery_shape(BUCKET, "", 32, 3072, 2048),
        delivery_shape(BUCKET, "", 32, 2048, 4096),
        delivery_shape(BUCKET, "llama", 32, 2048, 2048),
        delivery_shape(BUCKET, "", 32, 2048, None),
    ],
)
def test_another_shape_learns_by_itself(other: object) -> None:
    windows = LearnedWindows()
    for _ in range(TIMES_MIN):
        windows.learn(MINE, SHAPE, 0.004)
    assert windows.window_s(MINE, other) is None  # type: ignore[arg-type]
    assert delivery_shape(BUCKET, "", 32, 2060, 2040) == SHAPE  # nearly the same


def test_an_identity_hears_nothing_of_what_another_said() -> None:
    windows = LearnedWindows()
    for _ in range(TIMES_KEPT):
        windows.learn("mallory", SHAPE, 9.0)
    assert windows.window_s(MINE, SHAPE) is None


def test_whoever_has_many_shapes_crowds_out_only_its_own() -> None:
    windows = LearnedWindows()
    for _ in range(TIMES_MIN):
        windows.learn(MINE, SHAPE, 0.004)
    for number in range(2 * SHAPES_MAX):
        windows.learn("mallory", delivery_shape(str(number), "", 32, 2048, None), 0.001)
    assert windows.window_s(MINE, SHAPE) == 0.004
    assert repr(windows) == f"<LearnedWindows {SHAPES_MAX}/{SHAPES_MAX} shapes>"


def test_the_least_recently_used_shape_is_forgotten_first() -> None:
    windows = LearnedWindows()
    shapes = [delivery_shape(str(number), "", 32, 2048, None) for number in range(SHAPES_MAX + 1)]
    for shape in shapes[:-1]:
        for _ in range(TIMES_MIN):
            windows.learn(MINE, shape, 0.004)
    assert windows.window_s(MINE, shapes[0]) == 0.004  # used: the next one is the oldest
    windows.learn(MINE, shapes[-1], 0.004)
    assert windows.window_s(MINE, shapes[0]) == 0.004
    assert windows.window_s(MINE, shapes[1]) is None
