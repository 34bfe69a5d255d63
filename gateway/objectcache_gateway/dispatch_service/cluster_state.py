"""All that the dispatch service knows and decides; time is an argument.

Nodes and reservations are leased, and both are bounded in number, so nothing grows that nobody
renews. Nothing is kept on a disk: after one round of registrations and reports a restarted service
knows the cluster, and what its predecessor had reserved is in what workers report.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from objectcache_dispatch import (
    POLICIES,
    ClusterDispatcher,
    Decision,
    DispatchRequest,
    DispatchSettings,
    LostWork,
    Node,
    NodeLoad,
    Topology,
    WorkerLoad,
)
from objectcache_dispatch.topology import ROLES
from objectcache_gateway.dispatch_service.node_leases import Leases, NodeRegistry
from objectcache_gateway.dispatch_service.recent_reads import RecentReads
from objectcache_runtime.metrics.metric_cells import Counts
from objectcache_runtime.settings import DispatchServiceSettings
from objectcache_schemas.errors import Busy, Conflict, NotFound
from objectcache_schemas.operators.dispatch_api import (
    DispatchState,
    ListedRelay,
    ListedRelays,
    LoadsReport,
    LoadsTaken,
    NodeRegistered,
    NodeRegistration,
    NodeState,
    RelayRegistration,
    RequestReservation,
    ReservedPart,
    RouteRequest,
    SelectRequest,
    Undone,
    WorkerState,
)

NONE = "none"  # of a decision that could not be had


class ClusterState:
    """One cluster's nodes, leases and reservations; not for several threads at once."""

    def __init__(self, settings: DispatchServiceSettings, listed: Sequence[Node] = ()) -> None:
        """`listed` nodes are there without a lease. Raises `InvalidRequest` as `Topology` does."""
        self.settings = settings
        self._registry = NodeRegistry(listed)
        self.dispatcher = ClusterDispatcher(
            Topology(tuple(listed)),
            DispatchSettings(
                beta_tokens=settings.beta_tokens,
                alpha_s=settings.alpha_s,
                slack=settings.slack,
                any_node=settings.any_node,
                lease_s=settings.reservation_lease_s,
                report_age_s_max=settings.report_age_s_max or math.inf,
                waiting_max=settings.reservations_max,
                needs_decode=settings.decode,
            ),
            POLICIES[settings.route_policy],
        )
        self.decisions = Counts[tuple[str, str]]()  # by call, and kind of route
        self.reservations_ended = Counts[tuple[str]]()
        self.nodes_ended = Counts[tuple[str]]()
        self._reads = RecentReads()
        self._note_names()

    # --- nodes ---

    def register(
        self, name: str, registration: NodeRegistration, now_s: float
    ) -> tuple[NodeRegistered, Undone]:
        """A node is there, or still there, or has changed. Raises `InvalidRequest` for what cannot
        be beside the other nodes, `Conflict` for one of the topology file or over the limit.
        """
        self._refuse_listed(name)
        relay = self._registry.relays.get(name)
        undone = self._become(name, self._registry.merged(name, registration, relay), now_s)
        is_new = name not in self._registry.hosts
        lease_s = registration.lease_s or self.settings.node_lease_s
        self._registry.hosts.put(name, registration, lease_s, now_s)
        return NodeRegistered(name=name, is_new=is_new, lease_s=lease_s), undone

    def register_relay(
        self, name: str, registration: RelayRegistration, now_s: float
    ) -> tuple[NodeRegistered, Undone]:
        """The same of a node's relay, whose workers stay as they are registered. Of a node of the
        topology file it is the address alone that counts. Raises `Conflict` while the lease of a
        relay with another URL holds, too: two relays of one name would take each other's place.
        """
        self._refuse_second_relay(name, registration.relay, now_s)
        host = self._registry.hosts.get(name)
        undone = self._become(name, self._registry.merged(name, host, registration), now_s)
        is_new = name not in self._registry.relays
        lease_s = registration.lease_s or self.settings.node_lease_s
        self._registry.relays.put(name, registration, lease_s, now_s)
        return NodeRegistered(name=name, is_new=is_new, lease_s=lease_s), undone

    def remove(self, name: str, now_s: float) -> Undone:
        """A node is gone; what its relay has registered stays. Raises `NotFound`, and `Conflict`
        for one of the topology file.
        """
        self._refuse_listed(name)
        return self._remove(self._registry.hosts, name, f"node {name!r}", now_s)

    def remove_relay(self, name: str, now_s: float) -> Undone:
        """A node's relay is gone; its workers stay. Raises `NotFound`."""
        return self._remove(self._registry.relays, name, f"the relay of node {name!r}", now_s)

    def expire(self, now_s: float) -> list[str]:
        """Ends the leases of nodes, relays and reservations that nobody renewed; says of which
        nodes.
        """
        registry = self._registry
        ended = [*registry.hosts.drop_expired(now_s), *registry.relays.drop_expired(now_s)]
        if ended:
            self._settle(ended, "expired", now_s)
        expired = self.dispatcher.expire(now_s)
        if expired:
            self.reservations_ended.add(("expired",), len(expired))
        return list(dict.fromkeys(ended))

    # --- requests ---

    def select(self, asked: SelectRequest, now_s: float) -> RequestReservation:
        """Both workers and the route, reserved. Raises `Busy` where none can be had now, and as
        `ClusterDispatcher.select` does.
        """
        self._check_room()
        decision = self.dispatcher.select(_request(asked), now_s)
        return self._decided("select", decision, self._why_none(), now_s)

    def route(self, asked: RouteRequest, now_s: float) -> RequestReservation:
        """The route alone, reserved. Raises as `select`."""
        self._check_room()
        decision = self.dispatcher.route(_request(asked), asked.prefill, asked.decode, now_s)
        return self._decided("route", decision, "no node can read for the request", now_s)

    def submit(self, asked: SelectRequest, now_s: float) -> RequestReservation:
        """It waits until groups fetch it. Raises as `ClusterDispatcher.submit`."""
        self._check_room()
        self.dispatcher.submit(_request(asked), now_s)
        return RequestReservation(name=asked.name, lease_s=self.settings.reservation_lease_s)

    def read_done(self, name: str, now_s: float) -> RequestReservation:
        """Raises `NotFound`, as all that follow."""
        self.dispatcher.read_done(name, now_s)
        return self._reservation(name)

    def prefill_done(self, name: str, now_s: float) -> RequestReservation:
        """Its prefill worker is through with it."""
        self.dispatcher.prefill_done(name, now_s)
        return self._reservation(name)

    def renew(self, name: str, now_s: float) -> RequestReservation:
        """Another lease; the answer has the route that holds now."""
        self.dispatcher.renew(name, now_s)
        return self._reservation(name)

    def end(self, name: str, how: str, now_s: float) -> None:
        """It is completed, or released at any stage."""
        self.dispatcher.completed(name, now_s)
        self.reservations_ended.add((how,))

    # --- loads ---

    def take_loads(self, report: LoadsReport, now_s: float) -> LoadsTaken:
        """Takes what is known, renews those nodes' leases, and lets groups fetch."""
        unknown = dict[str, None]()
        nodes, workers = list[NodeLoad](), list[WorkerLoad]()
        for node in report.nodes:
            is_of_another = self._registry.is_of_another(node.node, node.relay)
            if node.node not in self._nodes or is_of_another:
                unknown[node.node] = None
                continue
            if node.is_alive:
                self._registry.renew_node(node.node, now_s)
            nodes.append(
                NodeLoad(
                    node.node,
                    node.read_queue_bytes,
                    node.landing_bytes_used,
                    node.is_alive,
                    max(0.0, now_s - node.age_s),
                    node.rate_bytes_per_s,
                )
            )
        for worker in report.workers:
            if worker.worker not in self._node_of:
                unknown[worker.worker] = None
                continue
            self._registry.hosts.renew(self._node_of[worker.worker], now_s)
            reported_s = max(0.0, now_s - worker.age_s)
            workers.append(WorkerLoad(worker.worker, worker.seq, worker.tok, reported_s))
        undone = self._undone(self.dispatcher.report(now_s, workers, nodes))
        fetched = list[RequestReservation]()
        for group in dict.fromkeys(report.fetch):
            if group not in self._groups:
                unknown[group] = None
                continue
            for decision in self.dispatcher.fetch(group, now_s):
                fetched.append(self._shown(decision))
                if group == self._group_of.get(decision.prefill):  # its decode group does, too
                    self._count("fetch", decision, now_s)
        return LoadsTaken(unknown=tuple(unknown), fetched=tuple(fetched), undone=undone)

    # --- what is shown ---

    def state(self, now_s: float) -> DispatchState:
        """Nodes and workers with their loads."""
        return DispatchState(
            nodes=tuple(self._node_state(node, now_s) for node in self._nodes.values()),
            reservations=len(self.dispatcher),
            waiting=self.dispatcher.waiting_count,
            policy=self.settings.route_policy,
        )

    def relays(self) -> ListedRelays:
        """Relays that can be asked, and where."""
        return ListedRelays(
            relays=tuple(
                ListedRelay(name=name, relay=url)
                for name, url in self._registry.relay_urls()
                if self.dispatcher.is_alive(name)
            )
        )

    def imbalance(self, now_s: float) -> float:
        """Of the bytes that were given to storage NICs lately: the most over the mean."""
        readers = [n.name for n in self._nodes.values() if n.storage_nic_bytes_per_s]
        return self._reads.imbalance(readers, now_s)

    def _node_state(self, node: Node, now_s: float) -> NodeState:
        load = self.dispatcher.node_load(node.name, now_s)
        lease_ends_s = self._registry.lease_ends_s(node.name)
        workers = [(worker, self.dispatcher.worker_load(worker.name)) for worker in node.workers]
        return NodeState(
            name=node.name,
            is_alive=load.is_alive,
            lease_left_s=None if lease_ends_s is None else max(0.0, lease_ends_s - now_s),
            storage_nic_bytes_per_s=node.storage_nic_bytes_per_s,
            compute_nic_bytes_per_s=node.compute_nic_bytes_per_s,
            compute_nics=node.compute_nics,
            memory_bytes_per_s=node.memory_bytes_per_s,
            landing_bytes=node.landing_bytes,
            read_queue_bytes=load.read_queue_bytes,
            landing_bytes_used=load.landing_bytes_used,
            workers=tuple(
                WorkerState(
                    name=worker.name,
                    role=worker.role,
                    group=worker.group,
                    kv_capacity_tokens=worker.kv_capacity_tokens,
                    seq=load.seq,
                    tok=load.tok,
                )
                for worker, load in workers
            ),
            relay=self._registry.relay_url(node.name),
        )

    # --- inside ---

    def _refuse_listed(self, name: str) -> None:
        if name in self._registry.listed:
            raise Conflict(
                f"node {name!r} is of the file dispatch.topology, and changes there",
                code="EntityAlreadyExists",
            )

    def _refuse_second_relay(self, name: str, url: str, now_s: float) -> None:
        leases = self._registry.relays
        if leases.get(name) is None or not self._registry.is_of_another(name, url):
            return
        left_s = (leases.ends_s(name) or now_s) - now_s
        if left_s > 0:
            raise Conflict(
                f"node {name!r} has a relay at {self._registry.relay_url(name)}, whose lease holds "
                f"for {left_s:.1f} s more; give this one another name (relay.node)",
                code="EntityAlreadyExists",
            )

    def _become(self, name: str, node: Node | None, now_s: float) -> Undone:
        """A node is this now. Raises as `register` does, and changes nothing then."""
        known = self._nodes.get(name)
        if known is None and len(self._nodes) >= self.settings.nodes_max:
            raise Conflict(
                f"{len(self._nodes)} nodes are registered, as many as dispatch.nodes_max allows",
                code="LimitExceeded",
            )
        if node is None or node == known:
            return Undone()
        return self._change({**self._nodes, name: node}, now_s)

    def _change(self, nodes: dict[str, Node], now_s: float) -> Undone:
        lost = self.dispatcher.change_topology(Topology(tuple(nodes.values())), now_s)
        self._note_names()
        return self._undone(lost)

    def _remove(
        self,
        leases: Leases[NodeRegistration] | Leases[RelayRegistration],
        name: str,
        what: str,
        now_s: float,
    ) -> Undone:
        if name not in leases:
            raise NotFound(f"{what} is not registered", code="NoSuchEntity")
        leases.drop(name)
        return self._settle([name], "removed", now_s)

    def _settle(self, names: Sequence[str], how: str, now_s: float) -> Undone:
        """Of these nodes something was dropped: they change, or go."""
        nodes = dict(self._nodes)
        for name in names:
            left = self._registry.node(name)
            if left is not None:
                nodes[name] = left
            elif nodes.pop(name, None) is not None:
                self.nodes_ended.add((how,))
        return self._change(nodes, now_s)

    def _note_names(self) -> None:
        topology = self.dispatcher.topology
        self._nodes = {node.name: node for node in topology.nodes}
        placed = list(topology.placed_workers())
        self._node_of = {worker.name: node.name for node, worker in placed}
        self._group_of = {worker.name: worker.group for _, worker in placed}
        self._groups = frozenset(self._group_of.values())

    def _undone(self, lost: LostWork) -> Undone:
        ended = tuple(each.name for each in lost.requests if each.name not in self.dispatcher)
        if ended:  # others were submitted, and wait again
            self.reservations_ended.add(("lost",), len(ended))
        return Undone(
            lost=ended,
            rerouted=tuple(self._shown(decision) for decision in lost.rerouted),
        )

    def _check_room(self) -> None:
        if len(self.dispatcher) >= self.settings.reservations_max:
            raise self._busy(
                f"{len(self.dispatcher)} reservations are open, as many as "
                "dispatch.reservations_max allows"
            )

    def _busy(self, why: str) -> Busy:
        return Busy(why, retry_after_s=self.settings.retry_after_s)

    def _why_none(self) -> str:
        for role in ROLES if self.settings.decode else ROLES[:1]:
            if not any(node.has(role) for node in self._nodes.values()):
                return f"no {role} worker is registered"
        return (
            "every prefill worker has more than dispatch.beta_tokens, or no decode worker has "
            "room, or no node can read for the request"
        )

    def _decided(
        self, call: str, decision: Decision | None, why_none: str, now_s: float
    ) -> RequestReservation:
        if decision is None:
            self.decisions.add((call, NONE))
            raise self._busy(why_none)
        self._count(call, decision, now_s)
        return self._shown(decision)

    def _count(self, call: str, decision: Decision, now_s: float) -> None:
        self.decisions.add((call, decision.route.kind))
        for part in decision.route.parts:
            self._reads.add(part.node, part.read_bytes, now_s)

    def _reservation(self, name: str) -> RequestReservation:
        decision = self.dispatcher.decision(name)
        if decision is None:
            return RequestReservation(name=name, lease_s=self.settings.reservation_lease_s)
        return self._shown(decision)

    def _shown(self, decision: Decision) -> RequestReservation:
        route, decode = decision.route, decision.decode
        return RequestReservation(
            name=decision.request.name,
            lease_s=self.settings.reservation_lease_s,
            prefill=decision.prefill,
            prefill_node=self._node_of.get(decision.prefill),
            decode=decode,
            decode_node=None if decode is None else self._node_of.get(decode),
            route=str(route),
            parts=tuple(
                ReservedPart(
                    node=part.node,
                    relay=part.relay,
                    read_bytes=part.read_bytes,
                    chunk_count=part.chunk_count,
                    relay_url=self._relay_url(part.relay),
                )
                for part in route.parts
            ),
            predicted_lateness_s=route.predicted_lateness_s,
        )

    def _relay_url(self, node: str | None) -> str | None:
        return None if node is None else self._registry.relay_url(node)

    def __repr__(self) -> str:
        return f"<ClusterState {len(self._nodes)} nodes, {self.dispatcher!r}>"


def _request(asked: SelectRequest) -> DispatchRequest:
    return DispatchRequest(
        asked.name,
        asked.cached_tokens,
        asked.new_tokens,
        asked.layer_bytes * asked.num_layers,
        asked.layer_bytes,
        asked.num_layers,
        asked.compute_window_s,
        asked.tenant,
        asked.chunk_bytes,
    )
