"""GPUs: prefill groups that step together, and decode workers that share their time.

A prefill group's step takes as long as its slowest GPU, each with the batch that `fill_batch` packs
under the compute quota. A decode worker gives each of its n requests a token in `decode_step_s` + n
x `decode_request_s`: all progress alike, so one count of tokens serves for all of them.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable

from objectcache_dispatch import Decision, DispatchRequest, LayerTime, fill_batch
from objectcache_laboratory.cluster.events import VirtualTime
from objectcache_laboratory.cluster.models import ModelCosts


class AgentTurn:
    """A request on its way, with the times of its stages, each in seconds of virtual time."""

    __slots__ = (
        "agent",
        "begun_s",
        "decided_s",
        "decision",
        "decode_begun_s",
        "generated_tokens",
        "left",
        "parts_to_read",
        "parts_to_use",
        "prefilled_s",
        "request",
        "submitted_s",
        "usable_s",
    )

    def __init__(
        self, agent: int, request: DispatchRequest, generated_tokens: int, now_s: float
    ) -> None:
        self.agent, self.request, self.generated_tokens = agent, request, generated_tokens
        self.left = request  # what is not prefilled yet
        self.decision: Decision | None = None
        self.parts_to_use = self.parts_to_read = 0
        self.submitted_s = now_s
        self.decided_s = self.usable_s = self.begun_s = self.prefilled_s = -1.0
        self.decode_begun_s = -1.0


_Batch = tuple[
    deque[AgentTurn], list[tuple[DispatchRequest, int]]
]  # a worker's queue, and its step


class PrefillGroup:
    """`on_prefilled` is called for each request that is through."""

    def __init__(
        self,
        time: VirtualTime,
        workers: int,
        step_time: LayerTime,
        quota_s: float,
        on_prefilled: Callable[[AgentTurn], None],
    ) -> None:
        self._time, self._step_time, self._quota_s = time, step_time, quota_s
        self._on_prefilled = on_prefilled
        self._queues = [deque[AgentTurn]() for _ in range(workers)]
        self._is_stepping = False
        self.workers = workers
        self.step_s = self.gpu_busy_s = 0.0  # the sum of steps; of GPUs' own times

    def add(self, worker: int, turn: AgentTurn) -> None:
        """Its KV is there, or comes as fast as it is used."""
        self._queues[worker].append(turn)
        if not self._is_stepping:
            self._step()

    def _step(self) -> None:
        batches = list[_Batch]()
        longest_s = 0.0
        for queue in self._queues:
            if not queue:
                continue
            batch = fill_batch((turn.left for turn in queue), self._step_time, self._quota_s)
            batches.append((queue, batch))
            own_s = self._step_time.seconds((left.cached_tokens, bsz) for left, bsz in batch)
            self.gpu_busy_s += own_s
            longest_s = max(longest_s, own_s)
            for turn, _ in zip(queue, batch, strict=False):
                if turn.begun_s < 0:
                    turn.begun_s = self._time.now_s
        self._is_stepping = bool(batches)
        if batches:
            self.step_s += longest_s
            self._time.at(self._time.now_s + longest_s, lambda: self._end(batches))

    def _end(
        self, batches: list[tuple[deque[AgentTurn], list[tuple[DispatchRequest, int]]]]
    ) -> None:
        done = list[AgentTurn]()
        for queue, batch in batches:
            for left, bsz in batch:
                turn = queue[0]
                if bsz == left.new_tokens:
                    done.append(queue.popleft())
                else:
                    turn.left = left.after(bsz)
        for turn in done:
            self._on_prefilled(turn)
        self._step()


class DecodeWorker:
    """`on_generated` is called when the last token of a request is out.

    A request that finds no KV memory waits, in order.
    """

    def __init__(
        self, time: VirtualTime, model: ModelCosts, on_generated: Callable[[AgentTurn], None]
    ) -> None:
        self._time, self._model, self._on_generated = time, model, on_generated
        self._running: list[tuple[float, int, AgentTurn]] = []  # by the count at which each ends
        self._waiting = deque[AgentTurn]()
        self._kv_tokens = 0
        self._count, self._counted_s = 0.0, 0.0  # tokens that a request would have got by now
        self._plan = 0
        self._number = 0

    @property
    def step_s(self) -> float:
        """Of a step by now."""
        return self._model.decode_step_s + len(self._running) * self._model.decode_request_s

    def add(self, turn: AgentTurn) -> None:
        """Its KV is in the GPU's memory, or waits for room there."""
        self._waiting.append(turn)
        self._admit()

    def _admit(self) -> None:
        self._advance()
        while self._waiting:
            turn = self._waiting[0]
            tokens = turn.request.tokens + turn.generated_tokens
            if self._running and self._kv_tokens + tokens > self._model.kv_capacity_tokens:
                break
            self._waiting.popleft()
            self._kv_tokens += tokens
            self._number += 1
            turn.decode_begun_s = self._time.now_s
            end = self._count + max(1, turn.generated_tokens - 1)  # prefill gave the first
            heapq.heappush(self._running, (end, self._number, turn))
        self._plan_next()

    def _advance(self) -> None:
        now_s = self._time.now_s
        if self._running:
            self._count += (now_s - self._counted_s) / self.step_s
        self._counted_s = now_s

    def _plan_next(self) -> None:
        self._plan += 1
        if self._running:
            plan = self._plan
            wait_s = max(0.0, self._running[0][0] - self._count) * self.step_s
            self._time.at(self._time.now_s + wait_s, lambda: self._end(plan))

    def _end(self, plan: int) -> None:
        if plan != self._plan:
            return  # others came or went since
        self._advance()
        _, _, turn = heapq.heappop(self._running)
        self._kv_tokens -= turn.request.tokens + turn.generated_tokens
        self._admit()
        self._on_generated(turn)
