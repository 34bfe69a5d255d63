"""ObjectCache as SGLang's external cache linker: its factory, its device pools, a real server."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from objectcache.connectors.sglang.settings import LOADS_MAX
from objectcache.connectors.store.configuration import LOOKUP_TIMEOUT_S
from objectcache.errors import InvalidRequest
from tests.engines import sglang_on_cpu
from tests.servers import RunningServer, start_server, stop_whole

sglang_on_cpu.prepare()

import torch  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402
    HiCacheStorageConfig,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.storage import StorageBackendFactory  # noqa: E402
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_cache.linker_factory import (  # noqa: E402
    create_unified_cache_linker,
)

PAGE = 8
LAYERS = 4
TOKENS = 256


def pool_of(kind: str) -> Any:
    return sglang_on_cpu.device_pool(
        kind, tokens=TOKENS, page_tokens=PAGE, layers=LAYERS, dtype=torch.bfloat16
    )


def linker_of(server: RunningServer, pool: Any, model: str, **changes: Any) -> Any:
    """A linker made as SGLang's worker makes it, its counter registered with the pool."""
    components = changes.pop("components", {ComponentType.FULL})
    drafts = changes.pop("drafts", ())
    config = {
        "linker": "ObjectCacheLinker",
        "linker_module_path": "objectcache.connectors.sglang_linker",
        "linker_extra_config": {
            "endpoint": server.endpoint,
            "bucket": "linked",
            "credentials_file": str(server.credentials_file),
            "lookup_timeout_s": 20.0,  # above any wait that a busy machine causes
            **changes,
        },
    }
    params = SimpleNamespace(
        page_size=PAGE,
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        tp_cache_group=None,
        attn_tp_cache_group=None,
        mtp_draft_device_pools=drafts,
        sidecar_draft_device_pools=(),
    )
    linker = create_unified_cache_linker(
        SimpleNamespace(model_path=model),
        params,
        backend="dynamic",
        config=config,
        components=components,
    )
    pool.register_layer_transfer_counter(linker.layer_done_counter)
    return linker


def slots(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def transfer(keys: list[str], where: torch.Tensor | None = None) -> list[PoolTransfer]:
    return [PoolTransfer(name=PoolName.KV, keys=keys, device_indices=where)]


def hashes(name: str, count: int) -> list[str]:
    return [f"{name.encode().hex()}{index:04x}" for index in range(count)]


def contents(pool: Any, where: torch.Tensor) -> list[torch.Tensor]:
    """Copies of every layer's K, and V where there is one, of these slots."""
    parts = [pool.k_buffer, pool.v_buffer] if hasattr(pool, "v_buffer") else [pool.kv_buffer]
    return [buffer[where].view(torch.uint8).clone() for part in parts for buffer in part]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def offload(linker: Any, keys: list[str], where: torch.Tensor) -> bool:
    assert linker.offload(transfer(keys, where))
    linker._offloader.join()
    assert linker.num_completed_offloads() == 1
    stored: bool = linker.pop_completed_offload()
    return stored


def store(server: RunningServer, pool: Any, model: str, keys: list[str], where: Any) -> None:
    """Have pages stored by a linker that waits as long as that takes."""
    linker = linker_of(server, pool, model)
    assert offload(linker, keys, where)
    linker.close()


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_offloaded_pages_are_found_and_loaded_layer_by_layer(
    server: RunningServer, kind: str
) -> None:
    pool = pool_of(kind)
    linker = linker_of(server, pool, f"m/{kind}")
    keys = hashes("a", 5)
    assert linker.lookup("r", transfer(keys)) == []
    expected, beside = contents(pool, slots(1, 9, 4)), contents(pool, slots(30))
    assert offload(linker, keys[:3], slots(1, 9, 4))
    assert linker.lookup("r", transfer(keys)) == [1, 2, 3]
    assert linker.load("r", transfer(keys[:3], slots(20, 31, 22)))
    index = linker.start_layer_wise_loading()
    linker.layer_done_counter.set_consumer(index)
    for layer in range(LAYERS):
        # The pool itself waits for the layer, as the forward does.
        key, value = pool.get_kv_buffer(layer)
        found = key[slots(20, 31, 22)].view(torch.uint8)
        assert torch.equal(found, expected[layer])
        if kind == "mha":
            found = value[slots(20, 31, 22)].view(torch.uint8)
            assert torch.equal(found, expected[LAYERS + layer])
    assert linker.finish_layer_wise_loading(index)
    assert same(contents(pool, slots(20, 31, 22)), expected)
    assert same(contents(pool, slots(30)), beside)
    linker.close()


def test_a_batch_loads_several_requests_and_leaves_out_the_cancelled(server: RunningServer) -> None:
    pool = pool_of("mha")
    linker = linker_of(server, pool, "m/batch")
    keys = hashes("b", 4)
    assert linker.start_layer_wise_loading() == -1
    assert offload(linker, keys, slots(0, 1, 2, 3))
    expected, untouched = contents(pool, slots(0, 1, 2, 3)), contents(pool, slots(16))
    linker.load("first", transfer(keys[:1], slots(10)))
    linker.load("second", transfer(keys[:1], slots(16)))
    linker.load("third", transfer(keys[1:], slots(11, 12, 13)))
    assert linker.cancel_queued_load("second")
    assert not linker.cancel_queued_load("second")
    index = linker.start_layer_wise_loading()
    assert linker.finish_layer_wise_loading(index)
    assert same(contents(pool, slots(10, 11, 12, 13)), expected)
    assert same(contents(pool, slots(16)), untouched)
    linker.close()


def test_requests_beyond_what_a_batch_loads_are_left_to_be_computed(server: RunningServer) -> None:
    pool = pool_of("mha")
    linker = linker_of(server, pool, "m/many")
    keys = hashes("j", 1)
    assert offload(linker, keys, slots(3))
    expected = contents(pool, slots(3))
    queued = [linker.load(f"r{n}", transfer(keys, slots(4 + n % 20))) for n in range(LOADS_MAX + 2)]
    assert queued == [True] * LOADS_MAX + [False] * 2
    index = linker.start_layer_wise_loading()
    assert linker.finish_layer_wise_loading(index)
    assert all(same(contents(pool, slots(page)), expected) for page in range(4, 24))
    assert linker.load("again", transfer(keys, slots(4)))
    linker.close()


def test_of_a_prefix_above_the_bound_of_loads_the_beginning_is_found_and_loaded(
    server: RunningServer,
) -> None:
    pool = pool_of("mha")
    linker = linker_of(server, pool, "m/long", load_bytes_max=64 << 10)
    most = (64 << 10) // linker._pool.geometry.page_bytes
    keys = hashes("k", most + 3)
    expected = contents(pool, slots(*range(most)))
    assert offload(linker, keys, slots(*range(most + 3)))
    assert linker.lookup("r", transfer(keys)) == list(range(1, most + 1))
    where = slots(*reversed(range(10, 10 + most)))
    assert not linker.load("r", transfer(keys, slots(*range(most + 3))))
    assert linker.load("r", transfer(keys[:most], where))
    assert linker.finish_layer_wise_loading(linker.start_layer_wise_loading())
    assert same(contents(pool, where), expected)
    linker.close()


def test_requests_above_the_bound_of_loads_together_are_left_to_be_computed_batch_after_batch(
    server: RunningServer,
) -> None:
    pool = pool_of("mha")
    linker = linker_of(server, pool, "m/together", load_bytes_max=128 << 10)
    keys = hashes("l", 1)
    assert offload(linker, keys, slots(3))
    expected = contents(pool, slots(3))
    for page in range(4, 24):
        # One page takes 64 KiB, the least that memory is made of.
        queued = [linker.load(f"r{n}", transfer(keys, slots(page))) for n in range(3)]
        assert queued == [True, True, False]
        assert linker.cancel_queued_load("r0")
        assert linker.load("r2", transfer(keys, slots(page)))
        assert linker.finish_layer_wise_loading(linker.start_layer_wise_loading())
        assert same(contents(pool, slots(page)), expected)
    assert linker._stores.outage.failure_count == 0
    linker.close()


@pytest.mark.parametrize("transport", ["auto", "nixl"])
def test_pages_are_stored_and_loaded_over_the_transport_that_is_chosen(
    server: RunningServer, transport: str
) -> None:
    if transport == "nixl":
        pytest.importorskip("nixl")
    pool = pool_of("mha")
    linker = linker_of(server, pool, f"m/{transport}", transport=transport)
    keys = hashes("n", 3)
    expected = contents(pool, slots(1, 9, 4))
    assert offload(linker, keys, slots(1, 9, 4))
    staged = linker._store._staging._target
    assert staged.transport == (None if transport == "auto" else transport)
    fetch, taken = linker._store.bucket.fetch, list[str]()

    def noted(*given: Any, **chosen: Any) -> Any:
        delivery = fetch(*given, **chosen)
        taken.append(delivery.transport)
        return delivery

    linker._store.bucket.fetch = noted
    assert linker.load("r", transfer(keys, slots(20, 31, 22)))
    assert linker.finish_layer_wise_loading(linker.start_layer_wise_loading())
    assert same(contents(pool, slots(20, 31, 22)), expected)
    assert taken == ["shared_memory" if transport == "auto" else transport]
    linker.close()


def test_pages_that_went_since_the_lookup_fail_the_batch_and_write_nothing(
    server: RunningServer,
) -> None:
    pool = pool_of("mha")
    linker = linker_of(server, pool, "m/gone")
    keys = hashes("c", 2)
    assert offload(linker, keys[:1], slots(0))
    before = contents(pool, slots(10, 11))
    linker.load("r", transfer(keys, slots(10, 11)))
    index = linker.start_layer_wise_loading()
    linker.layer_done_counter.set_consumer(index)
    pool.get_key_buffer(0)  # does not raise into the forward, nor wait for ever
    assert not linker.finish_layer_wise_loading(index)
    assert same(contents(pool, slots(10, 11)), before)
    linker.close()


def test_the_hicache_backend_reads_what_the_linker_stored(server: RunningServer) -> None:
    pool = pool_of("mha")
    linker = linker_of(server, pool, "m/both")
    keys = hashes("d", 2)
    assert offload(linker, keys, slots(3, 7))
    host = sglang_on_cpu.host_pool(pool, "page_first", page_tokens=PAGE)
    extra = {
        "backend_name": "objectcache",
        "module_path": "objectcache.connectors.sglang",
        "class_name": "ObjectCacheHiCache",
        "endpoint": server.endpoint,
        "bucket": "linked",
        "credentials_file": str(server.credentials_file),
    }
    sglang_on_cpu.publish_model("m/both")
    config = HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, False, True, "prod", extra_config=extra)
    backend = StorageBackendFactory.create_backend("dynamic", config, host)
    backend.register_mem_pool_host(host)
    assert backend.batch_get_v1(keys, slots(0, 1)) == [True, True]
    for layer in range(LAYERS):
        for part, buffer in ((0, pool.k_buffer), (1, pool.v_buffer)):
            found = host.kv_buffer[part, slots(0, 1), layer].view(torch.uint8)
            assert torch.equal(found, buffer[layer][slots(3, 7)].view(torch.uint8))
    backend.close()
    linker.close()


def test_reset_forgets_what_is_queued_and_all_results(server: RunningServer) -> None:
    linker = linker_of(server, pool_of("mha"), "m/reset")
    keys = hashes("e", 1)
    linker.offload(transfer(keys, slots(0)))
    linker.load("r", transfer(keys, slots(5)))
    linker.reset()
    assert linker.num_completed_offloads() == 0
    assert linker.start_layer_wise_loading() == -1
    assert linker.lookup("r", transfer(keys)) == [1]
    linker.close()
    linker.close()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"components": {ComponentType.FULL, ComponentType.SWA}}, "SWA"),
        ({"drafts": ("draft",)}, "speculative"),
        ({"bukcet": "x"}, "bukcet"),
    ],
)
def test_what_the_linker_cannot_serve_is_named_at_the_start(
    server: RunningServer, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidRequest, match=named):
        linker_of(server, pool_of("mha"), "m/wrong", **changes)


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RunningServer]:
    with start_server(tmp_path / "data") as running:
        yield running


def test_a_server_killed_during_a_load_fails_it_and_later_lookups_are_misses(
    own_server: RunningServer,
) -> None:
    pool = pool_of("mha")
    keys = hashes("f", 2)
    store(own_server, pool, "m/killed", keys, slots(0, 1))
    linker = linker_of(own_server, pool, "m/killed", timeout_s=3.0)
    before = contents(pool, slots(10, 11))
    stop_whole(own_server.storage_pid)  # so that the load is under way when it dies
    linker.load("r", transfer(keys, slots(10, 11)))
    index = linker.start_layer_wise_loading()
    own_server.kill_storage()
    own_server.kill_gateway()
    assert not linker.finish_layer_wise_loading(index)
    assert same(contents(pool, slots(10, 11)), before)
    assert linker.lookup("r", transfer(keys)) == []
    assert not offload(linker, hashes("g", 1), slots(2))
    linker.close()
    own_server.restart_storage()
    own_server.restart_gateway()
    again = linker_of(own_server, pool, "m/killed")
    assert again.lookup("r", transfer(keys)) == [1, 2]
    again.close()


def test_a_server_that_stops_answering_fails_a_load_within_the_timeout(
    own_server: RunningServer,
) -> None:
    pool = pool_of("mha")
    keys = hashes("h", 1)
    store(own_server, pool, "m/stopped", keys, slots(0))
    linker = linker_of(own_server, pool, "m/stopped", timeout_s=1.0)
    stop_whole(own_server.storage_pid)
    try:
        linker.load("r", transfer(keys, slots(10)))
        index = linker.start_layer_wise_loading()
        assert not linker.finish_layer_wise_loading(index)
    finally:
        os.kill(own_server.storage_pid, signal.SIGCONT)
    linker.close()


def test_the_scheduler_does_not_wait_for_a_server_that_is_stopped(
    own_server: RunningServer,
) -> None:
    pool = pool_of("mha")
    linker = linker_of(
        own_server, pool, "m/lookups", timeout_s=3600.0, lookup_timeout_s=LOOKUP_TIMEOUT_S
    )
    keys = hashes("i", 1)
    assert offload(linker, keys, slots(0))
    stop_whole(own_server.storage_pid)
    try:
        # Each would take an hour but for the lookups' own timeout, most half a second but for the
        # pause.
        assert [linker.lookup("r", transfer(keys)) for _ in range(200)] == [[]] * 200
        assert 1 <= linker._stores.outage.failure_count <= 3
    finally:
        os.kill(own_server.storage_pid, signal.SIGCONT)
    linker.close()
