"""Lists of relays, of replicas that know some and of such that know none."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from objectcache.channel.endpoint import Endpoint
from objectcache.routes.client_routes import UNKNOWN
from objectcache.routes.dispatch_client import DispatchClient
from objectcache.routes.dispatch_replicas import DispatchReplicas
from objectcache.routes.route_settings import RelayAddress
from objectcache.thread_reserve import ThreadReserve
from tests.dispatch_service.running import TOKEN, DispatchProcess, lasting_address
from tests.integration.served import wait_until
from tests.relay.relays import RunningRelay
from tests.routes.dispatched import dispatched_client, relays_of, requests_of, told
from tests.routes.routed import check_delivery, fetch
from tests.servers import RunningServer


def test_an_empty_list_hides_no_relay_that_another_replica_knows_or_knew(
    server: RunningServer, tmp_path: Path
) -> None:
    for name in ("empty", "full"):
        (tmp_path / name).mkdir()
    empty, full = DispatchProcess(tmp_path / "empty"), DispatchProcess(tmp_path / "full")
    try:
        with (
            RunningRelay(server, tmp_path / "d0.log", *told([full], tmp_path / "full", "d0")),
            dispatched_client(
                server, [empty.url, full.url], tmp_path / "full", worker="", route="relay:d0"
            ) as client,
        ):

            def comes_over_it() -> bool:
                with fetch(client) as delivery:
                    check_delivery(delivery)
                    return delivery.route == "relay:d0"

            wait_until(comes_over_it, "the other replica's list counts")
            full.process.kill()
            full.process.wait()
            lists = requests_of(empty, "GET", "/v1/relays")
            wait_until(
                lambda: comes_over_it() and requests_of(empty, "GET", "/v1/relays") > lists + 1,
                "the empty list was answered twice",
            )
            wait_until(comes_over_it, "what the other said is kept")
    finally:
        empty.process.terminate()
        full.process.terminate()


def test_relays_that_only_one_replica_knows_are_used_of_every_replica(
    server: RunningServer, tmp_path: Path
) -> None:
    services = list[DispatchProcess]()
    with ExitStack() as stack:
        relays = list[RunningRelay]()
        for node in ("d0", "d1"):
            folder = tmp_path / node
            folder.mkdir()
            services.append(service := DispatchProcess(folder, listen=lasting_address()))
            stack.callback(service.process.terminate)
            relay = RunningRelay(server, tmp_path / f"{node}.log", *told([service], folder, node))
            relays.append(stack.enter_context(relay))
        client = stack.enter_context(
            dispatched_client(server, [one.url for one in services], tmp_path / "d0", worker="")
        )

        def usable() -> set[str]:
            taken = set[str]()
            for node in ("d0", "d1"):
                with fetch(client, route=f"relay:{node}") as delivery:
                    check_delivery(delivery)
                    taken.add(delivery.route)
            return taken - {"direct"}

        wait_until(lambda: usable() == {"relay:d0", "relay:d1"}, "both lists count")
        services[1].process.kill()
        services[1].process.wait()
        lists = requests_of(services[0], "GET", "/v1/relays")
        wait_until(
            lambda: (
                len(usable()) == 2 and requests_of(services[0], "GET", "/v1/relays") > lists + 1
            ),
            "what a replica said that is away counts beside another's list",
        )
        assert relays[0].process.terminate() == 0  # it takes its leave

        def knows_its_leave() -> bool:
            with fetch(client, route="relay:d0") as delivery:
                check_delivery(delivery)
                return delivery.route_reason == UNKNOWN

        services[1] = DispatchProcess(tmp_path / "d1", listen=services[1].address)
        stack.callback(services[1].process.terminate)
        wait_until(knows_its_leave, "a relay that no replica lists is not known any more")
        wait_until(lambda: usable() == {"relay:d1"}, "the other registers anew")


def test_that_nothing_has_changed_is_told_and_that_all_have_gone(tmp_path: Path) -> None:
    dispatch = DispatchProcess(tmp_path)
    threads = ThreadReserve("lists")
    heard = list[list[str]]()

    def listed(addresses: Sequence[RelayAddress]) -> None:
        heard.append([one.node for one in addresses])

    replicas = DispatchReplicas([Endpoint.parse(dispatch.url)], lambda: TOKEN, None)
    client = DispatchClient(replicas, "", threads, listed)

    def has_heard(count: int) -> bool:
        client.want()
        return len(heard) >= count

    try:
        figures = {"storage_nic_bytes_per_s": 1e9, "compute_nic_bytes_per_s": 1e10}
        relay = {**figures, "landing_bytes": 1, "relay": "http://h:1", "lease_s": 600.0}
        assert dispatch.ask("PUT", "/v1/nodes/d0/relay", relay).status < 300
        assert dispatch.loads(nodes=[{"node": "d0"}])["unknown"] == []
        wait_until(lambda: has_heard(2), "a list that has not changed is told", 60.0)
        assert dispatch.ask("DELETE", "/v1/nodes/d0/relay").status < 300
        count = len(heard)  # one more may be under way
        wait_until(lambda: has_heard(count + 1) and heard[-1] == [], "the empty one is", 60.0)
        last = heard.index([])
        assert all(one == ["d0"] for one in heard[:last])
        assert not any(heard[last:])
    finally:
        client.close()
        threads.close()
        dispatch.process.terminate()


@pytest.mark.parametrize(("route", "bytes_min"), [("direct", 0), ("auto", 1 << 40)])
def test_a_hint_finds_a_relay_that_the_clients_own_route_does_not_look_for(
    server: RunningServer, tmp_path: Path, route: str, bytes_min: int
) -> None:
    dispatch = DispatchProcess(tmp_path)
    try:
        with dispatched_client(
            server, dispatch, tmp_path, worker="", route=route, route_bytes_min=bytes_min
        ) as client:
            with fetch(client) as delivery:
                check_delivery(delivery)
            with RunningRelay(server, tmp_path / "d0.log", *told([dispatch], tmp_path, "d0")):
                wait_until(lambda: len(relays_of(dispatch)) == 1, "it has registered")
                wait_until(lambda: client.route_over("d0") == "relay:d0", "a hint finds it")
                with fetch(client, route="relay:d0") as delivery:
                    check_delivery(delivery)
                    assert delivery.route == "relay:d0"
    finally:
        dispatch.process.terminate()
