from __future__ import annotations

import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from objectcache_laboratory.demo.options import DemoOptions, parse_options
from objectcache_laboratory.demo.report import verdict
from objectcache_laboratory.demo.results import (
    SAME_HOST,
    DemoResult,
    LayerEvents,
    ReuseMeasurement,
    TurnMeasurement,
    best_reuse,
)
from objectcache_laboratory.demo.timeline_svg import arrival_bars, timeline_svg
from objectcache_laboratory.demo.timeline_text import timeline_rows
from objectcache_laboratory.drawing.axis import ticks
from objectcache_laboratory.reference_engine.config import ModelConfig
from objectcache_schemas.errors import InvalidRequest

LAYERWISE = ReuseMeasurement(
    path=SAME_HOST,
    delivery="layerwise",
    transport="shared_memory",
    ttft_s=0.100,
    fetch_start_s=0.010,
    wire_bytes=3 << 20,
    layers=(
        LayerEvents(0, 0.030, 0.012, 0.030, 0.060),
        LayerEvents(1, 0.050, 0.060, 0.060, 0.080),
        LayerEvents(2, 0.0501, 0.080, 0.080, 0.100),
    ),
    bytes_identical=True,
    logits_identical=True,
)
CHUNKWISE = replace(LAYERWISE, delivery="chunkwise", ttft_s=0.120)
COMPUTED = TurnMeasurement(1, 100, 0, 0, 3, 0.4, answer=(1, 2), recomputed_answer=(1, 2))
REUSED = TurnMeasurement(
    turn=2,
    prompt_tokens=120,
    hit_tokens=96,
    fetched_bytes=3 << 20,
    stored_chunks=1,
    recompute_ttft_s=0.5,
    reuses=(CHUNKWISE, LAYERWISE),
    logits_difference=3e-7,
    answer=(5, 6),
    recomputed_answer=(5, 6),
)


def result(*turns: TurnMeasurement) -> DemoResult:
    return DemoResult("a.txt", 90, ModelConfig(), 32, (SAME_HOST,), turns)


def test_a_run_whose_answers_agree_has_no_failures_and_says_so() -> None:
    assert result(COMPUTED, REUSED).failures() == []
    assert verdict(result(COMPUTED, REUSED)).startswith("The answers agree: ")
    assert json.loads(result(COMPUTED, REUSED).to_json())["agree"] is True


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        (replace(REUSED, reuses=(replace(CHUNKWISE, bytes_identical=False),)), "chunkwise.*bytes"),
        (replace(REUSED, reuses=(replace(LAYERWISE, logits_identical=False),)), "layerwise.*bit"),
        (replace(REUSED, logits_difference=1e-3), "differ by 1.0e-03"),
        (replace(REUSED, recomputed_answer=(5, 7)), "answers of reuse and recomputation"),
        (replace(REUSED, hit_tokens=0), "nothing of the prefix"),
    ],
)
def test_whatever_disagrees_is_named_with_its_turn(turn: TurnMeasurement, reason: str) -> None:
    failures = result(COMPUTED, turn).failures()
    assert len(failures) == 1
    assert re.match(f"turn 2: .*{reason}", failures[0])
    assert verdict(result(COMPUTED, turn)) == f"The answers do not agree: {failures[0]}"


def test_the_turn_that_is_drawn_is_the_one_that_fetched_most() -> None:
    larger = replace(REUSED, turn=3, fetched_bytes=4 << 20)
    assert best_reuse([COMPUTED, larger, REUSED]) == larger
    assert best_reuse([COMPUTED]) is None


def test_layers_that_arrive_together_are_one_bar() -> None:
    bars = arrival_bars(LAYERWISE, merge_s=0.001)
    assert [(bar.first_layer, bar.last_layer) for bar in bars] == [(0, 0), (1, 2)]
    assert [bar.label for bar in bars] == ["0", "1\N{EN DASH}2"]
    assert (bars[0].start_s, bars[0].end_s, bars[1].end_s) == (0.010, 0.030, 0.0501)


def test_the_svg_is_wellformed_and_draws_a_bar_for_each_layer_in_both_lanes() -> None:
    root = ElementTree.fromstring(timeline_svg(REUSED, SAME_HOST))
    titles = [title.text or "" for title in root.iter("{http://www.w3.org/2000/svg}title")]
    texts = [text.text or "" for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert len(titles) == 2 * (2 + 3)  # layers 1 and 2 arrive as one bar
    assert "layer 0: 30.0 ms, for 30.0 ms" in titles
    assert {"first token 100 ms", "first token 120 ms", "ms"} <= set(texts)


def test_a_text_row_shows_transfer_then_waiting_then_compute() -> None:
    rows = timeline_rows(LAYERWISE, columns=20)  # a column is 5 ms
    assert rows[0].startswith("layer   0 |  ░░░░██████        |")
    assert rows[1].startswith("layer   1 |  ░░░░░░░░··████    |")


@pytest.mark.parametrize(
    ("end", "expected"), [(100, [0, 20, 40, 60, 80, 100]), (7, [0, 1, 2, 3, 4, 5, 6, 7])]
)
def test_ticks_are_round_numbers_up_to_the_end(end: float, expected: list[float]) -> None:
    assert ticks(end) == expected


def test_an_option_out_of_bounds_is_refused_by_its_flag() -> None:
    with pytest.raises(InvalidRequest, match="--turns must be from 2 to 4, got 9"):
        parse_options(["--turns", "9"])
    assert parse_options([]) == DemoOptions()
