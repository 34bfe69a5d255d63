"""The same bytes by every transport, fewer of them on the wire."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from objectcache import (
    AsyncClient,
    Client,
    FabricSettings,
    InvalidRequest,
    NotFound,
    PlainTarget,
)
from objectcache.kv_bucket import KvBucket
from tests.encoded_delivery.prefixes import (
    BUCKET,
    DATA,
    DEFLATE,
    KEYS,
    LAYERS,
    LAYOUT,
    SLICE_BYTES,
    ZSTD,
    client_of,
)
from tests.servers import RunningServer

HAS_NIXL = find_spec("nixl_cu12") is not None
NIXL = pytest.param("nixl", marks=pytest.mark.skipif(not HAS_NIXL, reason="needs nixl-cu12"))
TRANSPORTS = ["body", "shared_memory", NIXL]
ABSENT = ["00" * 32]


def reader(server: RunningServer, transport: str, *encodings: str) -> Client:
    fabric = FabricSettings("lo", "tcp") if transport == "nixl" else None
    return client_of(server, transport=transport, fabric=fabric, encodings=encodings)


def bucket_of(client: Client) -> KvBucket:
    return client.kv_bucket(BUCKET, LAYOUT)


def check(bucket: KvBucket, count: int, layers: tuple[int, int] | None = None, **how: Any) -> float:
    """Fetch the first chunks, compare every layer, and say how many bytes came for one."""
    first, end = layers or (0, LAYERS)
    options = {"delivery": "layerwise", "layers": layers, **how}
    with bucket.fetch(KEYS[:count], **options) as delivery:
        for layer, payload in delivery:
            assert np.array_equal(payload, DATA[:count, layer]), layer
        whole = delivery.wait()
        assert np.array_equal(whole, DATA[:count, first:end].transpose(1, 0, 2))
        assert delivery.delivered_bytes == count * (end - first) * SLICE_BYTES
        assert delivery.wire_bytes is not None
        assert delivery.is_encoded == (delivery.wire_bytes < delivery.delivered_bytes)
        return delivery.wire_bytes / delivery.delivered_bytes


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_mixed_prefix_arrives_as_it_was_put(server: RunningServer, transport: str) -> None:
    with reader(server, transport, ZSTD) as client:
        bucket = bucket_of(client)
        over_http, over_session = check(bucket, len(KEYS)), check(bucket, len(KEYS))
        assert 0.7 < over_http == over_session < 0.9


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_is_encoded_is_sent_in_two_thirds_of_its_bytes(
    server: RunningServer, transport: str
) -> None:
    with reader(server, transport, ZSTD) as client:
        bucket = bucket_of(client)
        assert check(bucket, 5) < 1 / 1.4
        assert check(bucket, 3) < 1 / 1.4  # ends inside of an extent
        assert check(bucket, 1) < 1 / 1.4


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_some_layers_of_a_prefix_come_too(server: RunningServer, transport: str) -> None:
    with reader(server, transport, ZSTD, DEFLATE) as client:
        bucket = bucket_of(client)
        for layers in ((0, 1), (2, 5), (LAYERS - 1, LAYERS)):
            assert check(bucket, len(KEYS), layers) < 0.85


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_as_much_as_is_stored_comes(server: RunningServer, transport: str) -> None:
    with reader(server, transport, ZSTD) as client:
        bucket = bucket_of(client)
        keys = KEYS[:4] + ABSENT
        with bucket.fetch(keys, delivery="layerwise", on_missing="truncate") as delivery:
            assert np.array_equal(delivery.wait().transpose(1, 0, 2), DATA[:4])
            assert (delivery.chunk_count, delivery.is_encoded) == (4, True)
        with pytest.raises(NotFound) as caught:
            bucket.fetch(keys, delivery="layerwise")
        assert caught.value.details.missing_index == 4


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_each_reader_gets_what_it_takes(server: RunningServer, transport: str) -> None:
    shares = {}
    for takes in ((), (ZSTD,), (DEFLATE,), (ZSTD, DEFLATE)):
        with reader(server, transport, *takes) as client:
            shares[takes] = check(bucket_of(client), len(KEYS))
    assert shares[()] == 1
    assert shares[ZSTD, DEFLATE] < shares[ZSTD,] < shares[DEFLATE,] < 1


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_one_that_takes_no_encoding_of_these_chunks_gets_them_plain(
    server: RunningServer, transport: str
) -> None:
    with reader(server, transport, DEFLATE) as client:
        assert check(bucket_of(client), 5) == 1


def test_a_call_may_ask_for_others_than_its_client(server: RunningServer) -> None:
    with reader(server, "body", ZSTD) as client:
        assert check(bucket_of(client), 5, encodings=[]) == 1
    with reader(server, "body") as client:
        assert check(bucket_of(client), 5, encodings=[ZSTD]) < 1 / 1.4
        with pytest.raises(InvalidRequest, match=r"encodings must be .*a list of planes-zstd"):
            check(bucket_of(client), 5, encodings="planes-zstd")
        with pytest.raises(InvalidRequest, match="'zip'"):
            check(bucket_of(client), 5, encodings=["zip"])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_chunks_after_chunks_are_plain(server: RunningServer, transport: str) -> None:
    with (
        reader(server, transport, ZSTD) as client,
        bucket_of(client).fetch(KEYS, delivery="chunkwise") as delivery,
    ):
        assert np.array_equal(delivery.wait().transpose(1, 0, 2), DATA)
        assert not delivery.is_encoded


def test_auto_is_decided_by_the_plain_payload(server: RunningServer) -> None:
    with reader(server, "body", ZSTD) as client:
        with bucket_of(client).fetch(KEYS[:1]) as delivery:
            chosen = delivery.mode
        with bucket_of(client).fetch(KEYS[:1], encodings=[]) as delivery:
            assert delivery.mode == chosen


@pytest.mark.parametrize("transport", ["shared_memory", NIXL])
def test_one_chunk_comes_by_the_paths_of_one_object(server: RunningServer, transport: str) -> None:
    with reader(server, transport, ZSTD) as client:
        bucket = bucket_of(client)
        assert check(bucket, 1, path="direct") < 1 / 1.4
        assert check(bucket, 1, path="buffer") == 1


def test_a_target_of_the_callers_gets_decoded_layers(server: RunningServer) -> None:
    memory = bytearray(DATA.nbytes)
    with reader(server, "auto", ZSTD) as client:
        bucket = bucket_of(client)
        targets = [PlainTarget(memory), client.shared_memory_target(DATA.nbytes)]
        for target in targets:
            for count, is_encoded in ((len(KEYS), True), (5, True), (5, False)):
                target.array[:] = 0
                takes = [ZSTD] if is_encoded else [DEFLATE]  # which these chunks are not in
                with bucket.fetch(
                    KEYS[:count], delivery="layerwise", target=target, encodings=takes
                ) as delivery:
                    assert delivery.is_encoded is is_encoded
                    last = delivery.wait_layer(LAYERS - 1)
                    assert np.array_equal(last, DATA[:count, LAYERS - 1])
                    delivery.wait()
                landed = target.array[: DATA[:count].nbytes].reshape(LAYERS, count, SLICE_BYTES)
                assert np.array_equal(landed.transpose(1, 0, 2), DATA[:count])


def test_a_target_is_free_when_its_delivery_is_closed_or_was_refused(server: RunningServer) -> None:
    target = PlainTarget(bytearray(DATA.nbytes))
    with reader(server, "auto", ZSTD) as client:
        bucket = bucket_of(client)
        with pytest.raises(NotFound):
            bucket.fetch(ABSENT, delivery="layerwise", target=target)
        with bucket.fetch(KEYS, delivery="layerwise", target=target) as delivery:
            delivery.wait_layer(0)
            with pytest.raises(InvalidRequest, match="in use by another delivery"):
                bucket.fetch(KEYS, delivery="layerwise", target=target)
        check(bucket, len(KEYS), target=target)


@pytest.mark.skipif(not HAS_NIXL, reason="needs nixl-cu12")
def test_a_target_that_a_fabric_reaches_gets_decoded_layers_too(server: RunningServer) -> None:
    with reader(server, "nixl", ZSTD) as client:
        target = client.fabric_target(DATA.nbytes)
        assert check(bucket_of(client), 5, target=target) < 1 / 1.4
        assert np.array_equal(
            target.array[: DATA[:5].nbytes].reshape(LAYERS, 5, SLICE_BYTES),
            DATA[:5].transpose(1, 0, 2),
        )
        target.close()


@pytest.mark.parametrize("transport", ["body", "shared_memory"])
def test_the_asynchronous_client_decodes_too(server: RunningServer, transport: str) -> None:
    asyncio.run(read_asynchronously(server, transport))


async def read_asynchronously(server: RunningServer, transport: str) -> None:
    keys = server.credentials
    client = AsyncClient(
        server.endpoint,
        access_key=keys.access_key,
        secret_key=keys.secret_key,
        transport=transport,
        encodings=[ZSTD],
    )
    async with client:
        bucket = await client.kv_bucket(BUCKET, LAYOUT)
        async with bucket.fetch(KEYS, delivery="layerwise") as delivery:
            async for layer, payload in delivery:
                assert np.array_equal(payload, DATA[:, layer])
            assert delivery.is_encoded
        async with bucket.fetch(KEYS, delivery="layerwise", encodings=[DEFLATE]) as delivery:
            assert np.array_equal((await delivery.wait()).transpose(1, 0, 2), DATA)
            assert delivery.is_encoded
