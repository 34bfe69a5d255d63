"""Relays that a client finds at the dispatch service, and routes that the service chooses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from objectcache import Client, InvalidRequest
from objectcache.routes import dispatch_replicas
from objectcache.routes.client_routes import (
    DISPATCHED,
    LEAST_LATE,
    NO_REPORTS,
    UNKNOWN,
)
from tests.dispatch_service.running import TOKEN, DispatchProcess
from tests.integration.served import wait_until
from tests.relay.relays import NIXL
from tests.routes.dispatched import dispatched, dispatched_client, wait_for_reason
from tests.routes.routed import check_delivery, fetch
from tests.servers import RunningServer

pytestmark = pytest.mark.usefixtures("patient_answers")


@pytest.mark.parametrize("transport", ["body", NIXL])
def test_the_service_chooses_and_hears_when_it_is_over(
    server: RunningServer, tmp_path: Path, transport: str
) -> None:
    with (
        dispatched(server, tmp_path) as (dispatch, _),
        dispatched_client(server, dispatch, tmp_path, transport=transport) as client,
    ):
        wait_for_reason(client, DISPATCHED)
        routes = set[str]()

        def comes_over_a_relay() -> bool:
            busy = [{"node": "p0", "read_queue_bytes": 10**12}]  # of this node's NIC
            assert dispatch.loads(nodes=busy)["unknown"] == []
            with fetch(client) as delivery:
                check_delivery(delivery)
                routes.add(delivery.route)
                return delivery.route_reason == DISPATCHED and delivery.route != "direct"

        wait_until(comes_over_a_relay, "a relay is chosen")
        assert routes <= {"direct", "relay:d0", "relay:d1"}
        wait_until(lambda: dispatch.state()["reservations"] == 0, "every reservation has ended")


def test_a_client_without_a_worker_chooses_among_the_relays_that_registered(
    server: RunningServer, tmp_path: Path
) -> None:
    with (
        dispatched(server, tmp_path) as (dispatch, _),
        dispatched_client(
            server, dispatch, tmp_path, worker="", dispatch_token=lambda: TOKEN
        ) as client,
    ):
        wait_for_reason(client, LEAST_LATE)

        def is_found() -> bool:
            with fetch(client, route="relay:d1") as delivery:
                check_delivery(delivery)
                return delivery.route == "relay:d1"

        wait_until(is_found, "it is found by its node's name")
        with fetch(client, route="relay:elsewhere") as delivery:
            check_delivery(delivery)
            assert (delivery.route, delivery.route_reason) == ("direct", UNKNOWN)
        assert dispatch.state()["reservations"] == 0


def test_while_the_service_is_away_the_client_chooses_by_itself(
    server: RunningServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch_replicas, "TOLD_EVERY_S", 600.0)  # longer than the test
    with (
        dispatched(server, tmp_path) as (dispatch, _),
        dispatched_client(server, dispatch, tmp_path) as client,
    ):
        wait_for_reason(client, DISPATCHED)
        address = dispatch.address
        dispatch.process.kill()
        dispatch.process.wait()
        reasons = set[str]()
        for _ in range(5):
            with fetch(client) as delivery:
                check_delivery(delivery)
                reasons.add(delivery.route_reason)
        assert reasons <= {LEAST_LATE, NO_REPORTS}
        wait_for_reason(client, LEAST_LATE)
        told_away = [one for one in caplog.records if "of no help" in one.getMessage()]
        assert len(told_away) == 1
        again = DispatchProcess(tmp_path, listen=address)
        try:
            again.register("p0", "prefill", lease_s=600.0)
            wait_for_reason(client, DISPATCHED)
        finally:
            again.process.terminate()


def test_a_service_that_is_not_there_costs_nothing_but_its_refusal(server: RunningServer) -> None:
    credentials = server.credentials
    with (
        Client(
            server.endpoint,
            access_key=credentials.access_key,
            secret_key=credentials.secret_key,
            dispatch="http://127.0.0.1:9",
            dispatch_token=lambda: TOKEN,
            worker="p0.0",
            route_bytes_min=0,
        ) as client,
        fetch(client) as delivery,
    ):
        check_delivery(delivery)
        assert (delivery.route, delivery.route_reason) == ("direct", NO_REPORTS)


def raises() -> str:
    raise RuntimeError("the vault is closed")


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"worker": "p9.0"}, r"worker 'p9\.0'\): .*prefill worker 'p9\.0'"),
        ({"dispatch_token": lambda: "another-token-than-the-services"}, "dispatch_token"),
        ({"dispatch_token": raises}, "dispatch_token raised RuntimeError: the vault is closed"),
        ({"dispatch_token": lambda: "a\nb"}, "dispatch_token must give a text"),
    ],
)
def test_what_the_service_refuses_is_logged_by_the_arguments_name_and_fails_no_delivery(
    server: RunningServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    how: dict[str, Any],
    told: str,
) -> None:
    dispatch = DispatchProcess(tmp_path)
    try:
        dispatch.register("p0", "prefill", lease_s=600.0)
        with dispatched_client(server, dispatch, tmp_path, **how) as client:

            def is_logged() -> bool:
                with fetch(client) as delivery:
                    check_delivery(delivery)
                return any("of no help" in one.getMessage() for one in caplog.records)

            wait_until(is_logged, "the refusal is logged")
        [line] = [one.getMessage() for one in caplog.records if "of no help" in one.getMessage()]
        assert re.search(told, line), line
        assert "S3" not in line
    finally:
        assert dispatch.process.terminate() == 0


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"dispatch": "http://d:9010"}, "dispatch_token must name the file"),
        ({"dispatch": "http://d:9010", "dispatch_token": "/nowhere/token"}, "cannot be read"),
        ({"dispatch": "d:9010", "dispatch_token": lambda: "t"}, "http://host:port"),
        ({"dispatch_token": "/nowhere/token"}, "need dispatch"),
        ({"worker": "p0.0"}, "need dispatch"),
        ({"worker": 7}, "worker must be a string"),
        ({"dispatch": "http://d:1,e:2", "dispatch_token": lambda: "t"}, r"dispatch: .* 'e:2'"),
        ({"dispatch": ["http://d:1", 7], "dispatch_token": lambda: "t"}, "dispatch: "),
        ({"dispatch": 7, "dispatch_token": lambda: "t"}, "dispatch must be the service's URL"),
        (
            {"dispatch": "http://d:1,http://d:1", "dispatch_token": lambda: "t"},
            "d:1 is there twice",
        ),
        (
            {"dispatch": [f"http://d:{n}" for n in range(1, 10)], "dispatch_token": lambda: "t"},
            "at most 8 URLs, got 9",
        ),
        ({"dispatch": "http://d:9010", "worker": "a b"}, "worker must be 1 to 128"),
    ],
)
def test_a_wrong_argument_of_the_service_is_told_by_its_name(
    how: dict[str, Any], told: str
) -> None:
    with pytest.raises(InvalidRequest, match=told):
        Client("http://a:9000", access_key="k", secret_key="s", **how)
