"""Small clusters, run to the end: what must hold however large they are."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest

from objectcache_dispatch import symmetric
from objectcache_laboratory.cluster.links import ReadOrder
from objectcache_laboratory.cluster.measures import ClusterMeasures
from objectcache_laboratory.cluster.models import MODELS
from objectcache_laboratory.cluster.placement import PLACINGS
from objectcache_laboratory.cluster.run import ClusterOptions, simulate
from objectcache_laboratory.cluster.trajectories import TRACES, Trajectory, generate
from objectcache_laboratory.cluster.two_nics import TwoNics, added_ttft
from objectcache_schemas.errors import InvalidRequest

MODEL = replace(MODELS["ds27b"], prefill_flop_per_s=1e15)  # so that NICs are what is full
TOTAL_BYTES = MODEL.layer_bytes_per_token * MODEL.num_layers


def short_agents(count: int, turns: int = 6) -> list[Trajectory]:
    """All alike: 20,000 tokens and then 200 more a turn, of which half are generated."""
    rows = [[20_000 + 200 * (turn - 1) + 100, 100, 100] for turn in range(turns)]
    rows[0] = [0, 20_000, 100]
    return [Trajectory(np.array(rows, np.int32)) for _ in range(count)]


def run(
    options: ClusterOptions, prefill: int = 1, decode: int = 1, agents: int = 60
) -> ClusterMeasures:
    topology = symmetric(
        prefill, decode, gpus=2, storage_nic_bytes_per_s=1e9, kv_capacity_tokens=2_500_000
    )
    return simulate(topology, MODEL, short_agents(agents), options)


@pytest.mark.parametrize("routes", PLACINGS)
def test_every_turn_is_served_and_every_whole_block_is_read_once(routes: str) -> None:
    found = run(ClusterOptions(routes=routes), 1, 2, agents=20)
    blocks = sum(-(-int(cached) // 64) for cached in short_agents(1)[0].turns[:, 0])
    assert found.requests == 20 * 6
    assert found.prefill_nic_bytes + found.decode_nic_bytes == pytest.approx(
        20 * blocks * 64 * TOTAL_BYTES
    )
    assert found.agent_s.p99 <= found.jct_s


@pytest.mark.parametrize("order", ["first_come", "due_time"])
def test_the_same_arguments_give_the_same_measures(order: ReadOrder) -> None:
    options = ClusterOptions(routes="any_node", order=order, arrivals_per_s=3.0, seed=5)
    assert asdict(run(options)) == asdict(run(options))
    assert asdict(run(options)) != asdict(run(replace(options, seed=6)))


def test_one_path_leaves_the_decode_nodes_nic_idle_and_two_paths_do_not() -> None:
    single = run(ClusterOptions(routes="single"))
    dual = run(ClusterOptions(routes="paper"))
    oracle = run(ClusterOptions(routes="paper", is_oracle=True))
    assert single.decode_nic_bytes == 0
    assert dual.decode_nic_bytes == pytest.approx(dual.prefill_nic_bytes, rel=0.25)
    assert 1.4 < single.jct_s / dual.jct_s < 2.1
    assert oracle.jct_s < dual.jct_s
    assert oracle.prefill_nic_bytes + oracle.decode_nic_bytes == 0


@pytest.mark.parametrize(("prefill", "decode", "agents"), [(1, 2, 90), (2, 4, 240)])
def test_what_routes_gain_and_how_even_nics_are_where_these_are_what_is_full(
    prefill: int, decode: int, agents: int
) -> None:
    single, turns, paper, ours = (
        run(ClusterOptions(routes=routes, seed=1), prefill, decode, agents)
        for routes in ("single", "round_robin", "paper", "any_node")
    )
    assert single.nic_max_over_mean == pytest.approx(3.0)  # two of three NICs bring nothing
    assert turns.nic_max_over_mean == pytest.approx(1.5, abs=0.15)  # half over a third of them
    assert paper.nic_max_over_mean < 1.30
    assert ours.nic_max_over_mean < 1.10
    assert 1.7 < single.jct_s / turns.jct_s < 2.0  # half of the bytes go the other way
    assert 2.7 < single.jct_s / paper.jct_s < 3.2  # three times the NICs
    assert ours.jct_s == pytest.approx(paper.jct_s, rel=0.05)


def test_single_path_is_as_fast_with_more_decode_nodes() -> None:
    one, two = (run(ClusterOptions(routes="single"), 1, decode) for decode in (1, 2))
    assert one.jct_s == pytest.approx(two.jct_s, rel=0.05)


def test_two_paths_of_one_and_one_node_are_as_fast_as_one_path_of_two_prefill_nodes() -> None:
    dual = run(ClusterOptions(routes="paper"), 1, 1)
    single = run(ClusterOptions(routes="single"), 2, 1)
    assert dual.jct_s == pytest.approx(single.jct_s, rel=0.10)


def test_whole_reads_begin_to_compute_later_than_reads_by_layer() -> None:
    layerwise = run(ClusterOptions(routes="single", reads="layerwise"), agents=1)
    whole = run(ClusterOptions(routes="single", reads="whole"), agents=1)
    assert layerwise.read_s.mean < whole.read_s.mean


def test_agents_that_arrive_at_a_rate_are_measured_after_the_warm_up() -> None:
    options = ClusterOptions(arrivals_per_s=2.0, warm_s=5.0)
    everything = run(replace(options, warm_s=0.0))
    assert run(options).ttft_s != everything.ttft_s
    assert run(replace(options, until_s=10.0)).requests < everything.requests


def test_waits_between_turns_lengthen_an_agent_by_as_much() -> None:
    topology = symmetric(1, 1, gpus=2)
    (agent,) = short_agents(1)
    waiting = Trajectory(agent.turns, np.full(len(agent.turns), 2.0))
    quick = simulate(topology, MODEL, [agent], ClusterOptions())
    slow = simulate(topology, MODEL, [waiting], ClusterOptions())
    assert slow.jct_s - quick.jct_s == pytest.approx(5 * 2.0, abs=0.2)


def test_wrong_options_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="routes 'best' are not known; of single"):
        ClusterOptions(routes="best")
    with pytest.raises(InvalidRequest, match="arrivals_per_s is 0"):
        ClusterOptions(arrivals_per_s=0)
    with pytest.raises(InvalidRequest, match="no trajectories"):
        simulate(symmetric(1, 1), MODEL, [], ClusterOptions())


@pytest.mark.parametrize(("rates_gbps", "share_max"), [((50.0, 50.0), 0.25), ((25.0, 75.0), 0.20)])
def test_due_times_and_least_lateness_take_most_of_the_added_ttft_away(
    rates_gbps: tuple[float, float], share_max: float
) -> None:
    experiment = TwoNics(rates_gbps, requests=1_000, seed=1)
    papers = added_ttft(replace(experiment, policy="shorter_queue", order="first_come"))
    ours = added_ttft(experiment)
    assert ours.mean <= share_max * papers.mean
    assert ours == added_ttft(experiment)


def test_two_nics_that_are_hardly_loaded_lose_nothing_worth_a_word() -> None:
    lost = added_ttft(TwoNics(load=0.01, requests=50))
    assert abs(lost.p50) < 1e-3
    with pytest.raises(InvalidRequest, match="load is 1"):
        TwoNics(load=1.0)
    with pytest.raises(InvalidRequest, match="policy 'best'"):
        TwoNics(policy="best")


def test_any_nodes_nic_carries_as_much_as_the_others_where_none_is_full() -> None:
    topology = symmetric(2, 4, gpus=2, storage_nic_bytes_per_s=3e9, kv_capacity_tokens=2_500_000)
    model = replace(MODEL, prefill_flop_per_s=1e14)
    agents = generate(TRACES["32K"], 80, 1)
    found = simulate(topology, model, agents, ClusterOptions(routes="any_node"))
    assert found.nic_share < 0.7
    assert found.nic_max_over_mean < 1.06  # direct before all that are idle, too, is 1.10


def test_a_quota_is_a_part_of_scheduling_and_workers_in_turn_have_none() -> None:
    for routes, is_cut in (("paper", True), ("round_robin", False)):
        options = ClusterOptions(routes=routes)
        usual, tiny = run(options, agents=8), run(replace(options, quota_s=0.011), agents=8)
        assert (usual.prefill_s != tiny.prefill_s) is is_cut
