"""Deliveries by every route and transport: every byte is compared."""

from __future__ import annotations

import asyncio
import gc
import weakref

import numpy as np
import pytest

from objectcache import (
    AsyncClient,
    Client,
    InvalidRequest,
    KvBucket,
    NotFound,
    PlainTarget,
    Unavailable,
)
from objectcache.routes.client_routes import SILENCE_S_MIN
from objectcache.sessions.target_session import TargetSession
from tests.integration.served import wait_until
from tests.relay.relays import BUCKET, LAYOUT, NIXL, PAYLOAD_BYTES, RunningRelay
from tests.routes.routed import (
    EXPECTED,
    KEYS,
    PATIENT_S,
    check_delivery,
    fetch,
    routed_client,
    wait_quiet,
)
from tests.servers import RunningServer

Relays = tuple[RunningRelay, RunningRelay]


@pytest.mark.parametrize("transport", ["auto", "body", "shared_memory", NIXL])
def test_every_byte_arrives_over_the_route_that_is_asked_for(
    server: RunningServer, relays: Relays, transport: str
) -> None:
    with routed_client(server, *relays, transport=transport) as client:
        for route in ("direct", "relay:b", "relay:c", "relay:b", "direct"):
            for how in ({}, {"layers": (2, 5)}, {"delivery": "chunkwise"}, {"delivery": "auto"}):
                with fetch(client, route=route, **how) as delivery:
                    first, end = delivery.layers.start, delivery.layers.stop
                    assert np.array_equal(delivery.wait(), EXPECTED[first:end])
                    assert (delivery.route, delivery.route_reason) == (route, "asked for")
                    expected = "shared_memory" if transport == "auto" else transport
                    assert delivery.transport == expected
                    assert delivery.chunk_count == len(KEYS)
        b, c = relays
        wait_quiet(b, c)
    assert b.report()["rate_bytes_per_s"] > 0


@pytest.mark.parametrize(("route", "servers"), [("direct", 1), ("relay:b", 1), ("split", 2)])
def test_whoever_delivers_a_part_hears_that_the_whole_is_waited_for(
    server: RunningServer, relays: Relays, monkeypatch: pytest.MonkeyPatch, route: str, servers: int
) -> None:
    told: list[tuple[TargetSession, int]] = []
    awaits = TargetSession.awaits

    def recorded(session: TargetSession, tag: int, end_layer: int, interval_s: float) -> None:
        assert 0 < interval_s < SILENCE_S_MIN, "a relay would pass for silent"
        told.append((session, end_layer))
        awaits(session, tag, end_layer, interval_s)

    monkeypatch.setattr(TargetSession, "awaits", recorded)
    with routed_client(server, *relays, transport="shared_memory", route=route) as client:
        with fetch(client, rate_bytes_per_s=PAYLOAD_BYTES / 2) as delivery:
            assert np.array_equal(delivery.wait(), EXPECTED)
            assert delivery.route.split(":")[0] == route.split(":")[0]
        assert [end_layer for _, end_layer in told] == [LAYOUT.num_layers] * servers
        assert len({session for session, _ in told}) == servers
        wait_quiet(*relays)


@pytest.mark.parametrize("route", ["direct", "auto", "relay:b", "split"])
def test_a_delivery_that_is_over_lets_go_of_its_memory_by_itself(
    server: RunningServer, relays: Relays, route: str
) -> None:
    """An engine that has frozen its objects collects no cycles for a long time."""
    with routed_client(server, *relays, transport="shared_memory", route=route) as client:
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                with fetch(client) as delivery:
                    check_delivery(delivery)
            let_go = weakref.ref(delivery.progress)
            del delivery
            wait_until(lambda: let_go() is None, "the last delivery is let go of")
        finally:
            gc.enable()


def test_a_relay_is_called_by_its_node_its_address_or_its_url(
    server: RunningServer, relays: Relays
) -> None:
    b, _ = relays
    address = b.endpoint.removeprefix("http://")
    for called in ("b", address, b.endpoint):
        with (
            routed_client(server, *relays, route=f"relay:{called}") as client,
            fetch(client) as delivery,
        ):
            check_delivery(delivery)
            assert delivery.route == "relay:b"
    credentials = server.credentials
    with (
        Client(
            server.endpoint,
            access_key=credentials.access_key,
            secret_key=credentials.secret_key,
            relays=[b.endpoint],
            route=f"relay:{address}",
            relay_timeout_s=PATIENT_S,
        ) as client,
        fetch(client) as delivery,
    ):
        check_delivery(delivery)
        assert delivery.route == f"relay:{address}"


def test_a_client_without_relays_goes_directly_and_says_so(server: RunningServer) -> None:
    with routed_client(server) as client, fetch(client) as delivery:
        check_delivery(delivery)
        assert (delivery.route, delivery.route_reason) == ("direct", "there are no relays")


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"relays": "http://b:7400"}, "relays must be a list"),
        ({"relays": ["b:7400"]}, "http://host:port"),
        ({"relays": ["=http://b:7400"]}, "before its '='"),
        ({"relays": [7]}, "must be strings"),
        ({"relays": ["http://b:1", "http://b:1"]}, "twice"),
        ({"relays": ["http://b:1"] * 300}, "at most 256"),
        ({"route": "relay:b"}, "needs relays"),
        ({"route": "sideways"}, "must be one of auto, direct, split, relay:NODE"),
        ({"route": "relay:"}, "must be one of"),
        ({"relays": ["b=http://b:1"], "route": "relay:c"}, "no relay 'c'; there are b"),
        ({"relays": ["b=http://b:1"], "relay_timeout_s": 0}, "relay_timeout_s"),
        ({"relays": ["b=http://b:1"], "route_bytes_min": -1}, "route_bytes_min"),
        ({"relays": ["b=http://b:1"], "node": 3}, "node must be a string"),
    ],
)
def test_a_wrong_argument_is_told_by_its_name(how: dict[str, object], told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        Client("http://a:9000", access_key="k", secret_key="s", **how)  # type: ignore[arg-type]


def test_a_wrong_route_of_a_fetch_is_told_too(server: RunningServer, relays: Relays) -> None:
    with (
        routed_client(server, *relays) as client,
        pytest.raises(InvalidRequest, match="no relay 'x'; there are b, c"),
    ):
        fetch(client, route="relay:x")
    with routed_client(server) as client, pytest.raises(InvalidRequest, match="needs relays"):
        fetch(client, route="relay:b")


@pytest.mark.parametrize("transport", ["body", "shared_memory", NIXL])
def test_a_target_of_the_callers_own_is_filled_over_a_relay(
    server: RunningServer, relays: Relays, transport: str
) -> None:
    with routed_client(server, *relays, transport=transport, route="relay:b") as client:
        target = (
            PlainTarget(bytearray(PAYLOAD_BYTES))
            if transport == "body"
            else client.shared_memory_target(PAYLOAD_BYTES)
            if transport == "shared_memory"
            else client.fabric_target(PAYLOAD_BYTES)
        )
        for _ in range(2):
            target.array[:] = 0
            with fetch(client, target=target) as delivery:
                check_delivery(delivery)
                assert delivery.route == "relay:b"
        assert np.array_equal(target.array.reshape(EXPECTED.shape), EXPECTED)


def test_what_is_stored_of_a_prefix_comes_over_a_relay(
    server: RunningServer, relays: Relays
) -> None:
    with routed_client(server, *relays, transport="auto", route="relay:b") as client:
        bucket = client.kv_bucket(BUCKET, LAYOUT)
        keys = [*KEYS, "0" * 64]
        with bucket.fetch(keys, on_missing="truncate") as delivery:
            assert delivery.chunk_count == len(KEYS)
            assert np.array_equal(delivery.wait(), EXPECTED)
        with pytest.raises(NotFound) as caught:
            bucket.fetch(keys)
        assert caught.value.details.missing_index == len(KEYS)


def test_an_event_loop_has_routes_too(server: RunningServer, relays: Relays) -> None:
    async def fetch_all() -> None:
        credentials = server.credentials
        async with AsyncClient(
            server.endpoint,
            access_key=credentials.access_key,
            secret_key=credentials.secret_key,
            relays=[f"b={relays[0].endpoint}"],
            route="relay:b",
            relay_timeout_s=PATIENT_S,
        ) as client:
            bucket = await client.kv_bucket(BUCKET, LAYOUT)
            async with bucket.fetch(KEYS) as delivery:
                assert np.array_equal(await delivery.wait(), EXPECTED)
                assert delivery.route == "relay:b"
            async with bucket.fetch(KEYS, route="direct") as delivery:
                assert np.array_equal(await delivery.wait(), EXPECTED)
                assert delivery.route == "direct"

    asyncio.run(fetch_all())


def test_where_neither_a_relay_nor_the_gateway_is_there_the_gateways_refusal_is_raised() -> None:
    with Client(
        "http://127.0.0.1:9",
        access_key="k",
        secret_key="s",
        relays=["b=http://127.0.0.1:10", "c=http://127.0.0.1:11"],
        route="relay:b",
    ) as client:
        bucket = KvBucket(client._core, BUCKET, LAYOUT, client._routes)
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1:9:"):
            bucket.fetch(KEYS)
