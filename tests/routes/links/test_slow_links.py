"""A relay of which no rate is known, over a slow storage link: it is waited for while it works.

On a busy machine joining a relay's session, or a report of it, may take too long, and a delivery
comes directly: it is tried again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from objectcache import Client
from objectcache.routes.client_routes import ASKED_FOR, SILENCE_UNKNOWN_S
from tests.relay.relays import (
    BOUND_S,
    CHUNK_COUNT,
    LAYOUT,
    NIXL,
    SLOW_BYTES_PER_S,
    RunningRelay,
)
from tests.routes.cut_link import CutLink
from tests.routes.routed import EXPECTED, fetch, routed_client, wait_quiet
from tests.servers import RunningServer, standing_still

TRANSPORTS = ["body", "shared_memory", NIXL]
TRIES = (False, False, False, True)  # whether it is the last one
SILENT = "it has brought nothing for too long"
LAYER_S = 2 * SILENCE_UNKNOWN_S  # which a layer takes over the link
LAYER_BYTES = CHUNK_COUNT * LAYOUT.per_layer_chunk_bytes


@contextmanager
def slowly_linked(
    server: RunningServer, folder: Path, transport: str, layer_s: float = LAYER_S, **how: Any
) -> Iterator[tuple[RunningRelay, Client]]:
    """A relay with a slow link to the store, and a client that knows nothing of it."""
    with (
        CutLink(server.endpoint, LAYER_BYTES / layer_s) as link,
        RunningRelay(
            server,
            folder / "relay.log",
            f"relay.endpoint={link.url}",
            "relay.transport=body",
            "relay.hold_s=0",  # no try finds what another one has left
        ) as relay,
        routed_client(
            server, relay, transport=transport, route="relay:b", relay_timeout_s=None, **how
        ) as client,
    ):
        yield relay, client


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_slow_link_of_a_relay_whose_rate_nobody_knows_is_no_silence(
    server: RunningServer, tmp_path: Path, transport: str
) -> None:
    with slowly_linked(server, tmp_path, transport) as (relay, client):
        for is_last in TRIES:
            with fetch(client, layers=(0, 2)) as delivery:
                assert np.array_equal(delivery.wait(), EXPECTED[:2])
                if delivery.route == "direct" and not is_last:
                    continue
                assert (delivery.route, delivery.route_reason) == ("relay:b", ASKED_FOR)
                break
        wait_quiet(relay)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_relay_that_is_stopped_before_its_first_layer_is_not_waited_for_as_long(
    server: RunningServer, tmp_path: Path, transport: str
) -> None:
    with slowly_linked(server, tmp_path, transport, timeout_s=20 * BOUND_S) as (relay, client):
        for is_last in TRIES:
            with fetch(client) as delivery:
                if delivery.progress.ready_end and not is_last:
                    continue
                assert delivery.progress.ready_end == 0
                with standing_still(relay.process.pid):
                    assert delivery.progress.wait_ended(2 * BOUND_S)
                    assert np.array_equal(delivery.wait(), EXPECTED)
                    assert delivery.route == "direct"
                    if SILENT not in delivery.route_reason and not is_last:
                        continue
                    assert SILENT in delivery.route_reason
                break
        wait_quiet(relay)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_relay_that_answers_reports_and_brings_nothing_is_cut_off_in_time(
    server: RunningServer, tmp_path: Path, transport: str
) -> None:
    with (
        CutLink(server.endpoint) as link,
        RunningRelay(
            server, tmp_path / "relay.log", f"relay.endpoint={link.url}", "relay.transport=body"
        ) as relay,
        routed_client(
            server,
            relay,
            transport=transport,
            route="relay:b",
            relay_timeout_s=None,
            timeout_s=20 * BOUND_S,
        ) as client,
        fetch(client, rate_bytes_per_s=SLOW_BYTES_PER_S // 2) as delivery,  # which tells no rate
    ):
        delivery.wait_layer(0)
        link.silence()
        assert delivery.progress.wait_ended(4 * BOUND_S)  # less than half of the caller's
        assert np.array_equal(delivery.wait(), EXPECTED)
        assert delivery.route == "direct"
        assert "it has brought nothing for too long" in delivery.route_reason
        assert relay.report()["deliveries"] in (0, 1)  # it can be asked all the time


def test_every_byte_of_a_body_over_a_slow_compute_link_is_no_silence(
    server: RunningServer, relays: tuple[RunningRelay, RunningRelay]
) -> None:
    for is_last in TRIES:
        with (
            CutLink(relays[0].endpoint, LAYER_BYTES / LAYER_S) as link,
            routed_client(
                server,
                urls=[link.url],
                route="relay:b",
                relay_timeout_s=LAYER_S / 2,
            ) as client,
            fetch(client, layers=(0, 2)) as delivery,
        ):
            assert np.array_equal(delivery.wait(), EXPECTED[:2])
            if delivery.route == "direct" and not is_last:
                continue
            assert (delivery.route, delivery.route_reason) == ("relay:b", ASKED_FOR)
            return


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_slow_link_is_waited_for_up_to_half_of_the_callers_timeout(
    server: RunningServer, tmp_path: Path, transport: str
) -> None:
    for layer_s in (LAYER_S, 5 * LAYER_S):  # a busy machine may need longer for the direct way
        timeout_s = 1.5 * layer_s  # so that half of it is over before a layer is there
        with slowly_linked(server, tmp_path, transport, layer_s, timeout_s=timeout_s) as (
            relay,
            client,
        ):
            with fetch(client, route="direct", timeout_s=2 * BOUND_S) as joined:
                assert np.array_equal(joined.wait(), EXPECTED)
            with fetch(client) as delivery:
                assert delivery.progress.wait_ended(2 * timeout_s)
                if layer_s == LAYER_S and not (
                    delivery.progress.complete and SILENT in delivery.route_reason
                ):
                    continue
                assert np.array_equal(delivery.wait(), EXPECTED)
                assert delivery.route == "direct"
                assert SILENT in delivery.route_reason
            wait_quiet(relay)
            return
