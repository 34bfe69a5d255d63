"""What the service decides, and that it forgets what nobody renews, under virtual time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from objectcache_dispatch import POLICIES
from objectcache_gateway.dispatch_service.cluster_state import ClusterState
from objectcache_gateway.dispatch_service.recent_reads import RecentReads
from objectcache_gateway.dispatch_service.topology_file import node_of
from objectcache_runtime.settings import DispatchServiceSettings
from objectcache_schemas.errors import Busy, Conflict, InvalidRequest, NotFound
from objectcache_schemas.operators.dispatch_api import (
    LoadsReport,
    NodeRegistration,
    NodeState,
    RegisteredWorker,
    RelayRegistration,
    ReportedNode,
    ReportedWorker,
    SelectRequest,
)
from objectcache_schemas.policy_names import ROUTE_POLICIES
from tests.unit.examples import examples


def node(name: str, rate: float = 1e9, landing_bytes: int = 10**12) -> NodeRegistration:
    """p.. has a prefill worker, d.. one for decode, others only relay."""
    workers: tuple[RegisteredWorker, ...] = ()
    if name[0] == "p":
        workers = (RegisteredWorker(name=f"{name}.0", role="prefill", group="P"),)
    elif name[0] == "d":
        workers = (
            RegisteredWorker(name=f"{name}.0", role="decode", group="D", kv_capacity_tokens=10**6),
        )
    return NodeRegistration(
        storage_nic_bytes_per_s=rate,
        compute_nic_bytes_per_s=1e10,
        landing_bytes=landing_bytes,
        workers=workers,
    )


def request(name: str, layer_bytes: int = 10**7) -> SelectRequest:
    return SelectRequest(
        name=name, cached_tokens=900, new_tokens=100, layer_bytes=layer_bytes, num_layers=10
    )


def cluster(*names: str, **fields: Any) -> ClusterState:
    found = ClusterState(DispatchServiceSettings(**{"report_age_s_max": 0.0, **fields}))
    for name in names:
        found.register(name, node(name), 0.0)
    return found


def relay_of(name: str, landing_bytes: int = 10**12) -> RelayRegistration:
    return RelayRegistration(
        relay=f"http://{name}:7400",
        storage_nic_bytes_per_s=2e9,
        compute_nic_bytes_per_s=3e10,
        landing_bytes=landing_bytes,
    )


def shown(found: ClusterState, name: str, now_s: float = 0.0) -> NodeState:
    [state] = [one for one in found.state(now_s).nodes if one.name == name]
    return state


@pytest.mark.parametrize("relay_first", [True, False])
def test_a_nodes_workers_and_its_relay_register_without_undoing_each_other(
    relay_first: bool,
) -> None:
    found = cluster("p")
    calls: list[Callable[[float], object]] = [
        lambda now_s: found.register("d", node("d", landing_bytes=0), now_s),
        lambda now_s: found.register_relay("d", relay_of("d"), now_s),
    ]
    for now_s, call in enumerate(calls[::-1] if relay_first else calls):
        call(float(now_s))
    found.take_loads(LoadsReport(nodes=(ReportedNode(node="p", read_queue_bytes=10**12),)), 2.0)
    chosen = found.select(request("r"), 2.0)
    assert (chosen.route, chosen.parts[0].relay_url) == ("relay:d", "http://d:7400")
    for call in calls:  # again, which changes nothing
        call(3.0)
    state = shown(found, "d")
    assert (state.relay, state.landing_bytes, len(state.workers)) == ("http://d:7400", 10**12, 1)
    assert (state.storage_nic_bytes_per_s, state.compute_nic_bytes_per_s) == (2e9, 3e10)
    assert found.renew("r", 3.0).route == "relay:d"
    undone = found.remove_relay("d", 4.0)
    assert [one.route for one in undone.rerouted] == ["direct"]
    state = shown(found, "d")
    assert (state.relay, state.landing_bytes, len(state.workers)) == (None, 0, 1)
    with pytest.raises(NotFound, match="relay of node 'd'"):
        found.remove_relay("d", 4.0)


def test_workers_that_go_leave_their_nodes_relay() -> None:
    found = cluster("p", "d")
    found.register_relay("d", relay_of("d"), 0.0)
    found.remove("d", 1.0)
    assert shown(found, "d").workers == ()
    assert shown(found, "d").relay == "http://d:7400"
    with pytest.raises(NotFound):
        found.remove("d", 1.0)
    found.remove_relay("d", 1.0)
    assert [one.name for one in found.state(1.0).nodes] == ["p"]


def test_leases_of_workers_and_relay_end_apart_and_each_is_renewed_by_its_own_loads() -> None:
    found = cluster("p", "d", node_lease_s=10.0)
    found.register_relay("d", relay_of("d"), 0.0)
    of_relay = LoadsReport(nodes=(ReportedNode(node="d"),))
    of_worker = LoadsReport(workers=(ReportedWorker(worker="p.0"),))
    for now_s in (6.0, 12.0):
        found.take_loads(of_relay, now_s)
        found.take_loads(of_worker, now_s)
        found.expire(now_s)
    assert (shown(found, "d").workers, shown(found, "d").relay) == ((), "http://d:7400")
    assert len(shown(found, "p").workers) == 1
    assert found.expire(22.0) == ["p", "d"]
    assert found.state(22.0).nodes == ()


def test_a_second_relay_of_a_name_is_refused_and_its_reports_renew_nothing() -> None:
    found = cluster("p", "d", node_lease_s=10.0)
    found.register_relay("d", relay_of("d"), 0.0)
    with pytest.raises(Conflict, match=r"http://d:7400, .* 4\.0 s more; .*relay\.node"):
        found.register_relay("d", relay_of("e"), 6.0)
    second = LoadsReport(nodes=(ReportedNode(node="d", relay="http://e:7400"),))
    assert found.take_loads(second, 6.0).unknown == ("d",)
    first = LoadsReport(nodes=(ReportedNode(node="d", relay="http://d:7400"),))
    assert found.take_loads(first, 7.0).unknown == ()
    with pytest.raises(Conflict):
        found.register_relay("d", relay_of("e"), 16.0)
    found.register_relay("d", relay_of("e"), 17.0)
    assert shown(found, "d").relay == "http://e:7400"
    assert found.take_loads(first, 17.0).unknown == ("d",)


def test_a_listed_node_gets_the_address_of_its_relay_alone() -> None:
    listed = node_of("d", node("d"))
    found = ClusterState(DispatchServiceSettings(), [listed])
    found.register_relay("d", relay_of("d", landing_bytes=5), 0.0)
    assert shown(found, "d").landing_bytes == 10**12
    assert shown(found, "d").relay == "http://d:7400"
    assert shown(found, "d").lease_left_s is None
    found.remove_relay("d", 0.0)
    assert shown(found, "d").relay is None


def test_the_settings_policies_are_the_librarys() -> None:
    assert set(ROUTE_POLICIES) == set(POLICIES)


def test_settings_reach_the_library() -> None:
    found = cluster(
        beta_tokens=7.0,
        alpha_s=2.0,
        slack=1.5,
        any_node=False,
        decode=False,
        route_policy="split",
        reservation_lease_s=9.0,
    ).dispatcher.settings
    assert (found.beta_tokens, found.alpha_s, found.slack, found.lease_s) == (7.0, 2.0, 1.5, 9.0)
    assert (found.any_node, found.needs_decode) == (False, False)


def test_a_route_policy_is_the_one_that_decides() -> None:
    def kind(policy: str) -> str:
        whole = request("r")
        asked = SelectRequest(
            name="r",
            cached_tokens=whole.cached_tokens,
            new_tokens=whole.new_tokens,
            layer_bytes=whole.layer_bytes,
            num_layers=whole.num_layers,
            chunk_bytes=10**6,
        )
        found = cluster("p", "d", route_policy=policy).select(asked, 0.0)
        return (found.route or "").partition(":")[0]

    assert (kind("shortest_time"), kind("split")) == ("direct", "split")


def test_a_node_without_a_recent_report_does_not_relay() -> None:
    found = cluster("p", "d", report_age_s_max=1.0)
    busy = ReportedNode(node="p", read_queue_bytes=10**12)
    found.take_loads(LoadsReport(nodes=(busy, ReportedNode(node="d"))), 5.0)
    assert found.select(request("r"), 5.5).route == "relay:d"
    assert found.select(request("s"), 6.5).route == "direct"


def test_a_registration_that_changes_nothing_only_renews() -> None:
    found = cluster("p", "d", node_lease_s=10.0)
    found.select(request("r"), 0.0)
    registered, undone = found.register("p", node("p"), 8.0)
    assert (registered.is_new, registered.lease_s, undone.lost) == (False, 10.0, ())
    found.register("d", node("d"), 8.0)
    assert found.expire(17.9) == []
    assert found.expire(18.0) == ["p", "d"]
    with pytest.raises(NotFound):
        found.renew("r", 18.0)


def test_a_node_that_changes_keeps_its_requests() -> None:
    found = cluster("p", "d")
    found.select(request("r"), 0.0)
    _, undone = found.register("p", node("p", rate=2e9), 0.0)
    assert undone.lost == ()
    (_, worker), *_ = [(n, w) for n in found.state(0.0).nodes for w in n.workers]
    assert (worker.name, worker.tok) == ("p.0", 1000)


def test_a_registration_that_cannot_be_changes_nothing() -> None:
    found = cluster("p", "d")
    before = found.state(0.0)
    both = NodeRegistration(
        storage_nic_bytes_per_s=1.0,
        compute_nic_bytes_per_s=1.0,
        workers=(RegisteredWorker(name="w", role="prefill", group="D"),),
    )
    with pytest.raises(InvalidRequest, match="group 'D' has workers of both roles"):
        found.register("x", both, 0.0)
    assert found.state(0.0) == before
    assert found.expire(1e6) == ["p", "d"]


def test_what_waits_again_is_not_said_to_be_lost() -> None:
    found = cluster("p", "d")
    found.submit(request("waits"), 0.0)
    found.take_loads(LoadsReport(fetch=("P",)), 0.0)
    found.select(request("selected"), 0.0)
    assert found.remove("p", 0.0).lost == ("selected",)
    assert found.state(0.0).waiting == 1
    assert found.renew("waits", 0.0).route is None


def test_a_decode_group_fetches_what_a_node_that_is_gone_has_prefilled() -> None:
    found = cluster("p", "d")
    found.submit(request("r"), 0.0)
    found.take_loads(LoadsReport(fetch=("D",)), 0.0)
    assert [r.name for r in found.take_loads(LoadsReport(fetch=("P",)), 0.0).fetched] == ["r"]
    found.prefill_done("r", 0.0)
    assert found.remove("p", 0.0).lost == ()
    [fetched] = found.take_loads(LoadsReport(fetch=("D",)), 0.0).fetched
    assert (fetched.prefill, fetched.prefill_node, fetched.decode_node) == ("p.0", None, "d")


def test_reservations_are_bounded_and_expire() -> None:
    found = cluster("p", "d", reservations_max=3, reservation_lease_s=5.0, beta_tokens=1e9)
    for number in range(3):
        found.select(request(f"r{number}"), 0.0)
    for ask in (found.select, found.submit):
        with pytest.raises(Busy, match=r"dispatch\.reservations_max") as refused:
            ask(request("s"), 0.0)
        assert refused.value.details.retry_after_s == 1.0
    found.renew("r1", 4.0)
    found.expire(5.0)
    assert found.state(5.0).reservations == 1
    assert found.reservations_ended[("expired",)] == 2


def test_bytes_are_balanced_over_the_nodes_that_have_a_storage_nic() -> None:
    reads = RecentReads()
    assert reads.imbalance(["a", "b"], 0.0) == 1.0
    reads.add("a", 300, 1.0)
    reads.add("b", 100, 2.0)
    assert reads.imbalance(["a", "b"], 2.0) == 1.5
    assert reads.imbalance(["a", "b", "c", "d"], 2.0) == 3.0
    assert reads.imbalance(["a", "b"], 6.2) == 2.0  # what a was given is over 5 s ago
    assert reads.imbalance(["a", "b"], 60.0) == 1.0


NAMES = st.sampled_from(["p0", "p1", "d0", "d1", "x"])
REQUESTS = st.integers(0, 12).map(lambda number: f"r{number}")


class AnyOrderOfCalls(RuleBasedStateMachine):
    """Only the errors that a router is told of come out, and leases end all there is."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.cluster = cluster(
            nodes_max=4, reservations_max=8, node_lease_s=5.0, reservation_lease_s=4.0
        )

    def told(self, call: Any, *arguments: Any) -> None:
        with contextlib.suppress(Busy, Conflict, InvalidRequest, NotFound):
            call(*arguments, self.now_s)

    @rule(name=NAMES, rate=st.sampled_from([0.0, 1e9, 2e9]), landing=st.sampled_from([0, 10**9]))
    def register(self, name: str, rate: float, landing: int) -> None:
        self.told(self.cluster.register, name, node(name, rate, landing))

    @rule(name=NAMES)
    def remove(self, name: str) -> None:
        self.told(self.cluster.remove, name)

    @rule(name=REQUESTS, layer_bytes=st.sampled_from([0, 10**7]))
    def select(self, name: str, layer_bytes: int) -> None:
        self.told(self.cluster.select, request(name, layer_bytes))

    @rule(name=REQUESTS)
    def submit(self, name: str) -> None:
        self.told(self.cluster.submit, request(name))

    @rule(name=REQUESTS, event=st.sampled_from(["read_done", "prefill_done", "renew", "end"]))
    def say(self, name: str, event: str) -> None:
        more = ("completed",) if event == "end" else ()
        self.told(getattr(self.cluster, event), name, *more)

    @rule(
        nodes=st.lists(NAMES, max_size=3),
        is_alive=st.booleans(),
        fetch=st.sets(st.sampled_from(["P", "D", "Q"])),
        age_s=st.floats(0.0, 12.0),
    )
    def report(self, nodes: list[str], is_alive: bool, fetch: set[str], age_s: float) -> None:
        known = {each.name for each in self.cluster.state(self.now_s).nodes}
        taken = self.cluster.take_loads(
            LoadsReport(
                nodes=tuple(ReportedNode(node=n, is_alive=is_alive, age_s=age_s) for n in nodes),
                workers=tuple(ReportedWorker(worker=f"{n}.0", tok=5, age_s=age_s) for n in nodes),
                fetch=tuple(sorted(fetch)),
            ),
            self.now_s,
        )
        assert set(nodes) & known == set(nodes) - set(taken.unknown)
        for decided in taken.fetched:
            assert decided.prefill is not None
            assert decided.decode is not None

    @rule(passed_s=st.floats(0.0, 3.0))
    def wait(self, passed_s: float) -> None:
        self.now_s += passed_s
        self.cluster.expire(self.now_s)

    @invariant()
    def all_is_bounded(self) -> None:
        state = self.cluster.state(self.now_s)
        assert len(state.nodes) <= 4
        assert state.waiting <= state.reservations <= 8
        assert self.cluster.imbalance(self.now_s) >= 1.0

    def teardown(self) -> None:
        self.now_s += 10.0
        self.cluster.expire(self.now_s)
        self.now_s += 10.0  # what waited again when its node was lost has a lease since then
        self.cluster.expire(self.now_s)
        state = self.cluster.state(self.now_s)
        assert (state.nodes, state.reservations, state.waiting) == ((), 0, 0)
        super().teardown()


AnyOrderOfCalls.TestCase.settings = settings(max_examples=examples(30), stateful_step_count=30)
TestAnyOrderOfCalls = AnyOrderOfCalls.TestCase
