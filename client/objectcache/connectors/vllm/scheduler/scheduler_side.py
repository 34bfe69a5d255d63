"""The connector in vLLM's scheduler: which prefixes are stored, and what each step moves."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from objectcache.connectors.identity.adapters import Adapters
from objectcache.connectors.store.load_budget import LoadBudget
from objectcache.connectors.timing.compute_windows import BatchShape
from objectcache.connectors.vllm.before_schedule.parked_requests import ParkedRequests
from objectcache.connectors.vllm.before_schedule.parking_choice import (
    ParkingChoice,
    had_better_park,
)
from objectcache.connectors.vllm.geometry import EngineGeometry
from objectcache.connectors.vllm.load_mode import LoadMode
from objectcache.connectors.vllm.plans import (
    LoadPlan,
    SavePlan,
    StepPlan,
    StepVerdicts,
    WorkerMeasures,
)
from objectcache.connectors.vllm.reports.engine_metrics import Increments
from objectcache.connectors.vllm.scheduler.lookups import NOTHING_STORED, Lookup, Lookups
from objectcache.connectors.vllm.scheduler.recently_saved import RecentlySaved
from objectcache.connectors.vllm.scheduler.route_hints import hinted_relay
from objectcache.connectors.vllm.scheduler.tainted import OpenSteps, TaintedBlocks
from objectcache.connectors.vllm.scheduler.tracked_request import TrackedRequest

ANSWER_VALID_S = 10.0  # a request that waited longer asks again: its blocks may be gone


@dataclass(frozen=True, slots=True)
class SideRoles:
    """What `kv_role` allows the engine: to use what is stored, and to store; and when it loads:
    never `auto`.
    """

    loads: bool
    saves: bool
    mode: LoadMode = LoadMode.LAYERWISE

    @property
    def parks_some(self) -> bool:
        """Whether requests may be parked until what they use is loaded."""
        return self.loads and self.mode is not LoadMode.LAYERWISE


class SchedulerSide:
    """Called from the scheduler's thread alone. Nothing here waits for the server."""

    def __init__(
        self,
        geometry: EngineGeometry,
        lookups: Lookups,
        roles: SideRoles,
        fetch_tokens_min: int,
        adapters: Adapters,
        budget: LoadBudget,
        choice: ParkingChoice,
    ) -> None:
        """`budget` is of the rank whose blocks are largest. `choice` chooses who is parked, in that
        mode.
        """
        self._geometry = geometry
        self._adapters = adapters
        self._budget = budget
        self._given_weights = geometry.namespace.weights_revision
        self._lookups = lookups
        self._roles = roles
        self._fetch_tokens_min = fetch_tokens_min
        self._tracked: dict[str, TrackedRequest] = {}
        self._loads: dict[str, LoadPlan] = {}
        self._parked = ParkedRequests(budget)
        self._choice = choice
        self._recent = RecentlySaved()
        self._verdicts = StepVerdicts()
        self._tainted = TaintedBlocks()
        self._open = OpenSteps()
        self._saves_of_step: dict[int, tuple[SavePlan, ...]] = {}
        self._counts = Increments()
        self._hits = 0
        self.hit_tokens = 0
        self._parked_hits = 0

    # --- what the scheduler asks ---

    def arrived(self, request: Any) -> None:
        """Ask about a request's prompt as soon as it is there."""
        adapter = self._adapters.revision_of(request.lora_request)
        lookup = self._begin(request, adapter)
        self._tracked[request.request_id] = TrackedRequest(request, lookup, adapter)

    def matched_tokens(self, request: Any, computed_tokens: int) -> int | None:
        """Tokens beyond `computed_tokens` that can be loaded; None until that is known, and where
        as much is loaded as may be: the request is asked about again for the next step.

        A whole number of blocks, no more than one step may load, and never the prompt's last token,
        which is always computed.

        A request that is parked holds no block that a load of this step fills: whether that is
        whole is known with the next step, and vLLM takes nothing back of requests that are parked.
        """
        if not self._roles.loads or request.skip_reading_prefix_cache:
            return 0
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            self.arrived(request)
            return None
        if self._parked.holds_outdated():
            return None
        now_s = time.monotonic()
        stored = tracked.lookup.result(now_s)
        if stored and now_s - tracked.lookup.started_s > ANSWER_VALID_S:
            tracked.lookup = self._begin(request, tracked.adapter)
            stored = None
        if stored is None:
            return None
        tracked.stored = stored
        tracked.local = computed_tokens // self._geometry.block_tokens
        usable = min(stored, (request.num_tokens - 1) // self._geometry.block_tokens)
        blocks = self._budget.fitting(max(0, usable - tracked.local))
        tokens: int = (tracked.local + blocks) * self._geometry.block_tokens - computed_tokens
        if tokens < self._fetch_tokens_min:
            return 0
        tracked.parks = self._had_better_park(request, blocks, computed_tokens + tokens)
        waits = tracked.parks and computed_tokens > 0 and bool(self._loads)
        return tokens if self._budget.has_room(blocks) and not waits else None

    def parks(self, request: Any) -> bool:
        """Whether the request is to be parked until the tokens are there that `matched_tokens` has
        told last.
        """
        tracked = self._tracked.get(request.request_id)
        return tracked is not None and tracked.parks

    def _had_better_park(self, request: Any, blocks: int, loaded_tokens: int) -> bool:
        if self._roles.mode is not LoadMode.PER_REQUEST:
            return self._roles.parks_some
        return had_better_park(self._choice.expected(blocks, loaded_tokens, request.num_tokens))

    def allocated(self, request: Any, block_ids: Sequence[int], external_tokens: int) -> None:
        """The request has its blocks: load what was matched, with the next step. vLLM tells it once
        more when a parked request is scheduled, with nothing to load then.
        """
        parks = self.parks(request)
        self._open.begins(request.request_id, external_tokens > 0 and not parks)
        if external_tokens == 0:
            return
        tracked = self._tracked[request.request_id]
        begin = tracked.local
        end = begin + external_tokens // self._geometry.block_tokens
        tracked.loaded = tuple(block_ids[begin:end])
        self._budget.take(len(tracked.loaded))
        load = LoadPlan(
            request_id=request.request_id,
            block_ids=tuple(block_ids[begin:end]),
            hashes=tuple(request.block_hashes[begin:end]),
            context_tokens=request.num_prompt_tokens,
            weights=self._names_of(tracked.adapter).namespace.weights_revision,
            relay=hinted_relay(getattr(request, "kv_transfer_params", None)),
        )
        if parks:
            self._parked.park(load)
            self._parked_hits += 1
        else:
            self._loads[request.request_id] = load
        self._hits += 1
        self.hit_tokens += external_tokens

    def finished(self, request_id: str) -> None:
        """The request is gone. What is to be saved of it has been copied from its blocks."""
        self._tracked.pop(request_id, None)
        if (load := self._loads.pop(request_id, None)) is not None:
            self._budget.give_back(len(load.block_ids))
        self._parked.give_up(request_id)

    def unstored(self, hashes: Collection[bytes]) -> None:
        """A worker could not store these blocks: the next request with them stores them."""
        self._recent.forget(hashes)

    def take_counts(self) -> dict[str, float]:
        """What was looked up and found since the last call."""
        return self._counts.take(
            {
                "lookups": self._lookups.count,
                "failed_lookups": self._lookups.failures,
                "hits": self._hits,
                "hit_tokens": self.hit_tokens,
                "parked_hits": self._parked_hits,
            }
        )

    # --- vLLM's own prefix cache ---

    def bind(self, cache_manager: Any) -> None:
        """vLLM's KVCacheManager: what a failed load spoils is taken out of its prefix cache."""
        self._tainted.bind(cache_manager)

    def reset(self) -> bool:
        """The weights are others from now on. Nothing that is stored or in the engine's blocks is
        used again, and what is stored from now on has names of its own.

        False where the engine's prefix cache is not known, and nothing was done.
        """
        if not self._tainted.bound:
            return False
        weights = f"{self._given_weights}|{secrets.token_hex(16)}"
        self._geometry = self._geometry.with_weights(weights)
        self._forget_saves()
        self._recent = RecentlySaved()
        self._take_loads()
        self._parked.outdate()
        for tracked in self._tracked.values():
            tracked.renew()
        self._tainted.all_in_use()
        return True

    # --- steps ---

    def plan(self, scheduled_tokens: dict[str, int], blocks: Any) -> StepPlan:
        """The step that was just scheduled. `blocks.get_block_ids(request_id)` is its table."""
        loads = self._take_loads()
        parked, given_up = self._parked.take()
        self._tainted.loaded(block for load in parked for block in load.block_ids)
        spoilt = self._spoilt(scheduled_tokens, blocks, loads) if self._tainted else set[str]()
        self._parked.scheduled(scheduled_tokens)
        right = {name: n for name, n in scheduled_tokens.items() if name not in spoilt}
        saves = self._saves(right, blocks) if self._roles.saves else ()
        step = self._verdicts.issue(saves=bool(saves))
        self._open.planned(step, bool(loads), scheduled_tokens, blocks)
        if saves:
            self._saves_of_step[step] = saves
        good, bad = self._verdicts.take()
        batch = self._batch(scheduled_tokens)
        if batch.tokens:
            self._choice.planned(step, self._next_batch(scheduled_tokens), time.monotonic())
        return StepPlan(step, tuple(loads.values()), saves, good, bad, batch, parked, given_up)

    def _take_loads(self) -> dict[str, LoadPlan]:
        """The loads of the step that is scheduled now; it alone holds memory for them."""
        loads, self._loads = self._loads, {}
        for load in loads.values():
            self._budget.give_back(len(load.block_ids))
        return loads

    def _batch(self, scheduled_tokens: dict[str, int]) -> BatchShape:
        """What the step computes; a request's tokens count before vLLM counts the step's."""
        return BatchShape.of(
            (count, tracked.request.num_computed_tokens)
            for request_id, count in scheduled_tokens.items()
            if (tracked := self._tracked.get(request_id)) is not None
        )

    def _next_batch(self, scheduled_tokens: dict[str, int]) -> BatchShape:
        """What the requests of the step will compute in the next one: a token, or what is left."""
        tracked_counts = (
            (self._tracked[name].request, count)
            for name, count in scheduled_tokens.items()
            if name in self._tracked
        )
        ends = ((request, request.num_computed_tokens + count) for request, count in tracked_counts)
        return BatchShape.of((max(1, request.num_tokens - end), end) for request, end in ends)

    def _spoilt(
        self, scheduled_tokens: dict[str, int], blocks: Any, loads: dict[str, LoadPlan]
    ) -> set[str]:
        """Requests whose step reads a tainted block: what it computes is tainted as well."""
        spoilt = set[str]()
        for request_id, count in scheduled_tokens.items():
            if (tracked := self._tracked.get(request_id)) is None:
                continue
            computed = tracked.request.num_computed_tokens
            begin = -(-computed // self._geometry.block_tokens)
            end = -(-(computed + count) // self._geometry.block_tokens)
            loaded = loads[request_id].block_ids if request_id in loads else ()
            table = blocks.get_block_ids(request_id)[0]
            if not self._tainted.step(table, loaded, begin, end):
                spoilt.add(request_id)
        self._tainted.evict()
        return spoilt

    def ended_parked(self, request_ids: Iterable[str]) -> None:
        """Every worker has loaded what it could for these requests."""
        self._parked.ended(request_ids)

    def measured(self, steps: set[int], measures: WorkerMeasures) -> None:
        """What every worker has measured until it was through with these steps."""
        self._choice.reported(steps, measures, time.monotonic())

    def reported(self, steps: set[int], failed_block_ids: Collection[int]) -> None:
        """Every worker is through with these steps, and could not load these blocks."""
        parked = self._parked.among(failed_block_ids)
        if parked:
            self._start_over(parked)  # no step has read them, and nobody finds them
            self._parked.failed(parked)
        if read := set(failed_block_ids) - parked:
            self._failed(read)
        else:
            self._verdicts.reported(steps, failed=False)
            for step in steps:
                self._saves_of_step.pop(step, None)
        self._open.reported(steps)
        self._tainted.evict()

    def _failed(self, failed_block_ids: Collection[int]) -> None:
        self._forget_saves()
        self._start_over(failed_block_ids)
        spoilt = self._tainted.failed(failed_block_ids, self._open.tables())
        self._compute_again(spoilt)

    def _start_over(self, failed_block_ids: Collection[int]) -> None:
        for tracked in self._tracked.values():
            tracked.start_over(failed_block_ids)

    def _compute_again(self, spoilt: Collection[int]) -> None:
        """Have every request compute from the first of these blocks on that it holds.

        Of requests that share a failed block vLLM has one compute it again, and takes it for
        computed in the others, though that one may need several steps. Each of them computes the
        same KV for the same place, so it does not matter whose is written last.
        """
        for name, tracked in self._tracked.items():
            if (place := self._tainted.first_held(name, spoilt)) is not None:
                request = tracked.request
                first = place * self._geometry.block_tokens
                request.num_computed_tokens = min(request.num_computed_tokens, first)

    def _forget_saves(self) -> None:
        """Nothing of the steps under way is stored."""
        self._verdicts.reported(set(), failed=True)
        for saves in self._saves_of_step.values():
            for save in saves:
                self._save_again(save)
        self._saves_of_step.clear()

    def _save_again(self, save: SavePlan) -> None:
        self._recent.forget(save.hashes)
        if (tracked := self._tracked.get(save.request_id)) is not None:
            tracked.saved_end = min(tracked.saved_end, save.first)

    def _saves(self, scheduled_tokens: dict[str, int], blocks: Any) -> tuple[SavePlan, ...]:
        now_s = time.monotonic()
        plans = (
            self._save(tracked, count, blocks, now_s)
            for request_id, count in scheduled_tokens.items()
            if (tracked := self._tracked.get(request_id)) is not None
        )
        return tuple(plan for plan in plans if plan is not None)

    def _save(
        self, tracked: TrackedRequest, count: int, blocks: Any, now_s: float
    ) -> SavePlan | None:
        """The prompt's blocks that are full after this step, from the first that is not stored.

        Blocks that the engine has from elsewhere are saved too: without them what comes behind
        would not be found.
        """
        if tracked.adapter is None:
            return None
        request = tracked.request
        prompt_tokens = min(request.num_computed_tokens + count, request.num_prompt_tokens)
        end = min(prompt_tokens // self._geometry.block_tokens, len(request.block_hashes))
        begin = max(tracked.saved_end, tracked.stored or tracked.lookup.result(now_s) or 0)
        hashes = request.block_hashes
        while begin < end and self._recent.has(hashes[begin], now_s):
            begin += 1
        if begin >= end:
            return None
        tracked.saved_end = end
        chosen = tuple(hashes[begin:end])
        self._recent.add(chosen, now_s)
        table = blocks.get_block_ids(request.request_id)[0]
        parent = hashes[begin - 1] if begin else None
        ids = tuple(table[begin:end])
        weights = self._names_of(tracked.adapter).namespace.weights_revision
        return SavePlan(request.request_id, begin, ids, chosen, parent, weights)

    # --- lookups ---

    def _begin(self, request: Any, adapter: str | None) -> Lookup:
        if adapter is None:
            return NOTHING_STORED
        count = request.num_prompt_tokens // self._geometry.block_tokens
        namespaces = self._names_of(adapter).namespaces
        return self._lookups.begin(namespaces, request.block_hashes[:count])

    def _names_of(self, adapter: str | None) -> EngineGeometry:
        """The names of KV that the weights compute with this adapter."""
        if not adapter:
            return self._geometry
        weights = self._geometry.namespace.weights_revision
        return self._geometry.with_weights(f"{weights}|adapter {adapter}")

    def close(self) -> None:
        """End the lookups."""
        self._lookups.close()

    def __repr__(self) -> str:
        return (
            f"<SchedulerSide {len(self._tracked)} requests, {self.hit_tokens} tokens hit, "
            f"{self._lookups.failures} lookups failed>"
        )
