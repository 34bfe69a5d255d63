"""Chunks of a lossy dtype: quantised by whoever puts, dequantised by whoever fetches."""

from __future__ import annotations

import asyncio

import numpy as np
import numpy.typing as npt
import pytest

from objectcache import AsyncClient, Client, DeliveryFailed, InvalidRequest, PlainTarget
from objectcache.deliveries.encoded.layer_views import dequantised_layers
from objectcache.kv_bucket import KvBucket
from objectcache.payload import PayloadShape
from objectcache_encodings.lossy import LOSSY_DTYPES, LossyDtype, kv_shape, lossy_layout
from objectcache_schemas.descriptor import DeliveryMode
from tests.encoded_delivery.prefixes import (
    LAYERS,
    LAYOUT,
    SLICE_BYTES,
    ZSTD,
    client_of,
    normal_numbers,
    store_as,
)
from tests.servers import RunningServer

CHUNKS = 5
DATA = normal_numbers(CHUNKS, seed=7)
TOKENS = np.arange(CHUNKS * LAYOUT.chunk_tokens) + 1000
SHAPE = kv_shape(LAYOUT, heads=8, width=128)
NAMES = sorted(LOSSY_DTYPES)


def dtype_of(name: str) -> LossyDtype:
    return LOSSY_DTYPES[name](SHAPE)


def there_and_back(lossy: LossyDtype) -> npt.NDArray[np.uint8]:
    """What comes back of `DATA`: uint8[layers, chunks, slice_bytes]."""
    out = np.empty((LAYERS, CHUNKS, SLICE_BYTES), np.uint8)
    for layer in range(LAYERS):
        lossy.dequantise(lossy.quantise(DATA[:, layer], layer), layer, out[layer])
    return out


def bucket_of(client: Client, lossy: LossyDtype, name: str) -> KvBucket:
    return client.kv_bucket(f"{lossy.name}-{name}", LAYOUT, create=True, lossy=lossy)


@pytest.mark.parametrize("encoding", [None, ZSTD])
@pytest.mark.parametrize("transport", ["body", "shared_memory"])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_fetched_is_what_dequantising_gives_of_what_was_put(
    server: RunningServer, name: str, transport: str, encoding: str | None
) -> None:
    lossy, expected = dtype_of(name), there_and_back(dtype_of(name))
    assert not np.array_equal(expected, DATA.transpose(1, 0, 2))
    bucket_name = f"{transport.replace('_', '-')}-{encoding}".lower()
    with client_of(server, transport=transport, encodings=[ZSTD]) as client:
        client.create_bucket(f"{name}-{bucket_name}")
        store_as(server, f"{name}-{bucket_name}", encoding)
        bucket = bucket_of(client, lossy, bucket_name)
        keys = bucket.chunk_keys(TOKENS)
        assert bucket.put(keys, DATA).stored == CHUNKS
        for delivery_mode in ("layerwise", "chunkwise"):
            with bucket.fetch(keys, delivery=delivery_mode) as delivery:
                assert delivery.slice_bytes == SLICE_BYTES
                for layer, payload in delivery:
                    assert np.array_equal(payload, expected[layer]), layer
                assert np.array_equal(delivery.wait(), expected)
                assert delivery.stored_bytes == CHUNKS * LAYERS * lossy.slice_bytes
                assert delivery.delivered_bytes == expected.nbytes
                wire_bytes = delivery.wire_bytes
                assert wire_bytes is not None
                assert wire_bytes <= delivery.stored_bytes
                is_encoded = encoding is not None and delivery_mode == "layerwise"
                assert delivery.is_encoded == is_encoded
        with bucket.fetch(keys[:3], layers=(2, 5)) as delivery:
            assert np.array_equal(delivery.wait(), expected[2:5, :3])


def test_a_lossless_reader_and_a_lossy_one_never_match_each_others_chunks(
    server: RunningServer,
) -> None:
    with client_of(server) as client:
        client.create_bucket("lossy-or-not")  # of no layout: for chunks of several
        buckets = {"": client.kv_bucket("lossy-or-not", LAYOUT)} | {
            name: client.kv_bucket("lossy-or-not", LAYOUT, lossy=dtype_of(name)) for name in NAMES
        }
        keys = {name: bucket.chunk_keys(TOKENS) for name, bucket in buckets.items()}
        assert len({key for one in keys.values() for key in one}) == CHUNKS * len(buckets)
        for name, bucket in buckets.items():
            assert bucket.match(keys[name]) == 0, name  # what the others put is not found
            bucket.put(keys[name], DATA)
            assert bucket.match(keys[name]) == CHUNKS
        with buckets[""].fetch(keys[""]) as delivery:
            assert np.array_equal(delivery.wait(), DATA.transpose(1, 0, 2))


def test_a_bucket_of_the_lossy_layout_refuses_the_lossless_one(server: RunningServer) -> None:
    lossy = dtype_of("lossy-q8")
    with client_of(server) as client:
        bucket = bucket_of(client, lossy, "layout")
        assert bucket.layout == lossy_layout(LAYOUT, lossy.name, SHAPE)
        with pytest.raises(Exception, match="KV layout"):
            client.kv_bucket(bucket.name, LAYOUT)


@pytest.mark.parametrize("encodings", [[], [ZSTD]])
def test_a_target_of_the_callers_gets_dequantised_layers(
    server: RunningServer, encodings: list[str]
) -> None:
    lossy = dtype_of("lossy-q8")
    with client_of(server, encodings=encodings) as client:
        bucket = bucket_of(client, lossy, f"target-{len(encodings)}")
        keys, expected = bucket.chunk_keys(TOKENS), there_and_back(lossy)
        bucket.put(keys, DATA)
        memory = np.zeros(expected.nbytes + 8, np.uint8)
        for target in (PlainTarget(memory), client.shared_memory_target(memory.nbytes)):
            with bucket.fetch(keys, delivery="layerwise", target=target) as delivery:
                assert np.array_equal(delivery.wait(), expected)
            assert np.array_equal(target.array[: expected.nbytes], expected.reshape(-1))
        with pytest.raises(InvalidRequest, match=f"the payload needs {expected.nbytes}"):
            bucket.fetch(keys, target=PlainTarget(memory[: expected.nbytes - 1]))


def test_layers_that_an_engine_puts_one_by_one_are_quantised(server: RunningServer) -> None:
    lossy = dtype_of("lossy-bins")  # which tells layers apart
    with client_of(server) as client:
        bucket = bucket_of(client, lossy, "layers")
        keys = bucket.chunk_keys(TOKENS)
        with bucket.put_layers(keys) as put:
            for layer in range(LAYERS):
                put.write_layer([DATA[chunk, layer] for chunk in range(CHUNKS)])
            with pytest.raises(InvalidRequest, match="all 6 layers are written"):
                put.write_layer(DATA[:, 0])
        with bucket.fetch(keys) as delivery:
            assert np.array_equal(delivery.wait(), there_and_back(lossy))


def test_numbers_that_no_dtype_holds_and_other_shapes_store_nothing(
    server: RunningServer,
) -> None:
    with client_of(server) as client:
        bucket = bucket_of(client, dtype_of("lossy-q8"), "refused")
        keys = bucket.chunk_keys(TOKENS)
        infinite = DATA.copy()
        infinite[3, 2, :2] = (0x80, 0x7F)
        for chunks in (infinite, list(infinite)):
            with pytest.raises(InvalidRequest, match=r"chunk 3, layer 2: .*not finite"):
                bucket.put(keys, chunks)
        with pytest.raises(InvalidRequest, match="the layout needs uint8"):
            bucket.put(keys, DATA[:, :, : SLICE_BYTES // 2])
        with pytest.raises(InvalidRequest, match="slices of"):
            client.kv_bucket(
                "other", LAYOUT, lossy=LOSSY_DTYPES["lossy-q8"](kv_shape(LAYOUT, 8, 64))
            )
        assert bucket.match(keys) == 0


def test_bytes_that_are_none_of_the_dtype_fail_the_delivery_at_their_layer(
    server: RunningServer,
) -> None:
    lossy = dtype_of("lossy-q8")
    with client_of(server) as client:
        bucket = bucket_of(client, lossy, "foreign")
        keys = bucket.chunk_keys(TOKENS)
        stored = np.zeros((CHUNKS, LAYERS, lossy.slice_bytes), np.uint8)
        stored[2, 4] = 0xFF  # scales that are no numbers
        client.kv_bucket(bucket.name, bucket.layout).put(keys, stored)
        with bucket.fetch(keys) as delivery:
            delivery.wait_layer(3)
            with pytest.raises(DeliveryFailed, match="no number") as caught:
                delivery.wait_layer(4)
            assert caught.value.details.layer == 4
            assert caught.value.details.key == keys[2]
        bucket.delete(keys[2])
        bucket.put(keys[2:3], DATA[2:3])
        with bucket.fetch(keys, layers=(4, 5)) as delivery:
            delivery.wait()


def test_a_slice_that_cannot_be_dequantised_is_looked_at_by_nobody() -> None:
    lossy = dtype_of("lossy-q8")
    shape = PayloadShape(0, 1, 3, lossy.slice_bytes, DeliveryMode.LAYERWISE)
    memory = np.zeros(shape.payload_bytes, np.uint8)
    memory[lossy.slice_bytes : 2 * lossy.slice_bytes] = 0xFF
    told: list[tuple[int, str]] = []

    def damaged(layer: int, key: str) -> None:
        told.append((layer, key))

    layers = dequantised_layers(None, memory, shape, None, ("a", "b", "c"), lossy, damaged)
    for _ in range(2):
        with pytest.raises(DeliveryFailed, match=r"layer 0, chunk 1 \(b\): .*no number") as caught:
            layers.layer(0, True)
        assert caught.value.details.key == "b"
    assert told == []


def test_an_event_loop_is_given_dequantised_layers(server: RunningServer) -> None:
    lossy = dtype_of("lossy-q6")

    async def go() -> npt.NDArray[np.uint8]:
        key = server.credentials
        client = AsyncClient(server.endpoint, access_key=key.access_key, secret_key=key.secret_key)
        async with client:
            bucket = await client.kv_bucket("lossy-loop", LAYOUT, create=True, lossy=lossy)
            keys = bucket.chunk_keys(TOKENS)
            await bucket.put(keys, DATA)
            async with bucket.fetch(keys) as delivery:
                return np.stack([payload async for _, payload in delivery])

    assert np.array_equal(asyncio.run(go()), there_and_back(lossy))
