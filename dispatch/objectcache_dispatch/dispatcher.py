"""The whole scheduler as a state machine: events in, decisions out, time an argument.

A router that lets workers fetch uses `submit` and `fetch` (the paper's form). One that pushes
requests uses `select`, or `route` where it picks workers by itself. Both then say `read_done`,
`prefill_done` and `completed`; any of them may be left out, since a later one implies those before
it, and a lease ends what nobody renews.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Container, Iterable
from dataclasses import dataclass

import numpy as np

from objectcache_dispatch.decode_choice import choose_decode, choose_group, high_token_limit
from objectcache_dispatch.loads import NodeLoad, WorkerLoad
from objectcache_dispatch.node_accounts import NodeAccounts
from objectcache_dispatch.prefill_choice import Floats, choose_prefill
from objectcache_dispatch.requests import DispatchRequest
from objectcache_dispatch.route_choice import (
    RoutePolicy,
    least_lateness,
    route_of,
)
from objectcache_dispatch.routes import ReadRoute, RoutePart
from objectcache_dispatch.settings import DispatchSettings
from objectcache_dispatch.topology import Topology
from objectcache_dispatch.worker_accounts import WorkerAccounts
from objectcache_schemas.errors import Busy, Conflict, InvalidRequest, NotFound

ALL = slice(None)


@dataclass(frozen=True, slots=True)
class Decision:
    """Who serves a request, and how its prefix comes. `decode` is None in a cluster without
    decode workers, and where a router named none.
    """

    request: DispatchRequest
    prefill: str
    decode: str | None
    route: ReadRoute


@dataclass(frozen=True, slots=True)
class LostWork:
    """What a node's loss undid: requests whose worker is gone, and decisions with another route.

    Requests that were submitted wait again by themselves, and their groups fetch the decisions;
    those that were selected are for the router to select again, and to tell the worker.
    """

    requests: tuple[DispatchRequest, ...] = ()
    rerouted: tuple[Decision, ...] = ()


class _Tracked:
    """A request that is waiting or runs; workers by their index."""

    __slots__ = (
        "decision",
        "decode",
        "expires_s",
        "is_submitted",
        "number",
        "outboxes",
        "prefill",
        "prefills",
        "promises",
        "reads",
        "request",
    )

    def __init__(self, request: DispatchRequest, number: int, is_submitted: bool) -> None:
        self.request, self.number, self.is_submitted = request, number, is_submitted
        self.prefill: int | None = None
        self.decode: int | None = None
        self.decision: Decision | None = None
        self.reads: tuple[RoutePart, ...] = ()  # not read yet
        self.outboxes: tuple[str, ...] = ()  # groups that fetch the decision
        self.prefills = False  # counts on its prefill worker
        self.promises = False  # counts as promised to that worker's node
        self.expires_s = math.inf


Waiting = OrderedDict[str, _Tracked]
_NOTHING: Waiting = OrderedDict()  # stays so


class ClusterDispatcher:
    """Assigns requests to workers and routes of a cluster; not for several threads at once.

    `now_s` is any clock that does not go back, and the one of reports' `reported_s`. Its nodes may
    come, go and change (`change_topology`).
    """

    def __init__(
        self,
        topology: Topology,
        settings: DispatchSettings,
        policy: RoutePolicy = least_lateness,
    ) -> None:
        self.topology, self.settings, self._policy = topology, settings, policy
        self._prefill = WorkerAccounts(topology, "prefill")
        self._decode = WorkerAccounts(topology, "decode")
        self._nodes = NodeAccounts(topology)
        self._lay_out_groups()
        self._for_prefill: Waiting = OrderedDict()
        self._for_decode: Waiting = OrderedDict()  # the global queue
        self._unrouted: Waiting = OrderedDict()  # both workers are known
        self._tracked: Waiting = OrderedDict()  # the next to expire first
        self._outboxes: dict[str, Waiting] = defaultdict(OrderedDict)
        self._numbers = 0

    def __repr__(self) -> str:
        return (
            f"<ClusterDispatcher {len(self._tracked)} requests, {len(self._for_prefill)} wait for "
            f"a prefill worker>"
        )

    def __len__(self) -> int:
        """Requests that wait or run."""
        return len(self._tracked)

    def __contains__(self, name: str) -> bool:
        return name in self._tracked

    @property
    def waiting_count(self) -> int:
        """Requests that were submitted and have no prefill worker yet."""
        return len(self._for_prefill)

    def submit(self, request: DispatchRequest, now_s: float) -> None:
        """Puts a request into the queues, from which groups fetch.

        Raises `InvalidRequest` for one that no decode worker could hold, `Conflict` for a name that
        is tracked already, `Busy` where `waiting_max` requests wait.
        """
        if len(self._for_prefill) >= self.settings.waiting_max:
            raise Busy(f"{len(self._for_prefill)} requests wait, as many as waiting_max allows")
        self._wait(self._track(request, now_s, is_submitted=True))

    def fetch(
        self,
        group: str,
        now_s: float,
        worker_loads: Iterable[WorkerLoad] = (),
        node_loads: Iterable[NodeLoad] = (),
    ) -> list[Decision]:
        """A group reports its loads and takes what it can (section 6.1).

        Returns the decisions of this group since it last fetched: those whose workers of both roles
        are known, so one may come a fetch after it was assigned. Raises `InvalidRequest` for a
        group, worker or node that is not in the topology.
        """
        self.report(now_s, worker_loads, node_loads)
        if group in self._prefill.slices:
            self._fetch_prefill(self._prefill.slices[group], now_s)
        elif group in self._decode.slices:
            self._fetch_decode(self._decode.places[group], now_s)
        else:
            raise InvalidRequest(f"group {group!r} is not in the topology")
        self._route_complete(now_s)
        fetched = self._outboxes.pop(group, _NOTHING)
        return [each.decision for each in fetched.values() if each.decision is not None]

    def fetch_all(self, now_s: float, first: int = 0) -> list[Decision]:
        """Every group fetches: those for decode, then those for prefill from number `first` on, by
        their places in `topology.groups`. Returns what prefill groups would have got, in that
        order. Groups for which nothing waits take no time, as hundreds of calls would.
        """
        self._drain_global()
        for waited_for in self._group_waiting_tokens.nonzero()[0].tolist():
            self._assign_decode(waited_for, now_s)
            self._route_complete(now_s)
        groups = self._prefill.groups
        for place in range(len(groups)):
            if not self._for_prefill:
                break
            group = groups[(first + place) % len(groups)]
            self._fetch_prefill(self._prefill.slices[group], now_s)
            self._route_complete(now_s)
        outboxes, self._outboxes = self._outboxes, defaultdict(OrderedDict)
        fetched = list[tuple[int, Waiting]]()  # what decode groups get is the same again
        for group, outbox in outboxes.items():
            if group in self._prefill.places:
                place = (self._prefill.places[group] - first) % len(groups)
                fetched.append((place, outbox))
        fetched.sort(key=lambda each: each[0])
        return [
            tracked.decision
            for _, outbox in fetched
            for tracked in outbox.values()
            if tracked.decision is not None
        ]

    def select(self, request: DispatchRequest, now_s: float) -> Decision | None:
        """Chooses both workers and the route at once, and reserves them.

        None, with nothing reserved, where every prefill worker is overloaded, or no decode worker
        has room, or no node can read for the request: ask again later. Raises as `submit` does.
        """
        self._check_new(request)
        prefill = choose_prefill(
            self._prefill.tok,
            self._queue_s(ALL, now_s),
            self.settings.beta_tokens,
            self.settings.alpha_s,
        )
        decode = self._decode_worker(request.tokens)
        if prefill is None or (decode is None and self._needs_decode):
            return None
        return self._reserve(request, prefill, decode, now_s)

    def route(
        self, request: DispatchRequest, prefill: str, decode: str | None, now_s: float
    ) -> Decision | None:
        """The route alone, reserved, for a router that has picked the workers; None where no node
        can read for it. Raises `InvalidRequest` for workers that are not there, and as `submit`.
        """
        self._check_new(request)
        _check_role(prefill, "prefill", self._prefill.index, self._decode.index)
        if decode is not None:
            _check_role(decode, "decode", self._decode.index, self._prefill.index)
        decode_index = None if decode is None else self._decode.index[decode]
        return self._reserve(request, self._prefill.index[prefill], decode_index, now_s)

    def report(
        self,
        now_s: float,
        worker_loads: Iterable[WorkerLoad] = (),
        node_loads: Iterable[NodeLoad] = (),
    ) -> LostWork:
        """Takes reports of any workers and nodes; one that is not alive is lost, one that is alive
        again takes part. Raises `InvalidRequest` for a name that is not in the topology.
        """
        lost = LostWork()
        for load in node_loads:
            node = self._node(load.node)
            if load.is_alive:
                self._revive(node)
                self._nodes.report(load, now_s)
            elif self._nodes.is_alive[node]:
                more = self.lost(load.node, now_s)
                lost = LostWork(lost.requests + more.requests, lost.rerouted + more.rerouted)
        for each in worker_loads:
            if each.worker in self._prefill.index:
                self._prefill.report(each, now_s)
            elif each.worker in self._decode.index:
                self._decode.report(each, now_s)
            else:
                raise InvalidRequest(f"worker {each.worker!r} is not in the topology")
        return lost

    def decision(self, name: str) -> Decision | None:
        """What holds for a request now; None while it waits. Raises `NotFound`, as `read_done`."""
        return self._known(name).decision

    def read_done(self, name: str, now_s: float) -> None:
        """The whole prefix of a request is with its prefill worker. Raises `NotFound` for a request
        that is not tracked, because it is completed or expired.
        """
        self._end_read(self._known(name), now_s)
        self._route_complete(now_s)

    def prefill_done(self, name: str, now_s: float) -> None:
        """Its prefill worker is through with it. Raises `NotFound`, as `read_done`."""
        self._end_prefill(self._known(name), now_s)
        self._route_complete(now_s)

    def completed(self, name: str, now_s: float) -> None:
        """It is finished, or given up at any stage. Raises `NotFound`, as `read_done`."""
        self._give_up(self._known(name), now_s)
        self._route_complete(now_s)

    def renew(self, name: str, now_s: float) -> None:
        """It still runs: another `lease_s`. Raises `NotFound`, as `read_done`."""
        self._known(name).expires_s = now_s + self.settings.lease_s
        self._tracked.move_to_end(name)

    def expire(self, now_s: float) -> list[DispatchRequest]:
        """Gives up what nobody renewed for `lease_s`, and says what that was."""
        expired = list[DispatchRequest]()
        while self._tracked:
            tracked = next(iter(self._tracked.values()))
            if tracked.expires_s > now_s:
                break
            self._give_up(tracked, now_s)
            expired.append(tracked.request)
        if expired:
            self._route_complete(now_s)
        return expired

    def lost(self, node: str, now_s: float) -> LostWork:
        """A node is dead, with its workers and its relay, until it reports that it is alive.

        Raises `InvalidRequest` for a node that is not in the topology.
        """
        index = self._node(node)
        workers = {worker.name for worker in self.topology.nodes[index].workers}
        return self._lose({node}, workers, now_s, lambda: self._bury(index))

    def change_topology(self, topology: Topology, now_s: float) -> LostWork:
        """Goes on with another topology; says what its change undid, as `lost` does.

        Nodes and workers that stay keep what is known of them. What is gone is lost; so is a
        worker that moved to another node or group. Others' figures may differ; what a node relays
        that has no landing memory any more gets another route. A node that comes is alive and has
        nothing.
        """
        staying = {node.name for node in topology.nodes}
        without_relay = {node.name for node in topology.nodes if not node.landing_bytes}
        placed = {(node.name, w.name, w.role, w.group) for node, w in topology.placed_workers()}
        gone = {node.name for node in self.topology.nodes} - staying
        workers = {
            w.name
            for node, w in self.topology.placed_workers()
            if (node.name, w.name, w.role, w.group) not in placed
        }
        return self._lose(gone, workers, now_s, lambda: self._adopt(topology, now_s), without_relay)

    def _lose(
        self,
        nodes: set[str],
        workers: set[str],
        now_s: float,
        change: Callable[[], None],
        without_relay: Collection[str] = (),
    ) -> LostWork:
        """Takes back what those have, makes the change, and decides anew."""
        without_worker, without_route = list[_Tracked](), list[_Tracked]()
        for each in self._tracked.values():
            if self._runs_on(each, workers):
                without_worker.append(each)
            elif any(part.node in nodes or part.relay in without_relay for part in each.reads):
                without_route.append(each)
        without_worker.sort(key=lambda each: each.number)
        without_route.sort(key=lambda each: each.number)
        for each in without_worker:
            self._give_up(each, now_s)
        for each in without_route:
            self._end_read(each, now_s)
        change()
        rerouted = list[Decision]()
        for each in without_route:
            decision = self._decide(each, now_s)
            if decision is not None:
                rerouted.append(decision)
            else:
                self._give_up(each, now_s)
                without_worker.append(each)
        for each in without_worker:
            if each.is_submitted:
                self._wait(self._track(each.request, now_s, is_submitted=True, number=each.number))
        self._sort_waiting()
        self._route_complete(now_s)
        return LostWork(tuple(each.request for each in without_worker), tuple(rerouted))

    def worker_load(self, worker: str) -> WorkerLoad:
        """As it is counted now. Raises `InvalidRequest` for one that is not in the topology."""
        for accounts in (self._prefill, self._decode):
            if worker in accounts.index:
                place = accounts.index[worker]
                if not accounts.is_alive[place]:
                    return WorkerLoad(worker)
                return WorkerLoad(worker, int(accounts.seq[place]), int(accounts.tok[place]))
        raise InvalidRequest(f"worker {worker!r} is not in the topology")

    def node_load(self, node: str, now_s: float) -> NodeLoad:
        """As it is counted now. Raises `InvalidRequest` for one that is not in the topology."""
        index = self._node(node)
        return NodeLoad(
            node,
            round(self._nodes.queue_bytes(index, now_s)),
            int(self._nodes.landing_used[index]),
            bool(self._nodes.is_alive[index]),
        )

    def is_alive(self, node: str) -> bool:
        """Whether a node takes part. Raises as `node_load`."""
        return bool(self._nodes.is_alive[self._node(node)])

    # --- waiting ---

    def _check_new(self, request: DispatchRequest) -> None:
        if request.name in self._tracked:
            raise Conflict(
                f"request {request.name!r} is tracked already; names must differ",
                code="EntityAlreadyExists",
            )
        if self._decode.workers and request.tokens > self._tokens_max:
            raise InvalidRequest(
                f"request {request.name!r} has {request.tokens} tokens; the largest decode worker "
                f"holds {self._tokens_max}"
            )

    def _track(
        self,
        request: DispatchRequest,
        now_s: float,
        *,
        is_submitted: bool,
        number: int | None = None,
    ) -> _Tracked:
        if number is None:  # one that comes back was accepted before
            self._check_new(request)
            number = self._numbers = self._numbers + 1
        tracked = _Tracked(request, number, is_submitted)
        tracked.expires_s = now_s + self.settings.lease_s
        self._tracked[request.name] = tracked
        return tracked

    def _wait(self, tracked: _Tracked) -> None:
        self._for_prefill[tracked.request.name] = tracked
        if self._needs_decode:
            self._for_decode[tracked.request.name] = tracked

    def _sort_waiting(self) -> None:
        """After a loss: those that come back are older than those that wait."""
        for queue in (self._for_prefill, self._for_decode):
            entries = sorted(queue.items(), key=lambda entry: entry[1].number)
            queue.clear()
            queue.update(entries)

    def _known(self, name: str) -> _Tracked:
        tracked = self._tracked.get(name)
        if tracked is None:
            raise NotFound(
                f"request {name!r} is not tracked: it was completed, or expired",
                code="NoSuchEntity",
            )
        return tracked

    @property
    def _needs_decode(self) -> bool:
        return self.settings.needs_decode or bool(self._decode.workers)

    # --- choosing workers ---

    def _queue_s(self, workers: slice, now_s: float) -> Floats:
        """float64[workers]: of each one's node."""
        of_workers: Floats = self._nodes.queue_s(now_s)[self._prefill.node_index[workers]]
        return of_workers

    def _fetch_prefill(self, workers: slice, now_s: float) -> None:
        queue, accounts, settings = self._for_prefill, self._prefill, self.settings
        tok = accounts.tok[workers]
        while queue:
            name, tracked = next(iter(queue.items()))
            queue_s = self._queue_s(workers, now_s)
            chosen = choose_prefill(tok, queue_s, settings.beta_tokens, settings.alpha_s)
            if chosen is None:
                break
            del queue[name]
            tracked.prefill = int(workers.start) + chosen
            tracked.prefills = tracked.promises = True
            accounts.give(tracked.prefill, tracked.request.tokens, now_s)
            self._nodes.promise(self._prefill_node(tracked), tracked.request.read_bytes)
            self._note_complete(tracked)

    def _fetch_decode(self, group: int, now_s: float) -> None:
        self._drain_global()
        self._assign_decode(group, now_s)

    def _assign_decode(self, group: int, now_s: float) -> None:
        """Phase 2 for what waits for a group."""
        accounts = self._decode
        workers = accounts.slices[accounts.groups[group]]
        queue = self._private[group]
        if not queue or not accounts.is_alive[workers].any():
            return
        limit = self._limit(workers, (each.request.tokens for each in queue.values()))
        tok, seq, capacity = (
            accounts.tok[workers],
            accounts.seq[workers],
            accounts.capacity[workers],
        )
        while queue:
            name, tracked = next(iter(queue.items()))
            chosen = choose_decode(tracked.request.tokens, tok, seq, capacity - tok, limit)
            if chosen is None:
                break
            del queue[name]
            self._group_waiting_tokens[group] -= tracked.request.tokens
            tracked.decode = int(workers.start) + chosen
            accounts.give(tracked.decode, tracked.request.tokens, now_s)
            self._note_complete(tracked)

    def _drain_global(self) -> None:
        """Phase 1: to the group with the least total, what waits for it included."""
        queue = self._for_decode
        if not queue:
            return
        totals = self._group_totals()
        while queue:
            name, tracked = next(iter(queue.items()))
            group = choose_group(totals, self._group_largest, tracked.request.tokens)
            if group is None:
                break  # those that could are dead
            del queue[name]
            totals[group] += tracked.request.tokens
            self._group_waiting_tokens[group] += tracked.request.tokens
            self._private[group][name] = tracked

    def _limit(self, workers: slice, lengths: Iterable[int]) -> float:
        """Z of a group's workers that are alive."""
        accounts = self._decode
        tok, capacity = accounts.tok[workers], accounts.capacity[workers]
        if not accounts.all_alive:
            is_alive = accounts.is_alive[workers]
            tok, capacity = tok[is_alive], capacity[is_alive]
        return high_token_limit(lengths, tok, capacity - tok, self.settings.slack)

    def _group_totals(self) -> Floats:
        """float64[groups]: the tokens of those that are alive, and what waits for the group."""
        tok = self._decode.tok
        if not self._decode.all_alive:
            tok = np.where(self._decode.is_alive, tok, 0.0)
        totals: Floats = np.add.reduceat(tok, self._group_starts) + self._group_waiting_tokens
        return totals

    def _largest_alive(self) -> Floats:
        """float64[groups]: the capacity of the largest worker that is alive; 0 where none is."""
        capacity = np.where(self._decode.is_alive, self._decode.capacity, 0.0)
        if not len(self._group_starts):
            return capacity
        largest: Floats = np.maximum.reduceat(capacity, self._group_starts)
        return largest

    def _decode_worker(self, tokens: int) -> int | None:
        """Both phases for one request: of the group with the least total that has room for it."""
        accounts = self._decode
        if not accounts.workers:
            return None
        totals = self._group_totals()
        while True:
            group = choose_group(totals, self._group_largest, tokens)
            if group is None:
                return None
            workers = accounts.slices[accounts.groups[group]]
            tok, seq = accounts.tok[workers], accounts.seq[workers]
            free = accounts.capacity[workers] - tok
            limit = self._limit(workers, [tokens])
            chosen = choose_decode(tokens, tok, seq, free, limit)
            if chosen is not None:
                return int(workers.start) + chosen
            totals[group] = np.inf

    # --- routes ---

    def _note_complete(self, tracked: _Tracked) -> None:
        if tracked.prefill is not None and (tracked.decode is not None or not self._needs_decode):
            self._unrouted[tracked.request.name] = tracked

    def _route_complete(self, now_s: float) -> None:
        """Routes for all whose workers are known, in the order of arrival."""
        if not self._unrouted:
            return
        for tracked in sorted(self._unrouted.values(), key=lambda each: each.number):
            if self._decide(tracked, now_s) is not None:
                del self._unrouted[tracked.request.name]
                self._keep_promise(tracked)

    def _reserve(
        self, request: DispatchRequest, prefill: int, decode: int | None, now_s: float
    ) -> Decision | None:
        tracked = self._track(request, now_s, is_submitted=False)
        tracked.prefill, tracked.decode = prefill, decode
        decision = self._decide(tracked, now_s)
        if decision is None:
            del self._tracked[request.name]
            return None
        tracked.prefills = True
        self._prefill.give(prefill, request.tokens, now_s)
        if decode is not None:
            self._decode.give(decode, request.tokens, now_s)
        return decision

    def _decide(self, tracked: _Tracked, now_s: float) -> Decision | None:
        """Takes a route and counts it; None where no node can read for the request."""
        assert tracked.prefill is not None
        request, prefill = tracked.request, self._prefill.workers[tracked.prefill]
        decode = None if tracked.decode is None else self._decode.workers[tracked.decode]
        route = self._choose_route(tracked, now_s)
        if route is None:
            return None
        for part in route.parts:
            node = self._nodes.index[part.node]
            self._nodes.read(node, part.read_bytes, now_s)
            if part.relay is not None:
                self._nodes.land(node, part.read_bytes, now_s)
        tracked.reads = route.parts
        name = None if decode is None else decode.name
        tracked.decision = Decision(request, prefill.name, name, route)
        if tracked.is_submitted:
            groups = (prefill.group,) if decode is None else (prefill.group, decode.group)
            tracked.outboxes = groups
            for group in groups:
                self._outboxes[group][request.name] = tracked
        return tracked.decision

    def _choose_route(self, tracked: _Tracked, now_s: float) -> ReadRoute | None:
        request, nodes = tracked.request, self._nodes
        direct = self._prefill_node(tracked)
        if not request.read_bytes:
            return ReadRoute((RoutePart(nodes.names[direct], None, 0),))
        decode = None if tracked.decode is None else int(self._decode.node_index[tracked.decode])
        candidates = nodes.candidates(
            direct, decode, now_s, self.settings.report_age_s_max, any_node=self.settings.any_node
        )
        return route_of(request, candidates, self._policy)

    # --- ends ---

    def _prefill_node(self, tracked: _Tracked) -> int:
        assert tracked.prefill is not None
        return int(self._prefill.node_index[tracked.prefill])

    def _keep_promise(self, tracked: _Tracked) -> None:
        if tracked.promises:
            tracked.promises = False
            self._nodes.keep_promise(self._prefill_node(tracked), tracked.request.read_bytes)

    def _end_read(self, tracked: _Tracked, now_s: float) -> None:
        for part in tracked.reads:
            node = self._nodes.index[part.node]
            self._nodes.has_read(node, part.read_bytes, now_s)
            if part.relay is not None:
                self._nodes.land(node, -part.read_bytes, now_s)
        tracked.reads = ()

    def _end_prefill(self, tracked: _Tracked, now_s: float) -> None:
        self._end_read(tracked, now_s)
        if tracked.prefills:
            assert tracked.prefill is not None
            tracked.prefills = False
            self._prefill.take_back(tracked.prefill, tracked.request.tokens, now_s)

    def _give_up(self, tracked: _Tracked, now_s: float) -> None:
        """Takes back all that it has, wherever it waits, and forgets it."""
        del self._tracked[tracked.request.name]
        self._keep_promise(tracked)
        self._end_prefill(tracked, now_s)
        name, tokens = tracked.request.name, tracked.request.tokens
        if tracked.decode is not None:
            self._decode.take_back(tracked.decode, tokens, now_s)
        else:
            for group, queue in enumerate(self._private):
                if queue.pop(name, None) is not None:
                    self._group_waiting_tokens[group] -= tokens
        for waiting in (self._for_prefill, self._for_decode, self._unrouted):
            waiting.pop(name, None)
        for fetcher in tracked.outboxes:
            outbox = self._outboxes.get(fetcher)
            if outbox is not None:
                outbox.pop(name, None)
                if not outbox:
                    del self._outboxes[fetcher]

    # --- nodes ---

    def _node(self, name: str) -> int:
        if name not in self._nodes.index:
            raise InvalidRequest(f"node {name!r} is not in the topology")
        return self._nodes.index[name]

    def _runs_on(self, tracked: _Tracked, workers: set[str]) -> bool:
        if tracked.decode is not None and self._decode.workers[tracked.decode].name in workers:
            return True
        if tracked.prefill is None or not (tracked.prefills or tracked.promises):
            return False
        return self._prefill.workers[tracked.prefill].name in workers

    def _lay_out_groups(self) -> None:
        """What is kept for each decode group, with empty queues."""
        slices = [self._decode.slices[group] for group in self._decode.groups]
        self._group_starts = np.array([each.start for each in slices], np.int64)
        self._tokens_max = int(self._decode.capacity.max(initial=0))
        self._group_largest = self._largest_alive()
        self._group_waiting_tokens = np.zeros(len(slices))
        self._private: list[Waiting] = [OrderedDict() for _ in slices]

    def _adopt(self, topology: Topology, now_s: float) -> None:
        """Another topology, once what is gone has nothing any more."""
        prefill, decode = WorkerAccounts(topology, "prefill"), WorkerAccounts(topology, "decode")
        nodes = NodeAccounts(topology)
        for each in self._tracked.values():
            if each.prefill is not None:  # one that is done with may be gone
                each.prefill = prefill.index.get(self._prefill.workers[each.prefill].name)
            if each.decode is not None:
                each.decode = decode.index.get(self._decode.workers[each.decode].name)
        prefill.take_over(self._prefill)
        decode.take_over(self._decode)
        nodes.take_over(self._nodes, now_s)
        self.topology, self._prefill, self._decode, self._nodes = topology, prefill, decode, nodes
        for node in np.flatnonzero(~nodes.is_alive):
            self._bury_workers(int(node))
        self._lay_out_groups()
        # Phase 1 anew, of all that have no decode worker.
        self._for_decode.clear()
        for name, each in self._tracked.items():
            if each.is_submitted and each.decode is None and each.decision is None:
                if self._needs_decode and name not in self._unrouted:
                    self._for_decode[name] = each
                else:
                    self._note_complete(each)
        self._sort_waiting()

    def _bury(self, node: int) -> None:
        self._nodes.bury(node)
        self._bury_workers(node)
        self._group_largest = self._largest_alive()
        # Phase 1 anew: a group may have lost those that could hold what waits for it.
        for queue in self._private:
            self._for_decode.update(queue)
            queue.clear()
        self._group_waiting_tokens[:] = 0

    def _bury_workers(self, node: int) -> None:
        for accounts in (self._prefill, self._decode):
            for worker in np.flatnonzero(accounts.node_index == node):
                accounts.bury(int(worker))

    def _revive(self, node: int) -> None:
        if self._nodes.is_alive[node]:
            return
        self._nodes.revive(node)
        for accounts in (self._prefill, self._decode):
            for worker in np.flatnonzero(accounts.node_index == node):
                accounts.revive(int(worker))
        self._group_largest = self._largest_alive()


def _check_role(name: str, role: str, known: Container[str], others: Container[str]) -> None:
    """Raise `InvalidRequest` unless the worker is one of `known`, which have the role."""
    if name in known:
        return
    if name in others:
        other = "decode" if role == "prefill" else "prefill"
        raise InvalidRequest(
            f"worker {name!r} is a {other} worker in the topology, no {role} worker"
        )
    raise InvalidRequest(f"{role} worker {name!r} is not in the topology")
