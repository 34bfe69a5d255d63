"""The arithmetic of the figures, and what they draw; nothing is timed here."""

from __future__ import annotations

import csv
import dataclasses
import functools
from pathlib import Path

import numpy as np
import pytest

from benchmarks.figures.__main__ import EXPERIMENTS, parse
from benchmarks.figures.experiment import columns, write_csv
from benchmarks.figures.experiments.one_object import OneObjectExperiment, path_row
from benchmarks.figures.experiments.overhead import (
    AGG,
    AGG_LINK,
    BATCH,
    OPTIMAL,
    OverheadExperiment,
    OverheadRow,
    Sample,
    judged,
    overhead_rows,
)
from benchmarks.figures.experiments.overhead import PATHS as OVERHEAD_PATHS
from benchmarks.figures.experiments.pacing import POLICIES as PACED_POLICIES
from benchmarks.figures.experiments.pacing import PacingExperiment, pacing_rows
from benchmarks.figures.experiments.tenth import (
    TenthExperiment,
    TenthRow,
    model_ttft_s,
)
from benchmarks.figures.experiments.workload_notes import goal_notes
from benchmarks.figures.experiments.workload_rows import (
    ALL,
    BOUND,
    POLICIES,
    Measured,
    Run,
    Runs,
    WorkloadRow,
    predicted,
    taken,
    workload_rows,
)
from benchmarks.figures.experiments.workloads import WorkloadsExperiment
from benchmarks.figures.gpu import Bytes, EmulatedGpu, Prefill, copy_chunks
from benchmarks.figures.local import LocalChunks, LocalLayers
from benchmarks.figures.paced_store import Paced
from benchmarks.figures.paper_data import NUM_LAYERS, REQUESTS, WORKLOADS
from benchmarks.figures.plots import save
from benchmarks.figures.rates import (
    Stamp,
    achieved_bytes_per_s,
    at_once,
    longest_gap_s,
    most_in_window,
    spread,
)
from benchmarks.figures.scaled import ScaledRequest, schedule
from objectcache_schemas.limits import BYTES_PER_GBIT, KIB, MIB
from objectcache_schemas.policy_names import PolicyName

SCALE = 16


# --- requests ---


@pytest.mark.parametrize("scale", [1, 8, 16, 64])
@pytest.mark.parametrize("chunk_tokens", [16, 64, 256])
@pytest.mark.parametrize("name", REQUESTS)
def test_chunks_hold_exactly_the_scaled_bytes(name: str, chunk_tokens: int, scale: int) -> None:
    request = ScaledRequest(REQUESTS[name], scale, chunk_tokens)
    assert request.geometry.payload_bytes * scale == 32 * REQUESTS[name].cached_tokens * 4096
    assert request.layer_bytes * NUM_LAYERS == request.geometry.payload_bytes


def test_the_scale_divides_chunks_and_leaves_slices_as_they_are() -> None:
    geometry = ScaledRequest(REQUESTS["64K, 87.5%"], SCALE).geometry
    assert (geometry.chunk_count, geometry.slice_bytes) == (224, 64 * KIB)
    assert geometry.payload_bytes == 448 * MIB


def test_a_request_of_less_than_a_chunk_is_one_smaller_chunk() -> None:
    geometry = ScaledRequest(REQUESTS["4K, 12.5%"], SCALE, chunk_tokens=256).geometry
    assert (geometry.chunk_count, geometry.slice_bytes) == (1, 128 * KIB)


def test_caps_and_margins_are_scaled_and_windows_are_not() -> None:
    changes = schedule("equal", 80.0, SCALE, 0.02)
    assert (changes.cap_gbps, changes.margin_gbps) == (5.0, 0.3125)
    request = ScaledRequest(REQUESTS["16K, 87.5%"], SCALE)
    assert request.demand.compute_window_s == 0.0088


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("policy", POLICIES[:-1])
def test_scaled_rates_are_those_of_the_paper(name: str, policy: PolicyName) -> None:
    paper = WORKLOADS[name]
    requests = [ScaledRequest(request, SCALE) for request in paper.requests]
    rates = [
        one.rate_bytes_per_s * SCALE / BYTES_PER_GBIT
        for one in predicted(paper, requests, policy, SCALE).requests
    ]
    column = POLICIES.index(policy)
    assert rates == pytest.approx([of[column] for of in paper.rates_gbps.values()], abs=0.02)


# --- the emulated GPU ---


class Recorded:
    """Layers of one byte each, and what was done with them."""

    def __init__(self, num_layers: int) -> None:
        self.events: list[tuple[str, int]] = []
        self._layers = np.arange(num_layers, dtype=np.uint8)[:, None]

    def wait_layer(self, layer: int) -> Bytes:
        self.events.append(("waited", layer))
        kv: Bytes = self._layers[layer]
        return kv

    def consumed(self, layer: int) -> None:
        self.events.append(("consumed", layer))


def test_the_gpu_loads_one_layer_ahead_of_the_one_it_computes() -> None:
    source = Recorded(3)
    EmulatedGpu(0.0, 2).prefill_layers(source, 3, started_s=0.0)
    assert source.events == [
        ("waited", 0),
        ("waited", 1),
        ("consumed", 0),
        ("waited", 2),
        ("consumed", 1),
        ("consumed", 2),
    ]


def test_a_prefill_is_its_windows_and_its_stalls() -> None:
    request = ScaledRequest(REQUESTS["4K, 87.5%"], 256, num_layers=2)
    gpu = EmulatedGpu(request.paper.window_s, 2 * request.layer_bytes)
    prefill = LocalLayers(request).prefill(gpu)
    assert prefill.stall_s > 0
    assert prefill.ttft_s == pytest.approx(2 * request.paper.window_s + prefill.stall_s)
    assert list(prefill.loaded_s) == sorted(prefill.loaded_s)


def test_chunkwise_nothing_is_computed_before_everything_is_loaded() -> None:
    request = ScaledRequest(REQUESTS["4K, 87.5%"], 256, num_layers=2)
    gpu = EmulatedGpu(request.paper.window_s, 2 * request.layer_bytes)
    prefill = LocalChunks(request).prefill_whole(gpu)
    assert prefill.ttft_s == pytest.approx(prefill.loaded_s[0] + 2 * request.paper.window_s)
    assert prefill.stall_s == prefill.loaded_s[0]


def test_chunks_are_copied_one_after_another() -> None:
    chunks = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    memory = np.zeros(32, np.uint8)
    copy_chunks(chunks, memory)
    assert memory[:24].tolist() == list(range(24))
    assert not memory[24:].any()


# --- rates ---


def test_the_rate_of_a_delivery_leaves_out_what_came_before_it_was_watched() -> None:
    assert achieved_bytes_per_s([at_once(1.0, 999), at_once(2.0, 10), at_once(3.0, 30)]) == 20.0
    assert achieved_bytes_per_s(spread([1.0, 2.0, 3.0], 10)) == 10.0


def test_the_longest_gap_is_between_neighbours_in_time() -> None:
    assert longest_gap_s([at_once(5.0, 1), at_once(1.0, 1), at_once(2.0, 1)]) == 3.0


def test_a_burst_is_seen_wherever_it_lies() -> None:
    steady = [at_once(n / 8, 10) for n in range(16)]
    assert most_in_window(steady, 0.25) == 30  # both ends count
    assert most_in_window([*steady, at_once(1.0625, 100)], 0.25) == 130


def test_a_large_piece_counts_as_coming_evenly() -> None:
    assert most_in_window([Stamp(1.0, 100, 0.0)], 0.2) == pytest.approx(20)


def test_pacing_is_told_against_the_assigned_rate_and_the_cap() -> None:
    cap = WORKLOADS["C"].cap_gbps * BYTES_PER_GBIT / SCALE
    stamps = [at_once(n / 1000, round(cap / 1000)) for n in range(1000)]
    one, every = pacing_rows("dispatcher", "equal", [Paced("a", cap / 2, stamps, 1000)], SCALE)
    assert one.off_percent == pytest.approx(100, rel=1e-3)
    assert one.longest_gap_ms == pytest.approx(1.0)
    assert one.implied_gap_ms == pytest.approx(1000 * 1000 / (cap / 2))
    assert every.assigned_gbps == 50.0
    assert every.over_cap_percent == pytest.approx(0.5, rel=1e-2)  # 201 of 200 pieces


@pytest.mark.parametrize(("achieved", "said"), [(1.02, ": met (goal 3 %)"), (1.2, ": missed (")])
def test_the_notes_on_pacing_say_whether_goals_are_met(achieved: float, said: str) -> None:
    stamps = [at_once(float(n), 1000) for n in range(10)]
    paced = [Paced("a", 1000 / achieved, stamps)]
    rows = [
        row
        for measured_by in ("dispatcher", "server")
        for row in pacing_rows(measured_by, "equal", paced, SCALE)
    ]
    notes = PacingExperiment().notes(rows)
    assert said in notes[0]
    assert "over the cap by at most 0.00 % in any 200 ms: met (goal 2 %)" in notes[1]


# --- rows ---


@functools.cache
def a_measured_workload(name: str) -> list[WorkloadRow]:
    requests = [ScaledRequest(request, SCALE) for request in WORKLOADS[name].requests]
    alone_s = {request.paper.name: 1.0 for request in requests}
    waited_s = {request.paper.name: 1.5 for request in requests}
    bases_s: dict[str, dict[str, float]] = {}
    for policy in POLICIES:
        bases_s[policy] = alone_s if policy == "stall_dynamic" else waited_s
    added_s = {policy: 2.0 / (2**number) for number, policy in enumerate(POLICIES)}
    measured: dict[PolicyName, Runs] = {}
    for policy in POLICIES:
        runs = [
            Run(tuple(Measured(bases_s[policy][name] + a_s, 1e8, 1e8) for name in alone_s))
            for a_s in (added_s[policy], 7.0, 0.0)
        ]
        measured[policy] = Runs(tuple(runs))
    return workload_rows(name, requests, measured, bases_s, SCALE)


def test_a_workload_is_judged_by_the_sum_of_what_its_requests_wait_longer() -> None:
    rows = {(row.policy, row.request): row for row in a_measured_workload("A")}
    equal, calibrated = rows["equal", ALL], rows["calibrated_stall_opt", ALL]
    assert equal.base_ms == 6000
    assert rows["stall_dynamic", ALL].base_ms == 4000
    assert equal.added_ms == 8000
    assert calibrated.below_equal == 16
    assert calibrated.paper_below_equal == pytest.approx(1.76, abs=0.01)
    assert rows["equal", "16K, 50%"].paper_ttft_ms == 1002.9
    assert rows["equal", "16K, 50%"].assigned_gbps == pytest.approx(12.8)
    bound = rows[BOUND, ALL].model_added_ms
    dynamic = rows["stall_dynamic", ALL].model_added_ms
    assert bound is not None
    assert dynamic is not None
    assert 0 < bound <= dynamic


def test_the_notes_compare_with_the_goals() -> None:
    notes = WorkloadsExperiment().notes(a_measured_workload("A"))
    assert "equal over calibrated_stall_opt 4.000: met (goal at least 1.76" in notes[0]
    assert "waits for an epoch too 16.000)" in notes[0]
    assert "stall_dynamic over calibrated_stall_opt 0.100: met (goal at most 0.6" in notes[1]


def test_a_missed_goal_is_said_beside_the_models_and_the_papers_own_figures() -> None:
    equal, calibrated, dynamic = (
        next(r for r in a_measured_workload("C") if r.policy == policy and r.request == ALL)
        for policy in ("equal", "calibrated_stall_opt", "stall_dynamic")
    )
    equal = dataclasses.replace(equal, added_ms=calibrated.added_ms)
    notes = goal_notes("C", equal, calibrated, dynamic)
    assert "1.000: missed (goal at least 1.24" in notes[0]
    assert "model's own 1.239" in notes[0]
    assert "the paper's unrounded 1.2353" in notes[0]


def a_run(ttft_s: float, achieved: float, assigned: float = 100.0) -> Run:
    return Run((Measured(ttft_s, assigned, achieved), Measured(ttft_s, 50.0, 50.0)), (100.0, 50.0))


def test_runs_off_their_rates_or_of_other_epochs_are_not_taken() -> None:
    runs = [a_run(1, 88.0), a_run(2, 98.0), a_run(3, 110.0, 110.0), a_run(4, 102.5), a_run(9, 100)]
    assert taken(runs, 2) == Runs((runs[1], runs[3]), reruns=3)


def test_the_best_of_bad_runs_is_kept_and_pointed_out() -> None:
    runs = [a_run(1, 88.0), a_run(2, 95.0), a_run(3, 110.0, 110.0)]
    best = taken(runs, 2)
    assert best == Runs((runs[1],), reruns=2)
    assert (best.taken[0].is_together, best.taken[0].is_on_rate) == (True, False)
    rows = a_measured_workload("A")
    off = dataclasses.replace(rows[4], is_on_rate=False, off_percent=-5.0)
    notes = WorkloadsExperiment().notes([*rows[:4], off, *rows[5:]])
    assert notes[2].startswith("A, equal: a request's rate was -5.0 % off what it was assigned")


def test_repeated_runs_count_by_their_medians_and_show_their_spread() -> None:
    rows = {(row.policy, row.request): row for row in a_measured_workload("A")}
    one, every = rows["equal", "16K, 50%"], rows["equal", ALL]
    assert (one.samples, one.ttft_ms, one.spread_ms) == (3, 3500, 7000)
    assert (every.samples, every.ttft_ms, every.spread_ms) == (3, 14000, 28000)


def test_a_workload_that_was_not_admitted_together_is_pointed_out() -> None:
    rows = a_measured_workload("A")
    late = dataclasses.replace(rows[4], is_together=False)
    assert late.request == ALL
    notes = WorkloadsExperiment().notes([*rows[:4], late, *rows[5:]])
    assert notes[2].startswith("A, equal: not all were admitted in one epoch")


def an_overhead(name: str) -> list[OverheadRow]:
    request = ScaledRequest(REQUESTS[name], SCALE, chunk_tokens=64)
    one = Prefill(2.0, 0.5, (0.25,))
    samples = {path: [Sample(one)] for path in (OPTIMAL, *OVERHEAD_PATHS)}
    samples[AGG] = [
        Sample(Prefill(ttft_s, 0.5, (0.25,)), rate)
        for ttft_s, rate in ((2.01, 1e9), (2.02, 2e9), (9.0, 9e9))
    ]
    samples[AGG_LINK] = [Sample(one, 0.75e9)]
    return overhead_rows(request, samples)


def test_an_overhead_is_the_median_over_the_optimal_path() -> None:
    row = next(row for row in an_overhead("64K, 50%") if row.path == AGG)
    assert row.over_ms == pytest.approx(20)
    assert row.over_percent == pytest.approx(1)
    assert row.compute_ms == pytest.approx(8672.64)
    assert row.spread_ms == pytest.approx(6990)
    assert judged(dataclasses.replace(row, over_percent=0.99)) == "met (goal at most +1 %)"
    assert judged(dataclasses.replace(row, over_percent=1.01)).startswith("missed")
    short = dataclasses.replace(row, request="4K, 50%", over_ms=5.1)
    assert judged(short) == "missed (goal at most +5 ms)"


def test_the_rate_of_a_served_path_is_told_at_the_papers_sizes() -> None:
    rows = {row.path: row for row in an_overhead("64K, 50%")}
    assert rows[AGG].effective_gbps == pytest.approx(2 * 8 * SCALE)
    assert rows[OPTIMAL].effective_gbps is None
    notes = OverheadExperiment().notes(list(rows.values()))
    assert "at 256 Gbps of the paper's sizes: " in notes[0]
    assert "paced to 100 Gbps over the scale (paper: S3Agg-LW)" in notes[1]
    assert "at 96 Gbps of the paper's sizes: no goal" in notes[1]


def test_the_model_of_a_tenth_knows_what_layerwise_hides() -> None:
    request = ScaledRequest(REQUESTS["64K, 50%"], SCALE)
    fast, slow = (model_ttft_s(request, AGG, rate_gbps) for rate_gbps in (100.0, 10.0))
    layer_s = 32768 * 4096 / (100 * BYTES_PER_GBIT)
    assert slow - fast == pytest.approx(9 * layer_s)
    fast, slow = (model_ttft_s(request, BATCH, rate_gbps) for rate_gbps in (100.0, 10.0))
    assert slow - fast == pytest.approx(32 * 9 * layer_s)


# --- files ---


def test_rows_are_written_as_csv(tmp_path: Path) -> None:
    rows = a_measured_workload("A")
    write_csv(tmp_path / "rows.csv", rows)
    written = list(csv.DictReader((tmp_path / "rows.csv").read_text().splitlines()))
    assert list(written[0]) == columns(rows)
    assert written[0]["paper_gbps"] == "20"
    assert written[-1]["ttft_ms"] == ""


PHASES_MS = {"storage": 0.5, "network": 0.25, "control_plane": 1.0}


def test_the_share_of_the_control_plane_is_told_of_small_objects_that_were_traced() -> None:
    rows = [
        path_row("shared memory", 64, 1, [0.004, 0.001, 0.002], 0.01, PHASES_MS),
        path_row("shared memory", 64, 8, [0.004], 0.01, {}),
        path_row("shared memory", 4096, 1, [0.004], 0.01, PHASES_MS),
    ]
    assert (rows[0].request_ms, rows[0].p99_ms, rows[0].network_ms) == (2.0, 4.0, 0.25)
    assert rows[0].gbytes_per_s == 3 * 65536 / 0.01 / 1e9
    assert OneObjectExperiment().notes(rows) == [
        "shared memory, 64 KiB: 50% of 2.00 ms are the control plane's"
    ]


@pytest.mark.timeout(600)  # several seconds of drawing, beside whatever a busy machine does
def test_every_figure_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    stamps = [at_once(0.0, 1), at_once(1.0, 1)]
    paced = [
        row
        for measured_by in ("dispatcher", "server")
        for policy in PACED_POLICIES
        for row in pacing_rows(measured_by, policy, [Paced("a", 1.0, stamps)], SCALE)
    ]
    tenths = [
        TenthRow("4K, 50%", 64, path, 1, 1.0, 2.0, 100.0, 90.0, True) for path in (BATCH, AGG)
    ]
    objects = [
        path_row(path, object_kib, concurrency, [0.002, 0.001, 0.004], 0.01, phases)
        for path, phases in (("HTTP bodies", {}), ("shared memory", PHASES_MS))
        for object_kib in (64, 4096)
        for concurrency in (1, 8)
    ]
    figures = {
        "one_object": OneObjectExperiment().plot(objects),
        "workloads": WorkloadsExperiment().plot(a_measured_workload("C")),
        "overhead": OverheadExperiment().plot(an_overhead("64K, 50%")),
        "tenth": TenthExperiment().plot(tenths),
        "pacing": PacingExperiment().plot(paced),
    }
    for name, figure in figures.items():
        files = save(figure, tmp_path, name)
        assert [file.name for file in files] == [f"{name}.svg", f"{name}.png"]
        assert "<svg" in files[0].read_text()


def test_experiments_are_named_once_and_can_be_chosen() -> None:
    names = [experiment.name for experiment in EXPERIMENTS]
    assert len(set(names)) == len(names)
    assert parse(["--only", "workloads", "--quick"]).only == ["workloads"]
    with pytest.raises(SystemExit):
        parse(["--only", "nothing"])
