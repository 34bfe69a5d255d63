"""What a load that failed leaves in vLLM's blocks and in its own prefix cache: no request computes
on it, and nothing of it reaches the store.
"""

# ruff: noqa: F401, F811 (fixtures of another module)

from __future__ import annotations

from collections.abc import Callable

import pytest
from vllm.v1.request import RequestStatus

from objectcache.connectors.vllm.plans import LoadPlan
from objectcache.deliveries.delivery import Delivery
from tests.engines.test_vllm_connector import (
    StartEngine,
    configs,
    prompt,
    start,
    stored_by_another,
)
from tests.engines.vllm_engine import BLOCK_TOKENS, Engine, EngineConfigs

SHARED = 320


def fail_next_load(engine: Engine) -> None:
    """Fail the deliveries of the next step that has some."""
    sides = [worker._worker for worker, _ in engine.workers]
    workers = [loads for side in sides for loads in (side.loads, side.parked)]
    fetches: list[Callable[[LoadPlan], Delivery]] = [loads._fetch for loads in workers]

    def refuse(plan: LoadPlan) -> Delivery:
        raise RuntimeError("a failure that begins no pause")

    def before_loads() -> None:
        engine.before_loads = restore
        for loads in workers:
            loads._fetch = refuse

    def restore() -> None:
        engine.before_loads = None
        for loads, fetch in zip(workers, fetches, strict=True):
            loads._fetch = fetch

    engine.before_loads = before_loads


def run_until_failed(engine: Engine) -> None:
    while not engine.failed_blocks:
        engine.step()
    if engine.before_loads is not None:
        engine.before_loads()


def assert_nothing_wrong_is_stored(start: StartEngine, tokens: list[int], ranks: int = 1) -> None:
    """A third engine, which has to take the store's word."""
    third = start(ranks=ranks)
    request = third.add("third", tokens)
    third.run()
    assert third.loaded_tokens["third"] >= SHARED
    assert third.wrong_positions(request) == []


def test_a_request_that_is_aborted_after_its_load_failed_leaves_nothing_behind(
    start: StartEngine,
) -> None:
    tokens = prompt(135, SHARED)
    longer = tokens + prompt(136, 100)
    stored_by_another(start, tokens)
    second = start()
    fail_next_load(second)
    second.add("victim", tokens + prompt(137, 50))
    run_until_failed(second)
    second.scheduler.finish_requests(["victim"], RequestStatus.FINISHED_ABORTED)
    later = second.add("later", longer)
    second.run()
    assert second.wrong_positions(later) == []
    second.saved()
    assert_nothing_wrong_is_stored(start, longer)
    assert len(second.scheduler.connector._scheduler._tainted) == 0


def test_what_was_computed_behind_a_failed_load_is_not_found_either(
    start: StartEngine,
) -> None:
    tokens = prompt(138, SHARED)
    longer = tokens + prompt(139, 150)
    stored_by_another(start, tokens)
    second = start()
    fail_next_load(second)
    second.add("victim", longer)  # in one step with what is behind the load
    run_until_failed(second)
    second.scheduler.finish_requests(["victim"], RequestStatus.FINISHED_ABORTED)
    later = second.add("later", [*longer, *prompt(140, 40)])
    second.run()
    assert second.wrong_positions(later) == []
    second.saved()
    assert_nothing_wrong_is_stored(start, longer)


def test_requests_that_share_a_failed_load_store_nothing_wrong(
    start: StartEngine,
) -> None:
    tokens = prompt(141, SHARED)
    stored_by_another(start, tokens)
    second = start()
    fail_next_load(second)
    ends = [prompt(142 + number, 60) for number in range(3)]
    requests = [
        second.add(f"sharer {number}", tokens + end, answer_tokens=20)
        for number, end in enumerate(ends)
    ]
    run_until_failed(second)
    second.run()
    second.saved()
    for end in ends:
        assert_nothing_wrong_is_stored(start, tokens + end)
    del requests


def test_a_request_that_is_preempted_after_its_load_failed_leaves_nothing_behind(
    start: StartEngine,
) -> None:
    tokens = prompt(150, SHARED)
    longer = tokens + prompt(151, 100)
    stored_by_another(start, tokens)
    second = start()
    fail_next_load(second)
    victim = second.add("victim", tokens + prompt(152, 50))
    run_until_failed(second)
    second.scheduler.running.remove(victim)
    second.scheduler._preempt_request(victim, 0.0)
    later = second.add("later", longer)
    second.run()
    assert second.wrong_positions(victim) == []
    assert second.wrong_positions(later) == []
    second.saved()
    assert_nothing_wrong_is_stored(start, longer)


def test_a_chunk_that_is_evicted_before_it_is_fetched_costs_only_what_comes_behind_it(
    start: StartEngine,
) -> None:
    tokens = prompt(153, 100)
    first = stored_by_another(start, tokens)
    worker = first.worker._worker
    hashes = [bytes(part) for part in first.request("hashes", tokens).block_hashes]
    keys = worker._geometry.namespace.keys(hashes)
    second = start()
    second.before_loads = lambda: worker._store.bucket().delete(keys[5])
    request = second.add("again", tokens)
    second.run()
    assert len(second.failed_blocks) == 1
    assert second.computed_tokens == 4 + BLOCK_TOKENS + 4
    assert second.wrong_positions(request) == []
    second.saved()
    assert worker._store.bucket().match(keys) == 6


def test_a_hole_in_a_stored_prefix_is_filled_though_what_is_behind_has_other_bits(
    start: StartEngine,
) -> None:
    import numpy as np

    tokens = prompt(154, SHARED)
    first = stored_by_another(start, tokens)
    worker = first.worker._worker
    bucket, layout = worker._store.bucket(), worker._store.layout
    hashes = [bytes(part) for part in first.request("hashes", tokens).block_hashes]
    keys = worker._geometry.namespace.keys(hashes)
    for key in keys[5:]:
        bucket.delete(key)
    other = np.ones((len(keys) - 6, layout.num_layers, layout.per_layer_chunk_bytes), np.uint8)
    bucket.put(keys[6:], other)
    assert bucket.match(keys) == 5
    second = start()
    second.answer("again", tokens)
    second.saved()
    assert bucket.match(keys) == len(keys)
    bucket.delete(keys[0])
    third = start()
    third.answer("again", tokens)
    third.saved()
    assert bucket.match(keys) == len(keys)


@pytest.mark.parametrize("runs_on", [False, True])
def test_after_a_reset_nothing_of_the_old_weights_is_used_or_mixed_with_the_new(
    start: StartEngine,
    runs_on: bool,
) -> None:
    tokens = prompt(155 + 2 * runs_on, SHARED)
    stored_by_another(start, tokens)
    second = start()
    old = None
    if runs_on:
        old = second.add("old", tokens + prompt(159, 300), answer_tokens=30)
        while not second.computed_tokens:
            second.step()
    done = second.scheduler.reset_prefix_cache(reset_running_requests=False, reset_connector=True)
    assert done is not runs_on
    second.run()
    second.add("new", tokens)
    second.run()
    assert "new" not in second.loaded_tokens
    second.saved()
    again = second.scheduler.connector._scheduler
    stored = second.worker._worker._store.bucket()
    hashes = [bytes(part) for part in second.request("hashes", tokens).block_hashes]
    assert stored.match(again._geometry.namespace.keys(hashes)) == len(hashes)
    if old is not None:
        kept = [bytes(part) for part in old.block_hashes[len(hashes) :]]
        assert stored.match(again._geometry.namespace.keys(kept)) == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_with_steps_under_way_a_failed_load_spoils_nothing_that_is_stored(
    start: StartEngine,
    configs: EngineConfigs,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
) -> None:
    tokens = prompt(160 + ranks, SHARED)
    longer = tokens + prompt(170 + ranks, 560)  # computed in several steps
    stored_by_another(start, tokens, ranks=ranks)
    monkeypatch.setattr(configs, "asynchronous", True)
    second = start(ranks=ranks)
    assert type(second.scheduler).__name__ == "AsyncScheduler"
    fail_next_load(second)
    second.add("victim", longer)
    second.add("sharer", tokens + prompt(180 + ranks, 60))
    second.is_strict = False  # vLLM may end here; what counts is what is stored
    second.run_ahead()
    assert second.failed_blocks
    second.saved()
    monkeypatch.setattr(configs, "asynchronous", False)
    assert_nothing_wrong_is_stored(start, longer, ranks=ranks)
    assert_nothing_wrong_is_stored(start, tokens + prompt(180 + ranks, 60), ranks=ranks)


def test_with_steps_under_way_a_request_is_aborted_before_its_failure_is_heard_of(
    start: StartEngine, configs: EngineConfigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(190, SHARED)
    longer = tokens + prompt(191, 560)
    stored_by_another(start, tokens)
    monkeypatch.setattr(configs, "asynchronous", True)
    second = start()
    fail_next_load(second)
    second.add("victim", longer)

    def abort() -> None:
        if second.failed_blocks and "victim" in second.scheduler.requests:
            second.scheduler.finish_requests(["victim"], RequestStatus.FINISHED_ABORTED)

    second.run_ahead(after_each=abort)
    later = second.add("later", longer)
    second.run_ahead()
    assert second.wrong_positions(later) == []
    second.saved()
    monkeypatch.setattr(configs, "asynchronous", False)
    assert_nothing_wrong_is_stored(start, longer)
