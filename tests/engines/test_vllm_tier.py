"""ObjectCache as a secondary tier of vLLM's offloading connector, made as vLLM makes it."""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from objectcache.connectors.vllm import tier as vllm_tier
from objectcache.connectors.vllm.tier import ObjectCacheTier
from objectcache_schemas.errors import InvalidRequest
from tests.engines.delivery_traces import NewTraces
from tests.servers import RunningServer, running_server, stop_whole

CHUNK_BYTES = 8192
SLOTS = 12
ROUNDS_MAX = 100_000
StartTier = Callable[..., ObjectCacheTier]


def offloading_spec(
    world_size: int = 1,
    window: int | None = None,
    tiers: tuple[dict[str, Any], ...] = (),
    model: str = "some/model",
) -> Any:
    """What vLLM tells its tiers. With a `window`, of so many chunks, there is a second group."""
    groups = [OffloadingGroupConfig(16, ("model.layers.0.self_attn.attn",), 0)]
    if window is not None:
        groups.append(OffloadingGroupConfig(16, ("model.layers.1.self_attn.attn",), 1, window))
    config = OffloadingConfig(
        groups=tuple(groups),
        worker_kv_bytes_per_block=CHUNK_BYTES,
        enable_kv_cache_events=False,
        extra_config={
            "cpu_bytes_to_use": SLOTS * CHUNK_BYTES,
            "secondary_tiers": [dict(tier) for tier in tiers],
        },
        engine_id=f"engine-{uuid.uuid4().hex[:8]}",
        model=OffloadingModelConfig(model, "bfloat16"),
        cache=OffloadingCacheConfig(16, 1),
        parallel=OffloadingParallelConfig(
            0, world_size, world_size, 1, 1, 1, 0, 1, None, is_parallelism_agnostic=False
        ),
    )
    return TieringOffloadingSpec(config)


def primary(fill: int | None = None) -> np.ndarray[Any, Any]:
    """The primary tier's memory: noise, or one value."""
    if fill is not None:
        return np.full((SLOTS, CHUNK_BYTES), fill, np.uint8)
    return np.random.default_rng(3).integers(0, 256, (SLOTS, CHUNK_BYTES), np.uint8)


def tier_config(on: RunningServer, **settings: Any) -> dict[str, Any]:
    """An entry of `secondary_tiers`."""
    return {
        "type": "ObjectCacheTier",
        "module_path": "objectcache.connectors.vllm_tier",
        "endpoint": on.endpoint,
        "bucket": "vllm-tier",
        "credentials_file": str(on.credentials_file),
        "weights_revision": "r1",
        "lookup_timeout_s": 20.0,  # above any wait that a busy machine causes
        "locality": "REMOTE",
        **settings,
    }


@pytest.fixture
def start(server: RunningServer) -> Iterator[StartTier]:
    """Tiers on the module's server, or on another one."""
    tiers: list[Any] = []

    def start_tier(
        memory: np.ndarray[Any, Any],
        on: RunningServer = server,
        world_size: int = 1,
        window: int | None = None,
        model: str = "some/model",
        **settings: Any,
    ) -> Any:
        view = memoryview(memory)  # type: ignore[arg-type]
        spec = offloading_spec(world_size, window, model=model)
        config = tier_config(on, **settings)
        tier = SecondaryTierFactory.create_secondary_tier(config, view, spec)
        tiers.append(tier)
        return tier

    yield start_tier
    for tier in tiers:
        tier.shutdown()


def keys_of(name: str, count: int, group: int = 0) -> list[Any]:
    """vLLM's keys of chunks."""
    hashes = [f"{name}-{index}".encode().ljust(32, b".") for index in range(count)]
    return [make_offload_key(part, group) for part in hashes]


def transfer(tier: Any, keys: list[Any], slots: list[int], load: bool) -> JobResult:
    """Run one job to its end."""
    job = TransferJob(5, keys, np.array(slots, np.int32), load, ReqContext("request"))
    (tier.submit_load if load else tier.submit_store)(job)
    for _ in range(ROUNDS_MAX):
        for result in tier.get_finished_jobs():
            assert result.job_id == 5
            return cast(JobResult, result)
        threading.Event().wait(0.001)  # a step takes as long
    raise AssertionError("no end")


def looked_up(tier: Any, keys: list[Any], request: str) -> list[LookupResult]:
    """Ask step by step, as the scheduler does, until every answer is there."""
    context = ReqContext(request)
    tier.on_new_request(context)
    for _ in range(ROUNDS_MAX):
        found = [tier.lookup(key, context) for key in keys]
        tier.on_schedule_end(ScheduleEndContext([], set()))
        if LookupResult.RETRY not in found:
            return found
        threading.Event().wait(0.001)  # a step takes as long
    raise AssertionError("no answer")


def test_chunks_go_from_one_engines_memory_to_anothers(start: StartTier) -> None:
    memory = primary()
    keys = keys_of("moved", 3)
    assert transfer(start(memory), keys, [7, 1, 2], load=False).success
    other = primary(fill=0)
    second = start(other)
    assert looked_up(second, keys, "one") == [LookupResult.HIT] * 3
    assert transfer(second, keys, [4, 5, 9], load=True).success
    np.testing.assert_array_equal(other[[4, 5, 9]], memory[[7, 1, 2]])
    assert not np.delete(other, [4, 5, 9], axis=0).any()


def test_chunks_are_wanted_as_a_whole_and_teach_no_window(
    start: StartTier, server: RunningServer
) -> None:
    tier = start(primary())
    keys = keys_of("whole", 3)
    assert transfer(tier, keys, [0, 1, 2], load=False).success
    traces = NewTraces(server, "vllm-tier")
    for _ in range(3):
        assert transfer(tier, keys, [4, 5, 6], load=True).success
    for trace in traces.all_ended(3):
        assert (trace.window_source, trace.reported_window_s) == ("whole", None)


def test_the_first_answer_is_to_ask_again_and_nothing_waits(start: StartTier) -> None:
    tier = start(primary())
    assert tier.lookup(keys_of("asked", 1)[0], ReqContext("one")) is LookupResult.RETRY
    assert looked_up(tier, keys_of("asked", 1), "one") == [LookupResult.MISS]


def test_what_lies_behind_a_missing_chunk_is_missing(start: StartTier) -> None:
    keys = keys_of("hole", 4)
    tier = start(primary())
    assert transfer(tier, [keys[0], keys[2], keys[3]], [0, 1, 2], load=False).success
    assert looked_up(tier, keys, "one") == [
        LookupResult.HIT,
        LookupResult.MISS,
        LookupResult.MISS,
        LookupResult.MISS,
    ]


def test_a_load_tells_which_chunks_came_and_the_rest_is_missing_from_then_on(
    start: StartTier,
) -> None:
    memory = primary()
    keys = keys_of("partly", 3)
    tier = start(memory)
    assert transfer(tier, keys[:2], [0, 1], load=False).success
    before = memory.copy()
    result = transfer(tier, keys, [3, 4, 5], load=True)
    assert not result.success
    assert list(result.successful_keys or ()) == keys[:2]
    np.testing.assert_array_equal(memory[[3, 4]], before[[0, 1]])
    np.testing.assert_array_equal(memory[5], before[5])


def test_chunks_with_other_bits_stay_and_the_others_are_stored(start: StartTier) -> None:
    memory = primary()
    keys = keys_of("conflict", 3)
    tier = start(memory)
    assert transfer(tier, keys[1:2], [0], load=False).success
    assert transfer(tier, keys, [3, 4, 5], load=False).success
    other = primary(fill=0)
    assert transfer(start(other), keys, [0, 1, 2], load=True).success
    np.testing.assert_array_equal(other[:3], memory[[3, 0, 5]])


def test_other_ranks_or_weights_have_names_of_their_own(start: StartTier) -> None:
    keys = keys_of("names", 1)
    assert transfer(start(primary()), keys, [0], load=False).success
    assert looked_up(start(primary(), world_size=2), keys, "one") == [LookupResult.MISS]
    assert looked_up(start(primary(), weights_revision="r2"), keys, "one") == [LookupResult.MISS]
    assert looked_up(start(primary()), keys, "one") == [LookupResult.HIT]


def test_without_a_revision_the_models_files_tell_weights_and_configurations_apart(
    tmp_path: Path, start: StartTier
) -> None:
    model = str(tmp_path)
    weights, configuration = tmp_path / "model.safetensors", tmp_path / "config.json"
    keys = keys_of("files", 1)

    def found() -> LookupResult:
        tier = start(primary(), model=model, weights_revision="")
        return looked_up(tier, keys, "one")[0]

    weights.write_bytes(b"a" * 100)
    os.utime(weights, ns=(1, 1))
    configuration.write_text('{"rope_theta": 10000.0}')
    first = start(primary(), model=model, weights_revision="")
    assert transfer(first, keys, [0], load=False).success
    assert found() is LookupResult.HIT
    weights.write_bytes(b"b" * 100)  # fine-tuned
    assert found() is LookupResult.MISS
    weights.write_bytes(b"a" * 100)
    os.utime(weights, ns=(1, 1))
    assert found() is LookupResult.HIT
    configuration.write_text('{"rope_theta": 500000.0}')
    assert found() is LookupResult.MISS


def test_weights_that_nothing_tells_of_are_warned_of(
    start: StartTier, caplog: pytest.LogCaptureFixture
) -> None:
    start(primary(), weights_revision="")
    assert "set the connector's weights_revision" in caplog.text


def test_a_server_that_is_gone_fails_jobs_and_finds_nothing(
    tmp_path: Path, start: StartTier
) -> None:
    keys = keys_of("gone", 2)
    with running_server(tmp_path / "data") as server:
        tier = start(primary(), on=server)
        assert transfer(tier, keys, [0, 1], load=False).success
        server.kill_gateway()
        assert not transfer(tier, keys, [2, 3], load=True).success
        assert not transfer(tier, keys, [2, 3], load=False).success
        assert looked_up(tier, keys, "one") == [LookupResult.MISS] * 2


def test_a_server_that_stands_still_costs_one_lookup_and_then_nothing_for_a_while(
    tmp_path: Path, start: StartTier
) -> None:
    with running_server(tmp_path / "data") as server:
        tier = start(primary(), on=server, lookup_timeout_s=0.3)
        assert looked_up(tier, keys_of("before", 1), "zero") == [LookupResult.MISS]
        stop_whole(server.gateway_pid)
        try:
            begun_s = time.monotonic()
            for number in range(20):
                keys = keys_of(f"asked {number}", 2)
                assert looked_up(tier, keys, str(number)) == [LookupResult.MISS] * 2
            spent_s = time.monotonic() - begun_s
            lookups = tier._outage.failure_count
            assert not transfer(tier, keys, [0, 1], load=True).success
        finally:
            os.kill(server.gateway_pid, signal.SIGCONT)
        assert 1 <= lookups <= 3  # further ones where the machine stood still for a pause
        assert spent_s < 30  # one without a bound of its own would take 60 s


def test_jobs_of_a_server_that_stands_still_are_given_up(
    tmp_path: Path, start: StartTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_tier, "DRAIN_TIMEOUT_S", 0.3)
    memory = primary()
    keys = keys_of("given up", 2)
    with running_server(tmp_path / "data") as server:
        tier = start(memory, on=server)
        assert transfer(tier, keys, [0, 1], load=False).success
        before = memory.copy()
        stop_whole(server.gateway_pid)
        try:
            for number in range(20):
                job = TransferJob(number, keys, np.array([2, 3], np.int32), True, ReqContext("r"))
                tier.submit_load(job)
            tier.drain_jobs()
            results = {result.job_id: result.success for result in tier.get_finished_jobs()}
            monkeypatch.setattr(vllm_tier, "DRAIN_TIMEOUT_S", 30.0)
        finally:
            os.kill(server.gateway_pid, signal.SIGCONT)
        assert results == dict.fromkeys(range(20), False)
        assert list(tier.get_finished_jobs()) == []
        np.testing.assert_array_equal(memory, before)


def test_a_group_with_a_window_is_answered_from_its_end(start: StartTier) -> None:
    tier = start(primary(), window=2)
    full, windowed = keys_of("both", 6), keys_of("both", 6, group=1)
    assert transfer(tier, full[:4], [0, 1, 2, 3], load=False).success
    assert transfer(tier, windowed[2:4], [4, 5], load=False).success
    asked = [*full, *reversed(windowed)]  # the order in which vLLM's scheduler asks
    found = dict(zip(asked, looked_up(tier, asked, "one"), strict=True))
    assert [found[key] is LookupResult.HIT for key in full] == [True] * 4 + [False] * 2
    assert [found[key] is LookupResult.HIT for key in windowed] == [
        False, False, True, True, False, False,
    ]  # fmt: skip


class Offloading:
    """vLLM's own manager of tiers, over memory of its own, with ours as its second tier."""

    def __init__(self, server: RunningServer) -> None:
        self.manager = offloading_spec(tiers=(tier_config(server),)).get_manager()
        self.memory = self.manager.primary_tier.get_kv_memoryview()

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext([], set()))

    def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(ROUNDS_MAX):
            if condition():
                return
            self.step()
            threading.Event().wait(0.001)
        raise AssertionError("it does not come to that")

    def rows(self, ids: Any) -> list[np.ndarray[Any, Any]]:
        array = np.frombuffer(self.memory.cast("B"), np.uint8).reshape(len(self.memory), -1)
        return [array[int(number)] for number in ids]


def test_vllms_own_manager_of_tiers_stores_and_promotes_through_ours(
    server: RunningServer,
) -> None:
    keys = keys_of("managed", 3)
    noise = np.random.default_rng(9).integers(0, 256, (3, CHUNK_BYTES), np.uint8)
    first = Offloading(server)
    context = ReqContext("first")
    first.manager.on_new_request(context)
    stored = first.manager.prepare_store(keys, context)
    assert stored is not None
    for row, bits in zip(first.rows(stored.store_spec.chunk_ids), noise, strict=True):
        row[:] = bits
    first.manager.complete_store(keys, context)
    first.until(lambda: not first.manager.has_pending_work())
    first.manager.on_request_finished(context)
    first.manager.shutdown()

    second = Offloading(server)
    context = ReqContext("second")
    second.manager.on_new_request(context)

    def all_found() -> bool:
        found = [second.manager.lookup(key, context) for key in keys]
        return found == [LookupResult.HIT] * 3

    second.until(all_found)
    loaded = second.manager.prepare_load(keys, context)
    for row, bits in zip(second.rows(loaded.chunk_ids), noise, strict=True):
        np.testing.assert_array_equal(row, bits)
    second.manager.complete_load(keys, context)
    second.manager.on_request_finished(context)
    second.manager.shutdown()


def test_after_vllms_reset_chunks_have_names_that_no_other_engine_has(
    server: RunningServer, start: StartTier
) -> None:
    before, after = keys_of("before a reset", 1), keys_of("after a reset", 1)
    engine = Offloading(server)
    (tier,) = engine.manager.secondary_tiers
    assert transfer(tier, before, [0], load=False).success
    assert looked_up(start(primary()), before, "one") == [LookupResult.HIT]
    engine.manager.reset_cache()  # as after a weight update
    assert looked_up(tier, before, "two") == [LookupResult.MISS]
    assert transfer(tier, after, [0], load=False).success
    assert looked_up(tier, after, "three") == [LookupResult.HIT]
    assert looked_up(start(primary()), after, "one") == [LookupResult.MISS]
    engine.manager.shutdown()


def test_an_unknown_setting_is_named(start: StartTier) -> None:
    with pytest.raises(InvalidRequest, match="'buckets' is unknown"):
        start(primary(), buckets="b")


def test_groups_whose_windows_vllm_does_not_tell_are_looked_up_from_the_first_chunk_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before_0_33 = [SimpleNamespace(group_id=number) for number in range(2)]
    assert vllm_tier._windows(before_0_33) == {0: None, 1: None}
    assert "does not tell which groups have a sliding window" in caplog.text
    caplog.clear()
    assert vllm_tier._windows(before_0_33[:1]) == {0: None}
    assert vllm_tier._windows(offloading_spec(window=3).config.groups) == {0: None, 1: 3}
    assert caplog.text == ""
