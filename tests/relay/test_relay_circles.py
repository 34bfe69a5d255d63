"""Relays whose upstream is a relay: refused, so that no get goes round in a circle."""

from __future__ import annotations

from pathlib import Path

import pytest

from objectcache.errors import Unsupported
from tests.fetcher.fetchers import RunningFetcher
from tests.integration.served import wait_until
from tests.relay.relays import NIXL, RunningRelay, check_get, nothing_left
from tests.routes.routed import check_delivery, fetch, routed_client
from tests.servers import RunningServer, free_port


def test_two_relays_that_ask_each_other_say_so_and_serve_nobody_and_deliveries_come_directly(
    server: RunningServer, tmp_path: Path
) -> None:
    logs = [tmp_path / "b.log", tmp_path / "c.log"]
    ports = [free_port(), free_port()]

    def settings(own: int, other: int) -> tuple[str, ...]:
        return (
            f"relay.listen=127.0.0.1:{ports[own]}",
            f"relay.endpoint=http://127.0.0.1:{ports[other]}",
            f"relay.node=node{own}",
        )

    with (
        RunningRelay(server, logs[0], *settings(0, 1)) as b,
        RunningRelay(server, logs[1], *settings(1, 0)) as c,
    ):
        for own, log in enumerate(logs):
            told = f"this is a relay, and 'relay:node{own}' asks here: set its relay.endpoint"
            wait_until(lambda log=log, told=told: told in log.read_text(), "it says so")  # type: ignore[misc]
            assert "can serve nobody" in log.read_text()
        for relay in (b, c):
            with relay.client() as client, pytest.raises(Unsupported, match="asks here"):
                check_get(client)
        with routed_client(server, b, c, route="relay:b") as client, fetch(client) as delivery:
            check_delivery(delivery)
            assert delivery.route == "direct"
            assert "relay:b refused" in delivery.route_reason
        wait_until(lambda: nothing_left(b), "nothing is left in the relay")
        wait_until(lambda: nothing_left(c), "nothing is left in the relay")


@pytest.mark.parametrize("upstream", ["body", "shared_memory", NIXL])
def test_a_relay_is_no_upstream_of_another_over_any_transport(
    server: RunningServer, relay: RunningRelay, tmp_path: Path, upstream: str
) -> None:
    settings = (f"relay.endpoint={relay.endpoint}", f"relay.transport={upstream}")
    with (
        RunningRelay(server, tmp_path / "second.log", *settings) as second,
        second.client() as client,
        pytest.raises(Unsupported, match="asks here"),
    ):
        check_get(client)


def test_a_fetcher_may_ask_a_relay_and_nothing_asks_a_fetcher(
    server: RunningServer, relay: RunningRelay, tmp_path: Path
) -> None:
    with RunningFetcher(
        server, tmp_path / "fetcher.log", f"relay.endpoint={relay.endpoint}"
    ) as fetcher:
        with fetcher.client("shared_memory") as client:
            check_get(client)
        for kind in (RunningRelay, RunningFetcher):
            asker = kind(
                server, tmp_path / f"{kind.name}.log", f"relay.endpoint={fetcher.endpoint}"
            )
            with (
                asker,
                asker.client("shared_memory") as client,
                pytest.raises(Unsupported, match="this is a fetcher"),
            ):
                check_get(client)
