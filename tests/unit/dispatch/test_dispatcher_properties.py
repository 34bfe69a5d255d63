"""What holds after any order of events, late, repeated and of requests that are gone included."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from objectcache_dispatch import (
    ClusterDispatcher,
    Decision,
    DispatchSettings,
    LostWork,
    NodeLoad,
    Topology,
    WorkerLoad,
)
from objectcache_schemas.errors import NotFound
from tests.unit.dispatch.clusters import node, request
from tests.unit.examples import examples

BETA, CAPACITY, LANDING = 400, 600, 3000
NODES = (
    *(node(f"p{n}", "prefill", workers=2, group=f"P{n}") for n in range(2)),
    *(
        node(f"d{n}", "decode", group=f"D{n // 2}", rate=700.0 * (n + 1), landing_bytes=LANDING,
             kv_capacity_tokens=CAPACITY)
        for n in range(3)
    ),
    node("cpu", landing_bytes=LANDING),
)  # fmt: skip
TOPOLOGY = Topology(NODES)
WORKERS = {worker.name: worker for _, worker in TOPOLOGY.placed_workers()}
NODE_OF = {worker.name: n.name for n, worker in TOPOLOGY.placed_workers()}
GROUPS = (*TOPOLOGY.groups("prefill"), *TOPOLOGY.groups("decode"))
NAMES = st.integers(0, 30).map(lambda number: f"r{number}")
NODE_NAMES = st.sampled_from([n.name for n in NODES])


class AnyOrderOfEvents(RuleBasedStateMachine):
    """Beside the dispatcher stands what was decided, with no account of reports or time."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.count = 0
        self.dispatcher = ClusterDispatcher(
            TOPOLOGY, DispatchSettings(beta_tokens=BETA, lease_s=20.0, needs_decode=True)
        )
        self.running: dict[str, Decision] = {}
        self.read = set[str]()  # whose prefix is with the prefill worker
        self.fetched = Counter[tuple[str, str]]()
        self.order: list[str] = []  # as submitted
        self.dead = set[str]()
        self.absent = set[str]()
        self.losses = 0

    def took(self, decision: Decision) -> None:
        """A decision that is new must be possible by what ran before it."""
        name = decision.request.name
        gone = self.dead | self.absent
        assert NODE_OF[decision.prefill] not in gone
        assert decision.decode is not None
        assert NODE_OF[decision.decode] not in gone
        assert not {part.node for part in decision.route.parts} & gone
        assert sum(part.read_bytes for part in decision.route.parts) == decision.request.read_bytes
        self.running[name] = decision
        self.read.discard(name)

    @rule(tokens=st.integers(2, 300), split=st.booleans())
    def select(self, tokens: int, split: bool) -> None:
        self.count += 1
        asked = request(f"s{self.count}", tokens - 1, 1, chunk_bytes=100 * split)
        before = {name: self.dispatcher.worker_load(name).tok for name in self.present_workers()}
        decision = self.dispatcher.select(asked, self.now_s)
        if decision is None:
            return
        assert before[decision.prefill] <= BETA
        assert decision.decode is not None
        assert before[decision.decode] + tokens <= CAPACITY
        self.took(decision)

    @rule(tokens=st.integers(2, 300))
    def submit(self, tokens: int) -> None:
        name = f"r{len(self.order)}"
        self.order.append(name)
        self.dispatcher.submit(request(name, tokens - 1, 1), self.now_s)

    @rule(group=st.sampled_from(GROUPS))
    def fetch(self, group: str) -> None:
        if group not in {WORKERS[name].group for name in self.present_workers()}:
            return
        for decision in self.dispatcher.fetch(group, self.now_s):
            assert decision.decode is not None
            assert group in (WORKERS[decision.prefill].group, WORKERS[decision.decode].group)
            if self.running.get(decision.request.name) != decision:
                self.took(decision)
            if not self.losses:
                self.fetched[decision.request.name, group] += 1
                assert self.fetched[decision.request.name, group] == 1  # once

    @rule(name=NAMES, event=st.sampled_from(["read_done", "prefill_done", "completed", "renew"]))
    def say(self, name: str, event: str) -> None:
        try:
            getattr(self.dispatcher, event)(name, self.now_s)
        except NotFound:
            assert name not in self.running
        else:
            if event == "completed":
                self.running.pop(name, None)
            elif event != "renew" and name in self.running:
                self.read.add(name)

    @rule(data=st.data(), event=st.sampled_from(["read_done", "prefill_done", "completed"]))
    def end_one_that_runs(self, data: st.DataObject, event: str) -> None:
        if self.running:
            self.say(data.draw(st.sampled_from(sorted(self.running))), event)

    @rule(passed_s=st.floats(0.0, 8.0))
    def wait(self, passed_s: float) -> None:
        self.now_s += passed_s

    @rule()
    def expire(self) -> None:
        for expired in self.dispatcher.expire(self.now_s):
            self.running.pop(expired.name, None)

    @rule(worker=st.sampled_from(sorted(WORKERS)), tok=st.integers(0, 700), age=st.floats(0, 12))
    def report_worker(self, worker: str, tok: int, age: float) -> None:
        if NODE_OF[worker] in self.absent:
            return
        at_s = max(0.0, self.now_s - age)
        self.dispatcher.report(self.now_s, [WorkerLoad(worker, tok // 50, tok, at_s)])

    @rule(name=NODE_NAMES, queue=st.integers(0, 9000), used=st.integers(0, LANDING))
    def report_node(self, name: str, queue: int, used: int) -> None:
        if name in self.absent:
            return
        load = NodeLoad(name, queue, used, True, self.now_s, 100.0 + queue)
        self.dispatcher.report(self.now_s, (), [load])
        self.dead.discard(name)

    @rule(name=NODE_NAMES)
    def lose(self, name: str) -> None:
        if name in self.absent:
            return
        self.dead.add(name)
        self.undone(self.dispatcher.lost(name, self.now_s))

    @rule(names=st.sets(NODE_NAMES, max_size=4))
    def change(self, names: set[str]) -> None:
        """Those nodes are no longer there; others come back alive."""
        self.dead -= names
        self.absent = names
        nodes = tuple(each for each in NODES if each.name not in names)
        self.undone(self.dispatcher.change_topology(Topology(nodes), self.now_s))

    def present_workers(self) -> list[str]:
        return [name for name in WORKERS if NODE_OF[name] not in self.absent]

    def undone(self, lost: LostWork) -> None:
        self.losses += 1
        for undone in lost.requests:
            self.running.pop(undone.name, None)
        for decision in lost.rerouted:
            self.took(decision)

    @invariant()
    def loads_are_at_least_what_runs_and_never_negative(self) -> None:
        decode = Counter[str]()
        for decision in self.running.values():
            assert decision.decode is not None
            decode[decision.decode] += decision.request.tokens
        for name in self.present_workers():
            load = self.dispatcher.worker_load(name)  # refuses negative figures by itself
            assert load.tok >= decode[name]
            assert (load.tok == 0) >= (NODE_OF[name] in self.dead)
        for each in NODES:
            if each.name in self.absent:
                continue
            node_load = self.dispatcher.node_load(each.name, self.now_s)
            assert node_load.is_alive == (each.name not in self.dead)
            landed = sum(
                part.read_bytes
                for name, decision in self.running.items()
                if name not in self.read
                for part in decision.route.parts
                if part.relay == each.name
            )
            assert landed <= node_load.landing_bytes_used
            assert landed <= each.landing_bytes

    def teardown(self) -> None:
        """When all is over, nothing of it is left but what reports say."""
        self.change(set())
        for number in range(len(self.order)):
            self.say(f"r{number}", "completed")
        for name in sorted(self.running):
            self.say(name, "completed")
        assert len(self.dispatcher) == 0
        self.now_s += 11.0
        for name in WORKERS:
            self.dispatcher.report(self.now_s, [WorkerLoad(name, 0, 0, self.now_s)])
            assert self.dispatcher.worker_load(name) == WorkerLoad(name)
        for each in NODES:
            self.dispatcher.report(self.now_s, (), [NodeLoad(each.name, reported_s=self.now_s)])
            assert self.dispatcher.node_load(each.name, self.now_s) == NodeLoad(each.name)
        super().teardown()


AnyOrderOfEvents.TestCase.settings = settings(max_examples=examples(20), stateful_step_count=40)
TestAnyOrderOfEvents = AnyOrderOfEvents.TestCase
