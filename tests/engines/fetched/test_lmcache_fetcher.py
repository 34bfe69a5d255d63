"""LMCache's plug-in and its L2 adapter on a bucket that is stored encoded: a fetcher's workers
decode what they load; without one the same bytes come plain, or encoded where that is set.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from objectcache.deliveries.delivery import Delivery
from objectcache.kv_bucket import KvBucket
from tests.encoded_delivery.prefixes import ZSTD
from tests.engines.fetched.encoded_bucket import NO_FETCHER, Decoded, encoded_server
from tests.engines.lmcache_parts import EngineSide, contents, engine_keys, engine_side, release
from tests.engines.test_lmcache_l2 import BUCKET as L2_BUCKET
from tests.engines.test_lmcache_l2 import adapter_of, loaded, object_keys, stored
from tests.engines.test_lmcache_plugin import BUCKET, connected
from tests.fetcher.fetchers import RunningFetcher
from tests.servers import RunningServer

COUNT = 6
LARGE = (4, 2, 64, 8, 64)
SLOW_GBPS = 0.005  # so many large chunks take seconds


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with encoded_server(tmp_path_factory.mktemp("encoded") / "data", BUCKET) as running:
        yield running


@pytest.fixture(scope="module")
def fetcher(
    server: RunningServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningFetcher]:
    log = tmp_path_factory.mktemp("fetcher") / "fetcher.log"
    with RunningFetcher(server, log) as running:
        yield running


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Delivery]:
    """Deliveries of this process, from now on."""
    fetch, found = KvBucket.fetch, list[Delivery]()

    def noted(self: KvBucket, *given: Any, **chosen: Any) -> Delivery:
        delivery = fetch(self, *given, **chosen)
        found.append(delivery)
        return delivery

    monkeypatch.setattr(KvBucket, "fetch", noted)
    return found


def filled(engine: EngineSide, count: int = COUNT) -> list[Any]:
    """Chunks of numbers such as KV cache has, which take fewer bytes encoded."""
    memory_objs = engine.chunks(count)
    for memory_obj in memory_objs:
        view = np.frombuffer(memory_obj.byte_array, np.uint16)
        numbers = engine.random.standard_normal(len(view), np.float32)
        view[:] = numbers.view(np.uint32) >> 16
    return memory_objs


def put(engine: EngineSide, connector: Any, keys: list[Any]) -> list[bytes]:
    memory_objs = filled(engine, len(keys))
    expected = contents(memory_objs)
    engine.call(connector.batched_put(keys, memory_objs))
    return expected


def test_the_plug_ins_gets_are_decoded_by_the_fetchers_workers(
    server: RunningServer, fetcher: RunningFetcher, begun: list[Delivery]
) -> None:
    keys = engine_keys(COUNT, first=1)
    with connected(server, store={"fetcher": fetcher.endpoint}) as (engine, connector):
        expected = put(engine, connector, keys)
        decoded = Decoded(fetcher)
        assert contents(engine.call(connector.batched_get(keys))) == expected
    assert decoded.decoded_bytes == {ZSTD: sum(map(len, expected))}
    assert [(one.route, one.transport) for one in begun] == [("relay:fetcher", "shared_memory")]


@pytest.mark.parametrize(
    ("url", "encodings"),
    [("", ""), (NO_FETCHER, ""), ("", ZSTD)],
    ids=["none", "away", "encodings"],
)
def test_without_a_fetcher_the_same_bytes_come_as_is_set(
    server: RunningServer, begun: list[Delivery], url: str, encodings: str
) -> None:
    keys = engine_keys(COUNT, first=10 + bool(url) + 2 * bool(encodings))
    store = {"fetcher": url, "encodings": encodings}
    with connected(server, store=store) as (engine, connector):
        expected = put(engine, connector, keys)
        assert contents(engine.call(connector.batched_get(keys))) == expected
    assert [(one.route, one.is_encoded) for one in begun] == [("direct", bool(encodings))]


def test_a_fetcher_that_is_killed_in_the_middle_of_a_get_costs_no_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, begun, decoded = engine_keys(COUNT, first=20), list[Delivery](), list[dict[str, float]]()
    fetch = KvBucket.fetch
    with (
        encoded_server(tmp_path / "data", BUCKET, f"scheduler.cap_gbps={SLOW_GBPS}") as own,
        RunningFetcher(own, tmp_path / "fetcher.log") as fetcher,
    ):

        def killed_after_a_layer(self: KvBucket, *given: Any, **chosen: Any) -> Delivery:
            delivery = fetch(self, *given, **chosen)
            begun.append(delivery)
            if not decoded:
                delivery.wait_layer(0)
                assert delivery.route == "relay:fetcher", delivery.route_reason
                decoded.append(fetcher.decoded_bytes)
                fetcher.process.kill()
            return delivery

        store = {"fetcher": fetcher.endpoint}
        with connected(own, store=store, shape=LARGE) as (engine, connector):
            expected = put(engine, connector, keys)
            monkeypatch.setattr(KvBucket, "fetch", killed_after_a_layer)
            for _ in range(2):
                assert contents(engine.call(connector.batched_get(keys))) == expected
    assert 0 < decoded[0][ZSTD] < sum(map(len, expected))
    assert [one.route for one in begun] == ["direct", "direct"]


def test_the_l2_adapters_loads_are_decoded_by_the_fetchers_workers(
    tmp_path: Path, begun: list[Delivery]
) -> None:
    keys = object_keys(COUNT, first=1)
    with (
        encoded_server(tmp_path / "data", L2_BUCKET) as own,
        RunningFetcher(own, tmp_path / "fetcher.log") as fetcher,
        engine_side({}) as engine,
        adapter_of(own, fetcher=fetcher.endpoint) as adapter,
    ):
        memory_objs, into = filled(engine), engine.chunks(COUNT)
        assert stored(adapter, keys, memory_objs).is_successful()
        assert loaded(adapter, keys, into) == list(range(COUNT))
        assert contents(into) == contents(memory_objs)
        assert fetcher.decoded_bytes == {ZSTD: sum(map(len, contents(memory_objs)))}
        release([*memory_objs, *into])
    assert [one.route for one in begun] == ["relay:fetcher"]
