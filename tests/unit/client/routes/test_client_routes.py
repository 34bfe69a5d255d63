"""Which relays a client knows, as lists of them come and relays fail, without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from objectcache.channel.access_key import SigningKey
from objectcache.core import CoreSettings, TransportChoice
from objectcache.pause import PAUSE_MAX_S
from objectcache.routes.accounts import FAILURES_MAX
from objectcache.routes.client_routes import COUNTED_MAX, OTHER, ClientRoutes, RelayLine
from objectcache.routes.relays_to_ask import ASKED_MAX, asking_order, relays_to_ask
from objectcache.routes.route_settings import RELAYS_MAX, AskedRoute, RelayAddress, RouteSettings
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.operators.relay_report import RelayReport

IDLE = RelayReport(
    read_queue_bytes=0,
    landing_free_bytes=1,
    landing_bytes=1,
    rate_bytes_per_s=0.0,
    deliveries=0,
    is_draining=False,
)


@contextmanager
def routes_over(*relays: str) -> Iterator[ClientRoutes]:
    addresses = tuple(RelayAddress.parse(one) for one in relays)
    settings = RouteSettings(addresses, AskedRoute("auto"), "p0")
    core = CoreSettings("us-east-1", TransportChoice.BODY, 10.0, 4, 1 << 20)
    routes = ClientRoutes(settings, core, lambda: SigningKey("k", "s", None), None)
    try:
        yield routes
    finally:
        routes.close()


def urls(lines: list[RelayLine]) -> list[str]:
    return [line.address.endpoint.url for line in lines]


def one_at(port: int, node: str = "d0") -> RelayAddress:
    return RelayAddress.parse(f"{node}=http://h:{port}")


def test_a_relay_that_was_listed_again_elsewhere_is_taken_there_and_the_old_one_ends() -> None:
    with routes_over() as routes:
        routes._listed([one_at(1)])
        [old] = routes.lines
        awaited = routes.assign(old, 100)
        routes._listed([one_at(2)])
        assert urls(routes.lines) == ["http://h:2"]
        assert routes._line("d0") is routes.lines[0]
        assert routes.others([None]) == routes.lines
        assert urls(routes._left) == ["http://h:1"]
        awaited.end()
        routes._listed([one_at(2)])  # as when nothing has changed
        assert (urls(routes.lines), routes._left) == (["http://h:2"], [])


def test_a_relay_that_comes_back_while_something_comes_over_it_is_the_same() -> None:
    with routes_over() as routes:
        routes._listed([one_at(1), one_at(2, "d1")])
        before = list(routes.lines)
        awaited = routes.assign(before[0], 100)
        routes._listed([one_at(2, "d1")])
        with pytest.raises(InvalidRequest, match="no relay 'd0'; there are d1"):
            routes._line("d0")
        routes._listed([one_at(1), one_at(2, "d1")])
        assert (routes.lines, routes._left) == (before, [])
        routes._listed([])
        assert routes._named("d0", "http://h:1") is before[0]  # by the dispatch service's choice
        assert (routes.lines, routes._left) == ([before[0]], [])
        awaited.end()


def test_those_that_the_caller_named_stay() -> None:
    with routes_over("b=http://b:1") as routes:
        routes._listed([one_at(1)])
        routes._listed([])
        assert urls(routes.lines) == ["http://b:1"]


def test_others_stand_in_for_relays_that_are_left_alone() -> None:
    nodes = [f"n{number}" for number in range(ASKED_MAX + 2)]
    with routes_over(*(f"{node}=http://{node}:1" for node in nodes)) as routes:
        asked = relays_to_ask("p0", nodes)
        for line in routes.lines:
            if line.address.node in asked:
                for _ in range(FAILURES_MAX):
                    routes.failed(line, "failed", "it is dead")
        left = {line.address.node for line in routes.others([])}
        assert left == {node for node in nodes if node not in asked}


def test_a_silent_relay_is_left_alone_unless_it_moved_others_bytes() -> None:
    with routes_over("b=http://b:1") as routes:
        [line] = routes.lines
        line.account.moved_s = 5.0
        routes.silent(line, 4.0, "no answer")
        assert not routes.is_left_alone(line)
        routes.silent(line, 6.0, "no answer")
        assert routes.is_left_alone(line)


def test_of_many_relays_those_are_asked_that_rank_first_and_no_more() -> None:
    nodes = [f"d{number}" for number in range(RELAYS_MAX)]
    with routes_over() as routes:
        routes._listed([one_at(number + 1, node) for number, node in enumerate(nodes)])
        names = [line.address.node for line in routes._asked(0.0)]
    assert names == asking_order("p0", nodes)[:ASKED_MAX]


def test_relays_that_gave_no_report_once_are_asked_again_beside_as_many_others() -> None:
    nodes = [f"n{number}" for number in range(3 * ASKED_MAX)]
    order = asking_order("p0", nodes)
    dead, living = order[: ASKED_MAX + 1], order[ASKED_MAX + 1 : 2 * ASKED_MAX + 1]
    with routes_over(*(f"{node}=http://{node}:1" for node in nodes)) as routes:
        for line in routes.lines:
            if line.address.node in dead:
                assert line.account.untold(1.0)
        assert [line.address.node for line in routes._asked(1.1)] == living
        later_s = 1.0 + 2 * PAUSE_MAX_S  # deliveries are sparse
        asked = [line.address.node for line in routes._asked(later_s)]
        assert asked == [*living, *dead[:ASKED_MAX]]
        routes._line(dead[0]).account.reported(IDLE, later_s)
        asked = [line.address.node for line in routes._asked(later_s)]
        assert asked == [dead[0], *living[:-1], *dead[1:]]


def test_of_more_relays_than_are_kept_each_node_keeps_others() -> None:
    nodes = [f"d{number}" for number in range(RELAYS_MAX + 44)]
    with routes_over() as routes:
        routes._listed([one_at(number + 1, node) for number, node in enumerate(nodes)])
        kept = {line.address.node for line in routes.lines}
    assert kept == relays_to_ask("p0", nodes, RELAYS_MAX) != set(nodes[:RELAYS_MAX])
    assert len(kept) == RELAYS_MAX


def test_no_more_than_so_many_routes_are_counted_by_name() -> None:
    with routes_over() as routes:
        for number in range(COUNTED_MAX + 5):
            routes._listed([one_at(1, f"d{number}")])
            routes.was_busy(routes.lines[0])
        counts = routes.counts()
    assert (len(counts), counts[OTHER, "was busy"]) == (COUNTED_MAX + 1, 5)
