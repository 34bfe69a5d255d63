"""The state machine: what each event does, one after the other."""

from __future__ import annotations

import random

import pytest

from objectcache_dispatch import (
    ClusterDispatcher,
    DispatchRequest,
    DispatchSettings,
    NodeLoad,
    Topology,
    WorkerLoad,
    shorter_queue,
)
from objectcache_dispatch.topology import ROLES
from objectcache_schemas.errors import Busy, Conflict, InvalidRequest, NotFound
from tests.unit.dispatch.clusters import node, one_of_each, request

SETTINGS = DispatchSettings(beta_tokens=500, lease_s=60.0)


def dispatcher(*others: str, settings: DispatchSettings = SETTINGS) -> ClusterDispatcher:
    return ClusterDispatcher(one_of_each(*(node(name) for name in others)), settings)


def loads(found: ClusterDispatcher, now_s: float = 0.0) -> tuple[int, int, int, int]:
    """Tokens of the prefill and of the decode worker, queues of their nodes in bytes."""
    return (
        found.worker_load("p.0").tok,
        found.worker_load("d.0").tok,
        found.node_load("p", now_s).read_queue_bytes,
        found.node_load("d", now_s).read_queue_bytes,
    )


def test_a_request_is_routed_once_both_workers_are_known_and_both_groups_fetch_it() -> None:
    found = dispatcher()
    found.submit(request("r"), 0.0)
    assert found.fetch("prefills", 0.0) == []
    assert loads(found) == (100, 0, 0, 0)
    [decision] = found.fetch("decodes", 0.0)
    assert (decision.prefill, decision.decode, str(decision.route)) == ("p.0", "d.0", "direct")
    assert found.fetch("prefills", 0.0) == [decision]
    assert loads(found) == (100, 100, 1000, 0)
    assert found.fetch("prefills", 0.0) == found.fetch("decodes", 0.0) == []


def test_routes_are_chosen_in_the_order_of_arrival() -> None:
    found = dispatcher()
    for name in ("first", "second"):
        found.submit(request(name), 0.0)
    found.fetch("prefills", 0.0)
    decided = found.fetch("decodes", 0.0)
    assert [(d.request.name, str(d.route)) for d in decided] == [
        ("first", "direct"),
        ("second", "relay:d"),
    ]


def test_each_end_takes_back_what_it_ends() -> None:
    found = dispatcher()
    assert found.select(request("r"), 0.0) is not None
    assert loads(found) == (100, 100, 1000, 0)
    found.read_done("r", 0.0)
    assert loads(found) == (100, 100, 0, 0)
    found.prefill_done("r", 0.0)
    assert loads(found) == (0, 100, 0, 0)
    found.completed("r", 0.0)
    assert loads(found) == (0, 0, 0, 0)
    for late in (found.read_done, found.prefill_done, found.completed, found.renew):
        with pytest.raises(NotFound, match="'r' is not tracked"):
            late("r", 0.0)


@pytest.mark.parametrize("end", ["prefill_done", "completed"])
def test_a_later_end_implies_those_before_it_and_a_repeated_one_does_nothing(end: str) -> None:
    found = dispatcher()
    found.select(request("r"), 0.0)
    getattr(found, end)("r", 0.0)
    assert loads(found)[::2] == (0, 0)
    if end == "prefill_done":
        found.read_done("r", 0.0)
        found.prefill_done("r", 0.0)
    assert loads(found)[::2] == (0, 0)


def test_a_relay_takes_landing_memory_until_the_prefix_is_read() -> None:
    found = dispatcher()
    found.select(request("a"), 0.0)
    decision = found.select(request("b"), 0.0)
    assert decision is not None
    assert str(decision.route) == "relay:d"
    assert found.node_load("d", 0.0).landing_bytes_used == 1000
    found.read_done("b", 0.0)
    assert found.node_load("d", 0.0).landing_bytes_used == 0


def test_a_full_landing_memory_sends_deliveries_direct() -> None:
    topology = Topology((node("p", "prefill"), node("d", "decode", landing_bytes=1999)))
    found = ClusterDispatcher(topology, SETTINGS)
    routes = list[str]()
    for number in range(4):
        decision = found.select(request(f"r{number}"), 0.0)
        assert decision is not None
        routes.append(str(decision.route))
    assert routes == ["direct", "relay:d", "direct", "direct"]


def test_a_request_without_a_route_waits_for_landing_memory_and_select_says_none() -> None:
    topology = Topology((node("p", "prefill", rate=0), node("d", "decode", landing_bytes=1000)))
    found = ClusterDispatcher(topology, SETTINGS)
    for name in ("r0", "r1"):
        found.submit(request(name), 0.0)
    found.fetch("prefills", 0.0)
    assert [d.request.name for d in found.fetch("decodes", 0.0)] == ["r0"]
    assert found.select(request("r2"), 0.0) is None
    found.read_done("r0", 1.0)
    assert [d.request.name for d in found.fetch("decodes", 1.0)] == ["r1"]


def test_a_read_queue_is_read_at_the_nics_rate() -> None:
    found = dispatcher()
    found.select(request("r"), 5.0)
    assert found.node_load("p", 5.4).read_queue_bytes == 600
    assert found.node_load("p", 9.0).read_queue_bytes == 0


def test_what_was_assigned_since_a_report_is_added_to_it() -> None:
    found = dispatcher()
    found.select(request("before"), 1.0)
    found.select(request("after"), 3.0)
    # As they were at 2: another router's 50 tokens, and 300 bytes beside the 1,000 of ours.
    found.report(3.0, [WorkerLoad("p.0", 2, 150, 2.0)], [NodeLoad("p", 1300, reported_s=2.0)])
    assert found.worker_load("p.0") == WorkerLoad("p.0", 3, 250)
    assert found.node_load("p", 3.0).read_queue_bytes == 1300 - 1000 + 1000
    found.completed("before", 3.5)
    assert found.worker_load("p.0") == WorkerLoad("p.0", 2, 150)


def test_a_load_is_never_less_than_what_is_known_to_be_there() -> None:
    found = dispatcher()
    found.select(request("r"), 1.0)
    found.report(2.0, [WorkerLoad("p.0", 0, 0, 2.0)])  # it has not heard of r yet
    assert found.worker_load("p.0").tok == 100


def test_an_older_report_changes_nothing() -> None:
    found = dispatcher()
    found.report(3.0, [WorkerLoad("p.0", 1, 70, 3.0)], [NodeLoad("p", 500, reported_s=3.0)])
    found.report(3.0, [WorkerLoad("p.0", 9, 90, 2.0)], [NodeLoad("p", 900, reported_s=2.0)])
    assert found.worker_load("p.0").tok == 70
    assert found.node_load("p", 3.0).read_queue_bytes == 500


def test_a_nic_is_as_fast_as_was_measured() -> None:
    found = dispatcher()
    found.report(0.0, (), [NodeLoad("p", 1000, reported_s=0.0, rate_bytes_per_s=100.0)])
    assert found.node_load("p", 5.0).read_queue_bytes == 500


def test_a_node_that_has_not_reported_for_long_does_not_relay() -> None:
    found = dispatcher(settings=DispatchSettings(500, report_age_s_max=1.0))
    found.report(0.0, (), [NodeLoad("d", reported_s=0.0)])
    routes = [found.select(request(f"r{n}"), at_s) for n, at_s in enumerate((0.9, 0.9, 1.1, 1.1))]
    assert [d and str(d.route) for d in routes] == ["direct", "relay:d", "direct", "direct"]


def test_beta_ends_a_fetch_and_select() -> None:
    found = dispatcher()
    names = [f"r{number}" for number in range(9)]
    for name in names:
        found.submit(request(name), 0.0)
    found.fetch("prefills", 0.0)
    decided = found.fetch("decodes", 0.0)
    assert [d.request.name for d in decided] == names[:6]  # 500 tokens are not over beta
    assert found.select(request("pushed"), 0.0) is None
    found.prefill_done("r0", 0.0)
    assert [d.request.name for d in found.fetch("prefills", 0.0)] == names[:1] + names[1:7]


def test_the_paper_s_policy_has_two_candidates() -> None:
    settings = DispatchSettings(500, any_node=False)
    found = ClusterDispatcher(one_of_each(node("cpu")), settings, shorter_queue)
    routes = [found.select(request(f"r{number}"), 0.0) for number in range(4)]
    assert [d and str(d.route) for d in routes] == ["direct", "relay:d", "direct", "relay:d"]


def test_a_router_that_picks_workers_gets_the_route() -> None:
    found = dispatcher("cpu")
    decision = found.route(request("r"), "p.0", None, 0.0)
    assert decision is not None
    assert (decision.decode, str(decision.route)) == (None, "direct")
    with pytest.raises(InvalidRequest, match=r"'d\.0' is a decode worker in the topology, no pre"):
        found.route(request("s"), "d.0", None, 0.0)
    with pytest.raises(InvalidRequest, match=r"'p\.0' is a prefill worker in the topology, no dec"):
        found.route(request("s"), "p.0", "p.0", 0.0)
    with pytest.raises(InvalidRequest, match="decode worker 'x' is not in the topology"):
        found.route(request("s"), "p.0", "x", 0.0)


def test_a_cluster_without_decode_workers_needs_none() -> None:
    found = ClusterDispatcher(Topology((node("p", "prefill"), node("cpu"))), SETTINGS)
    found.submit(request("r"), 0.0)
    [decision] = found.fetch("prefills", 0.0)
    assert (decision.decode, str(decision.route)) == (None, "direct")


def test_what_nobody_renews_expires() -> None:
    found = dispatcher()
    for name in ("kept", "left"):
        found.select(request(name), 0.0)
    found.submit(request("waiting"), 30.0)
    found.renew("kept", 30.0)
    assert found.expire(59.9) == []
    assert [r.name for r in found.expire(60.0)] == ["left"]
    assert loads(found)[:2] == (100, 100)
    assert [r.name for r in found.expire(90.0)] == ["waiting", "kept"]
    assert loads(found)[:2] == (0, 0)


def test_a_lost_relay_gives_another_route_and_both_groups_hear_of_it() -> None:
    found = dispatcher("cpu")
    for number in range(3):
        found.submit(request(f"r{number}"), 0.0)
    found.fetch("prefills", 0.0)
    decided = found.fetch("decodes", 0.0)
    assert [str(d.route) for d in decided] == ["direct", "relay:d", "relay:cpu"]
    found.fetch("prefills", 0.0)
    lost = found.lost("cpu", 0.0)
    assert lost.requests == ()
    [decision] = lost.rerouted
    assert (decision.request.name, str(decision.route)) == ("r2", "direct")
    assert found.fetch("prefills", 0.0) == found.fetch("decodes", 0.0) == [decision]
    assert found.node_load("cpu", 0.0) == NodeLoad("cpu", is_alive=False)


def test_requests_of_lost_workers_wait_again_in_the_order_of_arrival() -> None:
    topology = Topology(
        (node("p", "prefill", group="one"), node("q", "prefill", group="two"), node("d", "decode"))
    )
    found = ClusterDispatcher(topology, SETTINGS)
    for number in range(7):
        found.submit(request(f"r{number}"), 0.0)
    found.fetch("one", 0.0)
    found.fetch("decodes", 0.0)
    assert [r.name for r in found.lost("p", 0.0).requests] == [f"r{number}" for number in range(6)]
    found.fetch("two", 0.0)
    names = [d.request.name for d in found.fetch("decodes", 0.0)]
    assert names == [f"r{number}" for number in range(6)]
    assert found.fetch("one", 0.0) == []


def test_a_node_that_reports_again_takes_part_again() -> None:
    found = dispatcher()
    found.select(request("r"), 0.0)
    lost = found.report(1.0, (), [NodeLoad("p", is_alive=False, reported_s=1.0)])
    assert [r.name for r in lost.requests] == ["r"]
    assert found.select(request("r"), 1.0) is None
    found.report(2.0, (), [NodeLoad("p", reported_s=2.0)])
    assert found.select(request("r"), 2.0) is not None
    assert loads(found, 2.0) == (100, 100, 1000, 0)


def test_what_waits_for_a_lost_decode_group_goes_to_another() -> None:
    topology = Topology(
        (
            node("p", "prefill"),
            node("d", "decode", group="one", kv_capacity_tokens=150),
            node("e", "decode", group="two", kv_capacity_tokens=150),
        )
    )
    found = ClusterDispatcher(topology, SETTINGS)
    for number in range(3):
        found.submit(request(f"r{number}"), 0.0)
    found.fetch("prefills", 0.0)
    assert [d.request.name for d in found.fetch("one", 0.0)] == ["r0"]  # r2 waits for it
    assert [r.name for r in found.lost("d", 0.0).requests] == ["r0"]
    found.fetch("prefills", 0.0)
    assert [d.request.name for d in found.fetch("two", 0.0)] == ["r0"]


def test_wrong_use_is_named() -> None:
    found = dispatcher(settings=DispatchSettings(500, waiting_max=1))
    found.submit(request("r"), 0.0)
    with pytest.raises(Busy, match="waiting_max"):
        found.submit(request("s"), 0.0)
    with pytest.raises(Conflict, match="'r' is tracked already"):
        found.select(request("r"), 0.0)
    with pytest.raises(InvalidRequest, match=r"10001 tokens; .* worker holds 10000"):
        found.select(request("s", cached=10_000, new=1), 0.0)
    with pytest.raises(InvalidRequest, match="group 'x'"):
        found.fetch("x", 0.0)
    with pytest.raises(InvalidRequest, match="worker 'x'"):
        found.report(0.0, [WorkerLoad("x")])
    with pytest.raises(InvalidRequest, match="node 'x'"):
        found.lost("x", 0.0)


def test_a_request_that_reads_nothing_is_direct_and_takes_no_queue() -> None:
    found = dispatcher()
    decision = found.select(DispatchRequest("r", 0, 100, 0, 0, 10), 0.0)
    assert decision is not None
    assert str(decision.route) == "direct"
    assert loads(found) == (100, 100, 0, 0)


def test_all_groups_at_once_fetch_what_they_would_one_after_the_other() -> None:
    cluster = Topology(
        tuple(
            node(f"{role[0]}{n}", role, workers=2, group=f"{role}{n}", kv_capacity_tokens=700)
            for role in ROLES
            for n in range(3)
        )
    )
    prefill, decode = cluster.groups("prefill"), cluster.groups("decode")
    settings = DispatchSettings(beta_tokens=150)
    one, all_at_once = (ClusterDispatcher(cluster, settings) for _ in range(2))
    chooser = random.Random(1)
    running = list[str]()
    taken = 0
    for first in range(40):
        now_s = first * 0.5
        for number in range(chooser.randrange(5)):
            asked = request(f"r{first}-{number}", chooser.randrange(10, 300))
            for each in (one, all_at_once):
                each.submit(asked, now_s)
        for group in decode:
            one.fetch(group, now_s)
        order = [prefill[(first + place) % 3] for place in range(3)]
        expected = [decision for group in order for decision in one.fetch(group, now_s)]
        assert all_at_once.fetch_all(now_s, first) == expected
        running += [decision.request.name for decision in expected]
        taken += len({decision.prefill for decision in expected}) > 2
        for name in chooser.sample(running, len(running) // 2):
            running.remove(name)
            for each in (one, all_at_once):
                each.completed(name, now_s)
    assert taken, "several groups got something in one fetch"
    assert one.waiting_count == all_at_once.waiting_count
