"""vLLM's real scheduler with our connector, over a real server: what one engine stores, another
has in its blocks, byte for byte; and what cannot be had is computed.
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from objectcache.connectors.vllm import ObjectCacheConnector
from objectcache.connectors.vllm.plans import LoadPlan
from objectcache.deliveries.delivery import Delivery
from objectcache_schemas.errors import InvalidRequest
from tests.engines.vllm_engine import (
    BLOCK_TOKENS,
    ORDERS,
    Engine,
    EngineConfigs,
    kv_cache_config,
    model_directory,
    paged_tensors,
)
from tests.servers import RunningServer, running_server, stop_whole

StartEngine = Callable[..., Engine]
BLOCK_BYTES = 16 << 10
BUCKET = "vllm-kv"
LOOKUP_TIMEOUT_S = 20.0  # above any wait that a busy machine causes


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> EngineConfigs:
    """Read once: it takes seconds."""
    return EngineConfigs(model_directory(tmp_path_factory.mktemp("vllm")))


def extra_of(server: RunningServer, **chosen: Any) -> dict[str, Any]:
    """The connector's own configuration."""
    return {
        "endpoint": server.endpoint,
        "bucket": BUCKET,
        "credentials_file": str(server.credentials_file),
        "weights_revision": "r1",
        "fetch_tokens_min": BLOCK_TOKENS,
        "lookup_timeout_s": LOOKUP_TIMEOUT_S,
        "load_mode": "layerwise",
        **chosen,
    }


@pytest.fixture
def start(server: RunningServer, configs: EngineConfigs) -> Iterator[StartEngine]:
    """Engines on the module's server, or on another one."""
    engines: list[Engine] = []

    def start_engine(
        order: str = "LBNHC",
        *,
        on: RunningServer = server,
        latent: bool = False,
        role: str = "kv_both",
        ranks: int = 1,
        hashing: str = "sha256",
        **chosen: Any,
    ) -> Engine:
        config = configs.vllm_config(extra_of(on, **chosen), kv_role=role)
        config.cache_config.prefix_caching_hash_algo = hashing
        tensors = [paged_tensors(order, latent) for _ in range(ranks)]
        engine = Engine(config, *tensors, latent=latent)
        engines.append(engine)
        return engine

    yield start_engine
    for engine in engines:
        engine.close()


def prompt(seed: int, count: int) -> list[int]:
    """Tokens that no other seed begins with."""
    random = np.random.default_rng(seed)
    return [int(token) for token in random.integers(10, 900, count)]


def stored_by_another(start: StartEngine, tokens: list[int], **chosen: Any) -> Engine:
    """An engine that has computed the prompt, and stored it."""
    first = start(**chosen)
    assert first.answer("first", tokens) == 0
    first.saved()
    return first


@pytest.mark.parametrize("order", ORDERS)
def test_what_one_engine_stored_another_loads_into_blocks_of_any_order(
    start: StartEngine, order: str
) -> None:
    tokens = prompt(sorted(ORDERS).index(order), 100)
    stored_by_another(start, tokens, order="LBNHC" if order != "LBNHC" else "LHBNC")
    second = start(order)
    request = second.add("again", tokens)
    second.run()
    assert second.loaded_tokens == {"again": 96}
    assert second.computed_tokens == 4
    assert second.wrong_positions(request) == []
    assert second.failed_blocks == set()


def test_latents_are_stored_and_loaded(start: StartEngine) -> None:
    tokens = prompt(20, 70)
    stored_by_another(start, tokens, latent=True)
    second = start("BLNHC", latent=True)
    request = second.add("again", tokens)
    second.run()
    assert second.loaded_tokens == {"again": 64}
    assert second.wrong_positions(request) == []


def test_the_last_token_is_computed_even_where_its_block_is_stored(start: StartEngine) -> None:
    tokens = prompt(21, 96)
    stored_by_another(start, tokens)
    second = start()
    assert second.answer("again", tokens) == 80
    assert second.computed_tokens == 16


def test_only_what_the_engine_lacks_is_loaded(start: StartEngine) -> None:
    tokens = prompt(22, 100)
    stored_by_another(start, tokens)
    second = start()
    assert second.answer("beginning", tokens[:40]) == 32
    request = second.add("all", tokens)
    second.run()
    assert second.loaded_tokens["all"] == 96 - 32
    assert second.wrong_positions(request) == []


def test_a_prompt_that_is_computed_in_pieces_is_stored_whole(start: StartEngine) -> None:
    tokens = prompt(23, 700)  # a step computes at most 512
    first = stored_by_another(start, tokens)
    assert first.worker._worker.saves.saved_blocks == 43
    second = start()
    assert second.answer("again", tokens) == 688


def test_requests_of_one_step_have_deliveries_of_their_own(start: StartEngine) -> None:
    one, two = prompt(24, 100), prompt(25, 80)
    stored_by_another(start, one)
    stored_by_another(start, two)
    third = start()
    requests = [third.add("one", one), third.add("two", two)]
    third.run()
    assert third.loaded_tokens == {"one": 96, "two": 64}
    assert [third.wrong_positions(request) for request in requests] == [[], []]


def test_other_weights_or_another_salt_find_nothing(start: StartEngine) -> None:
    tokens = prompt(26, 100)
    stored_by_another(start, tokens)
    assert start(weights_revision="r2").answer("again", tokens) == 0
    salted = start()
    salted.add("salted", tokens, salt="tenant-1")
    salted.run()
    assert salted.loaded_tokens == {}
    assert start().answer("again", tokens) == 96


def test_a_hit_that_is_not_worth_a_delivery_is_computed(start: StartEngine) -> None:
    tokens = prompt(27, 100)
    stored_by_another(start, tokens)
    assert start(fetch_tokens_min=97).answer("again", tokens) == 0
    assert start(fetch_tokens_min=96).answer("again", tokens) == 96


def test_of_a_prefix_above_the_bound_of_loads_the_beginning_is_loaded(start: StartEngine) -> None:
    tokens = prompt(160, 300)
    stored_by_another(start, tokens)
    second = start(load_bytes_max=8 * BLOCK_BYTES)
    request = second.add("again", tokens)
    second.run()
    assert second.loaded_tokens == {"again": 8 * BLOCK_TOKENS}
    assert second.computed_tokens == 300 - 8 * BLOCK_TOKENS
    assert second.failed_blocks == set()
    assert second.wrong_positions(request) == []


def test_hits_that_are_above_the_bound_of_loads_together_are_loaded_one_after_the_other(
    start: StartEngine,
) -> None:
    prompts = {f"r{number}": prompt(161 + number, 100) for number in range(3)}
    first = start()
    for name, tokens in prompts.items():
        assert first.answer(name, tokens) == 0
    first.saved()
    second = start(load_bytes_max=8 * BLOCK_BYTES)
    requests = [second.add(name, tokens) for name, tokens in prompts.items()]
    second.run()
    assert second.loaded_tokens == dict.fromkeys(prompts, 96)
    assert second.failed_blocks == set()
    assert [second.wrong_positions(request) for request in requests] == [[], [], []]


@pytest.mark.parametrize("transport", ["auto", "nixl"])
def test_blocks_are_stored_and_loaded_over_the_transport_that_is_chosen(
    start: StartEngine, transport: str
) -> None:
    if transport == "nixl":
        pytest.importorskip("nixl")
    tokens = prompt(180 + (transport == "nixl"), 100)
    first = stored_by_another(start, tokens, transport=transport)
    staged = first.worker._worker.saves._staging._target
    assert staged.transport == (None if transport == "auto" else transport)
    second = start(transport=transport)
    loads, taken = second.worker._worker.loads, list[str]()
    fetch = loads._fetch

    def noted(plan: LoadPlan) -> Delivery:
        delivery: Delivery = fetch(plan)
        taken.append(delivery.transport)
        return delivery

    loads._fetch = noted
    request = second.add("again", tokens)
    second.run()
    assert second.loaded_tokens == {"again": 96}
    assert taken == ["shared_memory" if transport == "auto" else transport]
    assert second.wrong_positions(request) == []
    assert second.failed_blocks == set()


def test_a_producer_loads_nothing_and_a_consumer_stores_nothing(start: StartEngine) -> None:
    tokens = prompt(28, 100)
    consumer = start(role="kv_consumer")
    assert consumer.answer("first", tokens) == 0
    assert start().answer("second", tokens) == 0
    producer = start(role="kv_producer")
    assert producer.answer("third", tokens) == 0
    assert consumer.worker._worker.saves.saved_blocks == 0


def test_preempted_requests_come_to_the_same_end(start: StartEngine) -> None:
    prompts = [prompt(29, 480), prompt(30, 480)]
    engine = start()
    requests = [
        engine.add(str(number), tokens, answer_tokens=60) for number, tokens in enumerate(prompts)
    ]
    engine.run()
    assert sum(request.num_preemptions for request in requests) > 0
    engine.saved()
    again = start()
    for number, tokens in enumerate(prompts):
        request = again.add(f"again {number}", tokens)
        again.run()
        assert again.loaded_tokens[f"again {number}"] == 464
        assert again.wrong_positions(request) == []


def test_what_finds_no_room_on_its_way_is_not_stored_but_the_beginning_is(
    start: StartEngine,
) -> None:
    tokens = prompt(31, 1000)
    block_bytes = 4 * 2 * 2 * 32 * 2 * BLOCK_TOKENS
    first = start(staging_bytes_max=40 * block_bytes)
    first.answer("first", tokens)
    first.saved()
    assert first.worker._worker.saves.dropped_blocks > 0
    found = start().answer("again", tokens)
    assert 0 < found < 992


def test_other_bits_under_a_key_do_not_keep_the_rest_from_being_stored(start: StartEngine) -> None:
    engine = start()
    request = engine.add("first", prompt(32, 100))
    while not engine.computed_tokens:
        engine.step()
    worker = engine.worker._worker
    bucket, layout = worker._store.bucket(), worker._store.layout
    keys = worker._geometry.namespace.keys([bytes(part) for part in request.block_hashes])
    bucket.put(keys[:2], np.ones((2, layout.num_layers, layout.per_layer_chunk_bytes), np.uint8))
    engine.run()
    engine.saved()
    assert worker.saves.failures == 0
    assert bucket.match(keys) == 6


def test_a_server_that_is_killed_before_it_delivers_costs_only_the_computing(
    tmp_path: Path, start: StartEngine
) -> None:
    tokens = prompt(33, 100)
    longer = tokens + prompt(34, 100)
    with running_server(tmp_path / "data") as server:
        stored_by_another(start, tokens, on=server)
        second = start(on=server, load_timeout_s=1.0)
        second.before_loads = server.kill_storage
        request = second.add("again", longer)
        second.run()
        assert second.wrong_positions(request) == []
        assert len(second.failed_blocks) == 6
        assert second.loaded_tokens == {"again": 96}
        assert second.computed_tokens > 200  # in vain, then once more


def test_what_was_computed_on_blocks_that_failed_is_never_stored(
    tmp_path: Path, start: StartEngine
) -> None:
    tokens = prompt(35, 100)
    longer = tokens + prompt(36, 500)  # computed in several steps
    with running_server(tmp_path / "data") as server:
        stored_by_another(start, tokens, on=server)
        second = start(on=server, load_timeout_s=1.0)

        def fail_once() -> None:
            second.before_loads = None
            server.restart_storage()
            stop_whole(server.gateway_pid)

        second.before_loads = fail_once
        second.add("again", longer)
        while not second.failed_blocks:
            second.step()
        os.kill(server.gateway_pid, signal.SIGCONT)
        second.run()
        second.saved()
        assert second.worker._worker.saves.dropped_blocks > 0
        third = start(on=server)
        request = third.add("third", longer)
        third.run()
        assert third.loaded_tokens == {"third": 592}
        assert third.wrong_positions(request) == []


def test_a_server_that_is_killed_in_the_middle_leaves_the_layers_it_delivered(
    tmp_path: Path, start: StartEngine
) -> None:
    tokens = prompt(37, 1000)
    with running_server(tmp_path / "data", "scheduler.cap_gbps=0.001") as server:
        stored_by_another(start, tokens, on=server)
        second = start(on=server)
        waited: list[int] = []

        def kill_before_the_second_layer(layer: int) -> None:
            waited.append(layer)
            if len(waited) == 2:
                assert second.worker._worker.loads._under_way[0].failure is None
                server.kill_gateway()
                server.kill_storage()

        def watch() -> None:
            second.before_loads = None
            second.before_layer = kill_before_the_second_layer

        second.before_loads = watch
        request = second.add("again", tokens)
        second.run()
        assert len(second.failed_blocks) == 62
        assert second.wrong_positions(request) == []


def test_a_server_that_stands_still_is_not_waited_for_longer_than_said(
    tmp_path: Path, start: StartEngine
) -> None:
    tokens = prompt(38, 100)
    with running_server(tmp_path / "data") as server:
        stored_by_another(start, tokens, on=server)
        second = start(on=server, load_timeout_s=0.2)
        second.before_loads = lambda: stop_whole(server.gateway_pid)
        try:
            request = second.add("again", tokens)
            second.run()
        finally:
            os.kill(server.gateway_pid, signal.SIGCONT)
        assert len(second.failed_blocks) == 6
        assert second.wrong_positions(request) == []


def test_every_rank_loads_what_it_stored(start: StartEngine) -> None:
    tokens = prompt(70, 100)
    first = stored_by_another(start, tokens, ranks=2)
    assert [worker._worker.saves.saved_blocks for worker, _ in first.workers] == [6, 6]
    second = start("BLNHC", ranks=2)
    request = second.add("again", tokens)
    second.run()
    assert second.loaded_tokens == {"again": 96}
    assert second.wrong_positions(request) == []
    assert start().answer("alone", tokens) == 0  # one rank's blocks are others


def test_a_load_that_fails_on_one_rank_keeps_all_from_storing_what_follows(
    start: StartEngine,
) -> None:
    tokens = prompt(71, 100)
    longer = tokens + prompt(72, 100)
    stored_by_another(start, tokens, ranks=2)
    second = start(ranks=2)
    failing = second.workers[1][0]._worker
    geometry = failing._geometry
    other = tuple(replace(name, model="gone") for name in geometry.namespaces)

    def fail_once() -> None:
        second.before_loads = None
        failing._geometry = replace(geometry, namespaces=other)

    second.before_loads = fail_once
    request = second.add("again", longer)
    while not second.failed_blocks:
        second.step()
    failing._geometry = geometry
    second.run()
    second.saved()
    assert second.wrong_positions(request) == []
    assert [worker._worker.loads.loaded_blocks for worker, _ in second.workers] == [6, 0]
    dropped = [worker._worker.saves.dropped_blocks for worker, _ in second.workers]
    assert dropped == [6, 6]
    third = start(ranks=2)
    request = third.add("third", longer)
    third.run()
    assert third.loaded_tokens == {"third": 192}
    assert third.wrong_positions(request) == []


def test_blocks_are_found_by_the_hash_algorithm_they_were_stored_by(start: StartEngine) -> None:
    tokens = prompt(73, 100)
    stored_by_another(start, tokens, hashing="sha256_cbor")
    assert start().answer("again", tokens) == 0
    assert start(hashing="sha256_cbor").answer("again", tokens) == 96


def test_layers_that_the_engine_does_not_wait_for_are_failures(start: StartEngine) -> None:
    tokens = prompt(39, 100)
    stored_by_another(start, tokens)
    second = start()
    wait, second.worker.wait_for_layer_load = second.worker.wait_for_layer_load, lambda name: None
    request = second.add("again", tokens)
    while not second.failed_blocks:
        second.step()
    second.worker.wait_for_layer_load = wait
    second.run()
    assert len(second.failed_blocks) == 6
    assert second.wrong_positions(request) == []


def test_the_scheduler_goes_on_while_the_server_does_not_answer(
    start: StartEngine, server: RunningServer
) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        engine = start(endpoint=endpoint, lookup_timeout_s=5.0, load_timeout_s=0.3)
        engine.add("asked", prompt(40, 100))
        assert engine.step().total_num_scheduled_tokens == 0  # not known yet, and not waited for
        engine.add("short", prompt(41, 10))  # has no whole block, so nothing is asked
        engine.step()
        assert engine.step().num_scheduled_tokens.get("asked") is None
        engine.run()
        assert engine.loaded_tokens == {}
        assert engine.computed_tokens == 110


def test_a_server_that_refuses_connections_is_left_alone_for_a_while(start: StartEngine) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
    engine = start(endpoint=f"http://127.0.0.1:{port}")
    for number in range(5):
        assert engine.answer(str(number), prompt(50 + number, 40)) == 0
    assert 1 <= engine.scheduler.connector._scheduler._lookups.failures <= 3  # of a busy machine


def test_the_metadata_of_a_step_can_be_sent_to_another_process(start: StartEngine) -> None:
    engine = start()
    engine.add("one", prompt(60, 40))
    output = engine.step()
    while not output.total_num_scheduled_tokens:
        output = engine.step()
    plan = pickle.loads(pickle.dumps(output.kv_connector_metadata)).plan
    assert [len(save.hashes) for save in plan.saves] == [2]
    engine.run()


@pytest.mark.parametrize(
    ("extra", "transfer", "named"),
    [
        ({"weight_revision": "r1"}, {}, "'weight_revision' is unknown"),
        ({"load_timeout_s": 0}, {}, "'load_timeout_s' must be seconds"),
        ({"fetch_tokens_min": 1.5}, {}, "'fetch_tokens_min' must be a whole number"),
        ({"staging_bytes_max": 100}, {}, "'staging_bytes_max' is 100"),
        ({}, {"kv_load_failure_policy": "fail"}, "kv_load_failure_policy must be 'recompute'"),
    ],
)
def test_a_wrong_setting_is_named_at_the_start(
    server: RunningServer,
    configs: EngineConfigs,
    extra: dict[str, Any],
    transfer: dict[str, Any],
    named: str,
) -> None:
    config = configs.vllm_config(extra_of(server, **extra), **transfer)
    with pytest.raises(InvalidRequest, match=named):
        Engine(config, paged_tensors())


def test_a_wrong_setting_is_named_before_vllm_starts_its_processes(server: RunningServer) -> None:
    with pytest.raises(InvalidRequest, match="'bukcet' is unknown"):
        ObjectCacheConnector.requires_piecewise_for_cudagraph(extra_of(server, bukcet="kv"))


def test_what_it_says_of_a_wrong_setting_then_is_a_line_of_vllms_log() -> None:
    asked = """
from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging
from objectcache.connectors.vllm import ObjectCacheConnector
configure_logging(LoggingConfig())
ObjectCacheConnector.requires_piecewise_for_cudagraph({"bukcet": "kv"})
"""
    ended = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True)
    assert ended.returncode == 1
    (line,) = [one for one in (ended.stdout + ended.stderr).splitlines() if "cannot start" in one]
    ours = r"objectcache\.connectors\.vllm: ObjectCacheConnector cannot start: .*'bukcet'"
    assert re.search(rf"ERROR .* {ours}", line)


def test_hashes_that_differ_from_process_to_process_are_refused(
    server: RunningServer, configs: EngineConfigs
) -> None:
    config = configs.vllm_config(extra_of(server))
    config.cache_config.prefix_caching_hash_algo = "xxhash"
    with pytest.raises(InvalidRequest, match="prefix-caching-hash-algo xxhash"):
        Engine(config, paged_tensors())


def test_a_model_with_two_kinds_of_kv_is_refused(
    server: RunningServer, configs: EngineConfigs
) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    cache_config = kv_cache_config()
    cache_config.kv_cache_groups.append(kv_cache_config(latent=True).kv_cache_groups[0])
    with pytest.raises(InvalidRequest, match="2 kinds of KV cache"):
        ObjectCacheConnector(
            configs.vllm_config(extra_of(server)), KVConnectorRole.WORKER, cache_config
        )


def test_whole_cuda_graphs_are_ruled_out_and_saves_may_be_dropped(
    start: StartEngine, server: RunningServer
) -> None:
    assert ObjectCacheConnector.requires_piecewise_for_cudagraph(extra_of(server)) is True
    assert start().scheduler.connector.requires_kv_delivery is False
