"""Nodes and workers that come, go and change under a dispatcher that is running."""

from __future__ import annotations

from dataclasses import replace

import pytest

from objectcache_dispatch import (
    ClusterDispatcher,
    ClusterWorker,
    DispatchSettings,
    NodeLoad,
    Role,
    Topology,
    WorkerLoad,
)
from objectcache_schemas.errors import InvalidRequest, NotFound
from tests.unit.dispatch.clusters import node, one_of_each, request

SETTINGS = DispatchSettings(beta_tokens=500, lease_s=60.0, needs_decode=True)


def with_nodes(*names: str) -> Topology:
    """Those of prefill are called p.., of decode d.., others only relay."""
    roles: dict[str, Role] = {"p": "prefill", "d": "decode"}
    return Topology(tuple(node(name, roles.get(name[0])) for name in names))


def test_a_cluster_begins_empty_and_serves_once_both_roles_are_there() -> None:
    found = ClusterDispatcher(Topology(()), SETTINGS)
    assert found.select(request("r"), 0.0) is None
    found.change_topology(with_nodes("p"), 0.0)
    assert found.select(request("r"), 0.0) is None  # its decode nodes are still to come
    found.change_topology(with_nodes("p", "d"), 0.0)
    decision = found.select(request("r"), 0.0)
    assert decision is not None
    assert (decision.prefill, decision.decode) == ("p.0", "d.0")


def test_a_cluster_of_prefill_alone_decides_without_decode_workers() -> None:
    found = ClusterDispatcher(with_nodes("p"), replace(SETTINGS, needs_decode=False))
    decision = found.select(request("r"), 0.0)
    assert decision is not None
    assert decision.decode is None


def test_what_stays_keeps_its_requests_and_reports() -> None:
    found = ClusterDispatcher(one_of_each(), SETTINGS)
    assert found.select(request("r"), 0.0) is not None
    found.report(0.0, [WorkerLoad("d.0", 3, 250)], [NodeLoad("d", 4000, 300), NodeLoad("p", 6000)])
    lost = found.change_topology(with_nodes("x", "d", "p0", "p"), 1.0)
    assert (lost.requests, lost.rerouted) == ((), ())
    assert found.worker_load("p.0").tok == 100
    assert found.worker_load("d.0") == WorkerLoad("d.0", 3, 250)
    assert found.node_load("d", 1.0) == NodeLoad("d", 3000, 300)  # read at 1,000 bytes a second
    assert found.node_load("p", 1.0).read_queue_bytes == 5000
    found.completed("r", 1.0)
    assert found.worker_load("p.0").tok == 0


def test_a_queue_keeps_its_bytes_where_the_rate_of_its_nic_changes() -> None:
    found = ClusterDispatcher(one_of_each(), SETTINGS)
    found.report(0.0, (), [NodeLoad("p", 8000)])
    faster = Topology((node("p", "prefill", rate=4000.0), node("d", "decode")))
    found.change_topology(faster, 0.0)
    assert found.node_load("p", 0.0).read_queue_bytes == 8000
    assert found.node_load("p", 1.0).read_queue_bytes == 4000


def test_a_node_that_goes_takes_its_requests_along_and_routes_lead_elsewhere() -> None:
    found = ClusterDispatcher(with_nodes("p", "p1", "d", "x"), SETTINGS)
    found.report(0.0, (), [NodeLoad(name, 10**6) for name in ("p", "p1", "d")])
    over_x = found.select(request("moves"), 0.0)
    assert over_x is not None
    assert (over_x.prefill, str(over_x.route)) == ("p.0", "relay:x")
    lost_one = found.select(request("lost"), 0.0)
    assert lost_one is not None
    assert lost_one.prefill == "p1.0"
    lost = found.change_topology(with_nodes("p", "d"), 0.0)
    assert [each.name for each in lost.requests] == ["lost"]
    [rerouted] = lost.rerouted
    assert (rerouted.request.name, str(rerouted.route)) == ("moves", "direct")
    assert found.decision("moves") == rerouted
    with pytest.raises(NotFound):
        found.decision("lost")
    with pytest.raises(InvalidRequest, match="node 'x' is not in the topology"):
        found.node_load("x", 0.0)
    assert len(found) == 1


def test_what_was_submitted_waits_again_when_its_worker_is_gone() -> None:
    found = ClusterDispatcher(with_nodes("p", "d"), SETTINGS)
    for name in ("a", "b"):
        found.submit(request(name), 0.0)
    found.fetch("prefills", 0.0)
    assert found.waiting_count == 0
    assert [each.name for each in found.change_topology(with_nodes("d"), 0.0).requests] == [
        "a",
        "b",
    ]
    assert found.waiting_count == 2
    found.change_topology(with_nodes("p9", "d"), 0.0)
    found.fetch("decodes", 0.0)
    taken = found.fetch("prefills", 0.0)
    assert [(each.request.name, each.prefill) for each in taken] == [("a", "p9.0"), ("b", "p9.0")]


def test_requests_that_wait_get_a_decode_worker_once_there_is_one() -> None:
    found = ClusterDispatcher(with_nodes("p"), SETTINGS)
    found.submit(request("r"), 0.0)
    assert found.fetch("prefills", 0.0) == []
    found.change_topology(with_nodes("p", "d"), 0.0)
    assert [each.decode for each in found.fetch("decodes", 0.0)] == ["d.0"]


def test_a_worker_that_moves_is_lost_and_has_nothing() -> None:
    found = ClusterDispatcher(with_nodes("p", "d", "x"), SETTINGS)
    assert found.select(request("r"), 0.0) is not None
    worker = ClusterWorker("p.0", "prefill", "prefills")
    moved = Topology((node("d", "decode"), replace(node("x"), workers=(worker,))))
    assert [each.name for each in found.change_topology(moved, 0.0).requests] == ["r"]
    assert found.worker_load("p.0").tok == 0
    decision = found.select(request("s"), 0.0)
    assert decision is not None
    assert decision.route.parts[0].node == "x"


def test_a_dead_node_stays_dead_and_its_further_worker_gets_nothing() -> None:
    found = ClusterDispatcher(with_nodes("p", "d"), SETTINGS)
    found.lost("p", 0.0)
    more = Topology((node("p", "prefill", workers=2), node("d", "decode")))
    found.change_topology(more, 0.0)
    assert found.select(request("r"), 0.0) is None
    found.report(0.0, (), [NodeLoad("p")])
    assert found.select(request("r"), 0.0) is not None


def test_decisions_that_no_group_fetches_are_forgotten_with_their_requests() -> None:
    found = ClusterDispatcher(with_nodes("p", "d"), SETTINGS)
    found.submit(request("r"), 0.0)
    found.fetch("prefills", 0.0)
    assert len(found.fetch("decodes", 0.0)) == 1
    assert [each.name for each in found.expire(60.0)] == ["r"]
    assert found.fetch("prefills", 60.0) == []
