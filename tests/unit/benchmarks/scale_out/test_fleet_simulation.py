"""What holds in the simulation whatever is lost or added, and what its rules come to."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from benchmarks.scale_out.figures_of_runs import BALANCE_GOAL, Figures, figures_of
from benchmarks.scale_out.fleet_simulation import FleetPlan, FleetSimulation, Outcome
from benchmarks.scale_out.index_costs import GIVEN
from benchmarks.scale_out.prefill_requests import made_up_requests
from tests.unit.examples import examples

PLAN = FleetPlan(
    servers=4,
    engines=40,
    chunk_tokens=16,
    seconds=12.0,
    costs=GIVEN,
    gateways=3,
    link_gbps=50.0,
    lost_at_s=9.0,
    added_at_s=13.0,
)


def simulated(plan: FleetPlan, rate_per_s: float = 40.0) -> Outcome:
    requests = made_up_requests(rate_per_s, plan.seconds, plan.seed)

    async def run() -> Outcome:
        return FleetSimulation(plan, requests).run()

    return asyncio.run(run())


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    """Of a run in which a server is lost while it has work, and another added."""
    return simulated(PLAN)


def figures(plan: FleetPlan) -> Figures:
    return figures_of(plan, simulated(plan))


def test_every_request_is_served_once_and_stored_once(outcome: Outcome) -> None:
    assert outcome.retries > 0, "nothing was under way on the server that was lost"
    assert outcome.open == 0
    assert len(outcome.servings) > 300
    assert {(one.served, one.stored) for one in outcome.servings} == {(1, 1)}


def test_every_server_replays_every_record_once(outcome: Outcome) -> None:
    records, servers = outcome.log.records, outcome.servers
    assert [one.is_lost for one in servers] == [False, False, True, False, False]
    for server in servers:
        assert (server.index.end == len(records)) is not server.is_lost
    assert [record.number for record in records] == list(range(len(records)))
    lost_end = servers[2].index.end
    assert [record.applied_by for record in records] == [
        5 if record.number < lost_end else 4 for record in records
    ]


def test_every_block_is_stored_by_one_record(outcome: Outcome) -> None:
    log = outcome.log
    asked = {block for one in outcome.servings for block in one.request.blocks}
    assert set(log.stored) == asked
    chunks = sum(record.chunks for record in log.records)
    assert chunks == len(asked) * log.chunks_per_block
    assert all(number < len(log.records) for number in log.stored.values())


def test_every_engine_has_one_session_on_a_server_that_is_there(outcome: Outcome) -> None:
    held = {one.name: 0 for one in outcome.servers}
    for engine in outcome.engines:
        assert engine.server is not None
        assert not engine.server.is_lost
        held[engine.server.name] += 1
    living = [one for one in outcome.servers if not one.is_lost]
    assert [one.sessions for one in living] == [held[one.name] for one in living]
    assert sum(held.values()) == PLAN.engines


def test_nothing_is_left_under_way(outcome: Outcome) -> None:
    assert [one.load for one in outcome.servers] == [0] * 5


def test_what_is_carried_is_what_was_matched_and_put(outcome: Outcome) -> None:
    assert all(one.matched <= len(one.request.blocks) for one in outcome.servings)
    assert len(outcome.get_s) == len(outcome.servings)
    assert len(outcome.put_s) == sum(
        one.matched < len(one.request.blocks) for one in outcome.servings
    )


def test_a_seed_makes_the_same_run_again_and_another_one_does_not() -> None:
    plan = replace(PLAN, seconds=4.0, lost_at_s=6.0, added_at_s=8.0)
    assert figures(plan) == figures(plan)
    assert figures(plan) != figures(replace(plan, seed=1))


@pytest.mark.parametrize("seed", range(examples(2)))
def test_sessions_are_spread_within_the_goal_also_when_a_server_is_lost_or_added(
    seed: int,
) -> None:
    plan = FleetPlan(
        servers=16,
        engines=1000,
        chunk_tokens=256,
        seconds=8.0,
        costs=GIVEN,
        lost_at_s=6.5,
        added_at_s=8.5,
        seed=seed,
    )
    outcome = simulated(plan, 100.0)
    assert max(one.sessions.most for one in outcome.phases) <= BALANCE_GOAL
    assert outcome.phases[-1].sessions.least > 0, "the server that was added has none"
    assert outcome.moves > 0


def test_what_comes_without_a_session_fills_what_sessions_leave() -> None:
    plan = FleetPlan(
        servers=8, engines=200, chunk_tokens=256, seconds=30.0, costs=GIVEN, link_gbps=50.0
    )
    (phase,) = simulated(plan, 40.0).phases
    assert phase.both.most <= BALANCE_GOAL < phase.bound.most


def test_what_one_link_cannot_carry_is_named() -> None:
    plan = replace(PLAN, servers=1, link_gbps=10.0, lost_at_s=None, added_at_s=None)
    found = figures(plan)
    assert "link" in found.beyond
    assert found.open > 0
    assert "link" not in figures(replace(plan, link_gbps=10_000.0)).beyond
