"""Frames of one geometry that are asked for in another, which a bucket without a layout allows."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from objectcache import Client
from objectcache.core import TransportChoice
from objectcache.deliveries.fetch_request import FetchRequest
from objectcache.deliveries.fetching import fetch
from objectcache_schemas.descriptor import DeliveryMode, Descriptor
from tests.encoded_delivery.prefixes import (
    CHUNKS,
    DATA,
    KEYS,
    LAYERS,
    LAYOUT,
    SLICE_BYTES,
    ZSTD,
    client_of,
    store_as,
)
from tests.fetcher.fetchers import RunningFetcher
from tests.s3_clients import s3_client
from tests.servers import RunningServer

BUCKET = "no-layout"
BOUND_S = 30.0
HALF = CHUNKS // 2
OTHERS = [(LAYERS // 2, SLICE_BYTES * 2), (LAYERS * 2, SLICE_BYTES // 2)]


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[Client]:
    with client_of(server) as client:
        s3_client(server).create_bucket(Bucket=BUCKET)
        bucket = client.kv_bucket(BUCKET, LAYOUT)
        store_as(server, BUCKET, ZSTD)
        bucket.put(KEYS[:HALF], DATA[:HALF])
        store_as(server, BUCKET, None)
        bucket.put(KEYS[HALF:], DATA[HALF:])
        yield client


def check(client: Client, transport: str, num_layers: int, slice_bytes: int, first: int) -> bool:
    """Fetch the second half of a geometry's layers or all, and say whether it came encoded."""
    descriptor = Descriptor(
        tuple(KEYS),
        num_layers,
        LAYOUT.chunk_tokens,
        slice_bytes,
        DeliveryMode.LAYERWISE,
        (first, num_layers),
        encodings=(ZSTD,),
    )
    choice = TransportChoice(transport)
    request = FetchRequest(BUCKET, descriptor, None, choice, BOUND_S, time.monotonic())
    stored = DATA.reshape(CHUNKS, num_layers, slice_bytes)[:, first:].transpose(1, 0, 2)
    with fetch(client._core, request) as delivery:
        assert np.array_equal(delivery.wait(BOUND_S), stored)
        return delivery.is_encoded


@pytest.mark.parametrize("transport", ["body", "shared_memory"])
def test_slices_of_another_size_come_plain(client: Client, transport: str) -> None:
    assert check(client, transport, LAYERS, SLICE_BYTES, 0)
    for num_layers, slice_bytes in OTHERS:
        for first in (0, num_layers // 2):
            assert not check(client, transport, num_layers, slice_bytes, first)


def test_a_fetcher_that_asks_for_frames_gets_slices_of_another_size(
    server: RunningServer, client: Client, tmp_path_factory: pytest.TempPathFactory
) -> None:
    log = tmp_path_factory.mktemp("fetcher") / "fetcher.log"
    with (
        RunningFetcher(server, log) as fetcher,
        fetcher.client("shared_memory") as over_it,
    ):
        for num_layers, slice_bytes in ((LAYERS, SLICE_BYTES), *OTHERS):
            check(over_it, "shared_memory", num_layers, slice_bytes, 0)
        assert fetcher.decoded_bytes["plain"] > 2 * DATA.nbytes
