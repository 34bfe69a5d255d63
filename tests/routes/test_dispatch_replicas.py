"""Replicas of the dispatch service: any that answers is used, and one that does not costs once."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from objectcache import Client
from objectcache.routes.client_routes import DISPATCHED
from tests.dispatch_service.running import DispatchProcess, lasting_address
from tests.integration.served import wait_until
from tests.relay.relays import RunningRelay
from tests.routes.dispatched import (
    NODES,
    dispatched,
    dispatched_client,
    register_engine,
    requests_of,
    told,
    wait_for_reason,
    wait_for_relays,
)
from tests.routes.routed import check_delivery, fetch, wait_quiet
from tests.servers import RunningServer

pytestmark = pytest.mark.usefixtures("patient_answers")
Replicas = tuple[list[DispatchProcess], list[RunningRelay]]


@pytest.fixture
def two(server: RunningServer, tmp_path: Path) -> Iterator[Replicas]:
    """Two replicas, which the same relays tell of themselves."""
    with ExitStack() as stack:
        replicas = list[DispatchProcess]()
        stack.callback(lambda: [one.process.terminate() for one in replicas])
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
            replicas.append(DispatchProcess(tmp_path / name, listen=lasting_address()))
        relays = [
            stack.enter_context(
                RunningRelay(
                    server, tmp_path / f"{node}.log", *told(replicas, tmp_path / "first", node)
                )
            )
            for node in NODES
        ]
        for one in replicas:
            register_engine(one)
            wait_for_relays(one)
        yield replicas, relays


def check_dispatched(client: Client) -> None:
    """The service chose, whichever replica it was."""
    with fetch(client) as delivery:
        check_delivery(delivery)
        assert delivery.route_reason == DISPATCHED


def is_found(client: Client, again: DispatchProcess) -> bool:
    """Whether the client has asked a replica that was started again; it fetches once more."""
    check_dispatched(client)
    return requests_of(again, "GET", "/v1/relays") > 0


def test_a_replica_that_is_killed_is_gone_on_without_and_taken_when_it_is_back(
    server: RunningServer, tmp_path: Path, two: Replicas, caplog: pytest.LogCaptureFixture
) -> None:
    replicas, relays = two
    with dispatched_client(server, [one.url for one in replicas], tmp_path / "first") as client:
        wait_for_reason(client, DISPATCHED)
        for killed, name in ((0, "first"), (1, "second")):
            address = replicas[killed].address
            replicas[killed].process.kill()
            for _ in range(5):
                check_dispatched(client)
            replicas[killed] = DispatchProcess(tmp_path / name, listen=address)
            register_engine(replicas[killed])
            wait_for_relays(replicas[killed])
            wait_until(partial(is_found, client, replicas[killed]), "it is found to be back")
        for one in replicas:
            wait_until(lambda one=one: one.state()["reservations"] == 0, "all have ended")  # type: ignore[misc]
        told = [one.getMessage() for one in caplog.records if "of no help" in one.getMessage()]
        away = list(dict.fromkeys(line.split()[3] for line in told))
        assert away == [one.url for one in replicas]
        assert len(told) < 5  # one in 30 s
    wait_quiet(*relays)


def test_a_replica_that_takes_calls_and_answers_none_is_waited_for_once(
    server: RunningServer, tmp_path: Path
) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        dispatched(server, tmp_path) as (dispatch, _),
    ):
        urls = f"http://127.0.0.1:{silent.getsockname()[1]}, {dispatch.url}"
        with dispatched_client(server, urls, tmp_path) as client:
            for _ in range(20):
                check_dispatched(client)
        asked = list[bytes]()
        silent.setblocking(False)
        while True:
            try:
                connected, _ = silent.accept()
            except BlockingIOError:
                break
            with connected:
                connected.settimeout(5.0)
                asked.append(connected.recv(1 << 16))
        assert sum(one.startswith(b"POST /v1/route") for one in asked) == 1
