"""The asynchronous client: no blocked loop, and nothing left behind by a cancelled task."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import get_type_hints

import msgspec
import numpy as np
import pytest

from objectcache import AsyncClient, DeliveryFailed, InvalidRequest, NotFound
from objectcache.async_client import AsyncFetch, AsyncKvBucket, AsyncLayerPut
from objectcache.channel.responses import PutResult
from objectcache.kv_bucket import KvBucket
from objectcache_schemas.layout import KvLayout
from tests.unit.client.client_fakes import (
    DEADLINE_S,
    KEYS,
    LAYOUT,
    FakeGateway,
    Peer,
    Received,
    chunks_of,
    payload_of,
)


def client_of(gateway: FakeGateway, **options: float) -> AsyncClient:
    return AsyncClient(
        gateway.url,
        access_key="key",
        secret_key="secret",
        transport="body",
        timeout_s=options.get("timeout_s", DEADLINE_S),
        connections_max=int(options.get("connections_max", 4)),
    )


def bucket_of(client: AsyncClient) -> AsyncKvBucket:
    return AsyncKvBucket(KvBucket(client._client._core, "b", LAYOUT), client._calls)


def methods_of(kind: type) -> dict[str, Callable[..., object]]:
    return {n: m for n, m in inspect.getmembers(kind, inspect.isfunction) if n[0] != "_"}


def test_a_bucket_takes_the_arguments_of_the_blocking_one_and_says_what_it_returns() -> None:
    blocking, ours = methods_of(KvBucket), methods_of(AsyncKvBucket)
    assert blocking.keys() == ours.keys()
    for name, method in blocking.items():
        assert inspect.signature(ours[name]).parameters == inspect.signature(method).parameters
    assert {
        name: get_type_hints(method)["return"] for name, method in ours.items()
    } == {
        "chunk_keys": list[str],
        "match": int,
        "fetch": AsyncFetch,
        "put": PutResult,
        "put_layers": AsyncLayerPut,
        "delete": type(None),
    }  # fmt: skip
    waiting = {name for name, method in ours.items() if inspect.iscoroutinefunction(method)}
    assert waiting == {"match", "put", "delete"}


@pytest.mark.parametrize("name", ["match", "fetch", "put", "put_layers", "delete"])
def test_an_argument_that_there_is_not_is_refused_where_it_is_written(name: str) -> None:
    with pytest.raises(TypeError, match="timeout_ms"):
        getattr(AsyncKvBucket, name)(None, KEYS, timeout_ms=1)  # not awaited, and of no bucket


class Stepwise:
    """Sends a delivery's layers one by one, when told."""

    def __init__(self) -> None:
        self.steps = [threading.Event() for _ in range(LAYOUT.num_layers)]
        self.closed = threading.Event()

    def serve(self, request: Received, peer: Peer) -> None:
        payload = payload_of(5)
        peer.answer_delivery("layerwise", 5, b"", len(payload))
        for layer, step in enumerate(self.steps):
            assert step.wait(DEADLINE_S)
            peer.socket.sendall(payload[layer * 200 : layer * 200 + 200])
        peer.wait_closed()
        self.closed.set()


@pytest.mark.asyncio
async def test_layers_wake_the_tasks_that_wait_for_them() -> None:
    server = Stepwise()
    with FakeGateway(server.serve) as gateway:
        async with client_of(gateway) as client, bucket_of(client).fetch(KEYS) as delivery:
            waiters = [asyncio.create_task(delivery.wait_layer(layer)) for layer in (0, 1, 1)]
            last = asyncio.create_task(delivery.wait_layer(2))
            server.steps[0].set()
            server.steps[1].set()
            arrived = await asyncio.gather(*waiters)
            assert np.array_equal(arrived[0], chunks_of(5)[:, 0])
            assert np.array_equal(arrived[2], chunks_of(5)[:, 1])
            assert not last.done()
            with pytest.raises(DeliveryFailed, match="within"):
                await delivery.wait_layer(2, timeout_s=0.01)
            with pytest.raises(InvalidRequest, match="layer 3"):
                await delivery.wait_layer(3)
            server.steps[2].set()
            await last
            layers = [layer async for layer, _ in delivery]
            assert layers == list(delivery.layers) == [0, 1, 2]
            assert (await delivery.wait()).tobytes() == payload_of(5)
            assert (delivery.mode, delivery.transport, delivery.chunk_count) == (
                "layerwise",
                "body",
                5,
            )
            assert None not in delivery.arrivals_s


@pytest.mark.asyncio
async def test_a_failure_reaches_every_waiting_task() -> None:
    def serve(request: Received, peer: Peer) -> None:
        peer.answer_delivery("layerwise", 5, payload_of(5)[:200], 600)
        peer.close()

    with FakeGateway(serve) as gateway:
        async with client_of(gateway) as client, bucket_of(client).fetch(KEYS) as delivery:
            outcomes = await asyncio.gather(
                *(delivery.wait_layer(layer) for layer in (0, 1, 2)), return_exceptions=True
            )
            assert [type(outcome) for outcome in outcomes] == [
                np.ndarray,
                DeliveryFailed,
                DeliveryFailed,
            ]


@pytest.mark.asyncio
async def test_a_cancelled_fetch_closes_the_delivery_that_it_began() -> None:
    asked, go_on, closed = threading.Event(), threading.Event(), threading.Event()

    def serve(request: Received, peer: Peer) -> None:
        asked.set()
        assert go_on.wait(DEADLINE_S)
        peer.answer_delivery("layerwise", 5, b"", 600)
        peer.wait_closed()
        closed.set()

    with FakeGateway(serve) as gateway:
        async with client_of(gateway) as client:
            fetching = asyncio.ensure_future(bucket_of(client).fetch(KEYS))
            assert await asyncio.to_thread(asked.wait, DEADLINE_S)
            fetching.cancel()
            with pytest.raises(asyncio.CancelledError):
                await fetching
            go_on.set()
            assert await asyncio.to_thread(closed.wait, DEADLINE_S)


@pytest.mark.asyncio
async def test_a_cancelled_consumer_ends_the_delivery() -> None:
    server = Stepwise()
    with FakeGateway(server.serve) as gateway:
        async with client_of(gateway) as client:
            waiting = asyncio.Event()

            async def consume() -> None:
                async with bucket_of(client).fetch(KEYS) as delivery:
                    waiting.set()
                    await delivery.wait()

            task = asyncio.create_task(consume())
            await waiting.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            for step in server.steps:
                step.set()
            assert "0/4 open" in repr(client)


@pytest.mark.asyncio
async def test_calls_mirror_the_synchronous_ones() -> None:
    def serve(request: Received, peer: Peer) -> None:
        if "kv-put" in request.target:
            peer.answer(body=msgspec.msgpack.encode({"v": 1, "stored": 5, "existing": 0}))
        elif "kv-match" in request.target:
            peer.answer(body=msgspec.msgpack.encode({"v": 1, "matched": 2}))
        elif request.method == "GET":
            peer.answer(body=LAYOUT.to_bytes())
        elif request.method == "DELETE":
            xml = b"<Error><Code>NoSuchBucket</Code><Message>none</Message></Error>"
            peer.answer(404, body=xml)
        else:
            peer.answer()

    with FakeGateway(serve) as gateway:
        async with client_of(gateway) as client:
            await client.create_bucket("b")
            await client.put_layout("b", LAYOUT)
            assert await client.get_layout("b") == LAYOUT
            with pytest.raises(NotFound):
                await client.delete_bucket("b")
            bucket = await client.kv_bucket("b", LAYOUT)
            assert isinstance(bucket.layout, KvLayout)
            assert bucket.chunk_keys(b"12345678") == LAYOUT.chunk_keys(b"12345678")
            assert await bucket.match(KEYS) == 2
            assert (await bucket.put(KEYS, chunks_of(5))).stored == 5
            async with bucket.put_layers(KEYS) as put:
                for layer in range(3):
                    await put.write_layer(chunks_of(5)[:, layer])
            assert put.result is not None
            assert put.result.stored == 5
            with pytest.raises(InvalidRequest, match="1 of 3 layers"):
                async with bucket.put_layers(KEYS) as put:
                    await put.write_layer(chunks_of(5)[:, 0])
