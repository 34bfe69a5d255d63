"""A relay that dies, stands still or refuses costs time alone: the same delivery goes on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from objectcache import Client, PlainTarget
from objectcache.deliveries.delivery import Delivery
from objectcache.routes.client_routes import ASKED_FOR
from tests.integration.served import wait_until
from tests.integration.tenants import new_tenant
from tests.relay.relays import (
    NIXL,
    PAYLOAD_BYTES,
    SLOW_BYTES_PER_S,
    RunningRelay,
)
from tests.routes.routed import (
    EXPECTED,
    PATIENT_S,
    check_delivery,
    fetch,
    routed_client,
    wait_quiet,
)
from tests.servers import RunningServer, standing_still

Relays = tuple[RunningRelay, RunningRelay]
TRANSPORTS = ["body", "shared_memory", NIXL]
SLOW = 3 * SLOW_BYTES_PER_S  # a layer takes 0.13 s
ATTEMPTS = 5  # to stop a relay in the middle of a delivery


def has_brought_all(delivery: Delivery) -> bool:
    """Whether a busy machine let the relay come to the end before it was stopped."""
    assert np.array_equal(delivery.wait(), EXPECTED)
    return delivery.route == "relay:b"


def check_rest(delivery: Delivery, first: int) -> None:
    """What was there stays, and what was missing has come."""
    assert np.array_equal(delivery.wait(), EXPECTED)
    assert delivery.progress.failure is None
    assert delivery.route == "direct"
    assert "relay:b failed: layer" in delivery.route_reason
    missing = int(delivery.route_reason.split("layer ")[1].split()[0])
    assert missing > first  # nothing was asked for again from the beginning


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("layer", [-1, 3, 6])
def test_a_relay_that_is_killed_is_gone_on_without_from_the_layer_where_it_stood(
    server: RunningServer, tmp_path: Path, transport: str, layer: int
) -> None:
    for attempt in range(ATTEMPTS):
        with (
            RunningRelay(server, tmp_path / f"relay-{attempt}.log") as relay,
            routed_client(
                server, relay, transport=transport, route="relay:b", relay_timeout_s=PATIENT_S
            ) as client,
        ):
            for _ in range(1 if layer < 0 else 2):  # by HTTP, then over the session itself
                with fetch(client) as delivery:
                    check_delivery(delivery)
            with fetch(client, rate_bytes_per_s=SLOW) as delivery:
                if layer >= 0:
                    delivery.wait_layer(layer)
                relay.process.kill()
                if has_brought_all(delivery):
                    continue
                check_rest(delivery, layer)
            with fetch(client) as again:  # and it is not asked in vain for long
                check_delivery(again)
                assert again.route == "direct"
            return
    pytest.fail("no relay was killed before it had brought all")


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("layer", [0, 6])
def test_a_relay_that_stands_still_is_cut_off_and_gone_on_without(
    server: RunningServer, tmp_path: Path, transport: str, layer: int
) -> None:
    for attempt in range(ATTEMPTS):
        with (
            RunningRelay(server, tmp_path / f"relay-{attempt}.log") as relay,
            routed_client(
                server, relay, transport=transport, route="relay:b", relay_timeout_s=2.0
            ) as client,
        ):
            with fetch(client) as delivery:
                check_delivery(delivery)
            with fetch(client, rate_bytes_per_s=SLOW) as delivery:
                delivery.wait_layer(layer)
                if delivery.route != "relay:b":  # the machine was too busy
                    continue
                with standing_still(relay.process.pid):
                    if has_brought_all(delivery):
                        continue
                    check_rest(delivery, layer)
                    assert "it has brought nothing for too long" in delivery.route_reason
                    with fetch(client) as again:  # before it answers at all
                        check_delivery(again)
                        assert again.route == "direct"
                    delivery.close()
            held = delivery.wait()
            wait_quiet(relay)  # what it may have written late
            assert np.array_equal(held, EXPECTED)
            with fetch(client, route="direct") as another:
                check_delivery(another)
            return
    pytest.fail("no relay was stopped before it had brought all")


@pytest.mark.parametrize("transport", ["body", "shared_memory"])
def test_a_relay_that_brings_other_deliveries_is_not_silent(
    server: RunningServer, relays: Relays, transport: str
) -> None:
    # A busy machine may keep the relay from all for as long. A layer at the lowest rate takes 6 s.
    for timeout_s, is_last in ((3.0, False), (5.0, False), (5.0, True)):
        layer_s = 1.2 * timeout_s
        with (
            routed_client(
                server, relays[0], transport=transport, route="relay:b", relay_timeout_s=timeout_s
            ) as client,
            fetch(client, rate_bytes_per_s=EXPECTED[0].nbytes / layer_s) as slow,
        ):
            while not slow.progress.is_ready(1):
                with fetch(client) as other:
                    check_delivery(other)
            if slow.route == "direct" and not is_last:
                continue
            assert (slow.route, slow.route_reason) == ("relay:b", ASKED_FOR)
            slow.close()
            wait_quiet(relays[0])
            return


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_target_of_the_callers_own_is_filled_to_its_end(
    server: RunningServer, tmp_path: Path, transport: str
) -> None:
    with (
        RunningRelay(server, tmp_path / "relay.log") as relay,
        routed_client(
            server, relay, transport=transport, route="relay:b", relay_timeout_s=PATIENT_S
        ) as client,
    ):
        target = (
            PlainTarget(bytearray(PAYLOAD_BYTES))
            if transport == "body"
            else client.shared_memory_target(PAYLOAD_BYTES)
            if transport == "shared_memory"
            else client.fabric_target(PAYLOAD_BYTES)
        )
        with fetch(client, target=target, rate_bytes_per_s=SLOW_BYTES_PER_S) as delivery:
            delivery.wait_layer(2)
            relay.process.kill()
            check_rest(delivery, 2)
        assert np.array_equal(target.array.reshape(EXPECTED.shape), EXPECTED)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_all_deliveries_of_a_relay_that_is_killed_go_on(
    server: RunningServer, tmp_path: Path, transport: str
) -> None:
    with (
        RunningRelay(server, tmp_path / "b.log") as b,
        routed_client(
            server, b, transport=transport, route="relay:b", relay_timeout_s=PATIENT_S
        ) as client,
    ):
        deliveries = [fetch(client, rate_bytes_per_s=SLOW_BYTES_PER_S) for _ in range(4)]
        deliveries[0].wait_layer(1)
        b.process.kill()
        for delivery in deliveries:
            check_rest(delivery, -1)
            delivery.close()
        routes = client._routes
        assert routes is not None
        ways = (routes.lines[0].account, routes._direct)
        wait_until(lambda: not any(one.awaited_bytes for one in ways), "nothing is awaited")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_relay_without_landing_memory_is_passed_over(
    server: RunningServer, tmp_path: Path, transport: str
) -> None:
    room = f"relay.landing_bytes={4 << 20}"  # for one of 3 MiB
    with (
        RunningRelay(server, tmp_path / "relay.log", room, "relay.wait_s=0.05") as relay,
        routed_client(
            server, relay, transport=transport, route="relay:b", relay_timeout_s=PATIENT_S
        ) as client,
        fetch(client, rate_bytes_per_s=SLOW_BYTES_PER_S / 4) as first,
    ):
        first.wait_layer(0)
        with fetch(client) as second:
            check_delivery(second)
            assert second.route == "direct"
            assert "relay:b refused: no landing memory" in second.route_reason
        assert np.array_equal(first.wait_layer(1), EXPECTED[1])
        assert first.route == "relay:b"
        first.close()
        wait_quiet(relay)


def test_a_delivery_that_no_relay_of_that_size_could_take_says_nothing_of_its_health(
    server: RunningServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    room = f"relay.landing_bytes={1 << 20}"  # for a third of the whole
    with (
        RunningRelay(server, tmp_path / "relay.log", room) as relay,
        routed_client(server, relay, route="relay:b", relay_timeout_s=PATIENT_S) as client,
    ):
        for _ in range(5):
            with fetch(client) as large:
                check_delivery(large)
                assert large.route == "direct"
                assert "relay:b refused" in large.route_reason
        with fetch(client, layers=(0, 2)) as small:
            small.wait_layer(1)
            assert small.route == "relay:b"
        assert client.route_counts()["relay:b", "refused"] == 5
        [told] = [one for one in caplog.messages if "relay:b refused" in one]  # once
        assert "bytes of landing memory" in told
        wait_quiet(relay)


def test_a_relay_that_drains_is_passed_over_and_finishes_what_it_has(
    server: RunningServer, tmp_path: Path
) -> None:
    with (
        RunningRelay(server, tmp_path / "relay.log", "relay.drain_timeout_s=60") as relay,
        routed_client(server, relay, route="relay:b", relay_timeout_s=PATIENT_S) as client,
        fetch(client, rate_bytes_per_s=SLOW_BYTES_PER_S // 5) as first,  # it takes 15 s
    ):
        first.wait_layer(0)
        relay.process.signal_stop()
        wait_until(lambda: relay.report()["is_draining"], "the relay drains")
        with fetch(client) as second:
            check_delivery(second)
            assert second.route == "direct"
            assert "about to stop" in second.route_reason
        check_delivery(first)
        assert first.route == "relay:b"
        assert relay.process.wait() == 0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_relay_of_another_key_is_passed_over(
    server: RunningServer, tmp_path: Path, transport: str
) -> None:
    job = new_tenant(server, f"other-{transport.replace('_', '-')}")
    with (
        RunningRelay(server, tmp_path / "relay.log", job=job.credentials) as relay,
        routed_client(server, relay, transport=transport, route="relay:b") as client,
        fetch(client) as delivery,
    ):
        check_delivery(delivery)
        assert delivery.route == "direct"
        assert "relay:b refused" in delivery.route_reason


def test_a_relay_that_was_never_there_costs_nothing_but_a_refusal(server: RunningServer) -> None:
    credentials = server.credentials
    with (
        Client(
            server.endpoint,
            access_key=credentials.access_key,
            secret_key=credentials.secret_key,
            relays=["b=http://127.0.0.1:9"],
            route="relay:b",
        ) as client,
        fetch(client) as delivery,
    ):
        check_delivery(delivery)
        assert delivery.route == "direct"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_delivery_that_is_closed_early_ends_at_the_relay(
    server: RunningServer, relays: Relays, transport: str
) -> None:
    with routed_client(
        server, *relays, transport=transport, route="relay:c", relay_timeout_s=PATIENT_S
    ) as client:
        delivery = fetch(client, rate_bytes_per_s=128 << 10)  # it would take 24 s
        delivery.wait_layer(0)
        delivery.close()
        wait_quiet(relays[1])
        routes = client._routes
        assert routes is not None
        wait_until(lambda: routes.lines[1].account.awaited_bytes == 0, "nothing is awaited of it")
        with fetch(client) as again:
            check_delivery(again)
            assert again.route == "relay:c", again.route_reason
