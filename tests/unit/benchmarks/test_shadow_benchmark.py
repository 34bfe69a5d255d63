"""The arithmetic of the benchmark of encoded prefixes over slow links."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.shadow.__main__ import table
from benchmarks.shadow.contents import CONTENTS, LOSSLESS, PLAIN, Volume, expected, numbers, stored
from benchmarks.shadow.deliveries import Fetched
from benchmarks.shadow.engine_steps import Window
from benchmarks.shadow.interference import mean_s, of_layers, p99_s
from benchmarks.shadow.rig import SCALE, link_rate

VOLUME = Volume(layers=3, chunk_count=2)


def test_an_engine_computes_a_layer_when_it_is_there_and_the_one_before_is_through() -> None:
    assert Fetched((1.0, 2.0, 3.0), 0).ttft_s(0.1) == pytest.approx(3.1)  # the link is slower
    assert Fetched((1.0, 2.0, 3.0), 0).ttft_s(5.0) == pytest.approx(16.0)  # the engine is
    assert Fetched((3.0, 3.0, 3.0), 0).ttft_s(0.5) == pytest.approx(4.5)  # all at the end


def test_links_are_the_papers_over_the_scale() -> None:
    assert link_rate(10) * SCALE * 8 == pytest.approx(10e9)


def test_what_an_engine_must_have_are_the_models_numbers_or_close_ones() -> None:
    floats = [_floats(expected(content, VOLUME)) for content in CONTENTS]
    wanted = _floats(numbers(VOLUME))
    errors = [float(np.abs(one - wanted).max()) for one in floats]
    assert errors[:2] == [0.0, 0.0], "plain, and lossless"
    assert sorted(errors[2:]) == errors[2:], "fewer bits, further off"
    assert 0 < errors[2] < 0.05


def test_lossy_chunks_have_fewer_bytes_and_other_keys() -> None:
    sizes = {content.name: stored(content, VOLUME).nbytes for content in CONTENTS}
    assert sizes["plain"] == sizes["lossless"] == VOLUME.delivered_bytes
    assert sizes["q8"] < 0.6 * sizes["plain"]
    keys = {content.name: content.keys(VOLUME)[0] for content in CONTENTS}
    assert keys["q8"] not in (keys["plain"], keys["q6"])
    assert PLAIN.keys(VOLUME) == LOSSLESS.keys(VOLUME), "an encoding is no other content"


def test_steps_of_all_windows_make_the_mean_and_the_99th_percentile() -> None:
    windows = [Window((1.0,) * 99, 0.0), Window((2.0,) * 100 + (30.0,), 0.0)]
    assert mean_s(windows) == pytest.approx((99 + 200 + 30) / 200)
    assert p99_s(windows) == 2.0
    assert p99_s([*windows, Window((30.0,) * 2, 0.0)]) == 30.0


def test_wakes_and_processor_time_of_other_threads_are_those_for_a_layer() -> None:
    windows = [Window((1.0,), 5.0, 3, 0.0002, 9), Window((1.0,), 5.0, 1, 0.0002, 1)]
    assert of_layers(windows) == "2.5, 100"
    assert of_layers([Window((1.0,), 0.0)]) == "-"


def test_a_table_is_markdown() -> None:
    lines = list(table(("a", "b"), iter([("1", "2")])))
    assert lines == ["", "| a | b |", "| --- | --- |", "| 1 | 2 |", ""]


def _floats(slices: np.ndarray) -> np.ndarray:
    return (slices.view("<u2").astype(np.uint32) << 16).view(np.float32)
