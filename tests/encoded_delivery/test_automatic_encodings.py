"""`encodings="auto"`: plain over a fast way, encoded over a slow one once that is known."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from objectcache import AsyncClient, Client, InvalidRequest, PlainTarget
from objectcache.kv_bucket import KvBucket
from tests.encoded_delivery.prefixes import (
    BUCKET,
    DATA,
    KEYS,
    LAYERS,
    LAYOUT,
    PAYLOAD_BYTES,
    ZSTD,
    client_of,
)
from tests.servers import RunningServer

# Decoding is hundreds of times as fast, so that it is faster on a busy machine, too.
SLOW_BYTES_PER_S = 1 << 20


def take(bucket: KvBucket, **how: Any) -> bool:
    """Fetch the prefix, compare every layer, and say whether it came encoded."""
    with bucket.fetch(KEYS, delivery="layerwise", **how) as delivery:
        for layer, payload in delivery:
            assert np.array_equal(payload, DATA[:, layer]), layer
        return delivery.is_encoded


@pytest.mark.parametrize("transport", ["body", "shared_memory"])
def test_a_slow_link_is_measured_by_a_plain_delivery_and_the_next_comes_encoded(
    server: RunningServer, transport: str
) -> None:
    with client_of(server, transport=transport, encodings="auto") as client:
        bucket = client.kv_bucket(BUCKET, LAYOUT)
        slow = [take(bucket, rate_bytes_per_s=SLOW_BYTES_PER_S) for _ in range(3)]
        assert slow == [False, True, True]


def test_an_engine_that_computes_for_longer_than_the_link_takes_is_sent_plain_bytes(
    server: RunningServer,
) -> None:
    layer_s = PAYLOAD_BYTES / LAYERS / SLOW_BYTES_PER_S
    slow: dict[str, Any] = {"rate_bytes_per_s": SLOW_BYTES_PER_S}
    for is_last in (False, False, True):
        with client_of(server, transport="body", encodings="auto") as client:
            bucket = client.kv_bucket(BUCKET, LAYOUT)
            assert not take(bucket, **slow)
            came_encoded = take(bucket, compute_window_s=2 * layer_s, **slow)
            if came_encoded and not is_last:  # a busy machine made the link seem even slower
                continue
            assert not came_encoded
            assert take(bucket, compute_window_s=layer_s / 10, **slow)
            return


def test_a_target_of_the_callers_is_filled_either_way(server: RunningServer) -> None:
    with client_of(server, encodings="auto") as client:
        bucket = client.kv_bucket(BUCKET, LAYOUT)
        memory = np.empty(PAYLOAD_BYTES, np.uint8)
        for is_encoded in (False, True):
            memory[...] = 0
            how: dict[str, Any] = {
                "target": PlainTarget(memory),
                "rate_bytes_per_s": SLOW_BYTES_PER_S,
            }
            assert take(bucket, **how) == is_encoded
            landed = memory.reshape(LAYERS, len(KEYS), -1)
            assert np.array_equal(landed.transpose(1, 0, 2), DATA)


def test_deliveries_that_nobody_waited_for_or_that_say_nothing_of_the_link_teach_nothing(
    server: RunningServer,
) -> None:
    with client_of(server, transport="body", encodings="auto") as client:
        bucket = client.kv_bucket(BUCKET, LAYOUT)
        slow: dict[str, Any] = {"rate_bytes_per_s": SLOW_BYTES_PER_S}
        with bucket.fetch(KEYS, delivery="layerwise", **slow):
            pass
        with bucket.fetch(KEYS, delivery="chunkwise", **slow) as delivery:
            delivery.wait()
        with bucket.fetch(KEYS, delivery="layerwise", layers=(2, 3), **slow) as delivery:
            delivery.wait()
        assert not take(bucket, **slow)
        assert take(bucket, **slow)


def test_an_event_loop_learns_too(server: RunningServer) -> None:
    async def deliver() -> list[bool]:
        keys = server.credentials
        async with AsyncClient(
            server.endpoint,
            access_key=keys.access_key,
            secret_key=keys.secret_key,
            encodings="auto",
        ) as client:
            bucket = await client.kv_bucket(BUCKET, LAYOUT)
            seen = []
            for _ in range(2):
                slow: dict[str, Any] = {"rate_bytes_per_s": SLOW_BYTES_PER_S}
                async with await bucket.fetch(KEYS, delivery="layerwise", **slow) as delivery:
                    whole = await delivery.wait()
                    assert np.array_equal(whole.transpose(1, 0, 2), DATA)
                    seen.append(delivery.is_encoded)
            return seen

    assert asyncio.run(deliver()) == [False, True]


def test_it_is_said_for_one_fetch_or_for_the_client(server: RunningServer) -> None:
    with client_of(server, transport="body") as client:
        bucket = client.kv_bucket(BUCKET, LAYOUT)
        slow: dict[str, Any] = {"rate_bytes_per_s": SLOW_BYTES_PER_S}
        assert not take(bucket, encodings="auto", **slow)
        assert not take(bucket, **slow), "none is the default"
        assert take(bucket, encodings="auto", **slow)
        assert take(bucket, encodings=[ZSTD], **slow)


@pytest.mark.parametrize("wrong", [["auto", ZSTD], "automatic", [ZSTD, "zstd"]])
def test_what_is_no_encoding_is_refused_by_its_argument(wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match="encodings must be auto, or a list of"):
        Client("http://127.0.0.1:1", access_key="a", secret_key="s", encodings=wrong)
