"""ObjectCache as SGLang's dynamic HiCache storage: its factory, its host pools, a real server."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from objectcache.client import Client
from objectcache.connectors.sglang import page_store
from objectcache.connectors.sglang.served_model import KV_ARGUMENTS
from objectcache.connectors.store.configuration import LOOKUP_TIMEOUT_S
from objectcache.errors import AccessDenied, Conflict, InvalidRequest, Unavailable
from objectcache_schemas.layout import KvLayout
from tests.engines import sglang_on_cpu
from tests.engines.delivery_traces import NewTraces
from tests.servers import RunningServer, start_server, stop_whole

sglang_on_cpu.prepare()

import torch  # noqa: E402
from sglang.srt import runtime_context  # noqa: E402
from sglang.srt.arg_groups.field_order import POSITIONAL_FIELD_ORDER  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.storage import StorageBackendFactory  # noqa: E402

PAGE = 8
LAYERS = 3
BUCKET = "sglang"
MHA = ["layer_first", "page_first", "page_first_direct", "page_head", "page_unified"]
MLA = ["layer_first", "page_first", "page_first_direct", "page_unified"]
CASES = [*(("mha", name, 1) for name in MHA), ("mha", "page_unified", 2)] + [
    ("mla", name, 1) for name in MLA
]


@pytest.fixture(scope="module", autouse=True)
def bucket(server: RunningServer) -> None:
    with client_of(server) as client:
        client.create_bucket(BUCKET)


def client_of(server: RunningServer) -> Client:
    key = server.credentials
    return Client(server.endpoint, access_key=key.access_key, secret_key=key.secret_key)


def extra_config(server: RunningServer, **changes: Any) -> dict[str, Any]:
    return {
        "backend_name": "objectcache",
        "module_path": "objectcache.connectors.sglang",
        "class_name": "ObjectCacheHiCache",
        "interface_v1": 1,
        "endpoint": server.endpoint,
        "bucket": BUCKET,
        "credentials_file": str(server.credentials_file),
        "lookup_timeout_s": 20.0,  # above any wait that a busy machine causes
        **changes,
    }


def config(
    extra: dict[str, Any],
    model: str,
    *,
    tp: tuple[int, int] = (0, 1),
    mla: bool = False,
    **arguments: Any,
) -> Any:
    sglang_on_cpu.publish_model(model, **arguments)
    return HiCacheStorageConfig(
        tp_rank=tp[0],
        tp_size=tp[1],
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=mla,
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name="prod",  # the alias that all of these models are served under
        extra_config=extra,
    )


def backend_of(storage_config: Any, pool: Any) -> Any:
    backend = StorageBackendFactory.create_backend("dynamic", storage_config, pool)
    backend.register_mem_pool_host(pool)
    backend.on_host_pools_registered()
    return backend


def pool_of(kind: str, layout: str, groups: int = 1) -> Any:
    device = sglang_on_cpu.device_pool(
        kind, tokens=64, page_tokens=PAGE, layers=LAYERS, dtype=torch.bfloat16
    )
    pool = sglang_on_cpu.host_pool(device, layout, page_tokens=PAGE, head_groups=groups)
    raw = pool.kv_buffer.view(torch.uint8)
    generator = torch.Generator().manual_seed(3)
    raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))
    return pool


def slots(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def hashes(name: str, count: int) -> list[str]:
    return [f"{name.encode().hex()}{index:04x}" for index in range(count)]


def token(pool: Any, layer: int, component: int, slot: int) -> bytes:
    """One token's bytes of one layer, found as each layout documents it, heads in order."""
    buffer, layout = pool.kv_buffer, pool.layout
    page, row = divmod(slot, PAGE)
    if hasattr(pool, "kv_cache_dim"):
        found = {
            "layer_first": lambda: buffer[layer, slot],
            "page_first": lambda: buffer[slot, layer],
            "page_first_direct": lambda: buffer[page, layer, row],
            "page_unified": lambda: buffer[page, layer, row],
        }[layout]()
    else:
        found = {
            "layer_first": lambda: buffer[component, layer, slot],
            "page_first": lambda: buffer[component, slot, layer],
            "page_first_direct": lambda: buffer[component, page, layer, row],
            "page_head": lambda: buffer[component, page, :, row, layer],
            "page_unified": lambda: buffer[page, :, layer, component, row],
        }[layout]()
    return bytes(found.contiguous().view(torch.uint8).numpy().tobytes())


def chunk(pool: Any, page: int) -> bytes:
    """The page as a chunk: layer, K or V, token, head."""
    components = 1 if hasattr(pool, "kv_cache_dim") else 2
    return b"".join(
        token(pool, layer, component, page * PAGE + row)
        for layer in range(LAYERS)
        for component in range(components)
        for row in range(PAGE)
    )


def stored_chunk(server: RunningServer, backend: Any, key: str) -> bytes:
    store = backend._pools["kv"].store
    layout: KvLayout = store.bucket.layout
    with client_of(server) as client:
        bucket = client.kv_bucket(BUCKET, layout)
        with bucket.fetch(store.namespace.keys([key]), delivery="chunkwise") as delivery:
            return delivery.wait().tobytes()


@pytest.mark.parametrize(("kind", "layout", "groups"), CASES)
def test_pages_of_every_layout_are_stored_as_chunks_and_come_back(
    server: RunningServer, kind: str, layout: str, groups: int
) -> None:
    pool = pool_of(kind, layout, groups)
    model = f"m/{kind}-{layout}-{groups}"
    backend = backend_of(config(extra_config(server), model, mla=kind == "mla"), pool)
    keys = hashes("a", 3)
    assert backend.batch_exists(keys) == 0
    assert backend.batch_set_v1(keys, slots(4, 1, 2)) == [True] * 3
    assert backend.batch_exists(keys) == 3
    assert [stored_chunk(server, backend, key) for key in keys] == [
        chunk(pool, page) for page in (4, 1, 2)
    ]
    expected, beside = [chunk(pool, page) for page in (4, 1, 2)], chunk(pool, 8)
    assert backend.batch_get_v1(keys, slots(7, 6, 9)) == [True] * 3
    assert [chunk(pool, page) for page in (7, 6, 9)] == expected
    assert chunk(pool, 8) == beside
    backend.close()


def test_pages_are_wanted_as_a_whole_and_teach_no_window(server: RunningServer) -> None:
    pool = pool_of("mha", "page_first")
    backend = backend_of(config(extra_config(server), "m/whole"), pool)
    keys = hashes("w", 3)
    assert backend.batch_set_v1(keys, slots(4, 1, 2)) == [True] * 3
    traces = NewTraces(server, BUCKET)
    for _ in range(4):
        assert backend.batch_get_v1(keys, slots(7, 6, 9)) == [True] * 3
    for trace in traces.all_ended(4):
        assert (trace.window_source, trace.reported_window_s) == ("whole", None)
    backend.close()


def test_pages_stored_from_one_layout_are_read_into_another(server: RunningServer) -> None:
    writer, reader = pool_of("mha", "page_head"), pool_of("mha", "page_unified", 2)
    keys = hashes("b", 2)
    first = backend_of(config(extra_config(server), "m/shared"), writer)
    assert first.batch_set_v1(keys, slots(0, 5)) == [True, True]
    second = backend_of(config(extra_config(server), "m/shared"), reader)
    assert second.batch_get_v1(keys, slots(3, 2)) == [True, True]
    assert [chunk(reader, 3), chunk(reader, 2)] == [chunk(writer, 0), chunk(writer, 5)]
    for backend in (first, second):
        backend.close()


def test_the_interface_of_flat_tensors_reads_what_the_other_wrote(server: RunningServer) -> None:
    pool = pool_of("mha", "page_first")
    backend = backend_of(config(extra_config(server), "m/flat"), pool)
    keys = hashes("c", 3)
    assert backend.batch_set_v1(keys[:2], slots(0, 1)) == [True, True]
    pages = backend.batch_get(keys, [pool.get_dummy_flat_data_page() for _ in keys])
    assert pages[2] is None
    for page, expected in zip(pages[:2], (0, 1), strict=True):
        assert torch.equal(
            page.view(torch.uint8), pool.get_data_page(expected * PAGE).view(torch.uint8)
        )
    assert backend.set(keys[2], pool.get_data_page(6 * PAGE))
    assert backend.exists(keys[2])
    assert backend.batch_get_v1(keys[2:], slots(9)) == [True]
    assert chunk(pool, 9) == chunk(pool, 6)
    backend.close()


@pytest.mark.parametrize("transport", ["auto", "body"])
def test_a_batch_larger_than_a_request_is_split_and_whole(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    pool = pool_of("mha", "page_head")
    page_bytes = len(chunk(pool, 0))
    monkeypatch.setattr(page_store, "PUT_BYTES_MAX", 2 * page_bytes)
    monkeypatch.setattr(page_store, "FETCH_BYTES_MAX", 3 * page_bytes)
    extra = extra_config(server, transport=transport)
    backend = backend_of(config(extra, f"m/split-{transport}"), pool)
    keys = hashes("l", 7)
    assert backend.batch_set_v1(keys[:5], slots(0, 1, 2, 3, 4)) == [True] * 5
    found = backend.batch_get_v1(keys, slots(5, 6, 7, 8, 9, 10, 11))
    assert found == [True] * 5 + [False] * 2
    assert [chunk(pool, page) for page in (5, 6, 7, 8, 9)] == [chunk(pool, n) for n in range(5)]
    backend.close()


def test_a_page_that_is_missing_ends_the_run_and_is_not_touched(server: RunningServer) -> None:
    pool = pool_of("mha", "page_first_direct")
    backend = backend_of(config(extra_config(server), "m/miss"), pool)
    keys = hashes("d", 4)
    backend.batch_set_v1(keys[:2], slots(0, 1))
    backend.batch_set_v1(keys[3:], slots(3))
    assert backend.batch_exists(keys) == 2
    before = chunk(pool, 7)
    assert backend.batch_get_v1(keys, slots(5, 6, 7, 8)) == [True, True, False, False]
    assert chunk(pool, 5) == chunk(pool, 0)
    assert chunk(pool, 7) == before
    backend.close()


def test_a_page_that_another_computed_in_other_bytes_counts_as_stored(
    server: RunningServer,
) -> None:
    pool = pool_of("mha", "page_first")
    backend = backend_of(config(extra_config(server), "m/conflict"), pool)
    keys = hashes("e", 5)
    assert backend.batch_set_v1([keys[2]], slots(9)) == [True]
    prefix = HiCacheStorageExtraInfo(prefix_keys=hashes("before", 1))
    assert backend.batch_set_v1(keys, slots(0, 1, 2, 3, 4), prefix) == [True] * 5
    assert backend.batch_exists(keys) == 5
    backend.batch_get_v1(keys, slots(5, 6, 7, 8, 10))
    assert [chunk(pool, page) for page in (5, 6, 7, 8, 10)] == [
        chunk(pool, page) for page in (0, 1, 9, 3, 4)
    ]
    backend.close()


def test_ranks_of_heads_keep_their_own_pages_and_ranks_of_mla_share(server: RunningServer) -> None:
    keys = hashes("f", 1)
    for mla, seen in ((False, 0), (True, 1)):
        pool = pool_of("mla" if mla else "mha", "page_first")
        extra = extra_config(server)
        ranks = [
            backend_of(config(extra, f"m/ranks-{mla}", tp=(rank, 2), mla=mla), pool)
            for rank in (0, 1)
        ]
        assert ranks[0].batch_set_v1(keys, slots(0)) == [True]
        assert ranks[1].batch_exists(keys) == seen
        for backend in ranks:
            backend.close()


def test_other_weights_under_one_model_name_are_other_pages(server: RunningServer) -> None:
    pool = pool_of("mha", "page_first")
    keys = hashes("g", 1)
    first, second = (
        backend_of(config(extra_config(server, weights_revision=name), "m/revised"), pool)
        for name in ("r1", "r2")
    )
    assert first.batch_set_v1(keys, slots(0)) == [True]
    assert (first.batch_exists(keys), second.batch_exists(keys)) == (1, 0)
    for backend in (first, second):
        backend.close()


def test_models_that_are_served_under_one_alias_do_not_share_pages(server: RunningServer) -> None:
    pool = pool_of("mha", "page_first")
    keys = hashes("aliased", 1)
    seen: dict[str, int] = {}
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("first", "m/base", {}),
        ("again", "m/base", {"served_model_name": "else"}),
        ("other weights", "m/instruct", {}),
        ("other quantisation", "m/base", {"quantization": "fp8"}),
        ("other positions", "m/base", {"json_model_override_args": '{"rope_theta": 1}'}),
        ("other revision", "m/base", {"revision": "v2"}),
    ]
    for name, model, arguments in cases:
        backend = backend_of(config(extra_config(server), model, **arguments), pool)
        seen[name] = backend.batch_exists(keys)
        assert backend.batch_set_v1(keys, slots(0)) == [True]
        backend.close()
    assert seen == {name: int(name == "again") for name in seen}


def test_a_process_that_does_not_tell_its_model_is_refused(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage_config = config(extra_config(server), "m/untold")
    monkeypatch.setattr(runtime_context._CONTEXT, "_server_args", None)
    with pytest.raises(InvalidRequest, match="alias"):
        StorageBackendFactory.create_backend("dynamic", storage_config, None)


def test_arguments_that_change_kv_are_arguments_of_sglang() -> None:
    assert set(KV_ARGUMENTS) < set(POSITIONAL_FIELD_ORDER)


def test_pools_beside_kv_count_for_the_prefix_by_their_policy(server: RunningServer) -> None:
    kv, side = pool_of("mha", "page_first"), pool_of("mla", "page_first")
    backend = backend_of(config(extra_config(server), "m/hybrid"), kv)
    backend.register_mem_host_pool_v2(kv, PoolName.KV)
    for name in (PoolName.INDEXER, PoolName.SWA):
        backend.register_mem_host_pool_v2(side, name)
    keys = hashes("h", 4)

    def transfer(name: PoolName, count: int, start: int, **policy: Any) -> PoolTransfer:
        pages = slots(*range(start, start + count))
        return PoolTransfer(name=name, host_indices=pages, keys=keys[:count], **policy)

    done = backend.batch_set_v2([transfer(PoolName.KV, 4, 0), transfer(PoolName.INDEXER, 3, 0)])
    assert done == {PoolName.KV: [True] * 4, PoolName.INDEXER: [True] * 3}
    backend.batch_set_v2(
        [PoolTransfer(name=PoolName.SWA, host_indices=slots(5, 6), keys=keys[1:3])]
    )
    all_pages = PoolTransfer(name=PoolName.INDEXER, keys=keys)
    assert backend.batch_exists_v2(keys, [all_pages]).kv_hit_pages == 3
    window = PoolTransfer(
        name=PoolName.SWA, keys=keys[-2:], hit_policy=PoolHitPolicy.TRAILING_PAGES
    )
    found = backend.batch_exists_v2(keys, [window])
    assert (found.kv_hit_pages, found.extra_pool_hit_pages[PoolName.SWA]) == (3, 3)
    before = [chunk(side, 0), chunk(side, 1)]
    read = backend.batch_get_v2([transfer(PoolName.INDEXER, 2, 8)])
    assert read == {PoolName.INDEXER: [True, True]}
    assert [chunk(side, 8), chunk(side, 9)] == before
    unknown = backend.batch_get_v2([transfer(PoolName.MAMBA, 1, 0)])
    assert unknown == {PoolName.MAMBA: [False]}
    backend.close()


def test_slots_that_are_not_whole_pages_are_refused_and_nothing_is_touched(
    server: RunningServer,
) -> None:
    pool = pool_of("mha", "page_first")
    backend = backend_of(config(extra_config(server), "m/slots"), pool)
    keys = hashes("i", 2)
    assert backend.batch_set_v1(keys, slots(0, 1) + 1) == [False, False]
    assert backend.batch_set_v1(keys, slots(0)) == [False, False]
    assert backend.batch_set_v1(keys, slots(0, 100)) == [False, False]
    assert backend.batch_exists(keys) == 0
    backend.close()


@pytest.mark.parametrize(
    ("change", "named"),
    [({"bukcet": "x"}, "bukcet"), ({"timeout_s": "soon"}, "timeout_s"), ({"bucket": ""}, "bucket")],
)
def test_a_wrong_setting_is_named(
    server: RunningServer, change: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidRequest, match=named):
        StorageBackendFactory.create_backend(
            "dynamic", config(extra_config(server, **change), "m/wrong"), None
        )


def test_a_bucket_that_is_missing_is_made_and_one_with_a_layout_fails_the_attach(
    server: RunningServer,
) -> None:
    pool = pool_of("mha", "page_first")
    made = backend_of(config(extra_config(server, bucket="made"), "m/made"), pool)
    assert made.batch_set_v1(hashes("x", 1), slots(0)) == [True]
    made.close()
    layout = KvLayout(
        num_layers=1, chunk_tokens=1, per_layer_chunk_bytes=1, dtype="u8", fingerprint="other"
    )
    with client_of(server) as client:
        client.kv_bucket("laidout", layout, create=True)
    with pytest.raises(Conflict, match="laidout"):
        backend_of(config(extra_config(server, bucket="laidout"), "m/wrong"), pool)


def test_credentials_that_the_server_does_not_know_fail_the_attach(server: RunningServer) -> None:
    wrong = extra_config(server, access_key="AKIAWRONGWRONGWRONGX", secret_key="wrong")
    del wrong["credentials_file"]
    with pytest.raises(AccessDenied):
        backend_of(config(wrong, "m/wrong"), pool_of("mha", "page_first"))


def test_injected_failures_of_sglang_read_as_misses(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "1.0")
    pool = pool_of("mha", "page_first")
    backend = backend_of(config(extra_config(server), "m/injected"), pool)
    keys = hashes("j", 1)
    assert backend.batch_set_v1(keys, slots(0)) == [False]
    assert backend.batch_get_v1(keys, slots(0)) == [False]
    backend.close()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RunningServer]:
    with start_server(tmp_path / "data") as running:
        with client_of(running) as client:
            client.create_bucket(BUCKET)
        yield running


def test_a_dead_server_is_misses_in_bounded_time_and_its_pages_survive(
    own_server: RunningServer,
) -> None:
    pool = pool_of("mha", "page_head")
    patient = config(extra_config(own_server), "m/dead")
    keys = hashes("k", 2)
    first = backend_of(patient, pool)
    assert first.batch_set_v1(keys, slots(0, 1)) == [True, True]
    first.close()
    settings = config(extra_config(own_server, timeout_s=2.0, lookup_timeout_s=2.0), "m/dead")
    backend = backend_of(settings, pool)
    own_server.kill_storage()
    own_server.kill_gateway()
    before = np.frombuffer(chunk(pool, 5), np.uint8).copy()
    started_s = time.monotonic()
    assert backend.batch_get_v1(keys, slots(5, 6)) == [False, False]
    assert backend.batch_exists(keys) == 0
    assert backend.batch_set_v1(keys, slots(0, 1)) == [False, False]
    assert time.monotonic() - started_s < 60  # a bound, not a measurement
    assert np.array_equal(np.frombuffer(chunk(pool, 5), np.uint8), before)
    backend.close()
    with pytest.raises(Unavailable):
        backend_of(settings, pool)
    own_server.restart_storage()
    own_server.restart_gateway()
    again = backend_of(patient, pool)
    assert again.batch_get_v1(keys, slots(5, 6)) == [True, True]
    assert chunk(pool, 5) == chunk(pool, 0)
    again.close()


@pytest.mark.parametrize("stopped", ["storage", "gateway"])
def test_a_server_that_is_stopped_costs_lookups_a_moment_and_then_nothing(
    own_server: RunningServer, monkeypatch: pytest.MonkeyPatch, stopped: str
) -> None:
    pool = pool_of("mha", "page_head")
    # What is not bounded by the lookups' own timeout would be seen to hang.
    extra = extra_config(own_server, timeout_s=3600.0, lookup_timeout_s=LOOKUP_TIMEOUT_S)
    backend = backend_of(config(extra, "m/stopped"), pool)
    keys = hashes("m", 2)
    assert backend.batch_set_v1(keys, slots(0, 1)) == [True, True]
    store = backend._pools["kv"].store
    asked: list[int] = []
    match = store.bucket.match

    def counting(names: Any, **more: Any) -> int:
        asked.append(len(names))
        return int(match(names, **more))

    monkeypatch.setattr(store.bucket, "match", counting)
    pid = own_server.storage_pid if stopped == "storage" else own_server.gateway_pid
    stop_whole(pid)
    try:
        assert [backend.batch_exists(keys) for _ in range(50)] == [0] * 50
        assert backend.batch_get_v1(keys, slots(5, 6)) == [False, False]
        assert backend.batch_set_v1(keys, slots(0, 1)) == [False, False]
    finally:
        os.kill(pid, signal.SIGCONT)
    assert 1 <= len(asked) <= 3, "a server that is stopped is asked again after a pause alone"
    backend.close()
