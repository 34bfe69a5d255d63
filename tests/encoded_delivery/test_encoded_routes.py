"""Relays pass plain bytes on, whatever an engine could decode; directly it gets frames."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from objectcache import Client
from tests.encoded_delivery.prefixes import BUCKET, DATA, KEYS, LAYOUT, ZSTD
from tests.relay.relays import RunningRelay
from tests.routes.routed import PATIENT_S
from tests.servers import RunningServer


@pytest.fixture(scope="module")
def relay(
    server: RunningServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningRelay]:
    with RunningRelay(server, tmp_path_factory.mktemp("relay") / "relay.log") as running:
        yield running


@pytest.mark.parametrize("transport", ["body", "shared_memory"])
@pytest.mark.parametrize("route", ["direct", "relay", "split"])
def test_every_byte_arrives_over_every_route(
    server: RunningServer, relay: RunningRelay, transport: str, route: str
) -> None:
    keys = server.credentials
    with Client(
        server.endpoint,
        access_key=keys.access_key,
        secret_key=keys.secret_key,
        transport=transport,
        encodings=[ZSTD],
        relays=[relay.endpoint],
        route_bytes_min=0,
        relay_timeout_s=PATIENT_S,
    ) as client:
        bucket = client.kv_bucket(BUCKET, LAYOUT)
        asked = f"relay:{relay.endpoint}" if route == "relay" else route
        with bucket.fetch(KEYS, delivery="layerwise", route=asked) as delivery:
            for layer, payload in delivery:
                assert np.array_equal(payload, DATA[:, layer])
            assert delivery.route.startswith(route)
            assert delivery.is_encoded == (route == "direct")


@pytest.mark.parametrize("transport", ["body", "shared_memory"])
def test_a_relay_that_is_asked_for_encodings_answers_plain(
    relay: RunningRelay, transport: str
) -> None:
    with relay.client(transport, encodings=[ZSTD]) as client:
        bucket = client.kv_bucket(BUCKET, LAYOUT)
        with bucket.fetch(KEYS, delivery="layerwise") as delivery:
            assert np.array_equal(delivery.wait().transpose(1, 0, 2), DATA)
            assert not delivery.is_encoded
