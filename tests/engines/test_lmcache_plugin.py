"""LMCache's in-process mode through the plug-in, loaded by LMCache's own loader."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lmcache.v1.exceptions import IrrecoverableException
from lmcache.v1.storage_backend.connector import CreateConnector
from lmcache.v1.storage_backend.remote_backend import RemoteBackend

from objectcache import Client, KvLayout
from objectcache.connectors.lmcache.chunk_store import ChunkStore
from objectcache.connectors.lmcache.geometry import ChunkGeometry
from objectcache.connectors.lmcache.names import RELAY_HINT
from objectcache.connectors.store.configuration import LOOKUP_TIMEOUT_S, StoreConfiguration
from objectcache.deliveries.delivery import Delivery
from objectcache.kv_bucket import KvBucket
from objectcache.routes.client_routes import ASKED_FOR
from tests.engines.delivery_traces import NewTraces
from tests.engines.lmcache_parts import (
    EngineSide,
    contents,
    engine_keys,
    engine_side,
    release,
)
from tests.integration.served import wait_until
from tests.relay.relays import RunningRelay
from tests.servers import RunningServer, start_server, stop_whole

BUCKET = "lmcache"
PLUGIN = "objectcache"
BIG = (64, 2, 64, 8, 64)  # 8 MiB a chunk, of which LMCache's memory in these tests holds
BIG_CHUNKS_MAX = 32
PREFIX = f"remote_storage_plugin.{PLUGIN}."


@pytest.fixture(scope="module")
def bucket(server: RunningServer) -> RunningServer:
    with client_of(server) as client:
        client.create_bucket(BUCKET)
    return server


def client_of(server: RunningServer) -> Client:
    credentials = server.credentials
    return Client(
        server.endpoint, access_key=credentials.access_key, secret_key=credentials.secret_key
    )


def extra_config(server: RunningServer, **settings: Any) -> dict[str, Any]:
    values = {
        "module_path": "objectcache.connectors.lmcache",
        "class_name": "ObjectCacheConnectorAdapter",
        "endpoint": server.endpoint,
        "bucket": BUCKET,
        "credentials_file": str(server.credentials_file),
        "lookup_timeout_s": 20.0,  # above any wait that a busy machine causes
        **settings,
    }
    return {PREFIX + name: value for name, value in values.items()}


def connector_of(engine: EngineSide) -> Any:
    return CreateConnector(
        f"plugin://{PLUGIN}",
        engine.loop,
        engine.backend,
        engine.config,
        engine.metadata,
        plugin_name=PLUGIN,
    )


@contextmanager
def connected(server: RunningServer, **settings: Any) -> Iterator[tuple[EngineSide, Any]]:
    """An engine's side and a connector that LMCache made."""
    store = settings.pop("store", {})
    with engine_side(
        extra_config(server, **store), remote_storage_plugins=[PLUGIN], **settings
    ) as engine:
        connector = connector_of(engine)
        try:
            yield engine, connector
        finally:
            engine.call(connector.close())


def put(engine: EngineSide, connector: Any, keys: list[Any]) -> list[bytes]:
    """Store noise under the keys; returns it."""
    memory_objs = engine.chunks(len(keys))
    stored = contents(memory_objs)
    engine.call(connector.batched_put(keys, memory_objs))
    return stored


@pytest.mark.parametrize("transport", ["auto", "nixl"])
def test_chunks_are_stored_and_loaded_over_the_transport_that_is_chosen(
    bucket: RunningServer, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if transport == "nixl":
        pytest.importorskip("nixl")
    fetch, taken = KvBucket.fetch, list[str]()

    def noted(self: KvBucket, *given: Any, **chosen: Any) -> Delivery:
        delivery = fetch(self, *given, **chosen)
        taken.append(delivery.transport)
        return delivery

    monkeypatch.setattr(KvBucket, "fetch", noted)
    keys = engine_keys(3, first=410 if transport == "nixl" else 400)
    with connected(bucket, store={"transport": transport}) as (engine, connector):
        stored = put(engine, connector, keys)
        assert contents(engine.call(connector.batched_get(keys))) == stored
    assert taken == ["shared_memory" if transport == "auto" else transport]


def test_a_get_comes_over_the_relay_that_its_request_names_and_its_keys_stay_the_same(
    bucket: RunningServer, tmp_path: Path
) -> None:
    keys = engine_keys(2, first=430)
    with RunningRelay(bucket, tmp_path / "relay.log") as relay:
        store = {
            "relays": f"b={relay.endpoint}",
            "route": "direct",
            "transport": "body",
            "relay_timeout_s": 30.0,  # silent longer than it is on a busy machine
        }
        with connected(bucket, store=store) as (engine, connector):
            stored = put(engine, connector, keys)
            client = connector.getWrappedConnector()._store._client
            for hint, route in (("b", "relay:b"), ("elsewhere", "direct"), (7, "direct")):
                before = client.route_counts()
                hinted = [
                    dataclasses.replace(key, request_configs={RELAY_HINT: hint}) for key in keys
                ]
                assert contents(engine.call(connector.batched_get(hinted))) == stored
                [taken] = client.route_counts().items() - before.items()
                assert taken[0] == (route, ASKED_FOR)


def test_a_load_of_chunks_is_never_taken_for_a_paced_one(bucket: RunningServer) -> None:
    """The time of LMCache's copies is no compute window, however often it is seen."""
    loads = 6  # of 16 layers each: more than any learner waits for
    keys = engine_keys(2, first=420)
    traces = NewTraces(bucket, BUCKET)
    with connected(bucket) as (engine, connector):
        put(engine, connector, keys)
        for _ in range(loads):
            release(engine.call(connector.batched_get(keys)))
    for trace in traces.all_ended(loads):
        assert (trace.delivery, trace.window_source) == ("layerwise", "whole")
        assert trace.compute_window_s is None
        assert trace.reported_window_s is None


def test_a_bound_of_loads_splits_a_get_and_no_chunk_is_lost(bucket: RunningServer) -> None:
    keys = engine_keys(20, first=450)
    with connected(bucket) as (engine, connector):
        stored = put(engine, connector, keys)
    assert 16 * len(stored[0]) == 64 << 10
    with connected(bucket, store={"load_bytes_max": 64 << 10}) as (engine, connector):
        assert contents(engine.call(connector.batched_get(keys))) == stored


def test_a_batch_of_chunks_comes_back_byte_for_byte_and_stops_at_the_first_missing_one(
    bucket: RunningServer,
) -> None:
    keys = engine_keys(7, first=1)
    with connected(bucket) as (engine, connector):
        stored = put(engine, connector, keys[:4])
        put(engine, connector, keys[5:6])

        assert connector.batched_contains(keys) == 4
        assert engine.call(connector.batched_async_contains("lookup", keys)) == 4
        found = engine.call(connector.batched_get(keys))
        assert contents(found[:4]) == stored
        assert found[4:] == [None, None, None]
        prefix = engine.call(connector.batched_get_non_blocking("lookup", keys))
        assert contents(prefix) == stored
        alone = engine.call(connector.get(keys[2]))
        assert contents([alone]) == stored[2:3]
        assert engine.call(connector.get(keys[6])) is None
        assert engine.call(connector.exists(keys[3]))
        assert not connector.exists_sync(keys[4])

        release([*found, *prefix, alone])
        assert engine.used_bytes == 0


def test_chunks_are_stored_layer_after_layer_so_that_a_slice_is_a_layer(
    bucket: RunningServer,
) -> None:
    """LMCache keeps [K and V, layer, ...]; the store must be able to deliver one layer alone."""
    keys = engine_keys(3, first=2)
    with connected(bucket) as (engine, connector):
        stored = put(engine, connector, keys)
        names = connector.getWrappedConnector()._names(keys)
    parts, layers, layer_bytes = 2, 4, 16 * 2 * 8 * 2
    layout = KvLayout(
        num_layers=layers,
        chunk_tokens=16,
        per_layer_chunk_bytes=parts * layer_bytes,
        dtype="bfloat16",
        fingerprint="any",
    )
    with client_of(bucket) as client:
        bucket_of_layers = client.kv_bucket(BUCKET, layout)
        with bucket_of_layers.fetch(names, layers=(2, 3)) as delivery:
            second = delivery.wait_layer(2)
            for chunk, kv in zip(stored, second, strict=True):
                by_part = np.frombuffer(chunk, np.uint8).reshape(parts, layers, layer_bytes)
                assert kv.tobytes() == by_part[:, 2].tobytes()
        assert client.kv_bucket(BUCKET, layout).match(names) == 3


def test_the_latent_of_mla_is_stored_and_loaded(bucket: RunningServer) -> None:
    keys = engine_keys(2, first=3)
    with connected(bucket, shape=(3, 1, 16, 1, 24), use_mla=True) as (engine, connector):
        stored = put(engine, connector, keys)
        found = engine.call(connector.batched_get(keys))
        assert contents(found) == stored
        release(found)


def test_two_geometries_under_one_key_of_lmcache_do_not_meet(bucket: RunningServer) -> None:
    """The same number of bytes in another shape, which LMCache's own keys do not tell apart."""
    keys = engine_keys(2, first=4)
    with connected(bucket, shape=(4, 2, 16, 2, 8)) as (engine, connector):
        stored = put(engine, connector, keys)
    with connected(bucket, shape=(2, 2, 16, 4, 8)) as (other, connector):
        assert connector.batched_contains(keys) == 0
        assert other.call(connector.batched_get(keys)) == [None, None]
        assert put(other, connector, keys) != stored
    with connected(bucket, shape=(4, 2, 16, 2, 8)) as (engine, connector):
        found = engine.call(connector.batched_get(keys))
        assert contents(found) == stored
        release(found)


@pytest.mark.parametrize("other", ["weights revision", "rank", "tag"])
def test_what_else_makes_kv_differ_is_part_of_the_key(bucket: RunningServer, other: str) -> None:
    keys = engine_keys(2, first=5)
    with connected(bucket) as (engine, connector):
        put(engine, connector, keys)
    settings = {"weights_revision": "2"} if other == "weights revision" else {}
    if other == "rank":
        keys = engine_keys(2, first=5, worker_id=1, world_size=2)
    if other == "tag":
        keys = [_tagged(key) for key in keys]
    with connected(bucket, store=settings) as (_, connector):
        assert connector.batched_contains(keys) == 0


def _tagged(key: Any) -> Any:
    return type(key)(
        key.model_name,
        key.world_size,
        key.worker_id,
        key.chunk_hash,
        key.dtype,
        {"lmcache.tag.user": "a"},
    )


def test_other_bytes_of_a_chunk_that_is_stored_already_do_not_stop_the_rest(
    bucket: RunningServer,
) -> None:
    """KV that is computed again differs in its last bits; the first one stays."""
    keys = engine_keys(6, first=6)
    with connected(bucket) as (engine, connector):
        first = put(engine, connector, [keys[0], keys[3]])
        second = put(engine, connector, keys)
        found = engine.call(connector.batched_get(keys))
        assert contents(found) == [first[0], *second[1:3], first[1], *second[4:]]
        release(found)


def test_a_chunk_of_fewer_tokens_is_not_stored_and_the_log_says_so_once(
    bucket: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    keys = engine_keys(3, first=7)
    with connected(bucket) as (engine, connector):
        memory_objs = [engine.chunk(), engine.chunk(), engine.chunk(5)]
        stored = contents(memory_objs)
        with caplog.at_level(logging.WARNING, "objectcache"):
            engine.call(connector.batched_put(keys, memory_objs))
            engine.call(connector.put(keys[2], engine.chunk(5)))
        told = [record for record in caplog.records if "save_unfull_chunk" in record.message]
        assert len(told) == 1
        found = engine.call(connector.batched_get(keys))
        assert contents(found[:2]) == stored[:2]
        assert found[2] is None
        release(found)
        assert engine.used_bytes == 0


def test_a_removed_chunk_is_gone(bucket: RunningServer) -> None:
    keys = engine_keys(2, first=8)
    with connected(bucket) as (engine, connector):
        put(engine, connector, keys)
        assert connector.remove_sync(keys[1])
        assert connector.batched_contains(keys) == 1
        assert connector.remove_sync(keys[1])


def test_where_lmcache_has_room_for_a_part_that_part_is_loaded(bucket: RunningServer) -> None:
    keys = engine_keys(4, first=9)
    with connected(bucket, shape=BIG) as (engine, connector):
        stored = put(engine, connector, keys)
        held = engine.chunks(BIG_CHUNKS_MAX - 3)
        found = engine.call(connector.batched_get(keys))
        assert contents(found[:3]) == stored[:3]
        assert found[3] is None
        release([*held, *found])
        assert engine.used_bytes == 0


def test_the_remote_backend_of_lmcache_stores_finds_and_gets(bucket: RunningServer) -> None:
    keys = engine_keys(3, first=10)
    with engine_side(extra_config(bucket), remote_storage_plugins=[PLUGIN]) as engine:
        backend = RemoteBackend(
            engine.config, engine.metadata, engine.loop, engine.backend, "cpu", PLUGIN
        )
        memory_objs = engine.chunks(3)
        stored = contents(memory_objs)
        done = [asyncio.Event() for _ in keys]
        told: list[Any] = []

        def on_complete(key: Any) -> None:
            told.append(key)
            engine.loop.call_soon_threadsafe(done[len(told) - 1].set)

        backend.batched_submit_put_task(keys, memory_objs, on_complete_callback=on_complete)
        engine.call(done[2].wait())
        assert backend.batched_contains(engine_keys(5, first=10)) == 3
        found = backend.batched_get_blocking(keys)
        assert contents(found) == stored
        assert backend.remove(keys[0])
        assert not backend.contains(keys[0])
        release([*memory_objs, *found])
        backend.close()
        assert engine.used_bytes == 0


# --- failures ---


def test_layerwise_mode_is_refused_because_lmcache_would_take_a_failed_layer_for_a_good_one(
    bucket: RunningServer,
) -> None:
    with (
        engine_side(
            extra_config(bucket), remote_storage_plugins=[PLUGIN], use_layerwise=True
        ) as engine,
        pytest.raises(IrrecoverableException, match="use_layerwise is not served"),
    ):
        connector_of(engine)


@pytest.mark.parametrize(
    ("store", "settings", "message"),
    [
        ({"endpont": "x"}, {}, "'endpont' is unknown"),
        ({"bucket": ""}, {}, "'bucket' is missing; or set OBJECTCACHE_BUCKET"),
        ({"timeout_s": "fast"}, {}, "'timeout_s' must be seconds"),
        ({"transport": "pigeon"}, {}, "transport must be one of"),
        ({}, {"remote_serde": "cachegen"}, "remote_serde 'cachegen' is not served"),
    ],
)
def test_a_wrong_configuration_is_told_when_lmcache_starts(
    bucket: RunningServer, store: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with (
        engine_side(
            extra_config(bucket, **store), remote_storage_plugins=[PLUGIN], **settings
        ) as engine,
        pytest.raises(IrrecoverableException, match=message),
    ):
        connector_of(engine)


def test_ping_tells_whether_the_store_answers_and_makes_a_bucket_that_is_missing(
    bucket: RunningServer,
) -> None:
    with connected(bucket, store={"bucket": "made-by-lmcache"}) as (engine, connector):
        assert connector.support_ping()
        assert engine.call(connector.ping()) == 0
        stored = put(engine, connector, engine_keys(1))
        found = engine.call(connector.batched_get(engine_keys(1)))
        assert contents(found) == stored
        release(found)
    with connected(bucket, store={"secret_key": "another"}) as (engine, connector):
        assert engine.call(connector.ping()) != 0


def test_a_server_that_dies_in_a_get_is_a_miss_within_the_timeout_and_no_memory_is_kept(
    tmp_path: Path,
) -> None:
    keys = engine_keys(8, first=11)
    with start_server(tmp_path / "data") as mortal:
        with client_of(mortal) as client:
            client.create_bucket(BUCKET)
        with connected(mortal, shape=BIG) as (engine, connector):
            put(engine, connector, keys)
        with connected(mortal, shape=BIG, store={"timeout_s": 5}) as (engine, _):
            landed = _kill_at_first_allocation(engine, mortal)
            backend = RemoteBackend(
                engine.config, engine.metadata, engine.loop, engine.backend, "cpu", PLUGIN
            )
            assert backend.batched_get_blocking(keys) == [None] * len(keys)
            assert landed
            assert backend.batched_contains(keys) == 0
            assert engine.call(backend.connection.ping()) != 0
            assert engine.used_bytes == 0
            backend.close()


def _kill_at_first_allocation(engine: EngineSide, server: RunningServer) -> list[int]:
    """End the storage server when the connector asks for the memory of a delivery that runs."""
    allocate = engine.backend.allocate
    landed: list[int] = []

    def killing(*arguments: Any, **named: Any) -> Any:
        if not landed:
            server.kill_storage()
        landed.append(1)
        return allocate(*arguments, **named)

    engine.backend.allocate = killing
    return landed


@pytest.mark.parametrize("stopped", ["storage", "gateway"])
def test_a_server_that_is_stopped_costs_lookups_a_moment_and_then_nothing(
    tmp_path: Path, stopped: str
) -> None:
    """LMCache asks in its scheduler, and has no timeout of its own there."""
    keys = engine_keys(2, first=13)
    with start_server(tmp_path / "data") as running:
        pid = running.storage_pid if stopped == "storage" else running.gateway_pid
        extra = extra_config(running, lookup_timeout_s=LOOKUP_TIMEOUT_S)
        with engine_side(extra, remote_storage_plugins=[PLUGIN]) as engine:
            backend = RemoteBackend(
                engine.config, engine.metadata, engine.loop, engine.backend, "cpu", PLUGIN
            )
            put(engine, backend.connection, keys)
            wait_until(lambda: backend.batched_contains(keys) == 2, "the chunks to be found")
            outage = backend.connection.getWrappedConnector()._store._outage
            failures = outage.failure_count  # of a machine that was busy
            stop_whole(pid)
            try:
                # Each would take timeout_s, a minute, but for the lookups' own timeout, and half a
                # second but for the pause.
                assert [backend.batched_contains(keys) for _ in range(100)] == [0] * 100
                assert [backend.contains(keys[0]) for _ in range(100)] == [False] * 100
                assert backend.batched_get_blocking(keys) == [None, None]
                assert 1 <= outage.failure_count - failures <= 3
            finally:
                os.kill(pid, signal.SIGCONT)
            wait_until(lambda: backend.batched_contains(keys) == 2, "the pause to be over")
            backend.close()


def test_weights_and_configuration_of_a_models_directory_are_part_of_the_key(
    bucket: RunningServer, tmp_path: Path
) -> None:
    keys = [dataclasses.replace(key, model_name=str(tmp_path)) for key in engine_keys(1, first=14)]
    found: list[int] = []
    for weights, configuration in (("a", "1"), ("a", "1"), ("bb", "1"), ("bb", "2")):
        if not found or weights != "a":
            (tmp_path / "model.safetensors").write_text(weights)
        (tmp_path / "config.json").write_text(f'{{"rope_theta": {configuration}}}')
        with connected(bucket) as (engine, connector):
            found.append(connector.batched_contains(keys))
            put(engine, connector, keys)
    assert found == [0, 1, 0, 0]


def test_a_put_that_is_cancelled_keeps_its_memory_until_the_bytes_are_stored(
    bucket: RunningServer,
) -> None:
    keys = engine_keys(4, first=12)
    with connected(bucket, shape=BIG) as (engine, connector):
        memory_objs = engine.chunks(4)
        stored = contents(memory_objs)

        async def cancelled() -> None:
            task = asyncio.ensure_future(connector.batched_put(keys, memory_objs))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        engine.call(cancelled())
        others = engine.chunks(4)  # LMCache has let the objects go: this is noise in free memory
        wait_until(lambda: connector.batched_contains(keys) == 4, "the chunks to be stored")
        found = engine.call(connector.batched_get(keys))
        assert contents(found) == stored
        release([*others, *found])


def test_a_bucket_with_a_kv_layout_is_refused_with_its_reason(bucket: RunningServer) -> None:
    layout = KvLayout(
        num_layers=1, chunk_tokens=1, per_layer_chunk_bytes=1, dtype="x", fingerprint="x"
    )
    with client_of(bucket) as client:
        client.kv_bucket("with-layout", layout, create=True)
    credentials = bucket.credentials
    store = ChunkStore(
        StoreConfiguration(
            bucket.endpoint, "with-layout", credentials.access_key, credentials.secret_key
        )
    )
    geometry = ChunkGeometry.of([(2, 4, 16, 8)], [2])
    with pytest.raises(Exception, match="KV layout"):
        store.store(["key"], [np.zeros(geometry.chunk_bytes, np.uint8)], geometry)
    store.close()
