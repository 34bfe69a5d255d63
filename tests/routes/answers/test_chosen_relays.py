"""A relay that the dispatch service chooses, and that this client has found to fail."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from objectcache import pause
from objectcache.routes.client_routes import DISPATCHED, LEAST_LATE, NO_REPORTS
from tests.dispatch_service.running import DispatchProcess
from tests.integration.served import wait_until
from tests.relay.relays import RunningRelay
from tests.routes.cut_link import CutLink
from tests.routes.dispatched import NODES, dispatched_client, register_engine
from tests.routes.routed import check_delivery, fetch
from tests.servers import RunningServer

pytestmark = pytest.mark.usefixtures("patient_answers")
REST_S = 600.0  # longer than the test


def test_a_relay_that_is_left_alone_is_not_asked_though_the_service_chooses_it(
    server: RunningServer,
    relays: tuple[RunningRelay, RunningRelay],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pause, "PAUSE_MIN_S", REST_S)
    monkeypatch.setattr(pause, "PAUSE_MAX_S", REST_S)
    dispatch = DispatchProcess(tmp_path)
    try:
        register_engine(dispatch)
        with (
            CutLink(relays[0].endpoint) as first,
            CutLink(relays[1].endpoint) as second,
            dispatched_client(server, dispatch, tmp_path) as client,
        ):
            for node, link in zip(NODES, (first, second), strict=True):
                figures = {"storage_nic_bytes_per_s": 1e9, "compute_nic_bytes_per_s": 1e10}
                said = {"relay": link.url, "landing_bytes": 10**11, "lease_s": REST_S, **figures}
                assert dispatch.ask("PUT", f"/v1/nodes/{node}/relay", said).status == 200

            def fetched() -> tuple[str, str]:
                """Route and reason of a delivery for which the service chooses a relay."""
                loads = [{"node": node, "read_queue_bytes": 0} for node in NODES]
                busy = {"node": "p0", "read_queue_bytes": 10**12}
                assert dispatch.loads(nodes=[busy, *loads])["unknown"] == []
                with fetch(client) as delivery:
                    check_delivery(delivery)
                    return delivery.route, delivery.route_reason

            wait_until(
                lambda: fetched() in {(f"relay:{node}", DISPATCHED) for node in NODES},
                "a relay is chosen",
            )
            first.reset()  # the service can be told of the relays, and this client cannot ask them
            second.reset()
            routes = client._routes
            assert routes is not None

            def are_left_alone() -> bool:
                fetched()
                rests = [line.account.rest_s(time.monotonic()) for line in routes.lines]
                return len(rests) == len(NODES) and min(rests) > 0

            wait_until(are_left_alone, "both relays are left alone")
            before = {one: count for one, count in routes.counts().items() if one[1] == DISPATCHED}
            for _ in range(3):
                route, reason = fetched()
                assert route == "direct"
                assert reason in (LEAST_LATE, NO_REPORTS)
            after = {one: count for one, count in routes.counts().items() if one[1] == DISPATCHED}
            assert after == before
            wait_until(lambda: dispatch.state()["reservations"] == 0, "every reservation has ended")
    finally:
        assert dispatch.process.terminate() == 0
