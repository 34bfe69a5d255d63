"""Relays that are dead, or say nothing, shut out none that lives."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from objectcache import Client
from objectcache.routes import accounts, relay_reports
from objectcache.routes.client_routes import LEAST_LATE
from objectcache.routes.relays_to_ask import ASKED_MAX, relays_to_ask
from tests.integration.served import wait_until
from tests.relay.relays import RunningRelay
from tests.routes.routed import check_delivery, fetch
from tests.servers import RunningServer, standing_still

NODES = [f"n{number}" for number in range(ASKED_MAX + 1)]
ASKED = relays_to_ask("p0", NODES)  # as many as are asked, all of which are dead


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_others_stand_in_for_relays_whose_reports_cannot_be_read(
    server: RunningServer,
    relays: tuple[RunningRelay, RunningRelay],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    # However slowly a busy machine has all of them answer.
    monkeypatch.setattr(accounts, "REPORT_AGE_S_MAX", 5.0)
    monkeypatch.setattr(relay_reports, "ANSWER_S_MAX", 2.0)
    [living] = set(NODES) - ASKED
    with RunningRelay(server, tmp_path / "dead.log", "relay.listen=0.0.0.0:0") as dead:
        port = urlsplit(dead.endpoint).port
        urls = {node: f"http://127.0.0.{number}:{port}" for number, node in enumerate(NODES, 2)}
        urls[living] = relays[0].endpoint
        credentials = server.credentials
        with (
            Client(
                server.endpoint,
                access_key=credentials.access_key,
                secret_key=credentials.secret_key,
                relays=[f"{node}={url}" for node, url in urls.items()],
                node="p0",
                route_bytes_min=0,
                transport="body",
            ) as client,
            ExitStack() as stack,
        ):

            def reporting() -> set[str]:
                """Relays that can be chosen by what they report."""
                with fetch(client) as delivery:
                    check_delivery(delivery)
                    is_chosen = delivery.route_reason == LEAST_LATE
                routes = client._routes
                assert routes is not None
                now_s = time.monotonic()
                found = {line.address.node for line in routes.lines if line.account.load(now_s)}
                return found if is_chosen else set()

            if how == "killed":
                dead.process.kill()
            else:
                stack.enter_context(standing_still(dead.process.pid))
            wait_until(lambda: reporting() == {living}, "the one that lives stands in")
            if how == "stopped":
                stack.close()
                wait_until(lambda: reporting() >= ASKED, "they are asked again")
