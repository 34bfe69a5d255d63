"""The simulator: conservation, known cases, and what its flags refuse."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from objectcache_schemas.operators.schedule import TenantShare
from objectcache_schemas.policy_names import FOR_LIFE, PolicyName
from objectcache_storage_server.admission.delivery_turns import AdmissionLimits
from objectcache_storage_server.scheduling.rates.policies import RATE_POLICIES, assigned_rates
from objectcache_storage_server.scheduling.scheduler import BYTES_PER_GBIT, FRAGMENT_S
from objectcache_storage_server.scheduling.ttft_model import ttft_at_rate
from objectcache_storage_server.simulation import progress as progress_module
from objectcache_storage_server.simulation import side_by_side
from objectcache_storage_server.simulation.__main__ import main
from objectcache_storage_server.simulation.arrivals import (
    Arrival,
    among_tenants,
    at_load,
    with_chunkwise,
    with_window_errors,
    without_windows,
)
from objectcache_storage_server.simulation.machine import Machine
from objectcache_storage_server.simulation.measures import (
    jain_index,
    measure,
    offered_utilisation,
)
from objectcache_storage_server.simulation.mix import poisson_arrivals, rate_for, read_mix
from objectcache_storage_server.simulation.mooncake import trace_arrivals
from objectcache_storage_server.simulation.progress import SimulationProgress
from objectcache_storage_server.simulation.run import FRAGMENT_S as COARSE_S
from objectcache_storage_server.simulation.run import Outcome, SimulatedSchedule, simulate
from tests.unit.storage_server.scheduling.paper_tables import (
    COMPUTE_WINDOWS,
    MARGIN_GBPS,
    WORKLOADS,
)

POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
LIMITS = AdmissionLimits(256, 256, 64, 10.0)
EPOCH_S = 0.001
FRAGMENT_COARSE_S = 0.005  # so that many requests are quick
LINK = Machine(50 * BYTES_PER_GBIT)


def a_schedule(
    policy: PolicyName, limits: AdmissionLimits = LIMITS, fragment_s: float = COARSE_S
) -> SimulatedSchedule:
    return SimulatedSchedule(policy, MARGIN_GBPS, EPOCH_S, limits, fragment_s)


def some_arrivals(requests: int = 60, rate_per_s: float = 2.0, seed: int = 3) -> list[Arrival]:
    return poisson_arrivals(read_mix(None), requests, rate_per_s, seed)


def ttfts(outcome: Outcome) -> dict[Arrival, float]:
    return {client.arrival: client.ttft_s for client in outcome.clients}


# --- what is simulated ---


@pytest.mark.parametrize("policy", POLICIES)
def test_every_byte_of_every_request_that_is_served_arrives_once(policy: PolicyName) -> None:
    arrivals = some_arrivals()
    outcome = simulate(arrivals, LINK, a_schedule(policy))
    assert len(outcome.clients) + len(outcome.refused) == len(arrivals)
    for client in outcome.clients:
        assert client.arrived_bytes == client.demand.payload_bytes
    assert outcome.sent_bytes == sum(client.demand.payload_bytes for client in outcome.clients)
    served = {client.arrival for client in outcome.clients}
    assert served | set(outcome.refused) == set(arrivals)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_seed_gives_the_same_result_and_another_one_another(policy: PolicyName) -> None:
    first = simulate(some_arrivals(30), LINK, a_schedule(policy))
    again = simulate(some_arrivals(30), LINK, a_schedule(policy))
    other = simulate(some_arrivals(30, seed=4), LINK, a_schedule(policy))
    assert ttfts(first) == ttfts(again)
    assert ttfts(first) != ttfts(other)


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("policy", RATE_POLICIES)
def test_with_rates_for_life_the_papers_workloads_take_what_the_overlap_model_says(
    workload: str, policy: PolicyName
) -> None:
    shared = WORKLOADS[workload]
    machine = Machine(shared.cap_bytes_per_s)
    requests = [COMPUTE_WINDOWS[name] for name in shared.allocations_gbps]
    arrivals = [Arrival(0.0, tokens, window_ms / 1e3) for tokens, window_ms in requests]
    schedule = replace(a_schedule(policy, fragment_s=FRAGMENT_S), rates=FOR_LIFE)
    outcome = simulate(arrivals, machine, schedule)
    rates = assigned_rates(
        policy, shared.demands, shared.cap_bytes_per_s, MARGIN_GBPS * BYTES_PER_GBIT
    )
    found = ttfts(outcome)
    for arrival, demand, rate in zip(arrivals, shared.demands, rates, strict=True):
        assert found[arrival] == pytest.approx(ttft_at_rate(demand, rate) + EPOCH_S, rel=0.01)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("machine", "slowest_gbps"),
    [
        (Machine(50 * BYTES_PER_GBIT), 50),
        (Machine(50 * BYTES_PER_GBIT, nic_bytes_per_s=10 * BYTES_PER_GBIT), 10),
        (Machine(50 * BYTES_PER_GBIT, engine_bytes_per_s=20 * BYTES_PER_GBIT), 20),
    ],
)
def test_a_request_alone_is_as_fast_as_the_slowest_part_allows(
    policy: PolicyName, machine: Machine, slowest_gbps: float
) -> None:
    alone = Arrival(0.0, 14336, 0.0088)
    schedule = a_schedule(policy, fragment_s=FRAGMENT_S)
    (client,) = simulate([alone], machine, schedule).clients
    rate = slowest_gbps * BYTES_PER_GBIT
    assert machine.alone_ttft_s(alone) == ttft_at_rate(client.demand, rate)
    assert client.ttft_s == pytest.approx(ttft_at_rate(client.demand, rate), rel=0.01, abs=EPOCH_S)


def test_the_engines_latency_delays_by_itself_alone() -> None:
    alone = Arrival(0.0, 14336, 0.0088)
    slow = Machine(50 * BYTES_PER_GBIT, engine_latency_s=0.5)
    quick = simulate([alone], LINK, a_schedule("stall_dynamic")).clients[0].ttft_s
    late = simulate([alone], slow, a_schedule("stall_dynamic")).clients[0].ttft_s
    assert late == pytest.approx(quick + 0.5)


def test_nobody_is_faster_than_alone_and_more_load_costs_more() -> None:
    arrivals, means = some_arrivals(150, 1.0), []
    for load in (0.25, 1.0, 4.0):
        coming = at_load(arrivals, load)
        outcome = simulate(coming, LINK, a_schedule("stall_dynamic"))
        for client in outcome.clients:
            assert client.ttft_s >= LINK.alone_ttft_s(client.arrival) - 1e-6
        means.append(measure("stall_dynamic", load, coming, LINK, outcome).added_mean_s)
    assert means == sorted(means)
    assert means[-1] > 10 * means[0]


def test_past_the_bounds_of_admission_requests_get_slow_down() -> None:
    """One tenant alone has three of the four places."""
    arrivals = [Arrival(0.0, 57344, 0.07575) for _ in range(20)]
    outcome = simulate(arrivals, LINK, a_schedule("stall_dynamic", AdmissionLimits(4, 4, 8, 600.0)))
    assert (len(outcome.clients), len(outcome.refused)) == (11, 9)
    hurried = AdmissionLimits(4, 4, 8, 0.5)
    outcome = simulate(arrivals, LINK, a_schedule("stall_dynamic", hurried))
    assert (len(outcome.clients), len(outcome.refused)) == (3, 17)


def test_who_gets_no_rate_for_life_in_time_gets_slow_down() -> None:
    first, late = Arrival(0.0, 57344, 0.07575), Arrival(0.1, 57344, 0.07575)
    schedule = replace(a_schedule("equal", AdmissionLimits(9, 9, 9, 0.5)), rates=FOR_LIFE)
    outcome = simulate([first, late], LINK, schedule)
    assert outcome.refused == [late]
    assert [client.arrival for client in outcome.clients] == [first]


# --- windows that are wrong, and deliveries outside of the pool ---


def test_wrong_windows_are_told_and_true_ones_are_computed_with() -> None:
    true = Arrival(0.0, 57344, 0.07575)
    for error in (0.25, 4.0):
        told = replace(true, window_error=error)
        assert LINK.told_demand(told).compute_window_s == pytest.approx(error * 0.07575)
        assert LINK.alone_ttft_s(told) == LINK.alone_ttft_s(true)
    # told four times the window, a quarter of the rate: the GPU waits for what it computes in time
    slow = simulate([replace(true, window_error=4.0)], LINK, a_schedule("stall_opt"))
    quick = simulate([true], LINK, a_schedule("stall_opt"))
    carrying_s = 4 * 32 * true.compute_window_s
    assert slow.clients[0].ttft_s == pytest.approx(carrying_s + true.compute_window_s, rel=0.01)
    assert quick.clients[0].ttft_s == pytest.approx(33 * true.compute_window_s, rel=0.01)


def test_window_errors_are_within_the_factor_and_the_same_for_the_seed() -> None:
    arrivals = some_arrivals(500)
    errors = [one.window_error or 0.0 for one in with_window_errors(arrivals, 3.0, 1)]
    assert 1 / 3 <= min(errors) < 0.4
    assert 2.5 < max(errors) <= 3.0
    assert sum(error > 1 for error in errors) == pytest.approx(250, rel=0.2)
    assert with_window_errors(arrivals, 3.0, 1) == with_window_errors(arrivals, 3.0, 1)
    assert with_window_errors(arrivals, 3.0, 1) != with_window_errors(arrivals, 3.0, 2)
    wider = [one.window_error or 0.0 for one in with_window_errors(arrivals, 9.0, 1)]
    assert wider == pytest.approx([error**2 for error in errors])


def test_feedback_of_exact_windows_changes_next_to_nothing() -> None:
    arrivals = some_arrivals()
    told = simulate(arrivals, LINK, a_schedule("stall_dynamic"))
    untold = simulate(arrivals, LINK, replace(a_schedule("stall_dynamic"), has_feedback=False))
    with_feedback = measure("", 1.0, arrivals, LINK, told).added_mean_s
    without = measure("", 1.0, arrivals, LINK, untold).added_mean_s
    assert with_feedback == pytest.approx(without, rel=0.05)


def test_feedback_helps_where_windows_are_wrong() -> None:
    """A GPU that is slower than was said is not fed ahead of others once it tells."""
    seed = 0
    arrivals = with_window_errors(some_arrivals(250, 1.8, seed), 4.0, seed)
    added_s: dict[bool, float] = {}
    for has_feedback in (True, False):
        schedule = replace(
            a_schedule("stall_dynamic"), has_feedback=has_feedback, fragment_s=FRAGMENT_COARSE_S
        )
        outcome = simulate(arrivals, LINK, schedule)
        added_s[has_feedback] = measure("", 1.0, arrivals, LINK, outcome).added_mean_s
    assert added_s[True] < added_s[False]


def test_a_chunkwise_request_computes_once_all_of_it_is_there() -> None:
    alone = Arrival(0.0, 14336, 0.0088, is_chunkwise=True)
    for policy in POLICIES:
        (client,) = simulate([alone], LINK, a_schedule(policy)).clients
        expected_s = client.demand.payload_bytes / LINK.alone_bytes_per_s + 32 * 0.0088
        assert client.ttft_s == pytest.approx(expected_s, rel=0.01)
        assert LINK.alone_ttft_s(alone) == pytest.approx(expected_s)


@pytest.mark.parametrize("policy", POLICIES)
def test_deliveries_outside_of_the_pool_take_turns_with_it(policy: PolicyName) -> None:
    arrivals = without_windows(with_chunkwise(some_arrivals(80), 0.3, 1), 0.3, 1)
    chunkwise = sum(one.is_chunkwise for one in arrivals)
    windowless = sum(one.told_window_s is None for one in arrivals)
    assert chunkwise == pytest.approx(24, abs=12)
    assert windowless == pytest.approx(24, abs=12)
    assert any(one.is_pooled for one in arrivals)
    outcome = simulate(arrivals, LINK, a_schedule(policy))
    assert len(outcome.clients) == len(arrivals)
    for client in outcome.clients:
        assert client.arrived_bytes == client.demand.payload_bytes
        assert client.ttft_s >= LINK.alone_ttft_s(client.arrival) - 1e-6


# --- tenants that differ ---


def test_a_tenants_weight_counts_its_stalls_more_and_its_cap_holds() -> None:
    arrivals = [Arrival(0.0, 57344, 0.07575, tenant) for tenant in ("heavy", "light")]
    found: dict[str, float] = {}
    shares = {"heavy": TenantShare(weight=9.0), "light": TenantShare(weight=1.0)}
    outcome = simulate(arrivals, LINK, replace(a_schedule("equal"), tenants=shares))
    for client in outcome.clients:
        found[client.arrival.tenant] = client.ttft_s
    assert found["heavy"] < 0.75 * found["light"]
    capped = {"light": TenantShare(cap_gbps=2.0)}
    outcome = simulate(arrivals, LINK, replace(a_schedule("stall_dynamic"), tenants=capped))
    (light,) = [client for client in outcome.clients if client.arrival.tenant == "light"]
    carrying_s = light.demand.payload_bytes / (2.0 * BYTES_PER_GBIT)
    assert light.ttft_s == pytest.approx(carrying_s + 0.07575, rel=0.02)


# --- where requests come from ---

LINES = [
    {"timestamp": 0, "input_length": 1500, "output_length": 1, "hash_ids": [1, 2, 3]},
    {"timestamp": 500, "input_length": 2000, "output_length": 1, "hash_ids": [1, 2, 9, 3]},
    {"timestamp": 900, "input_length": 700, "output_length": 1, "hash_ids": [7, 1]},
    {"timestamp": 950, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]},
]


def a_trace(tmp_path: Path, text: str | None = None) -> Path:
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, LINES)) + "\n" if text is None else text)
    return file


def test_a_hit_is_the_prefix_that_was_seen_before_and_never_the_last_token(tmp_path: Path) -> None:
    profile = read_mix(None).profile
    arrivals = trace_arrivals(a_trace(tmp_path), profile, 100)
    assert [(one.at_s, one.cached_tokens) for one in arrivals] == [(0.5, 1024), (0.95, 512)]
    assert arrivals[0].compute_window_s == profile.window_s(2000, 1024)
    assert len(trace_arrivals(a_trace(tmp_path), profile, 1)) == 1


def test_requests_at_random_have_the_mix_and_the_rate() -> None:
    arrivals = some_arrivals(4000, 5.0)
    assert arrivals[-1].at_s == pytest.approx(800, rel=0.05)
    tokens = [arrival.cached_tokens for arrival in arrivals]
    for cached_tokens, window_ms in COMPUTE_WINDOWS.values():
        assert tokens.count(cached_tokens) == pytest.approx(500, rel=0.15)
        one = next(arrival for arrival in arrivals if arrival.cached_tokens == cached_tokens)
        assert one.compute_window_s == pytest.approx(window_ms / 1e3)


def test_tenants_have_zipfs_shares_and_fairness_is_measured_between_them() -> None:
    arrivals = among_tenants(some_arrivals(5000), 100, 1)
    tenants = [arrival.tenant for arrival in arrivals]
    assert tenants.count("tenant-1") == pytest.approx(10 * tenants.count("tenant-10"), rel=0.3)
    outcome = simulate(arrivals[:200], LINK, a_schedule("stall_dynamic"))
    fairness = measure("", 1.0, arrivals[:200], LINK, outcome).fairness
    assert fairness is not None
    assert fairness.tenants == len(set(tenants[:200]))
    assert 1 / fairness.tenants <= fairness.jain <= 1.0
    assert jain_index([1.0, 1.0, 1.0]) == pytest.approx(1.0)
    assert jain_index([5.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain_index([0.0]) == 1.0


def test_the_default_rate_offers_seventy_percent_of_the_link(
    capsys: pytest.CaptureFixture[str],
) -> None:
    mix = read_mix(None)
    rate_per_s = rate_for(mix, 0.7, LINK.alone_bytes_per_s / LINK.token_bytes)
    arrivals = poisson_arrivals(mix, 5000, rate_per_s, 1)
    assert offered_utilisation(arrivals, LINK) == pytest.approx(0.7, rel=0.05)
    assert offered_utilisation([Arrival(0.0, 512, 0.01)], LINK) is None
    for gbps in ("10", "100"):
        flags = ["--cap-gbps", "200", "--nic-gbps", gbps, "--requests", "150", "--load", "x0.5,x1"]
        assert main([*flags, "--policy", "equal", "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)
        offered = [row["offered_utilisation"] for row in rows]
        assert offered == pytest.approx([0.35, 0.7], rel=0.1)


# --- the command ---


def test_json_and_csv_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.csv"
    flags = ["--cap-gbps", "50", "--requests", "20", "--load", "x0.5,x2", "--tenants", "3"]
    assert main([*flags, "--json", "--csv", str(file)]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["load"], row["policy"]) for row in rows] == [
        (load, policy) for load in (0.5, 2.0) for policy in POLICIES
    ]
    with file.open() as stream:
        written = list(csv.DictReader(stream))
    assert [float(row["added_mean_s"]) for row in written] == [row["added_mean_s"] for row in rows]
    assert [float(row["jain"]) for row in written] == [row["fairness"]["jain"] for row in rows]


def test_the_table_names_policy_and_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--cap-gbps", "50", "--policy", "stall_dynamic", "--trace", str(a_trace(tmp_path))]
    assert main(flags) == 0
    shown = capsys.readouterr()
    assert "trace.jsonl, 2 deliveries, 50 Gbps" in shown.out
    assert "stall_dynamic" in shown.out
    assert "equal" not in shown.out
    assert "No lower bound is stated for arrivals over time" in shown.out
    assert "offered" in shown.out
    assert "decisions in" in shown.err


def test_a_terminal_is_told_in_one_line_and_a_file_in_many_what_is_being_simulated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress_module, "FIRST_S", math.inf)  # however slow the machine is
    flags = ["--cap-gbps", "50", "--requests", "5", "--policy", "equal", "--load", "x1,x2"]
    assert main(flags) == 0
    told = [re.sub(r"after [0-9.]+ s", "after T s", line) for line in said(capsys).splitlines()]
    assert told[:3] == [
        "simulating 2 runs of 5 deliveries",
        "1 of 2 after T s: equal, load x1",
        "2 of 2 after T s: equal, load x2",
    ]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(flags) == 0
    parts = said(capsys).split("\r\x1b[K")
    assert [part.partition(" ")[0] for part in parts[1:4]] == ["simulating", "1", "2"]
    assert parts[4].endswith("/s\n")  # in a line of its own


@pytest.mark.parametrize("is_terminal", [False, True])
def test_what_is_left_is_told_from_what_has_ended_since_the_first_end(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    at = [100.0, 0]  # the time, and how many have ended
    progress = SimulationProgress(2, 100, lambda: int(at[1]), lambda: at[0])
    progress.begin(2)
    for at[:] in [(101.0, 0), (105.0, 10), (106.0, 30), (107.0, 50), (107.5, 60)]:
        progress.look()
    progress.run_ended("equal")
    at[:] = [109.0, 90]
    progress.look()
    at[:] = [112.0, 200]
    progress.run_ended("stall_opt")
    told = [line for line in re.split(r"\n|\r\x1b\[K", said(capsys)) if line]
    assert told == [
        "simulating 2 runs of 100 deliveries, 2 at once",
        "25% after 7.0 s, about 8 s to go",  # 40 in 2 s, of 150
        "1 of 2 after 7.5 s, about 7 s to go: equal",
        *(["45% after 9.0 s, about 6 s to go"] if is_terminal else []),
        "2 of 2 after 12.0 s: stall_opt",
    ]


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err


def test_runs_in_processes_of_their_own_have_the_outcomes_of_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--cap-gbps", "50", "--requests", "20", "--load", "x1,x2", "--policy", "equal"]
    assert main([*flags, "--json"]) == 0
    alone = capsys.readouterr().out
    monkeypatch.setattr(side_by_side, "DELIVERIES_ALONE_MAX", 0)

    def two_cores(_: int) -> set[int]:
        return {0, 1}

    monkeypatch.setattr(os, "sched_getaffinity", two_cores)
    assert main([*flags, "--json"]) == 0
    shown = capsys.readouterr()
    assert "of 20 deliveries, 2 at once" in shown.err
    assert shown.out == alone


def test_tenants_that_are_named_have_columns_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--cap-gbps", "50", "--requests", "40", "--tenants", "3", "--policy", "equal"]
    flags += ["--tenant", "1=0.5:10", "--tenant", "tenant-3=8"]
    assert main(flags) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "tenant-1, mean ms" in shown
    assert "tenant-2, mean ms" not in shown
    assert "tenant-3, mean ms" in shown
    file = tmp_path / "figures.csv"
    assert main([*flags, "--json", "--csv", str(file)]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert [one["tenant"] for one in row["tenants"]] == ["tenant-1", "tenant-3"]
    with file.open() as stream:
        (written,) = csv.DictReader(stream)
    for one in row["tenants"]:
        assert float(written[f"{one['tenant']}_added_mean_s"]) == one["added_mean_s"]


@pytest.mark.parametrize("module", ["simulation", "what_if"])
def test_a_reader_that_leaves_ends_the_command_quietly(tmp_path: Path, module: str) -> None:
    requests = tmp_path / "requests.csv"
    rows = "".join(f"r{number},1000,0.01,2\n" for number in range(500))
    requests.write_text("name,bytes_per_layer,compute_window_s,num_layers\n" + rows)
    loads = ",".join(["x1"] * 16)  # more rows, of both, than wait to be written
    flags = {
        "simulation": ["--requests", "2", "--load", loads],
        "what_if": ["--policy", "equal", str(requests)],
    }
    command = [sys.executable, "-m", f"objectcache_storage_server.{module}", "--cap-gbps", "50"]
    with subprocess.Popen(
        [*command, *flags[module]], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait(60) == -signal.SIGPIPE
    assert "Error" not in errors
    assert "Exception" not in errors


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_the_plot_is_drawn(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib comes with the extra figures")
    file = tmp_path / f"figure.{suffix}"
    flags = ["--cap-gbps", "50", "--requests", "10", "--load", "x1,x2", "--plot", str(file)]
    assert main(flags) == 0
    assert file.stat().st_size > 1000


def test_without_matplotlib_the_remedy_is_named_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    flags = ["--cap-gbps", "50", "--requests", "200000", "--plot", str(tmp_path / "f.svg")]
    assert main(flags) == 2
    assert 'pip install "objectcache[figures]"' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ([], "--cap-gbps"),
        (["--cap-gbps", "0"], "--cap-gbps must be from 0.001"),
        (["--cap-gbps", "nan"], "--cap-gbps must be from 0.001"),
        (["--cap-gbps", "fast"], "--cap-gbps"),
        (["--nic-gbps", "0"], "--nic-gbps must be"),
        (["--engine-gbps", "-1"], "--engine-gbps must be"),
        (["--engine-latency-ms", "-1"], "--engine-latency-ms must be"),
        (["--margin-gbps", "-1"], "--margin-gbps must be"),
        (["--requests", "0"], "--requests must be from 1"),
        (["--rate", "0"], "--rate must be"),
        (["--tenants", "0"], "--tenants must be"),
        (["--deliveries-max", "0"], "--deliveries-max must be"),
        (["--window-error", "0.5"], "--window-error must be from 1"),
        (["--chunkwise", "1.5"], "--chunkwise must be from 0 to 1"),
        (["--windowless", "-1"], "--windowless must be from 0 to 1"),
        (["--tenant", "1=2"], "say how many with --tenants"),
        (["--tenants", "3", "--tenant", "1"], "--tenant must be like 3=2"),
        (["--tenants", "3", "--tenant", "4=2"], "--tenants has numbers from 1 to 3"),
        (["--tenants", "3", "--tenant", "1=heavy"], "the weight must be from 0.001 to 1000"),
        (["--tenants", "3", "--tenant", "1=2:0"], "the cap must be from 0.001"),
        (["--tenants", "3", "--tenant", "1=2", "--tenant", "tenant-1=3"], "names tenant-1 twice"),
        (["--tenants", "3", *["--tenant", "1=2"] * 65], "may be given 64 times"),
        (["--seed", "x"], "--seed"),
        (["--load", "x1,fast"], "--load must be like x0.5,x1,x2"),
        (["--load", "x0"], "--load must be like"),
        (["--load", ",".join(["x1"] * 33)], "at most 32"),
        (["--policy", "fifo"], "--policy"),
        (["--rates", "ever"], "--rates"),
        (["--policy", "equal", "--all"], "--all"),
        (["--trace", "missing.jsonl"], "cannot read missing.jsonl"),
        (["--mix", "missing.csv"], "cannot read missing.csv"),
        (["--trace", "missing.jsonl", "--rate", "5"], "--rate is of requests at random"),
        (["--plot", "figure.pdf"], "--plot must end in .svg or .png"),
        (
            ["--csv", "/nowhere/figures.csv", "--requests", "2"],
            "--csv is /nowhere/figures.csv: there is",
        ),
        (["--unknown"], "--unknown"),
    ],
)
def test_a_wrong_flag_gives_one_clear_line(
    flags: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if flags and "--cap-gbps" not in flags:
        flags = ["--cap-gbps", "50", *flags]
    assert main(flags) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("objectcache simulate: ")
    assert problem in lines[0]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no request finds a block"),
        ("{}\n", "line 1: Object missing required field `timestamp`"),
        ("x\n", "line 1: JSON is malformed"),
        (json.dumps(LINES[0]) + '\n{"timestamp": "a"}\n', "line 2"),
        (json.dumps({**LINES[0], "timestamp": -1}), "line 1: timestamp must be"),
        (json.dumps({**LINES[0], "input_length": 0}), "line 1: input_length must be"),
    ],
)
def test_a_broken_trace_is_refused_with_its_line(
    tmp_path: Path, text: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--cap-gbps", "50", "--trace", str(a_trace(tmp_path, text))]) == 2
    assert problem in capsys.readouterr().err


def test_a_broken_mix_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mix.csv"
    file.write_text("context,hit_rate\n4K,0.5\n")
    assert main(["--cap-gbps", "50", "--mix", str(file)]) == 2
    assert "line 1 must be context,hit_rate" in capsys.readouterr().err


def test_the_command_of_the_client_runs_it() -> None:
    flags = ["--cap-gbps", "50", "--requests", "5", "--json", "--policy", "stall_dynamic"]
    done = subprocess.run(
        [sys.executable, "-m", "objectcache_operations", "simulate", *flags],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    (row,) = json.loads(done.stdout)
    assert row["served"] == 5
