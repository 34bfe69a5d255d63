"""Loads before their requests are scheduled: no step computes on what is not there, whatever fails,
however steps run.
"""

# ruff: noqa: F401, F811 (fixtures of another module)

from __future__ import annotations

import os
import signal
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from objectcache.connectors.vllm.before_schedule.side_copies import SideCopies
from objectcache.connectors.vllm.plans import LoadPlan
from objectcache.deliveries.delivery import Delivery
from objectcache.kv_bucket import KvBucket
from tests.engines.delivery_traces import NewTraces
from tests.engines.test_vllm_connector import (
    BLOCK_BYTES,
    BUCKET,
    StartEngine,
    configs,
    prompt,
    start,
    stored_by_another,
)
from tests.engines.test_vllm_shared_failures import wrong_now
from tests.engines.vllm_engine import BLOCK_TOKENS, Engine, EngineConfigs
from tests.servers import RunningServer, running_server, stop_whole

SHARED = 320
BLOCKS = SHARED // BLOCK_TOKENS
WAIT_S = 30.0
Fresh = Callable[[int, int], list[int]]
Fetch = Callable[[LoadPlan], Delivery]


class Held:
    """The deliveries of an engine's workers, which begin when they are let go."""

    def __init__(self, engine: Engine) -> None:
        self._workers = [worker._worker.parked for worker, _ in engine.workers]
        self._fetches: list[Fetch] = [parked._fetch for parked in self._workers]
        self.let_go = threading.Event()
        for parked, fetch in zip(self._workers, self._fetches, strict=True):
            parked._fetch = self._held(fetch)

    def _held(self, fetch: Fetch) -> Fetch:
        def wait(plan: LoadPlan) -> Delivery:
            assert self.let_go.wait(WAIT_S)
            return fetch(plan)

        return wait


def refuse(engine: Engine, rank: int | None = None) -> None:
    """Have all deliveries fail, or those of one rank."""

    def refused(plan: LoadPlan) -> Delivery:
        raise RuntimeError("a failure that begins no pause")

    for number, (worker, _) in enumerate(engine.workers):
        if rank in (None, number):
            worker._worker.parked._fetch = refused


class FailingCopies(SideCopies):
    """A device that says when it is waited for that a copy has failed."""

    @contextmanager
    def behind_steps(self) -> Iterator[None]:
        yield
        raise RuntimeError("CUDA error: unspecified launch failure")


def step_until_parked(engine: Engine, name: str) -> None:
    while engine.scheduler.requests[name].status != RequestStatus.WAITING_FOR_REMOTE_KVS:
        engine.step()


@pytest.fixture(params=[False, True], ids=["in turn", "asynchronous"])
def start_before(
    request: pytest.FixtureRequest,
    start: StartEngine,
    configs: EngineConfigs,
    monkeypatch: pytest.MonkeyPatch,
) -> StartEngine:
    """Engines that load before they schedule, under both kinds of scheduling."""

    def start_engine(**chosen: Any) -> Engine:
        monkeypatch.setattr(configs, "asynchronous", request.param)
        engine = start(load_mode="before_schedule", **chosen)
        monkeypatch.setattr(configs, "asynchronous", False)
        return engine

    return start_engine


@pytest.fixture
def fresh(request: pytest.FixtureRequest) -> Fresh:
    """Prompts that no other test has stored."""
    of_test = zlib.crc32(request.node.nodeid.encode())
    return lambda seed, count: prompt(of_test + seed, count)


def run(engine: Engine) -> None:
    """Run as the engine's scheduling does."""
    if type(engine.scheduler).__name__ == "AsyncScheduler":
        engine.run_ahead()
    else:
        engine.run()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_request_is_scheduled_when_its_kv_is_in_its_blocks(
    start: StartEngine, start_before: StartEngine, fresh: Fresh, ranks: int
) -> None:
    tokens = fresh(800 + ranks, 100)
    stored_by_another(start, tokens, ranks=ranks)
    second = start_before(ranks=ranks)
    held = Held(second)
    request = second.add("again", tokens)
    other = second.add("other", fresh(803, 60), answer_tokens=5)
    step_until_parked(second, "again")
    while not other.num_output_tokens:  # it does not wait for the load
        assert "again" not in second.step().num_scheduled_tokens
    held.let_go.set()
    run(second)
    assert second.loaded_tokens == {"again": 96}
    assert second.computed_tokens == 4 + 60 + 4
    assert second.wrong_positions(request) == []
    assert second.failed_blocks == set()


@pytest.mark.parametrize(("ranks", "failing"), [(1, None), (2, None), (2, 1)])
def test_after_a_failed_load_everything_is_computed_and_stored_again(
    start: StartEngine, start_before: StartEngine, fresh: Fresh, ranks: int, failing: int | None
) -> None:
    tokens = fresh(810 + ranks + (failing or 0), SHARED)
    longer = tokens + fresh(815, 100)
    stored_by_another(start, tokens, ranks=ranks)
    second = start_before(ranks=ranks)
    refuse(second, failing)
    requests = [
        second.add(f"sharer {number}", longer[: len(longer) - number], answer_tokens=5)
        for number in range(3)
    ]
    run(second)
    assert second.failed_blocks
    assert [second.wrong_positions(request) for request in requests] == [[], [], []]
    assert [request.num_output_tokens for request in requests] == [5, 5, 5]
    second.saved()
    third = start(ranks=ranks)
    request = third.add("third", longer)
    third.run()
    assert third.loaded_tokens["third"] == len(longer) // BLOCK_TOKENS * BLOCK_TOKENS
    assert third.wrong_positions(request) == []


def test_after_a_copy_that_failed_on_the_device_everything_is_computed(
    start: StartEngine, start_before: StartEngine, fresh: Fresh
) -> None:
    tokens = fresh(818, SHARED)
    stored_by_another(start, tokens)
    second = start_before()
    second.worker._worker.parked._side_copies = FailingCopies()
    request = second.add("again", [*tokens, 7])
    run(second)
    assert len(second.failed_blocks) == BLOCKS
    assert second.computed_tokens == SHARED + 1
    assert second.wrong_positions(request) == []
    assert second.worker._worker.parked.failures == 1


def test_the_server_is_told_who_loads_and_that_nothing_is_computed_between_layers(
    start: StartEngine,
    start_before: StartEngine,
    fresh: Fresh,
    server: RunningServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens = fresh(819, SHARED)
    stored_by_another(start, tokens)
    said: list[dict[str, Any]] = []
    fetch = KvBucket.fetch

    def heard(bucket: KvBucket, keys: list[str], **chosen: Any) -> Delivery:
        said.append(chosen)
        return fetch(bucket, keys, **chosen)

    monkeypatch.setattr(KvBucket, "fetch", heard)
    second = start_before(compute_profile="a-llama")
    traces = NewTraces(server, BUCKET)
    second.add("again", tokens + fresh(820, 50))
    run(second)
    assert second.loaded_tokens["again"] == SHARED
    (trace,) = traces.all_ended(1)
    assert (trace.window_source, trace.delivery) == ("whole", "layerwise")
    (asked,) = said
    assert asked["fingerprint"] == "a-llama"
    assert asked["context_tokens"] == SHARED + 50
    assert asked["computed_tokens"] is None


def test_of_a_prefix_that_lost_its_end_the_rest_is_loaded(
    start: StartEngine, start_before: StartEngine, fresh: Fresh
) -> None:
    tokens = fresh(820, 100)
    first = stored_by_another(start, tokens)
    worker = first.worker._worker
    hashes = [bytes(part) for part in first.request("hashes", tokens).block_hashes]
    keys = worker._geometry.namespace.keys(hashes)
    second = start_before()
    second.before_loads = lambda: worker._store.bucket().delete(keys[4])
    request = second.add("again", tokens)
    run(second)
    assert len(second.failed_blocks) == 2
    assert second.computed_tokens == 100 - 4 * BLOCK_TOKENS
    assert second.wrong_positions(request) == []
    second.saved()
    assert worker._store.bucket().match(keys) == 6


def test_a_request_that_is_aborted_while_it_is_loaded_gives_its_blocks_back_afterwards(
    start: StartEngine, start_before: StartEngine, fresh: Fresh
) -> None:
    tokens = fresh(830, SHARED)
    stored_by_another(start, tokens)
    second = start_before()
    pool = second.scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    held = Held(second)
    second.add("victim", tokens + fresh(831, 50))
    step_until_parked(second, "victim")
    second.scheduler.finish_requests(["victim"], RequestStatus.FINISHED_ABORTED)
    second.step()
    assert pool.get_num_free_blocks() < free
    held.let_go.set()
    while "victim" in second.scheduler.requests:
        second.step()
    assert pool.get_num_free_blocks() == free
    later = second.add("later", tokens + fresh(832, 50))
    run(second)
    assert second.loaded_tokens["later"] == SHARED
    assert second.wrong_positions(later) == []
    assert second.worker._worker.parked.failures == 0


def test_loads_wait_for_the_memory_that_earlier_steps_loads_still_hold(
    start: StartEngine, start_before: StartEngine, fresh: Fresh
) -> None:
    prompts = {f"r{number}": fresh(840 + number, 100) for number in range(3)}
    first = start()
    for name, tokens in prompts.items():
        assert first.answer(name, tokens) == 0
    first.saved()
    second = start_before(load_bytes_max=8 * BLOCK_BYTES)
    held = Held(second)
    requests = [second.add(name, tokens) for name, tokens in prompts.items()]
    while not second.worker._worker.parked._under_way:  # whoever's answer is there first
        second.step()
    for _ in range(20):
        second.step()
    statuses = [request.status for request in requests]
    assert sorted(statuses) == [RequestStatus.WAITING] * 2 + [RequestStatus.WAITING_FOR_REMOTE_KVS]
    held.let_go.set()
    run(second)
    assert second.loaded_tokens == dict.fromkeys(prompts, 96)
    assert second.failed_blocks == set()
    assert [second.wrong_positions(request) for request in requests] == [[], [], []]


def test_weights_that_change_while_a_load_is_under_way_leave_nothing_of_the_old_ones(
    start: StartEngine, start_before: StartEngine, fresh: Fresh
) -> None:
    tokens = fresh(850, SHARED)
    stored_by_another(start, tokens)
    second = start_before()
    held = Held(second)
    old = second.add("old", tokens + fresh(851, 50))
    step_until_parked(second, "old")
    second.scheduler.reset_prefix_cache(reset_connector=True)
    new = second.add("new", tokens + fresh(852, 50))
    second.step()
    assert new.status == RequestStatus.WAITING  # it would find what the load brings
    held.let_go.set()
    run(second)
    assert second.computed_tokens == SHARED + 50 + 50
    assert "new" not in second.loaded_tokens
    assert [second.wrong_positions(request) for request in (old, new)] == [[], []]


def test_weights_that_change_when_a_load_has_just_ended_are_not_found_by_others(
    start: StartEngine, start_before: StartEngine, fresh: Fresh
) -> None:
    tokens = fresh(855, SHARED)
    stored_by_another(start, tokens)
    second = start_before()
    second.add("old", tokens + fresh(856, 50))
    while "old" not in second.scheduler.finished_recving_kv_req_ids:
        second.step()
    second.scheduler.reset_prefix_cache(reset_connector=True)
    second.add("new", tokens + fresh(857, 50))
    run(second)
    assert second.computed_tokens == 50 + SHARED + 50


def test_a_server_that_stands_still_is_not_waited_for_longer_than_said(
    tmp_path: Path, start: StartEngine, start_before: StartEngine, fresh: Fresh
) -> None:
    tokens = fresh(860, 100)
    with running_server(tmp_path / "data") as server:
        stored_by_another(start, tokens, on=server)
        second = start_before(on=server, load_timeout_s=0.2)
        second.before_loads = lambda: stop_whole(server.gateway_pid)
        try:
            request = second.add("again", tokens)
            run(second)
        finally:
            os.kill(server.gateway_pid, signal.SIGCONT)
        assert len(second.failed_blocks) == 6
        assert second.wrong_positions(request) == []


def test_a_server_that_is_killed_in_the_middle_costs_only_the_computing(
    tmp_path: Path, start: StartEngine, start_before: StartEngine, fresh: Fresh
) -> None:
    tokens = fresh(861, 1000)
    with running_server(tmp_path / "data", "scheduler.cap_gbps=0.001") as server:
        stored_by_another(start, tokens, on=server)
        second = start_before(on=server)
        request = second.add("again", tokens)
        step_until_parked(second, "again")
        parked = second.worker._worker.parked
        while not parked._under_way["again"]._installed:
            second.step()
        server.kill_gateway()
        server.kill_storage()
        run(second)
        assert len(second.failed_blocks) == 62
        assert second.wrong_positions(request) == []


def test_an_engine_that_ends_while_it_loads_waits_for_no_server(
    start: StartEngine, start_before: StartEngine, fresh: Fresh
) -> None:
    tokens = fresh(870, SHARED)
    stored_by_another(start, tokens)
    second = start_before()
    held = Held(second)
    second.add("again", tokens + fresh(871, 50))
    step_until_parked(second, "again")
    parked = second.worker._worker.parked
    held.let_go.set()
    second.worker.shutdown()
    assert parked._under_way == {}


def fail_next_layerwise_load(engine: Engine) -> None:
    def refused(plan: LoadPlan) -> Delivery:
        raise RuntimeError("a failure that begins no pause")

    engine.worker._worker.loads._fetch = refused


def test_vllm_does_not_survive_a_failed_load_of_the_other_mode_under_asynchronous_scheduling(
    start: StartEngine, configs: EngineConfigs, monkeypatch: pytest.MonkeyPatch, fresh: Fresh
) -> None:
    """Not ours to repair: it forgets that the failed step's sample was taken back."""
    tokens = fresh(880, SHARED)
    stored_by_another(start, tokens)
    monkeypatch.setattr(configs, "asynchronous", True)
    second = start(load_mode="layerwise")
    fail_next_layerwise_load(second)
    second.add("victim", [*tokens, 7], answer_tokens=5)
    with pytest.raises(IndexError, match="request victim has no token"):
        second.run_ahead()


def test_where_vllm_does_not_survive_it_the_mode_is_the_other_one(
    start: StartEngine, configs: EngineConfigs, monkeypatch: pytest.MonkeyPatch, fresh: Fresh
) -> None:
    tokens = fresh(881, SHARED)
    stored_by_another(start, tokens)
    monkeypatch.setattr(configs, "asynchronous", True)
    second = start(load_mode="auto")
    refuse(second)
    victim = second.add("victim", [*tokens, 7], answer_tokens=5)
    second.run_ahead()
    assert second.failed_blocks
    assert second.wrong_positions(victim) == []
    assert victim.num_output_tokens == 5
