"""ObjectCache as SGLang's external cache linker: device pages filled layer by layer.

Loaded by `--unified-cache-external-linker-config`; docs/sglang.md has the flags. SGLang's own
contract is `UnifiedCacheLinker` in `sglang/srt/mem_cache/unified_cache/unified_cache_linker.py` of
0.5.23.
"""

from __future__ import annotations

import logging
import os
from functools import partial
from queue import Empty, Queue
from typing import Any

from objectcache.connectors.device.engine_copier import engine_copier_of
from objectcache.connectors.identity.namespace import compute_fingerprint
from objectcache.connectors.missing_engine import missing_engine
from objectcache.connectors.sglang.batch_timings import BatchTimings, timed_counter
from objectcache.connectors.sglang.device_pool import DevicePages, DevicePool
from objectcache.connectors.sglang.linked_loads import LinkedLoad, load_layers
from objectcache.connectors.sglang.served_model import identity_of
from objectcache.connectors.sglang.settings import (
    LOADS_MAX,
    Rank,
    Shape,
    Stores,
    read_linker_settings,
)
from objectcache.connectors.sglang.worker import Worker
from objectcache.connectors.store.load_budget import LoadBudget
from objectcache.connectors.store.outage import forget_frames
from objectcache.connectors.timing.moments import clock_of
from objectcache.connectors.timing.step_windows import StepTiming
from objectcache_schemas.errors import InvalidRequest, ObjectCacheError

try:
    from sglang.srt.mem_cache.hicache_storage import PoolName as _PoolName  # pyright: ignore[reportMissingImports]
    from sglang.srt.mem_cache.unified_cache.unified_cache_linker import (  # pyright: ignore[reportMissingImports]
        LayerWiseLoadCounter as _LayerWiseLoadCounter,
    )
    from sglang.srt.mem_cache.unified_cache.unified_cache_linker import (  # pyright: ignore[reportMissingImports]
        UnifiedCacheLinker as _UnifiedCacheLinker,
    )
    from sglang.srt.mem_cache.unified_cache.unified_cache_linker import (  # pyright: ignore[reportMissingImports]
        device_module as _device_module,
    )
except ImportError as error:
    _UnifiedCacheLinker = missing_engine("sglang", error)
    _LayerWiseLoadCounter = missing_engine("sglang", error)
    _device_module = missing_engine("sglang", error)
    _PoolName = missing_engine("sglang", error)

_KV = "kv"
_FULL = "FULL"
_logger = logging.getLogger("objectcache.connectors.sglang")


class ObjectCacheLinker(_UnifiedCacheLinker):
    """Prefixes of a bucket, loaded into SGLang's device pools while the forward runs.

    A lookup is one round trip; a load is one layerwise delivery a request; an offload is a put that
    a thread carries out. The constructor raises what is wrong with the configuration. Afterwards a
    failed lookup is a miss, a failed offload is not stored, and a failed load is reported by
    `finish_layer_wise_loading`, whereupon SGLang aborts the requests of the batch.
    """

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: dict[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:
        """Raises `InvalidRequest` for a wrong setting and for pools that it cannot store, and what
        is wrong with the bucket: `AccessDenied`, `Conflict`, `Unavailable`.
        """
        super().__init__()
        settings, copies = read_linker_settings(extra_config)
        _check_supported(params, components)
        self.forward_stream = forward_stream
        kvcache = params.token_to_kv_pool_allocator.get_kvcache()
        self._pool = DevicePool(kvcache, params.page_size)
        self.pools = {_PoolName.KV: self._pool}
        tensor_parallel = _tensor_parallel(params)
        self._owns_offloads = not self._pool.rank_replicated or tensor_parallel[0] == 0
        identity = identity_of(server_args, settings.weights_revision, os.environ)
        self._copier = engine_copier_of(self._pool.device, copies)
        self._stores = Stores(settings, identity, self._copier)
        rank = _rank(params, self._pool.rank_replicated, tensor_parallel)
        shape = Shape(
            self._pool.layout_name,
            self._pool.dtype,
            self._pool.num_layers,
            params.page_size,
            self._pool.geometry.layer_bytes,
            self._pool.slice_axes,
        )
        self._store = self._stores.open(shape, rank)
        chunk_bytes = _layers_max(params, self._pool.num_layers) * shape.slice_bytes
        self._budget = LoadBudget(settings.load_bytes_max, chunk_bytes, LOADS_MAX)
        self._timings = BatchTimings(
            clock_of(self._pool.device),
            settings.compute_profile or compute_fingerprint(identity.model, tensor_parallel[1]),
            num_layers=self._pool.num_layers,
            page_tokens=params.page_size,
            step_tokens_max=_step_tokens_max(server_args),
        )
        self.layer_done_counter = timed_counter(
            _LayerWiseLoadCounter, self._pool.num_layers, self._timings
        )
        self._pending: dict[str, LinkedLoad] = {}
        self._results: Queue[bool] = Queue()
        self._loader = Worker("objectcache-load")
        self._offloader = Worker("objectcache-offload")

    # --- lookup and load ---

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        """Every length of a stored prefix, in pages: all up to the longest that one load may have.
        One round trip.
        """
        kv = _kv_of(transfers)
        if kv is None:
            return []
        self._timings.looked_up(rid, len(kv.keys))
        keys = kv.keys[: self._budget.fitting(len(kv.keys))]
        return list(range(1, self._store.match(keys) + 1))

    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Queue a load for the next batch; False where there is nothing to load, and where the
        batch is full: SGLang computes the request's KV then. All ranks decide alike.
        """
        kv = _kv_of(transfers)
        if kv is None or not self._budget.has_room(len(kv.keys)):
            return False
        assert rid not in self._pending, rid
        self._budget.take(len(kv.keys))
        self._pending[rid] = LinkedLoad(list(kv.keys), kv.device_indices)
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        """Forget a load that has not begun; whether there was one."""
        if (load := self._pending.pop(rid, None)) is None:
            return False
        self._budget.give_back(len(load.hashes))
        return True

    def start_layer_wise_loading(self) -> int:
        """Begin what is queued; the batch's index at `layer_done_counter`, or -1 for nothing."""
        if not self._pending:
            return -1
        pending, self._pending = self._pending, {}
        loads = list(pending.values())
        self._budget.clear()
        index: int = self.layer_done_counter.update_producer()
        pages = [(rid, len(load.hashes)) for rid, load in pending.items()]
        timing = self._timings.batch_begins(index, pages)
        ready = _device_module.Event()  # the slots were freed by work that may still be queued
        ready.record()
        self._loader.put(lambda: self._load(index, loads, ready, timing))
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Wait until a batch writes to the device no more; whether every layer is there."""
        landed: bool = self.layer_done_counter.finish(counter_index)
        return landed

    def _load(self, index: int, loads: list[LinkedLoad], ready: Any, timing: StepTiming) -> None:
        try:
            ready.synchronize()
            complete = partial(self.layer_done_counter.complete, index)
            load_layers(
                self._store, self._pool, loads, complete, _device_module, timing, self._copier
            )
            self._stores.outage.answered("a load")
        except BaseException as error:  # the forward would wait for ever
            self._note("a load", error)
            forget_frames(error)  # the counter keeps it
            self.layer_done_counter.fail(index, error)

    # --- offload ---

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """Queue pages to be stored; False where there are none. Completed in the order queued."""
        kv = _kv_of(transfers)
        if kv is None:
            return False
        if not self._owns_offloads:
            self._results.put(True)
            return True
        hashes, slots, events = list(kv.keys), kv.device_indices, self.record_offload_ready()
        self._offloader.put(lambda: self._offload(hashes, slots, events))
        return True

    def num_completed_offloads(self) -> int:
        """Offloads whose results wait to be taken."""
        return self._results.qsize()

    def pop_completed_offload(self) -> bool:
        """The oldest completed offload's result: whether all of its pages are stored."""
        return self._results.get_nowait()

    def _offload(self, hashes: list[str], slots: Any, events: list[Any]) -> None:
        stored = False
        try:
            for event in events:
                event.synchronize()
            pages = DevicePages(self._pool, slots, self._copier)
            stored = all(self._store.store(hashes, pages))
        except BaseException as error:  # the tree would keep its pages for ever
            self._note("an offload", error)
        finally:
            self._results.put(stored)

    # --- the end ---

    def reset(self) -> None:
        """Wait for what runs, forget the rest and all results."""
        self._pending.clear()
        self._budget.clear()
        self._loader.join()
        self._offloader.join()
        while True:
            try:
                self._results.get_nowait()
            except Empty:
                break
        self.layer_done_counter.reset()
        self._timings.reset()

    def close(self) -> None:
        """As `reset`, then end the threads and close connections."""
        self.reset()
        self._loader.close()
        self._offloader.close()
        self._stores.close()
        if self._copier is not None:
            self._copier.close()

    def _note(self, what: str, error: BaseException) -> None:
        if isinstance(error, ObjectCacheError):
            self._stores.outage.failed(what, error)
        else:
            _logger.error("%s failed", what, exc_info=error)

    def __repr__(self) -> str:
        return f"<ObjectCacheLinker {self._pool!r}, {len(self._pending)} loads queued>"


def _kv_of(transfers: list[Any]) -> Any:
    """The transfer of KV pages, where it names any."""
    found = [entry for entry in transfers if str(entry.name) == _KV and entry.keys]
    return found[0] if found else None


def _check_supported(params: Any, components: Any) -> None:
    others = sorted(entry.name for entry in components if entry.name != _FULL)
    if others:
        raise InvalidRequest(
            f"the linker stores full attention alone, the model has {', '.join(others)} too; use "
            f"--hicache-storage-backend dynamic with objectcache.connectors.sglang"
        )
    if params.mtp_draft_device_pools or params.sidecar_draft_device_pools:
        raise InvalidRequest("the linker does not store draft KV; turn speculative decoding off")


def _step_tokens_max(server_args: Any) -> int | None:
    """What SGLang computes of a prompt in one forward; None where it is not bounded."""
    size = getattr(server_args, "chunked_prefill_size", None)
    return size if isinstance(size, int) and size > 0 else None


def _tensor_parallel(params: Any) -> tuple[int, int]:
    import torch  # pyright: ignore[reportMissingImports]

    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return 0, 1
    group = params.attn_tp_cache_group or params.tp_cache_group
    return distributed.get_rank(group=group), distributed.get_world_size(group=group)


def _layers_max(params: Any, num_layers: int) -> int:
    """Layers of the pipeline rank that has the most: all of them must decide alike."""
    if params.pp_size == 1:
        return num_layers
    import torch  # pyright: ignore[reportMissingImports]

    most = torch.tensor([num_layers])
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, params.pp_cache_group)
    return int(most.item())


def _rank(params: Any, replicated: bool, tensor_parallel: tuple[int, int]) -> Rank:
    return Rank.of(
        (params.pp_rank, params.pp_size),
        (params.attn_cp_rank, params.attn_cp_size),
        (0, 1) if replicated else tensor_parallel,
    )
