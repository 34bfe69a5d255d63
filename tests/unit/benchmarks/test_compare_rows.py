"""The pure parts of `python -m benchmarks.compare`: windows, rows, judging, the table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.compare.cells import FULL, JUDGED, LLAMA, MLA, QUICK, Cell
from benchmarks.compare.grid import grid_lines
from benchmarks.compare.limits import Limits
from benchmarks.compare.rows import Judgement, Row, Sample, judge
from benchmarks.compare.table import markdown, write_json
from benchmarks.compare.ways import (
    BODY,
    MOONCAKE_LAYERS,
    MOONCAKE_WHOLE,
    OURS_AS_S3,
    RADOSGW,
    REDIS_IN_PLACE,
    SHARED_MEMORY,
    Way,
    lmcache_way,
    nixl_obj_way,
)
from objectcache_schemas.limits import MIB


def _row(way: Way, first_s: float, last_s: float, cell: Cell = JUDGED, times: int = 1) -> Row:
    between = (first_s,) * (cell.model.num_layers - 1)
    return Row(cell, way, (Sample((*between, last_s), 1.0, 2.0),) * times)


def test_the_grid_has_our_first_layers_of_the_peers_and_says_what_was_not_measured() -> None:
    rows = [
        _row(SHARED_MEMORY, 0.002, 0.05),
        Row(JUDGED, BODY, (), "failed"),
        _row(MOONCAKE_LAYERS, 0.004, 0.5),
    ]
    line = list(grid_lines(rows))[2]
    assert line == f"| {JUDGED} | 256 | 2.00 (0.50) | - | - | 4.00 | 50.0 | - | - | 500 |"


def test_a_cell_has_the_bytes_of_its_model() -> None:
    assert JUDGED.payload_bytes == 512 * MIB
    assert JUDGED.geometry.chunk_count == 256
    assert Cell(MLA, 1024, 64).payload_bytes == 1024 * 1152 * 61


def test_every_cell_is_whole_chunks_and_the_judged_one_is_in_both_runs() -> None:
    assert all(cell.tokens % cell.chunk_tokens == 0 for cell in (*FULL, *QUICK))
    assert JUDGED in FULL
    assert JUDGED in QUICK


@pytest.mark.parametrize(
    ("tokens", "row"),
    [(1024, "4K, 50%"), (2048, "4K, 50%"), (4096, "4K, 87.5%"), (8192, "16K, 50%")],
)
def test_a_window_is_of_the_row_with_the_nearest_cached_prefix(tokens: int, row: str) -> None:
    assert Cell(LLAMA, tokens, 16).paper_request.name == row


def test_a_model_of_more_layers_computes_as_long_in_all() -> None:
    llama, mla = Cell(LLAMA, 4096, 16), Cell(MLA, 4096, 16)
    assert mla.compute_window_s * 61 == pytest.approx(llama.compute_window_s * 32)
    assert mla.compute_window_s != llama.compute_window_s


def test_a_row_reports_medians_and_processor_time_per_gigabyte() -> None:
    samples = tuple(Sample((first, 2 * first), 0.5, 1.0) for first in (0.010, 0.030, 0.011))
    row = Row(JUDGED, SHARED_MEMORY, samples)
    assert row.first_layer_s == 0.011
    assert row.last_layer_s == 0.022
    assert 0.029 < row.first_layer_p99_s <= 0.030
    gigabytes = 512 * MIB / 1e9
    assert row.client_s_per_gb == pytest.approx(0.5 / gigabytes)
    assert row.server_s_per_gb == pytest.approx(1.0 / gigabytes)
    assert row.rate_bytes_per_s == pytest.approx(512 * MIB / 0.022)


def test_layers_that_come_one_by_one_are_computed_meanwhile() -> None:
    window_s, layers = JUDGED.compute_window_s, JUDGED.model.num_layers
    in_order = tuple(0.001 * (layer + 1) for layer in range(layers))
    layerwise = Row(JUDGED, SHARED_MEMORY, (Sample(in_order, 0, 0),))
    whole = Row(JUDGED, MOONCAKE_WHOLE, (Sample((in_order[-1],) * layers, 0, 0),))
    assert layerwise.last_layer_s == whole.last_layer_s
    assert layerwise.ttft_s == pytest.approx(0.001 + layers * window_s)
    assert whole.ttft_s == pytest.approx(in_order[-1] + layers * window_s)


def test_ours_is_judged_against_the_best_peer_of_each_kind() -> None:
    rows = [
        _row(SHARED_MEMORY, 0.004, 0.100),
        _row(MOONCAKE_LAYERS, 0.010, 0.090),  # the soonest; does not persist
        _row(REDIS_IN_PLACE, 0.200, 0.200),  # the fastest that persists; no S3
        _row(lmcache_way(OURS_AS_S3), 0.400, 0.400),  # the fastest S3 path
        _row(nixl_obj_way(RADOSGW, layerwise=True), 0.050, 9.0),
    ]
    first, persistent, s3 = judge(rows, JUDGED)
    assert (first.peer, first.ratio, first.is_met) == (MOONCAKE_LAYERS.name, 0.4, True)
    assert (persistent.peer, persistent.ratio) == (REDIS_IN_PLACE.name, 0.5)
    assert (s3.peer, s3.ratio, s3.is_met) == (lmcache_way(OURS_AS_S3).name, 0.25, True)


def test_a_goal_that_is_missed_says_so() -> None:
    rows = [_row(SHARED_MEMORY, 0.006, 0.300), _row(lmcache_way(RADOSGW), 0.010, 0.200)]
    judgements = judge(rows, JUDGED)
    assert [judgement.is_met for judgement in judgements] == [False, False, False]
    assert all(str(judgement).startswith("MISSED") for judgement in judgements)


def test_a_goal_is_met_at_its_very_limit() -> None:
    assert Judgement("first layer", "ours", "peer", 0.5, 0.5).is_met
    assert not Judgement("first layer", "ours", "peer", 0.501, 0.5).is_met


def test_each_of_our_ways_is_judged_and_none_is_a_peer_of_another() -> None:
    rows = [
        _row(SHARED_MEMORY, 0.001, 0.1),
        _row(BODY, 0.002, 0.2),
        _row(MOONCAKE_WHOLE, 0.5, 0.5),
    ]
    judgements = judge(rows, JUDGED)
    assert [judgement.ours for judgement in judgements] == [SHARED_MEMORY.name, BODY.name]
    assert {judgement.peer for judgement in judgements} == {MOONCAKE_WHOLE.name}


def test_nothing_is_judged_against_other_cells_or_paths_that_were_not_measured() -> None:
    missing = Row(JUDGED, MOONCAKE_LAYERS, (), "mooncake not installed")
    elsewhere = _row(REDIS_IN_PLACE, 0.1, 0.1, cell=Cell(LLAMA, 1024, 16))
    assert judge([_row(SHARED_MEMORY, 0.01, 0.1), missing, elsewhere], JUDGED) == []


def test_a_ranged_path_asks_for_each_chunk_and_layer() -> None:
    assert nixl_obj_way(RADOSGW, layerwise=True).requests(256, 32) == 8192
    assert nixl_obj_way(RADOSGW, layerwise=False).requests(256, 32) == 256
    assert SHARED_MEMORY.requests(256, 32) == 1


def test_the_table_has_a_line_for_each_path_and_names_what_is_missing(tmp_path: Path) -> None:
    small = Cell(LLAMA, 1024, 16)
    rows = [
        _row(SHARED_MEMORY, 0.004, 0.100, times=3),
        Row(JUDGED, lmcache_way(RADOSGW), (), "radosgw not found"),
        _row(BODY, 0.002, 0.030, cell=small),
    ]
    limits = {JUDGED: Limits(3e9, 10e9), small: Limits(2e9, 9e9)}
    judgements = judge([*rows, _row(MOONCAKE_LAYERS, 0.1, 0.2)], JUDGED)
    lines = markdown(rows, limits, [str(each) for each in judgements]).splitlines()
    (ours,) = [line for line in lines if line.startswith(f"| {SHARED_MEMORY.name}")]
    assert "4.00 (4.00) | 100 (100) | 5.37 |" in ours
    assert any("not measured: radosgw not found" in line for line in lines)
    assert any("2.00 GB/s" in line and "9.00 GB/s" in line for line in lines)
    pipes = {line.count("|") for line in lines if line.startswith("|")}
    assert pipes == {11}

    file = tmp_path / "compare.json"
    write_json(file, {"commit": "abc"}, rows, limits, judgements)
    written = json.loads(file.read_bytes())
    assert written["rows"][0]["payload_bytes"] == 512 * MIB
    assert len(written["rows"][0]["samples"]) == 3
    assert written["judged"][0]["is_met"] is True
    assert written["limits"][1]["bytes_per_s"]["copy"] == 9e9


def test_a_path_keeps_its_name_and_copies_for_each_server() -> None:
    ours, theirs = lmcache_way(OURS_AS_S3), lmcache_way(RADOSGW)
    assert ours.name != theirs.name
    assert theirs.copies == ours.copies + 1
    assert not ours.is_ours
    assert replace(theirs, name=ours.name) != ours
