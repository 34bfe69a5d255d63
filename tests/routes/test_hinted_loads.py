"""A router's hint in loads of LMCache's chunks, whose connector needs LMCache itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from objectcache.connectors.lmcache.chunk_store import ChunkStore
from objectcache.connectors.lmcache.geometry import ChunkGeometry
from objectcache.connectors.lmcache.names import RELAY_HINT, hinted_relay
from objectcache.connectors.store.configuration import StoreConfiguration
from objectcache.payload import Bytes
from objectcache.routes.client_routes import ASKED_FOR
from tests.relay.relays import RunningRelay
from tests.routes.routed import PATIENT_S
from tests.servers import RunningServer

GEOMETRY = ChunkGeometry(1, 1, 4, 64 << 10, "hinted")
KEYS = [f"hinted-{number}" for number in range(3)]


@pytest.mark.parametrize(
    ("configs", "relay"),
    [
        ({RELAY_HINT: "d0"}, "d0"),
        ({RELAY_HINT: "d" * 257}, ""),
        ({RELAY_HINT: ["d0"]}, ""),
        ({"lmcache.tag.relay": "d0"}, ""),
        ({}, ""),
        (None, ""),
        ("d0", ""),
    ],
)
def test_a_hint_is_a_short_text_and_anything_else_is_none(configs: Any, relay: str) -> None:
    assert hinted_relay([SimpleNamespace(request_configs=configs)]) == relay


def test_without_keys_or_configurations_there_is_no_hint() -> None:
    assert hinted_relay([]) == hinted_relay([SimpleNamespace()]) == ""


def test_a_load_comes_over_the_relay_that_is_named_and_by_the_clients_route_else(
    server: RunningServer, tmp_path: Path
) -> None:
    stored = np.random.default_rng(3).integers(0, 256, (3, GEOMETRY.chunk_bytes), np.uint8)
    with RunningRelay(server, tmp_path / "relay.log") as relay:
        configuration = StoreConfiguration(
            server.endpoint,
            "hinted",
            server.credentials.access_key,
            server.credentials.secret_key,
            transport="body",
            relays=(f"b={relay.endpoint}", "gone=http://127.0.0.1:9"),
            route="direct",
            relay_timeout_s=PATIENT_S,
        )
        store = ChunkStore(configuration)
        try:
            assert store.store(KEYS, list(stored), GEOMETRY) == 3
            counts = dict[tuple[str, str], int]()
            for hint, route in (("b", "relay:b"), ("elsewhere", "direct"), ("", "direct")):
                loaded = np.zeros_like(stored)

                def landing(begin: int, count: int, loaded: Any = loaded) -> Sequence[Bytes]:
                    return list(loaded[begin : begin + count])

                assert store.load(KEYS, GEOMETRY, landing, hint) == 3
                assert np.array_equal(loaded, stored)
                counts[route, ASKED_FOR] = counts.get((route, ASKED_FOR), 0) + 1
                assert store._client.route_counts() == counts
            loaded = np.zeros_like(stored)
            assert store.load(KEYS, GEOMETRY, lambda b, n: list(loaded[b : b + n]), "gone") == 3
            assert np.array_equal(loaded, stored)  # who is named and away costs time alone
            assert store._client.route_counts()["relay:gone", "refused"] == 1
        finally:
            store.close()
