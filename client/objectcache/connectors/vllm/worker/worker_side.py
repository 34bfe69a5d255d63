"""The connector in a vLLM worker: layers into its paged KV, and out of it."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from objectcache.connectors.store.route_hints import route_by
from objectcache.connectors.store.stored_chunks import put_chunks_absent
from objectcache.connectors.timing.moments import Clock
from objectcache.connectors.timing.step_windows import StepTiming
from objectcache.connectors.vllm.before_schedule.parked_loads import ParkedLoads
from objectcache.connectors.vllm.before_schedule.side_copies import SideCopies
from objectcache.connectors.vllm.geometry import EngineGeometry
from objectcache.connectors.vllm.plans import LoadPlan, StepPlan, WorkerMeasures
from objectcache.connectors.vllm.reports.engine_metrics import Increments
from objectcache.connectors.vllm.settings import VllmSettings
from objectcache.connectors.vllm.store import Store
from objectcache.connectors.vllm.worker.block_copies import BlockCopies
from objectcache.connectors.vllm.worker.load_timings import LoadTimings
from objectcache.connectors.vllm.worker.loads import Loads, SharedByLoads
from objectcache.connectors.vllm.worker.measured_work import MeasuredWork
from objectcache.connectors.vllm.worker.paged_layout import ContentShape
from objectcache.connectors.vllm.worker.saves import SavePiece, Saves
from objectcache.connectors.vllm.worker.staging import SlotStaging
from objectcache.deliveries.delivery import Delivery
from objectcache.payload import Bytes
from objectcache_schemas.errors import InvalidRequest

logger = logging.getLogger("objectcache.connectors.vllm")
_LAYER_NUMBER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


class WorkerSide:
    """One worker's layers, its deliveries and its saves. Called from the worker's thread alone."""

    def __init__(
        self,
        geometry: EngineGeometry,
        store: Store,
        settings: VllmSettings,
        layer_numbers: Mapping[str, int],
        copies: BlockCopies,
        staging_slots: int,
        clock: Clock,
        side_copies: SideCopies,
    ) -> None:
        """`layer_numbers` maps vLLM's layer names to places in the layers of `copies`, which are in
        the order in which the model computes them, by `clock`. Parked requests' layers go by
        `side_copies`, too.
        """
        self._geometry = geometry
        self._store = store
        self._numbers = layer_numbers
        self._plan: StepPlan | None = None
        self._steps: set[int] = set()
        self._measured = MeasuredWork()
        self._timings = LoadTimings(clock, geometry.fingerprint, self._measured.computed)
        self._counts = Increments()
        self._copies = copies
        timeout_s, shared = settings.load_timeout_s, SharedByLoads(self._measured.loaded)
        self.loads = Loads(self._fetch, copies, timeout_s, shared)
        self.parked = ParkedLoads(self._fetch_parked, copies, timeout_s, side_copies, shared)
        register = store.staging_memory()
        staged_in = None if register is None else copies.reachable(register)
        staging = SlotStaging(staged_in, staging_slots, store.layout)
        self.saves = Saves(self._put, copies, staging)

    # --- one step ---

    def begin(self, plan: StepPlan) -> None:
        """A step begins. One that never ended is ended: layers that were not waited for failed."""
        self.end()
        self._plan = plan
        self._timings.step_begins(plan)
        self.saves.decided(plan.good, plan.bad)
        self.parked.start(plan.parked)
        self.parked.give_up(plan.given_up)
        if self._geometry.stores:
            self.saves.start(plan.saves)

    def start_loads(self) -> None:
        """Ask for what the step needs."""
        if self._plan is not None:
            self._timings.loads_begin(self._plan)
            self.loads.start(self._plan.loads)

    def wait_layer(self, name: str) -> None:
        """Return when the layer's blocks are filled, or have failed. Another name has no effect."""
        if (number := self._numbers.get(name)) is not None:
            self._timings.wait_begins()
            self.loads.wait(number)
            self._timings.wait_ended(number)

    def save_layer(self, name: str) -> None:
        """The layer of this step is computed."""
        if (number := self._numbers.get(name)) is not None:
            self.saves.save(number)

    def end(self) -> None:
        """The step is over. Repeating has no effect."""
        if self._plan is None:
            return
        self._timings.step_ends()
        self.loads.end_step()
        self.saves.end_step(self._plan.step)
        self._steps.add(self._plan.step)
        self._plan = None

    def take_failed_blocks(self) -> set[int]:
        """Blocks that could not be loaded; the model has read those of this step's loads."""
        self.loads.end_step()
        return self.loads.take_failed_blocks() | self.parked.take_failed_blocks()

    def take_loaded(self) -> set[str]:
        """Parked requests whose loads have ended, whole or not."""
        return self.parked.take_ended()

    def take_steps(self) -> set[int]:
        """Steps that ended since the last call."""
        steps, self._steps = self._steps, set()
        return steps

    def take_unstored(self) -> tuple[bytes, ...]:
        """Hashes of blocks that the scheduler takes for stored, and are not."""
        return self.saves.take_unstored()

    def take_measures(self) -> WorkerMeasures:
        """What steps and loads took that are known since the last call."""
        return self._measured.take(self.loads.wait_seconds)

    def take_counts(self) -> dict[str, float]:
        """What was loaded, saved and waited for since the last call."""
        loads, parked, saves = self.loads, self.parked, self.saves
        loaded_blocks = loads.loaded_blocks + parked.loaded_blocks
        chunk_bytes = self._store.layout.chunk_bytes
        return self._counts.take(
            {
                "loads": loads.load_count + parked.load_count,
                "failed_loads": loads.failures + parked.failures,
                "loaded_blocks": loaded_blocks,
                "loaded_bytes": loaded_blocks * chunk_bytes,
                "load_seconds": loads.load_seconds + parked.load_seconds,
                "wait_seconds": loads.wait_seconds,
                "saved_blocks": saves.saved_blocks,
                "saved_bytes": saves.saved_blocks * chunk_bytes,
                "dropped_blocks": saves.dropped_blocks,
                "failed_puts": saves.failures,
            }
        )

    # --- the store; in threads of the loads and the saves ---

    def _fetch(self, plan: LoadPlan) -> Delivery:
        return self._delivery(plan, self._timings.of(plan))

    def _fetch_parked(self, plan: LoadPlan) -> Delivery:
        """Nothing is computed between its layers: they are laid into blocks as they come. How many
        tokens its step will compute is not known yet.
        """
        return self._delivery(plan, StepTiming(self._geometry.fingerprint))

    def _delivery(self, plan: LoadPlan, timing: StepTiming) -> Delivery:
        delivery = self._store.bucket().fetch(
            self._keys(plan.weights, plan.hashes),
            delivery="layerwise",
            on_missing="truncate",
            compute_window_s=timing.window_s,
            context_tokens=plan.context_tokens,
            fingerprint=timing.fingerprint,
            computed_tokens=timing.computed_tokens,
            route=route_by(self._store.client, plan.relay),
        )
        timing.begun(delivery)
        return delivery

    def _keys(self, weights: str, hashes: Sequence[bytes]) -> list[str]:
        return self._geometry.with_weights(weights).namespace.keys(hashes)

    def _put(self, piece: SavePiece, chunks: Bytes) -> None:
        """Store those of a piece that nobody has stored."""
        keys = self._keys(piece.weights, piece.hashes)
        parents = self._keys(piece.weights, [] if piece.parent is None else [piece.parent])
        bucket = self._store.bucket()
        put_chunks_absent(bucket, keys, chunks, parents[0] if parents else None)

    def close(self) -> None:
        """Finish what is to be put, give up the rest."""
        logger.info("%r, %r, %r", self.loads, self.parked, self.saves)
        self.saves.close()
        self.loads.close()
        self.parked.close()
        self._copies.close()

    def __repr__(self) -> str:
        return f"<WorkerSide {self.loads!r}, {self.saves!r}>"


def content_of(spec: Any, backend: str) -> ContentShape:
    """How vLLM's blocks hold K and V, from its KV cache's specification and attention backend."""
    latent = type(spec).__name__ == "MLAAttentionSpec"
    rows_apart = backend == "CPU_ATTN"
    return ContentShape(spec.head_size, spec.head_size_v, latent, rows_apart)


def ordered_names(kv_caches: Mapping[str, Any]) -> list[str]:
    """Layer names as the model computes them: by the number in the name."""
    return sorted(kv_caches, key=_layer_number)


def _layer_number(name: str) -> int:
    found = _LAYER_NUMBER.findall(name)
    if len(found) != 1:
        raise InvalidRequest(f"layer {name!r} has no one number in its name to be ordered by")
    return int(found[0])


def numbered(kv_caches: Mapping[str, Any]) -> tuple[dict[str, int], list[Any]]:
    """Each layer's place, and the tensors in that order; layers that share a tensor share a place.

    Only the first of those waits for its KV and saves it: the others only read it.
    """
    numbers: dict[str, int] = {}
    tensors: list[Any] = []
    places: dict[tuple[int, int], int] = {}
    for name in ordered_names(kv_caches):
        tensor = kv_caches[name]
        place = (tensor.data_ptr(), tensor.storage_offset())
        if place not in places:
            places[place] = numbers[name] = len(tensors)
            tensors.append(tensor)
    return numbers, tensors


def staging_slots(settings: VllmSettings, chunk_bytes: int, block_count: int) -> int:
    """How many blocks may be under way to the store; no more than the engine has.

    Raises `InvalidRequest` where not one fits.
    """
    slots = min(settings.staging_bytes_max // chunk_bytes, block_count)
    if slots < 1:
        raise InvalidRequest(
            f"connector setting 'staging_bytes_max' is {settings.staging_bytes_max}; one block of "
            f"this model needs {chunk_bytes} bytes"
        )
    return slots
