"""Routes that the client chooses by itself: auto and split, with real relays' reports."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from objectcache import Client, PlainTarget, pause
from objectcache.routes import accounts, relay_reports
from objectcache.routes.accounts import FAILURES_MAX
from objectcache.routes.client_routes import LEAST_LATE, LEFT_ALONE, NO_REPORTS, SMALL, UNDIVIDED
from tests.integration.served import wait_until
from tests.relay.relays import (
    BUCKET,
    LAYOUT,
    NIXL,
    PAYLOAD_BYTES,
    SLOW_BYTES_PER_S,
    RunningRelay,
)
from tests.routes.routed import (
    EXPECTED,
    KEYS,
    check_delivery,
    fetch,
    routed_client,
    wait_quiet,
)
from tests.servers import RunningServer

DEADLINE_S = 20.0
ATTEMPTS = 20  # to kill a relay in the middle of a delivery
Relays = tuple[RunningRelay, RunningRelay]
TRANSPORTS = ["auto", "body", "shared_memory", NIXL]


def wait_for_reports(client: Client) -> None:
    def is_informed() -> bool:
        with fetch(client) as delivery:
            check_delivery(delivery)
            return delivery.route_reason == LEAST_LATE

    wait_until(is_informed, "the relays' reports are there")


def test_small_deliveries_go_directly_and_nobody_is_asked(server: RunningServer) -> None:
    with routed_client(server) as plain, fetch(plain) as delivery:
        check_delivery(delivery)
    credentials = server.credentials
    with Client(
        server.endpoint,
        access_key=credentials.access_key,
        secret_key=credentials.secret_key,
        relays=["b=http://127.0.0.1:9"],
    ) as client:
        with fetch(client) as delivery:  # 3 MiB
            check_delivery(delivery)
            assert (delivery.route, delivery.route_reason) == ("direct", SMALL)
        assert client.route_counts() == {("direct", SMALL): 1}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_busy_direct_way_has_deliveries_come_over_relays(
    server: RunningServer, relays: Relays, transport: str
) -> None:
    with routed_client(server, *relays, transport=transport, route_bytes_min=0) as client:
        with fetch(client) as first:
            check_delivery(first)

        def is_least_late() -> bool:
            with fetch(client) as delivery:
                check_delivery(delivery)
                return (delivery.route, delivery.route_reason) == ("direct", LEAST_LATE)

        wait_until(is_least_late, "the direct way is less late")
        with fetch(client, route="direct", rate_bytes_per_s=128 << 10) as slow:  # it takes 24 s
            slow.wait_layer(0)

            def comes_over_a_relay() -> bool:
                with fetch(client) as delivery:
                    check_delivery(delivery)
                    return delivery.route in ("relay:b", "relay:c")

            wait_until(comes_over_a_relay, "a relay is less late")
        counts = client.route_counts()
        assert counts["direct", LEAST_LATE] >= 1
        assert counts["direct", "asked for"] == 1
        assert sum(counts.get((relay, LEAST_LATE), 0) for relay in ("relay:b", "relay:c")) >= 1
        wait_quiet(*relays)


def test_the_first_deliveries_of_all_know_what_the_relays_report(
    server: RunningServer, relays: Relays, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However busy the machine is.
    monkeypatch.setattr(relay_reports, "FIRST_ANSWER_S", DEADLINE_S)
    monkeypatch.setattr(relay_reports, "ANSWER_S_MAX", DEADLINE_S)
    monkeypatch.setattr(accounts, "REPORT_AGE_S_MAX", DEADLINE_S)
    with (
        routed_client(server, *relays, route_bytes_min=0) as client,
        ThreadPoolExecutor(4) as threads,
    ):

        def reason(_: int) -> str:
            with fetch(client) as delivery:
                check_delivery(delivery)
                return delivery.route_reason

        assert set(threads.map(reason, range(4))) == {LEAST_LATE}


def test_relays_that_are_not_there_are_waited_for_by_nobody(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_reports, "FIRST_ANSWER_S", 1e6)
    credentials = server.credentials
    with Client(
        server.endpoint,
        access_key=credentials.access_key,
        secret_key=credentials.secret_key,
        relays=["b=http://127.0.0.1:9"],
        route_bytes_min=0,
    ) as client:
        for _ in range(2):
            with fetch(client) as delivery:
                check_delivery(delivery)
                assert (delivery.route, delivery.route_reason) == ("direct", NO_REPORTS)


def test_many_deliveries_at_once_by_every_route_leave_nothing(
    server: RunningServer, relays: Relays
) -> None:
    with (
        routed_client(server, *relays, transport="auto", route_bytes_min=0) as client,
        ThreadPoolExecutor(6) as threads,
    ):
        wait_for_reports(client)

        def one(number: int) -> None:
            route = ("auto", "relay:b", "split", "direct", "auto", "relay:c")[number % 6]
            with fetch(client, route=route, rate_bytes_per_s=4 * SLOW_BYTES_PER_S) as delivery:
                check_delivery(delivery)

        list(threads.map(one, range(24)))
        wait_quiet(*relays)
        routes = client._routes
        assert routes is not None
        ways = [*(line.account for line in routes.lines), routes._direct]
        wait_until(lambda: not any(one.awaited_bytes for one in ways), "nothing is awaited")


def test_this_nodes_own_relay_brings_it_nothing(server: RunningServer, relays: Relays) -> None:
    with routed_client(server, relays[0], node="b", route_bytes_min=0) as client:
        with fetch(client, route="direct", rate_bytes_per_s=SLOW_BYTES_PER_S) as slow:
            slow.wait_layer(0)
            for _ in range(3):
                with fetch(client) as delivery:
                    check_delivery(delivery)
                    assert (delivery.route, delivery.route_reason) == ("direct", NO_REPORTS)
        with fetch(client, route="relay:b") as delivery:  # by whoever wants it all the same
            check_delivery(delivery)
            assert delivery.route == "relay:b"


def test_a_relay_that_says_nothing_any_more_is_not_chosen(
    server: RunningServer, tmp_path: Path
) -> None:
    with (
        RunningRelay(server, tmp_path / "relay.log") as relay,
        routed_client(server, relay, route_bytes_min=0, relay_timeout_s=2.0) as client,
    ):
        wait_for_reports(client)
        os.kill(relay.process.pid, signal.SIGSTOP)
        try:

            def is_forgotten() -> bool:
                with fetch(client) as delivery:
                    check_delivery(delivery)
                    return delivery.route_reason == NO_REPORTS

            wait_until(is_forgotten, "its last report is too old")
        finally:
            os.kill(relay.process.pid, signal.SIGCONT)
        wait_for_reports(client)


@pytest.fixture
def long_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has failed often enough, however long that takes, is left alone until a test ends."""
    monkeypatch.setattr(accounts, "FAILURES_S", 600.0)
    monkeypatch.setattr(pause, "PAUSE_MIN_S", 600.0)
    monkeypatch.setattr(pause, "PAUSE_MAX_S", 600.0)


@pytest.mark.usefixtures("long_rests")
def test_a_relay_that_fails_again_and_again_is_left_alone(server: RunningServer) -> None:
    credentials = server.credentials
    with Client(
        server.endpoint,
        access_key=credentials.access_key,
        secret_key=credentials.secret_key,
        relays=["b=http://127.0.0.1:9"],
        route="relay:b",
        transport="body",
    ) as client:
        reasons = list[str]()
        for _ in range(FAILURES_MAX + 1):
            with fetch(client) as delivery:
                check_delivery(delivery)
                assert delivery.route == "direct"
                reasons.append(delivery.route_reason)
        assert all("relay:b refused" in reason for reason in reasons[:FAILURES_MAX])
        assert reasons[FAILURES_MAX] == LEFT_ALONE
        assert client.route_counts()["relay:b", "refused"] == FAILURES_MAX


@pytest.mark.usefixtures("long_rests")
def test_a_relay_that_somebody_else_names_is_taken_only_if_it_is_this_clients_and_alive(
    server: RunningServer, relays: Relays
) -> None:
    with routed_client(server, relays[0]) as client:
        assert client.route_over("b") == client.route_over(relays[0].endpoint) == "relay:b"
        assert client.route_over("http://elsewhere:7400") is None
        routes = client._routes
        assert routes is not None
        for _ in range(FAILURES_MAX):
            routes.failed(routes.lines[0], "failed", "for the test")
        assert client.route_over("b") is None
    with routed_client(server) as client:
        assert client.route_over("b") is None


# --- split ---


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_split_delivery_comes_by_two_ways_and_every_byte_is_right(
    server: RunningServer, relays: Relays, transport: str
) -> None:
    def dividing() -> Client:
        """One that knows no rate yet: it would not divide what one way is far faster with."""
        wait_quiet(*relays)
        return routed_client(server, *relays, transport=transport, route="split")

    for how in ({}, {"layers": (2, 5)}, {"delivery": "auto"}, {}):
        with dividing() as client, fetch(client, **how) as delivery:
            first, end = delivery.layers.start, delivery.layers.stop
            assert np.array_equal(delivery.wait(), EXPECTED[first:end])
            assert delivery.route.startswith("split:")
            assert delivery.mode == "layerwise"
            assert delivery.chunk_count == len(KEYS)
            counts = [int(part.split("=")[1]) for part in delivery.route.split(",")]
            assert sum(counts) == len(KEYS)
            with fetch(client, **how) as again:  # by both ways, or one that is far faster
                assert np.array_equal(again.wait(), EXPECTED[first:end])
    with dividing() as client:
        bucket = client.kv_bucket(BUCKET, LAYOUT)
        with bucket.fetch([*KEYS, "0" * 64], on_missing="truncate") as delivery:
            assert np.array_equal(delivery.wait(), EXPECTED)
            assert delivery.route.startswith("split:")
    wait_quiet(*relays)


def test_a_split_into_a_target_of_the_callers_own(server: RunningServer, relays: Relays) -> None:
    target = PlainTarget(bytearray(PAYLOAD_BYTES))
    with (
        routed_client(server, *relays, route="split") as client,
        fetch(client, target=target) as delivery,
    ):
        check_delivery(delivery)
        assert delivery.route.startswith("split:")
    assert np.array_equal(target.array.reshape(EXPECTED.shape), EXPECTED)


def test_what_cannot_be_divided_goes_directly(server: RunningServer, relays: Relays) -> None:
    with routed_client(server, *relays, route="split") as client:
        bucket = client.kv_bucket(BUCKET, LAYOUT)
        with bucket.fetch(KEYS[:1]) as delivery:
            assert np.array_equal(delivery.wait(), EXPECTED[:, :1])
            assert (delivery.route, delivery.route_reason) == ("direct", UNDIVIDED)
        with fetch(client, delivery="chunkwise") as delivery:
            assert np.array_equal(delivery.wait(), EXPECTED)
            assert (delivery.route, delivery.route_reason) == ("direct", UNDIVIDED)


@pytest.mark.parametrize("transport", ["body", "shared_memory", NIXL])
def test_a_split_whose_relay_is_killed_goes_on_directly(
    server: RunningServer, tmp_path: Path, transport: str
) -> None:
    for attempt in range(ATTEMPTS):
        with (
            RunningRelay(server, tmp_path / f"relay-{attempt}.log") as relay,
            routed_client(server, relay, transport=transport, route="split") as client,
        ):
            with fetch(client, route="relay:b") as delivery:  # no rate of the direct way is known
                check_delivery(delivery)
            with fetch(client, rate_bytes_per_s=SLOW_BYTES_PER_S) as delivery:  # it takes 3 s
                assert delivery.route.startswith("split:"), delivery.route_reason
                delivery.wait_layer(2)
                relay.process.kill()
                check_delivery(delivery)
                if delivery.route.startswith("split:"):  # a busy machine killed it too late
                    continue
                assert delivery.route == "direct"
                assert "relay:b failed" in delivery.route_reason
            return
    pytest.fail("no relay was killed before it had brought its part")
