"""`ObjectCacheConnector`: vLLM's KVConnectorBase_V1 over an ObjectCache bucket.

vLLM makes one in its scheduler and one in every worker. This module hands each call to the side
that it belongs to, and nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from objectcache.connectors.device.engine_copier import engine_copier_of
from objectcache.connectors.identity.adapters import Adapters
from objectcache.connectors.missing_engine import missing_engine
from objectcache.connectors.store.load_budget import LoadBudget
from objectcache.connectors.store.stored_chunks import match_prefix
from objectcache.connectors.timing.moments import clock_of
from objectcache.connectors.vllm.before_schedule.parked_loads import LOADS_MAX
from objectcache.connectors.vllm.before_schedule.parking_choice import ParkingChoice
from objectcache.connectors.vllm.before_schedule.side_copies import side_copies_of
from objectcache.connectors.vllm.geometry import EngineGeometry, lossy_of, read_geometry
from objectcache.connectors.vllm.load_mode import EngineSteps, LoadMode, chosen_mode, tell_mode
from objectcache.connectors.vllm.plans import NOTHING_MEASURED, StepPlan, WorkerMeasures
from objectcache.connectors.vllm.reports.engine_log import log_through_engine, start_told
from objectcache.connectors.vllm.reports.engine_metrics import (
    ObjectCachePromMetrics,
    ObjectCacheStats,
)
from objectcache.connectors.vllm.scheduler.lookups import Lookups
from objectcache.connectors.vllm.scheduler.scheduler_side import SchedulerSide, SideRoles
from objectcache.connectors.vllm.settings import read_settings
from objectcache.connectors.vllm.store import Store
from objectcache.connectors.vllm.worker.beside_copies import BesideCopies
from objectcache.connectors.vllm.worker.block_copies import BlockCopies, WaitedCopies
from objectcache.connectors.vllm.worker.load_memory import make_ready, ready_lengths
from objectcache.connectors.vllm.worker.paged_layout import PagedLayer
from objectcache.connectors.vllm.worker.worker_side import (
    WorkerSide,
    content_of,
    numbered,
    staging_slots,
)
from objectcache.core import TransportChoice
from objectcache.landing.target_pool import REGIONS_MAX
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.layout import KvLayout

try:
    import vllm  # pyright: ignore[reportMissingImports]
    from vllm.distributed.kv_transfer.kv_connector.v1 import base as kv_connector  # pyright: ignore[reportMissingImports]

    vllm_version: str = vllm.__version__
    scheduler_role: Any = kv_connector.KVConnectorRole.SCHEDULER
    KVConnectorBase_V1: Any = kv_connector.KVConnectorBase_V1
    KVConnectorMetadata: Any = kv_connector.KVConnectorMetadata
    KVConnectorWorkerMetadata: Any = kv_connector.KVConnectorWorkerMetadata
except ImportError as error:
    KVConnectorBase_V1 = missing_engine("vllm", error)
    KVConnectorMetadata = KVConnectorWorkerMetadata = object
    vllm_version, scheduler_role = "", None


@dataclass(frozen=True)
class StepMetadata(KVConnectorMetadata):
    """One step's plan, on its way to the workers."""

    plan: StepPlan


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """Steps that a worker is through with, on their way to the scheduler."""

    steps: set[int]
    unstored: tuple[bytes, ...] = ()  # hashes of blocks
    measures: WorkerMeasures = NOTHING_MEASURED

    def aggregate(self, other: StepReport) -> StepReport:
        """Several workers' reports of one step."""
        return StepReport(
            self.steps | other.steps,
            self.unstored + other.unstored,
            self.measures.with_rank(other.measures),
        )


class ObjectCacheConnector(KVConnectorBase_V1):
    """Configured by `--kv-transfer-config` alone; docs/vllm.md has the line.

    Raises `InvalidRequest` at the engine's start naming the setting, or the option of vLLM, that
    cannot be served.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        log_through_engine()
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._store: Store | None = None
        with start_told("ObjectCacheConnector"):
            self._start(vllm_config, role, kv_cache_config)

    def _start(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        transfer = vllm_config.kv_transfer_config
        if transfer.kv_load_failure_policy != "recompute":
            raise InvalidRequest(
                "kv_load_failure_policy must be 'recompute' in --kv-transfer-config, got "
                f"{transfer.kv_load_failure_policy!r}: a block that is evicted while it is on its "
                "way would fail its request"
            )
        self._settings, self._configuration = read_settings(transfer.kv_connector_extra_config)
        self._geometry = read_geometry(
            vllm_config,
            kv_cache_config,
            self._configuration.weights_revision,
            vllm_version,
            os.environ,
            self._configuration.lossy,
        )
        if profile := self._configuration.compute_profile:
            self._geometry = replace(self._geometry, fingerprint=profile)
        if role == scheduler_role:
            loads, saves = transfer.is_kv_consumer, transfer.is_kv_producer
            mode = self._load_mode() if loads else LoadMode.LAYERWISE
            self._scheduler = self._scheduler_side(SideRoles(loads, saves, mode))

    def _load_mode(self) -> LoadMode:
        """The engine's, which the log is told. Workers do as the scheduler's plans say."""
        setting, steps = LoadMode(self._settings.load_mode), EngineSteps.of(self._vllm_config)
        tell_mode(setting, steps)
        return chosen_mode(setting, steps)

    def _scheduler_side(self, roles: SideRoles) -> SchedulerSide:
        layout = _layout(self._geometry, len(self._layer_names()))
        timeout_s = self._configuration.lookup_timeout_s
        lossy = lossy_of(self._geometry.spec, layout, self._configuration.lossy)
        store = self._store = Store(self._configuration, layout, timeout_s, lossy=lossy)
        lookups = Lookups(lambda keys: match_prefix(store.bucket(), keys), timeout_s)
        adapters = Adapters(os.environ)
        return SchedulerSide(
            self._geometry,
            lookups,
            roles,
            self._settings.fetch_tokens_min,
            adapters,
            self._budget(layout, LOADS_MAX if roles.parks_some else REGIONS_MAX),
            ParkingChoice(
                layout.num_layers,
                layout.chunk_bytes,
                self._vllm_config.scheduler_config.max_num_batched_tokens,
            ),
        )

    def _budget(self, layout: KvLayout, loads_max: int) -> LoadBudget:
        """What any rank has memory for: that with the most layers."""
        layers = max(layout.num_layers, _largest_stage(self._vllm_config, os.environ))
        return LoadBudget(
            self._configuration.load_bytes_max, layers * layout.per_layer_chunk_bytes, loads_max
        )

    def _layer_names(self) -> list[str]:
        names: list[str] = self._kv_cache_config.kv_cache_groups[0].layer_names
        return names

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is a later miss, and nothing else."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """A replayed whole graph would skip the waits for layers.

        vLLM asks before it starts its processes, where an error is not drowned by their tracebacks.
        Raises `InvalidRequest` naming the setting.
        """
        log_through_engine()
        with start_told("ObjectCacheConnector"):
            read_settings(extra_config)
        return True

    # --- the scheduler's side ---

    def on_new_request(self, request: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.arrived(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        tokens = self._scheduler.matched_tokens(request, num_computed_tokens)
        return tokens, bool(tokens) and self._scheduler.parks(request)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert self._scheduler is not None
        self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._scheduler is not None:
            self._scheduler.bind(kv_cache_manager)

    def reset_cache(self) -> bool:
        """vLLM asks for it after its weights were changed."""
        assert self._scheduler is not None
        return self._scheduler.reset()

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        assert self._scheduler is not None
        scheduled = scheduler_output.num_scheduled_tokens
        plan = self._scheduler.plan(scheduled, scheduler_output.kv_connector_block_state)
        return StepMetadata(plan)

    def update_connector_output(self, connector_output: Any) -> None:
        assert self._scheduler is not None
        report = connector_output.kv_connector_worker_meta
        if not isinstance(report, StepReport):
            report = StepReport(set())
        self._scheduler.unstored(report.unstored)
        self._scheduler.measured(report.steps, report.measures)
        self._scheduler.reported(report.steps, connector_output.invalid_block_ids or ())
        self._scheduler.ended_parked(connector_output.finished_recving or ())

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        self._scheduler.finished(request.request_id)
        return False, None

    # --- a worker's side ---

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Raises `InvalidRequest` where the layers are not of one shape."""
        with start_told("ObjectCacheConnector"):
            self._register(kv_caches)

    def _register(self, kv_caches: Mapping[str, Any]) -> None:
        numbers, tensors = numbered(kv_caches)
        block_count = self._kv_cache_config.num_blocks
        content = content_of(self._geometry.spec, self._backend(next(iter(numbers))))
        layers = [PagedLayer(tensor, block_count, content) for tensor in tensors]
        layout = _layout_of(self._geometry, layers)
        budget = LoadBudget(self._configuration.load_bytes_max, layout.chunk_bytes)
        slots = staging_slots(self._settings, layout.chunk_bytes, block_count)
        device = tensors[0].device
        copies = self._copies(device, layers)
        timeout_s = self._settings.load_timeout_s
        lossy = lossy_of(self._geometry.spec, layout, self._configuration.lossy)
        store = self._store = Store(self._configuration, layout, timeout_s, copies.region, lossy)
        if self._vllm_config.kv_transfer_config.is_kv_consumer:
            self._make_memory_ready(budget.fitting(self._blocks_max(block_count)), store)
        self._worker = WorkerSide(
            self._geometry,
            store,
            self._settings,
            numbers,
            copies,
            slots,
            clock_of(device),
            side_copies_of(device),
        )

    def _copies(self, device: Any, layers: list[PagedLayer]) -> BlockCopies:
        copier = engine_copier_of(device, self._settings.copies())
        return WaitedCopies(layers) if copier is None else BesideCopies(layers, copier)

    def _blocks_max(self, block_count: int) -> int:
        """Blocks of the longest request."""
        tokens: int = self._vllm_config.model_config.max_model_len
        return min(tokens // self._geometry.block_tokens, block_count)

    def _make_memory_ready(self, load_blocks: int, store: Store) -> None:
        load_bytes = load_blocks * store.layout.chunk_bytes
        lengths = ready_lengths(load_bytes, self._settings.ready_bytes_max)
        if lengths and self._configuration.transport != TransportChoice.BODY.value:
            make_ready(store.client.stock_memory, lengths)

    def _backend(self, layer_name: str) -> str:
        """The name of a layer's attention backend; empty where vLLM does not tell."""
        layers = self._vllm_config.compilation_config.static_forward_context
        backend = getattr(layers.get(layer_name), "attn_backend", None)
        return "" if backend is None else str(backend.get_name())

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin(connector_metadata.plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._worker is not None:
            self._worker.wait_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        if self._worker is not None:
            self._worker.save_layer(layer_name)

    def wait_for_save(self) -> None:
        """What the step saves has left its blocks already; it is stored behind the engine."""
        if self._worker is not None:
            self._worker.end()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, None if self._worker is None else self._worker.take_loaded()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._worker is None else self._worker.take_failed_blocks()

    def build_connector_worker_meta(self) -> StepReport | None:
        if self._worker is None:
            return None
        worker = self._worker
        return StepReport(worker.take_steps(), worker.take_unstored(), worker.take_measures())

    # --- what vLLM's loggers show ---

    def get_kv_connector_stats(self) -> ObjectCacheStats | None:
        """What this side has counted since the last call; None: nothing."""
        side = self._scheduler or self._worker
        counts = {} if side is None else side.take_counts()
        return ObjectCacheStats(counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ObjectCacheStats:
        """Counts that came from another process."""
        return ObjectCacheStats(dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ObjectCachePromMetrics:
        """The counters among vLLM's metrics."""
        return ObjectCachePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Puts what is to be stored, bounded in time. Repeating has no effect."""
        scheduler, self._scheduler = self._scheduler, None
        worker, self._worker = self._worker, None
        store, self._store = self._store, None
        if scheduler is not None:
            scheduler.close()
        if worker is not None:
            worker.close()
        if store is not None:
            store.close()

    def __repr__(self) -> str:
        return f"<ObjectCacheConnector {self._scheduler or self._worker!r}>"


def _layout(geometry: EngineGeometry, layer_count: int) -> KvLayout:
    return KvLayout(
        num_layers=layer_count,
        chunk_tokens=geometry.block_tokens,
        per_layer_chunk_bytes=geometry.spec.unpadded_page_size_bytes,
        dtype=geometry.dtype,
        fingerprint=geometry.namespace.prefix,
    )


def _largest_stage(vllm_config: Any, environment: Mapping[str, str]) -> int:
    """Layers of the pipeline rank that has the most; 0 where there is one rank."""
    stages: int = vllm_config.parallel_config.pipeline_parallel_size
    if stages == 1:
        return 0
    if split := environment.get("VLLM_PP_LAYER_PARTITION"):
        return max(int(count) for count in split.split(","))
    layers: int = vllm_config.model_config.get_total_num_hidden_layers()
    return -(-layers // stages)


def _layout_of(geometry: EngineGeometry, layers: list[PagedLayer]) -> KvLayout:
    layout = _layout(geometry, len(layers))
    for number, layer in enumerate(layers):
        if layer.slice_bytes != layout.per_layer_chunk_bytes:
            raise InvalidRequest(
                f"layer {number} has blocks of {layer.slice_bytes} bytes, the model's KV cache is "
                f"specified with {layout.per_layer_chunk_bytes}: layers must be of one shape"
            )
    return layout
