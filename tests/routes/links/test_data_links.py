"""A link over which a relay writes by NIXL is cut, and the one by which it is asked is not.

Links last for all tests: this process' UCX knows their devices, and a run in which they went after
each test has crashed, which may have been why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from benchmarks.figures.experiment import NotPossible
from benchmarks.figures.shaped_link import ShapedLink, run_tool, shaped_link
from objectcache import Client
from objectcache.sessions.fabric_joining import FabricSettings
from tests.integration.served import wait_until
from tests.relay.relays import HAS_NIXL, SLOW_BYTES_PER_S, RunningRelay
from tests.routes.cut_link import CutLink
from tests.routes.routed import (
    EXPECTED,
    PATIENT_S,
    check_delivery,
    fetch,
    routed_client,
    wait_quiet,
)
from tests.servers import RunningServer

pytestmark = pytest.mark.skipif(not HAS_NIXL, reason="nixl-cu12 is not installed")

OVER_TCP = "TLS=tcp"  # else UCX copies between processes of one host, past all links
SLOW = 3 * SLOW_BYTES_PER_S  # a layer takes 0.13 s


@pytest.fixture(scope="module")
def links() -> Iterator[tuple[ShapedLink, ShapedLink]]:
    """One for requests and one for data, both into the namespace of the first."""
    try:
        with shaped_link() as control, shaped_link(1) as data:
            run_tool(*data.within, "ip", "link", "set", data.far_device, "netns", control.namespace)
            address = ("address", "add", f"{data.address}/30", "dev", data.far_device)
            run_tool(*control.within, "ip", *address)
            run_tool(*control.within, "ip", "link", "set", data.far_device, "up")
            yield control, data
    except NotPossible as why:
        pytest.skip(str(why))


@contextmanager
def linked(
    server: RunningServer,
    links: tuple[ShapedLink, ShapedLink],
    folder: Path,
    *settings: str,
    timeout_s: float,
) -> Iterator[tuple[RunningRelay, Client, Callable[[str], None]]]:
    """A relay behind both links, a client that takes its route, and what sets the data's link `up`
    or `down`.
    """
    control, data = links
    with (
        CutLink(server.endpoint, host=control.near_address) as upstream,
        RunningRelay(
            server,
            folder / "relay.log",
            f"relay.listen={control.address}:0",
            f"relay.endpoint={upstream.url}",
            "relay.transport=body",
            "storage.nixl=trusting",
            f"storage.nixl_devices={data.far_device}",
            f"storage.nixl_ucx={OVER_TCP}",
            *settings,
            within=(*control.within, "setpriv", "--pdeathsig", "KILL"),
        ) as relay,
        routed_client(
            server,
            relay,
            transport="nixl",
            route="relay:b",
            relay_timeout_s=timeout_s,
            fabric=FabricSettings("", OVER_TCP),
        ) as client,
    ):

        def set_data(state: str) -> None:
            run_tool(*control.within, "ip", "link", "set", data.far_device, state)

        yield relay, client, set_data


@pytest.mark.parametrize("layer", [0, 4])
@pytest.mark.parametrize(
    ("fabric_timeout_s", "timeout_s"),
    [(3, PATIENT_S), (30, 3.0)],
    ids=["the relay gives it up", "the client does"],
)
def test_a_data_link_that_is_cut_while_the_relay_can_be_asked_costs_time_alone(
    server: RunningServer,
    links: tuple[ShapedLink, ShapedLink],
    tmp_path: Path,
    fabric_timeout_s: int,
    timeout_s: float,
    layer: int,
) -> None:
    for patience_s in (timeout_s, PATIENT_S):  # a busy machine may keep layers for longer
        settings = (f"relay.fabric_timeout_s={fabric_timeout_s}",)
        with linked(server, links, tmp_path, *settings, timeout_s=patience_s) as (
            relay,
            client,
            set_data,
        ):
            with fetch(client) as delivery:
                check_delivery(delivery)
            with fetch(client, rate_bytes_per_s=SLOW) as delivery:
                delivery.wait_layer(layer)
                if delivery.route != "relay:b" and patience_s != PATIENT_S:
                    continue
                assert delivery.route == "relay:b"
                set_data("down")
                assert np.array_equal(delivery.wait(), EXPECTED)
                assert delivery.route == "direct"
                assert "relay:b failed: layer" in delivery.route_reason
                assert int(delivery.route_reason.split("layer ")[1].split()[0]) > layer
            assert relay.report()["is_draining"] is False  # it can be asked all the time
            with fetch(client) as again:
                check_delivery(again)
                assert again.route == "direct"
            held = delivery.wait()
            wait_quiet(relay)
            set_data("up")

            def is_taken() -> bool:
                with fetch(client) as one:
                    check_delivery(one)
                    return one.route == "relay:b"

            wait_until(is_taken, "the relay's route is taken again")
            assert np.array_equal(held, EXPECTED)  # nothing was written late
            return
