"""A dispatch service with relays, and clients that use it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from objectcache import Client
from tests.dispatch_service.running import DispatchProcess, lasting_address
from tests.integration.served import wait_until
from tests.relay.relays import RunningRelay
from tests.routes.routed import PATIENT_S, check_delivery, fetch
from tests.servers import RunningServer

NODES = ("d0", "d1")


def told(dispatch: Sequence[DispatchProcess], folder: Path, node: str) -> tuple[str, ...]:
    """Settings of a relay that registers at each of these."""
    return (
        f"relay.dispatch={', '.join(one.url for one in dispatch)}",
        f"relay.dispatch_token_file={folder / 'token'}",
        f"relay.node={node}",
        "relay.storage_nic_gbps=8",
        "relay.compute_nic_gbps=80",
        "relay.report_s=0.05",
    )


def register_engine(dispatch: DispatchProcess, **fields: Any) -> None:
    """Node p0 with worker p0.0."""
    dispatch.register("p0", "prefill", lease_s=600.0, **fields)


def wait_for_relays(dispatch: DispatchProcess) -> None:
    wait_until(lambda: len(relays_of(dispatch)) == len(NODES), "all relays have registered")


def relays_of(dispatch: DispatchProcess) -> list[str]:
    return [node["relay"] for node in dispatch.state()["nodes"] if node["relay"]]


def requests_of(dispatch: DispatchProcess, method: str, path: str) -> float:
    """Calls that it has served."""
    return dispatch.metric(
        f'objectcache_dispatch_requests_total{{method="{method}",path="{path}"}}'
    )


@contextmanager
def dispatched(
    server: RunningServer, folder: Path
) -> Iterator[tuple[DispatchProcess, list[RunningRelay]]]:
    """A service with the nodes p0, of this engine, and d0 and d1, which have relays."""
    with ExitStack() as stack:
        dispatch = DispatchProcess(folder, listen=lasting_address())
        stack.callback(dispatch.process.terminate)
        relays = [
            stack.enter_context(
                RunningRelay(server, folder / f"{node}.log", *told([dispatch], folder, node))
            )
            for node in NODES
        ]
        register_engine(dispatch)
        wait_for_relays(dispatch)
        yield dispatch, relays


def dispatched_client(
    server: RunningServer, dispatch: DispatchProcess | str | Sequence[str], folder: Path, **how: Any
) -> Client:
    """A client of worker p0.0 unless said otherwise; the caller closes it."""
    credentials = server.credentials
    defaults = {
        "worker": "p0.0",
        "dispatch_token": folder / "token",
        "transport": "body",
        "route_bytes_min": 0,
        "relay_timeout_s": PATIENT_S,
    }
    return Client(
        server.endpoint,
        access_key=credentials.access_key,
        secret_key=credentials.secret_key,
        dispatch=dispatch.url if isinstance(dispatch, DispatchProcess) else dispatch,
        node="p0",
        **{**defaults, **how},
    )


def wait_for_reason(client: Client, reason: str) -> None:
    """Fetch until a route is taken for it."""

    def has_reason() -> bool:
        with fetch(client) as delivery:
            check_delivery(delivery)
            return delivery.route_reason == reason

    wait_until(has_reason, f"a route is taken by reason of {reason}")
