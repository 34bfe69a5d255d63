"""How often clients ask relays and the dispatch service, counted by those."""

from __future__ import annotations

from pathlib import Path

import pytest

from objectcache.routes import client_routes, relay_reports
from objectcache.routes.client_routes import DISPATCHED, LEAST_LATE
from tests.integration.served import wait_until
from tests.relay.relays import RunningRelay
from tests.routes.dispatched import (
    dispatched,
    dispatched_client,
    register_engine,
    requests_of,
    wait_for_reason,
)
from tests.routes.routed import PATIENT_S, check_delivery, fetch, routed_client
from tests.servers import RunningServer

pytestmark = pytest.mark.usefixtures("patient_answers")
FETCHES = 20


def reports_of(relay: RunningRelay) -> float:
    return relay.samples()["reports_total",]


def test_deliveries_that_are_to_come_directly_ask_nobody(
    server: RunningServer, tmp_path: Path
) -> None:
    with (
        dispatched(server, tmp_path) as (dispatch, relays),
        dispatched_client(server, dispatch, tmp_path, route="direct") as client,
    ):
        for _ in range(FETCHES):
            with fetch(client) as delivery:
                check_delivery(delivery)
        with dispatched_client(
            server, dispatch, tmp_path, route_bytes_min=1 << 30, route="direct"
        ) as other:
            for how in ({"route": "direct"}, {"route": "auto"}):  # the second is small
                with fetch(other, **how) as delivery:
                    check_delivery(delivery)
        assert requests_of(dispatch, "GET", "/v1/relays") == 0
        assert requests_of(dispatch, "POST", "/v1/route") == 0
        assert [reports_of(relay) for relay in relays] == [0, 0]


def test_where_the_service_chooses_relays_are_not_asked_and_a_route_is_two_calls(
    server: RunningServer, tmp_path: Path
) -> None:
    with (
        dispatched(server, tmp_path) as (dispatch, relays),
        dispatched_client(server, dispatch, tmp_path) as client,
    ):
        register_engine(dispatch, storage_nic_bytes_per_s=1e14)
        for _ in range(FETCHES):
            with fetch(client) as delivery:
                check_delivery(delivery)
                assert (delivery.route, delivery.route_reason) == ("direct", DISPATCHED)
        ends = "/v1/reservations/{name}/complete"
        wait_until(lambda: requests_of(dispatch, "POST", ends) == FETCHES, "all have ended")
        assert requests_of(dispatch, "POST", "/v1/route") == FETCHES
        assert requests_of(dispatch, "POST", "/v1/reservations/{name}/read_done") == 0
        assert [reports_of(relay) for relay in relays] == [0, 0]


def test_a_client_asks_some_of_many_relays_its_own_among_them_and_stops_when_nothing_is_fetched(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_routes, "ASKED_MAX", 2)
    monkeypatch.setattr(relay_reports, "LINGER_S", 1.0)
    # Nobody stands in for a relay that a busy machine keeps from answering.
    monkeypatch.setattr(relay_reports, "ANSWER_S_MAX", PATIENT_S)
    with (
        RunningRelay(server, tmp_path / "b.log") as b,
        RunningRelay(server, tmp_path / "c.log") as c,
        RunningRelay(server, tmp_path / "d.log") as d,
        routed_client(server, b, c, d, node="d", route_bytes_min=0) as client,
    ):
        wait_for_reason(client, LEAST_LATE)
        counts = [reports_of(relay) for relay in (b, c, d)]
        assert counts[2] > 0
        assert sorted(count > 0 for count in counts[:2]) == [False, True]
        with fetch(client, route=f"relay:{'bc'[counts.index(0)]}") as delivery:
            check_delivery(delivery)  # by whoever names it, all the same
            assert delivery.route == f"relay:{'bc'[counts.index(0)]}"
        routes = client._routes
        assert routes is not None
        wait_until(
            lambda: not any(line.reports._is_reading for line in routes.lines),
            "nobody is asked any more",
        )
        counts = [reports_of(relay) for relay in (b, c, d)]
        with fetch(client, route="direct") as delivery:
            check_delivery(delivery)
        assert [reports_of(relay) for relay in (b, c, d)] == counts


def test_many_deliveries_share_a_look_at_which_relays_there_are(
    server: RunningServer, tmp_path: Path
) -> None:
    with (
        dispatched(server, tmp_path) as (dispatch, _),
        dispatched_client(server, dispatch, tmp_path, worker="") as client,
    ):
        wait_for_reason(client, LEAST_LATE)
        before = requests_of(dispatch, "GET", "/v1/relays")
        assert before >= 1

        def looked_again() -> bool:
            with fetch(client) as delivery:
                check_delivery(delivery)
            return requests_of(dispatch, "GET", "/v1/relays") > before

        wait_until(looked_again, "it looks again while deliveries are being made")
        with fetch(client, route="relay:d1") as delivery:  # who is there still has its place
            check_delivery(delivery)
            assert delivery.route == "relay:d1"
