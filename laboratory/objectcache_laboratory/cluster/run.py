"""Agents against a cluster: each sends its next turn when the one before is generated.

turn: submitted -> decided (dispatch) -> usable (storage NIC, hop) -> begun (queue of the GPU)
      -> prefilled = first token -> KV into the decode worker's GPU -> generated
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np

from objectcache_dispatch import Decision, DispatchRequest, LayerTime, Node, Topology
from objectcache_laboratory.cluster.events import VirtualTime
from objectcache_laboratory.cluster.gpus import AgentTurn, DecodeWorker, PrefillGroup
from objectcache_laboratory.cluster.links import NICS, BusyLink, NicRead, NicTraffic, ReadOrder
from objectcache_laboratory.cluster.measures import (
    LOADED_SHARE,
    WINDOW_S,
    ClusterMeasures,
    TimeSpread,
    max_over_mean,
)
from objectcache_laboratory.cluster.models import ModelCosts
from objectcache_laboratory.cluster.placement import FETCH_S, ClusterPlacement, placing_named
from objectcache_laboratory.cluster.trajectories import Trajectory
from objectcache_schemas.errors import InvalidRequest

BLOCK_TOKENS = 64  # whole blocks are read
BETA_S = 5.0  # the paper's: beta is what one GPU prefills in so long
STEP_BASE_S = 0.01  # of a forward pass, however few tokens it has
NO_QUOTA_S = 1e9

Reads = Literal["layerwise", "whole"]


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """`reads`: a prefill begins when no layer will be waited for, or when all are there. `order`
    is each storage NIC's. `arrivals_per_s` are agents a second (None: all at once); their turns
    that begin before `warm_s` are not measured, and nothing after `until_s` happens.
    `is_oracle` reads and transfers nothing. `quota_s` is the compute quota; it is a part of the
    paper's scheduling (its appendix A.4), so routes whose workers are taken in turn have none.
    """

    routes: str = "paper"
    reads: Reads = "layerwise"
    order: ReadOrder = "first_come"
    is_oracle: bool = False
    quota_s: float = 0.3
    arrivals_per_s: float | None = None
    warm_s: float = 0.0
    until_s: float = float("inf")
    seed: int = 0

    def __post_init__(self) -> None:
        placing_named(self.routes)
        if self.arrivals_per_s is not None and not self.arrivals_per_s > 0:
            raise InvalidRequest(f"arrivals_per_s is {self.arrivals_per_s}; above 0")


class _NodeParts:
    """The links of one node; its compute NICs by number, each a GPU's."""

    __slots__ = ("memory", "next_nic", "nic", "nics_in", "nics_out", "traffic")

    def __init__(self, node: Node, time: VirtualTime, order: ReadOrder) -> None:
        self.traffic = NicTraffic(WINDOW_S)
        self.nic = NICS[order](time, node.storage_nic_bytes_per_s, self.traffic)
        self.nics_in = [BusyLink(node.compute_nic_bytes_per_s) for _ in range(node.compute_nics)]
        self.nics_out = [BusyLink(node.compute_nic_bytes_per_s) for _ in range(node.compute_nics)]
        self.memory = BusyLink(node.memory_bytes_per_s or float("inf"))
        self.next_nic = itertools.cycle(range(node.compute_nics))


class _Place:
    """Where a worker is: its node, its compute NIC there, its group and its number in that."""

    __slots__ = ("gpu", "group", "node", "number")

    def __init__(self, node: str, gpu: int, group: str, number: int) -> None:
        self.node, self.gpu, self.group, self.number = node, gpu, group, number


class ClusterRun:
    """One run of one cluster; `run` once."""

    def __init__(
        self,
        topology: Topology,
        model: ModelCosts,
        trajectories: Sequence[Trajectory],
        options: ClusterOptions,
    ) -> None:
        if not trajectories:
            raise InvalidRequest("no trajectories; at least 1")
        if not topology.groups("decode"):
            raise InvalidRequest("the topology has no decode worker")
        self._topology, self._model, self._options = topology, model, options
        self._trajectories = trajectories
        self._time = VirtualTime()
        self._step_time = LayerTime(
            1 / model.prefill_flop_per_s,
            model.flop_per_token_context,
            model.flop_per_token,
            STEP_BASE_S,
        )
        placing = placing_named(options.routes)
        self._quota_s = options.quota_s if placing.is_scheduled else NO_QUOTA_S
        self._placement = ClusterPlacement(topology, placing, self._beta_tokens())
        self._nodes = {
            node.name: _NodeParts(node, self._time, options.order) for node in topology.nodes
        }
        self._places = dict[str, _Place]()
        self._groups = dict[str, PrefillGroup]()
        self._decodes = dict[str, DecodeWorker]()
        self._build_workers()
        self._turns = dict[str, AgentTurn]()
        self._next_turn = [0] * len(trajectories)
        self._is_fetching = False
        self._started_s = [0.0] * len(trajectories)
        self._last_s = 0.0
        self._requests = self._prompt_tokens = 0
        self._times = {name: array("d") for name in _TIMES}

    def run(self) -> ClusterMeasures:
        """To the end of all agents, or to `until_s`."""
        options = self._options
        start_s = 0.0
        rng = np.random.default_rng(options.seed)
        for agent in range(len(self._trajectories)):
            if options.arrivals_per_s is not None:
                start_s += float(rng.exponential(1 / options.arrivals_per_s))
            self._time.at(start_s, partial(self._start, agent))
        self._time.run(options.until_s)
        return self._measures()

    # --- a turn, stage by stage ---

    def _start(self, agent: int) -> None:
        self._started_s[agent] = self._time.now_s
        self._submit(agent)

    def _submit(self, agent: int) -> None:
        number = self._next_turn[agent]
        self._next_turn[agent] = number + 1
        cached, appended, generated = self._trajectories[agent].turns[number].tolist()
        request = self._request(f"{agent}-{number}", cached, appended)
        turn = AgentTurn(agent, request, generated, self._time.now_s)
        self._turns[request.name] = turn
        decision = self._placement.submit(request, self._time.now_s)
        if decision is not None:
            self._read(decision)
        elif not self._is_fetching:
            self._is_fetching = True
            self._time.at(self._time.now_s, self._fetch)

    def _request(self, name: str, cached: int, appended: int) -> DispatchRequest:
        model = self._model
        blocks = 0 if self._options.is_oracle else -(-cached // BLOCK_TOKENS)
        layer_bytes = blocks * BLOCK_TOKENS * model.layer_bytes_per_token
        compute_s = self._step_time.seconds([(cached, appended)])
        return DispatchRequest(
            name,
            cached,
            appended,
            layer_bytes * model.num_layers,
            layer_bytes,
            model.num_layers,
            compute_window_s=compute_s / model.num_layers,
            chunk_bytes=BLOCK_TOKENS * model.layer_bytes_per_token * model.num_layers,
        )

    def _fetch(self) -> None:
        for decision in self._placement.fetch(self._time.now_s):
            self._read(decision)
        self._is_fetching = bool(self._placement.waiting)
        if self._is_fetching:
            self._time.at(self._time.now_s + FETCH_S, self._fetch)

    def _read(self, decision: Decision) -> None:
        turn = self._turns[decision.request.name]
        turn.decision, turn.decided_s = decision, self._time.now_s
        request = decision.request
        if not request.read_bytes:
            self._placement.dispatcher.read_done(request.name, self._time.now_s)
            self._usable(turn)
            return
        parts = decision.route.parts
        turn.parts_to_use = turn.parts_to_read = len(parts)
        is_layerwise = self._options.reads == "layerwise"
        for part in parts:
            hop_s = self._hop_s(decision, part.read_bytes, part.node, part.relay is not None)
            self._nodes[part.node].nic.read(
                NicRead(
                    part.read_bytes / request.num_layers,
                    request.num_layers,
                    (request.compute_window_s or 0.0) * request.num_layers,
                    hop_s,
                    (lambda: self._part_usable(turn)) if is_layerwise else None,
                    lambda: self._part_read(turn),
                )
            )

    def _hop_s(self, decision: Decision, read_bytes: int, node: str, is_relayed: bool) -> float:
        """How much later than off the storage NIC a layer is with the GPU: one layer over each
        link, and what those are behind.
        """
        now_s, parts = self._time.now_s, self._nodes[node]
        prefill = self._places[decision.prefill]
        links = [parts.memory, self._nodes[prefill.node].nics_in[prefill.gpu]]
        if is_relayed:
            links.append(parts.nics_out[next(parts.next_nic)])
        behind_s = 0.0
        for link in links:
            backlog_s = max(0.0, link.busy_until_s - now_s)
            copies = 2 if link is parts.memory else 1  # written and read
            link.carry(now_s, copies * read_bytes)
            layer_s = read_bytes / decision.request.num_layers / link.rate_bytes_per_s
            behind_s = max(behind_s, backlog_s) + layer_s
        return behind_s

    def _part_usable(self, turn: AgentTurn) -> None:
        turn.parts_to_use -= 1
        if not turn.parts_to_use:
            self._usable(turn)

    def _part_read(self, turn: AgentTurn) -> None:
        turn.parts_to_read -= 1
        if turn.parts_to_read:
            return
        self._placement.dispatcher.read_done(turn.request.name, self._time.now_s)
        if self._options.reads == "whole":
            self._usable(turn)

    def _usable(self, turn: AgentTurn) -> None:
        assert turn.decision is not None
        turn.usable_s = self._time.now_s
        place = self._places[turn.decision.prefill]
        self._groups[place.group].add(place.number, turn)

    def _prefilled(self, turn: AgentTurn) -> None:
        assert turn.decision is not None
        assert turn.decision.decode is not None
        now_s = turn.prefilled_s = self._time.now_s
        self._placement.dispatcher.prefill_done(turn.request.name, now_s)
        if turn.generated_tokens < 2:
            self._generated(turn)
            return
        decode = self._decodes[turn.decision.decode]
        self._time.at(self._kv_there_s(turn, turn.decision), lambda: decode.add(turn))

    def _kv_there_s(self, turn: AgentTurn, decision: Decision) -> float:
        """When the whole KV is in the decode GPU's memory: it left layer by layer, so the last
        layer is on its way now; then it is copied up, over that GPU's compute NIC.
        """
        now_s, model = self._time.now_s, self._model
        if self._options.is_oracle or decision.decode is None:
            return now_s
        prefill, decode = self._places[decision.prefill], self._places[decision.decode]
        node = self._nodes[decode.node]
        token_bytes = model.layer_bytes_per_token * model.num_layers
        prompt_bytes = turn.request.tokens * token_bytes
        there = sum(part.read_bytes for part in decision.route.parts if part.node == decode.node)
        sent_bytes = max(0, prompt_bytes - there)
        out = self._nodes[prefill.node].nics_out[prefill.gpu]
        behind_s = max(0.0, out.busy_until_s - now_s)
        out.carry(now_s, sent_bytes)
        sent_s = now_s + behind_s + sent_bytes / model.num_layers / out.rate_bytes_per_s
        node.memory.carry(now_s, 2 * sent_bytes)
        return node.nics_in[decode.gpu].carry(sent_s, prompt_bytes)

    def _generated(self, turn: AgentTurn) -> None:
        now_s = self._time.now_s
        self._placement.dispatcher.completed(turn.request.name, now_s)
        del self._turns[turn.request.name]
        self._measure(turn)
        agent, trajectory = turn.agent, self._trajectories[turn.agent]
        self._last_s = now_s
        number = self._next_turn[agent]
        if number == len(trajectory.turns):
            self._times["agent"].append(now_s - self._started_s[agent])
        elif trajectory.delays_s is not None and trajectory.delays_s[number] > 0:
            self._time.at(now_s + float(trajectory.delays_s[number]), lambda: self._submit(agent))
        else:
            self._submit(agent)

    def _measure(self, turn: AgentTurn) -> None:
        self._requests += 1
        self._prompt_tokens += turn.request.tokens
        if turn.submitted_s < self._options.warm_s:
            return
        times = self._times
        times["ttft"].append(turn.prefilled_s - turn.submitted_s)
        times["dispatch"].append(turn.decided_s - turn.submitted_s)
        times["read"].append(turn.usable_s - turn.decided_s)
        times["queue"].append(turn.begun_s - turn.usable_s)
        times["prefill"].append(turn.prefilled_s - turn.begun_s)
        if turn.generated_tokens > 1:
            step_s = (self._time.now_s - turn.decode_begun_s) / (turn.generated_tokens - 1)
            times["tpot"].append(step_s)
            times["ttst"].append(turn.decode_begun_s - turn.prefilled_s + step_s)

    # --- the cluster ---

    def _beta_tokens(self) -> float:
        """Prompt tokens that one GPU is through with in `BETA_S`, by this load's mean request."""
        sample = self._trajectories[:200]
        turns = np.concatenate([each.turns for each in sample]).astype(np.float64)
        seconds = self._model.flop(turns[:, 0].mean(), 1.0) / self._model.prefill_flop_per_s
        per_request_s = turns[:, 1].mean() * seconds
        return float(max(1.0, BETA_S / per_request_s) * turns[:, :2].sum(axis=1).mean())

    def _build_workers(self) -> None:
        members = dict[str, int]()
        for node in self._topology.nodes:
            for gpu, worker in enumerate(node.workers):
                is_alone = worker.role == "prefill" and not self._model.expert_parallel
                group = worker.name if is_alone else worker.group
                number = members[group] = members.get(group, -1) + 1
                nic = gpu % node.compute_nics
                self._places[worker.name] = _Place(node.name, nic, group, number)
                if worker.role == "decode":
                    self._decodes[worker.name] = DecodeWorker(
                        self._time, self._model, self._generated
                    )
        prefill = [p.group for name, p in self._places.items() if name not in self._decodes]
        for group in dict.fromkeys(prefill):
            self._groups[group] = PrefillGroup(
                self._time,
                members[group] + 1,
                self._step_time,
                self._quota_s,
                self._prefilled,
            )

    def _measures(self) -> ClusterMeasures:
        spreads = {name: TimeSpread.of(values) for name, values in self._times.items()}
        nodes = [(node, self._nodes[node.name]) for node in self._topology.nodes]
        of_role = {
            role: sum(parts.nic.read_bytes for node, parts in nodes if node.has(role))
            for role in ("prefill", "decode")
        }
        jct_s = max(self._last_s, 1e-9)
        rates = sum(node.storage_nic_bytes_per_s for node, _ in nodes)
        loaded_bytes = LOADED_SHARE * rates / len(nodes) * WINDOW_S
        steps = [
            (group.gpu_busy_s, group.step_s * group.workers) for group in self._groups.values()
        ]
        return ClusterMeasures(
            routes=self._options.routes,
            requests=self._requests,
            jct_s=self._last_s,
            agent_s=spreads["agent"],
            ttft_s=spreads["ttft"],
            ttst_s=spreads["ttst"],
            tpot_s=spreads["tpot"],
            dispatch_s=spreads["dispatch"],
            read_s=spreads["read"],
            queue_s=spreads["queue"],
            prefill_s=spreads["prefill"],
            nic_max_over_mean=max_over_mean([p.traffic.bytes_of for _, p in nodes], loaded_bytes),
            nic_share=sum(parts.nic.read_bytes for _, parts in nodes) / (rates * jct_s),
            prefill_nic_bytes=of_role["prefill"],
            decode_nic_bytes=of_role["decode"],
            gpu_share=sum(busy for busy, _ in steps) / max(1e-9, sum(most for _, most in steps)),
            prompt_tokens_per_s=self._prompt_tokens / jct_s,
        )


_TIMES = ("agent", "ttft", "ttst", "tpot", "dispatch", "read", "queue", "prefill")


def simulate(
    topology: Topology,
    model: ModelCosts,
    trajectories: Sequence[Trajectory],
    options: ClusterOptions,
) -> ClusterMeasures:
    """One run, and its measures."""
    return ClusterRun(topology, model, trajectories, options).run()


def oracle_of(options: ClusterOptions) -> ClusterOptions:
    """The same without anything that is read or transferred."""
    return replace(options, is_oracle=True)
