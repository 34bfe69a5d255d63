"""`ObjectCacheTier`: ObjectCache as a secondary tier of vLLM's own offloading connector.

That connector keeps KV in the host's memory, and whole chunks of it in further tiers. It knows no
layers: an engine that shall begin before the last layer is there uses `connectors.vllm`. This is
for those that have the offloading connector already.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np

from objectcache.connectors.identity.model_identity import identify
from objectcache.connectors.identity.namespace import KvNamespace
from objectcache.connectors.missing_engine import missing_engine
from objectcache.connectors.store.configuration import StoreConfiguration
from objectcache.connectors.store.lossy_setting import refuse_lossy
from objectcache.connectors.store.outage import Outage
from objectcache.connectors.store.stored_chunks import match_prefix, put_chunks_absent
from objectcache.connectors.vllm.reports.engine_log import log_through_engine, start_told
from objectcache.connectors.vllm.store import Complaints, Store
from objectcache.connectors.vllm.worker.paged_layout import runs
from objectcache.payload import Bytes
from objectcache_schemas.compute_windows import WHOLE_S
from objectcache_schemas.errors import InvalidRequest, Unavailable
from objectcache_schemas.layout import KvLayout
from objectcache_schemas.limits import MIB

try:
    import vllm  # pyright: ignore[reportMissingImports]
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]
    from vllm.v1.kv_offload.base import (  # pyright: ignore[reportMissingImports]
        Locality,
        LookupResult,
        Medium,
        RequestOffloadingContext,
        get_offload_group_idx,
    )
    from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager  # pyright: ignore[reportMissingImports]
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager  # pyright: ignore[reportMissingImports]

    vllm_version: str = vllm.__version__
    device_type: str = current_platform.device_type
    storage_medium: Any = Medium.STORAGE
except ImportError as error:
    AsyncLookupManager = SecondaryTierManager = missing_engine("vllm", error)
    JobResult = Locality = LookupResult = RequestOffloadingContext = missing_engine("vllm", error)
    get_offload_group_idx = missing_engine("vllm", error)
    vllm_version = device_type = ""
    storage_medium = None

logger = logging.getLogger("objectcache.connectors.vllm_tier")
THREADS = 8  # requests to the server at once
JOBS_MAX = 1024  # under way; what is submitted beyond fails at once
HOLES_MAX = 16  # round trips of one lookup in a group with a window
DRAIN_TIMEOUT_S = 10.0  # then what is under way is given up
PIECE_BYTES_MAX = 32 * MIB  # of one put, and of its copy


class _Lookups(AsyncLookupManager):
    """Asks, in a thread of vLLM's, which of a request's chunks are stored: one round trip for a
    group with full attention, and for one with a window one for each run of stored chunks.
    """

    def __init__(
        self,
        match: Callable[[Sequence[bytes]], int],
        windows: Mapping[int, int | None],
        outage: Outage,
        tier_type: str,
    ) -> None:
        """`match` tells how many leading chunks are stored; `windows` has the chunks that a group
        needs in a run, None where it needs all from the first on.
        """
        self._match = match
        self._windows = windows
        self._outage = outage
        super().__init__(tier_type=tier_type)

    def batch_lookup(self, keys: list[bytes], req_context: Any) -> Iterable[bool]:
        """One answer a key: a key that could not be asked for counts as missing."""
        stored = set[bytes]()
        for group, window in self._windows.items():
            of_group = [key for key in keys if get_offload_group_idx(key) == group]
            stored.update(self._outage.attempt("a lookup", partial(self._of, of_group, window), []))
        return [key in stored for key in keys]

    def _of(self, keys: Sequence[bytes], window: int | None) -> list[bytes]:
        """Of a group's keys, in the order in which vLLM asks, those that are stored and of use.

        vLLM asks for windows from the end of the prompt on, and takes the first run that is long
        enough. Chunks behind the first hole of a group without a window could not be used.
        """
        stored: list[bytes] = []
        begin = 0
        for _ in range(HOLES_MAX if window is not None else 1):
            if begin >= len(keys):
                break
            matched = self._match(keys[begin:])
            stored += keys[begin : begin + matched]
            if window is not None and matched >= window:
                break
            begin += matched + 1
        return stored


class ObjectCacheTier(SecondaryTierManager):
    """Configured in `secondary_tiers`; docs/vllm.md has the line.

    Loads and stores run in threads of the tier's own; all calls return at once but `drain_jobs` and
    `shutdown`. What fails is a failed job, which vLLM computes again.
    """

    medium = storage_medium

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        locality: str | None = None,
        **settings: Any,
    ) -> None:
        """`settings` are those of `StoreConfiguration`; vLLM passes them one by one.

        Raises `InvalidRequest` naming the one that is unknown, of the wrong type, or missing.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        log_through_engine()
        with start_told("ObjectCacheTier"):
            self._start(offloading_spec, primary_kv_view, tier_type, locality, settings)

    def _start(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        locality: str | None,
        settings: Mapping[str, Any],
    ) -> None:
        self.locality = None if locality is None else Locality(locality)
        configuration = StoreConfiguration.from_mapping(settings, os.environ)
        refuse_lossy(configuration.lossy, "the tier takes blocks as they are; the connector can")
        namespace = _namespace(offloading_spec.config, configuration.weights_revision, os.environ)
        self._namespace = namespace
        self._started_with = namespace.weights_revision
        self._memory: Bytes = np.frombuffer(primary_kv_view.cast("B"), np.uint8).reshape(
            len(primary_kv_view), -1
        )
        self._configuration = configuration
        self._store = self._connect(configuration.timeout_s)
        self._asked = self._connect(configuration.lookup_timeout_s)
        self._outage = Outage(logger)
        self._threads = ThreadPoolExecutor(THREADS, f"objectcache-{tier_type}")
        self._jobs: dict[int, tuple[Any, Future[None]]] = {}
        self._lock = threading.Lock()
        self._finished: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._loading: dict[int, list[bytes]] = {}
        self._complaints = Complaints(logger, "moving chunks of KV failed")
        windows = _windows(offloading_spec.config.groups)
        self._lookups = _Lookups(self._match, windows, self._outage, tier_type)

    def _connect(self, timeout_s: float) -> Store:
        namespace = self._namespace
        layout = KvLayout(
            num_layers=1,  # the primary tier's chunks are opaque
            chunk_tokens=max(self._offloading_spec.tokens_per_block)
            * self._offloading_spec.blocks_per_chunk,
            per_layer_chunk_bytes=self._memory.shape[1],
            dtype=namespace.dtype,
            fingerprint=namespace.prefix,
        )
        return Store(self._configuration, layout, timeout_s)

    # --- vLLM's scheduler ---

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """HIT, MISS, or RETRY until the answer is there."""
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: Any) -> None:
        """Begin to store chunks of the primary tier."""
        self._submit(job_metadata, "a store", self._put)

    def submit_load(self, job_metadata: Any) -> None:
        """Begin to load chunks into the primary tier."""
        self._loading[job_metadata.job_id] = list(job_metadata.keys)
        self._submit(job_metadata, "a load", self._fetch)

    def get_finished_jobs(self) -> Iterable[Any]:
        """Jobs that ended since the last call. What was not loaded is missing for its request."""
        finished = []
        while not self._finished.empty():
            result = self._finished.get()
            finished.append(result)
            keys = self._loading.pop(result.job_id, [])
            if not result.success:
                loaded: set[Any] = set(result.successful_keys or ())
                self._lookups.mark_miss([key for key in keys if key not in loaded])
        return finished

    def on_new_request(self, req_context: Any) -> Any:
        """No wishes of its own."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        self._lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        """Send the step's lookups."""
        self._lookups.flush()

    def drain_jobs(self) -> None:
        """Return when nothing touches the primary tier's memory any more: after DRAIN_TIMEOUT_S
        what is still under way fails. That leaves nothing half written: chunks are copied into the
        primary tier when all have come, and stored all or none, out of a copy.

        vLLM asks for it only when it resets the cache, after its weights were changed, and tells a
        tier nothing else of that. So from then on chunks have names that no other engine has.
        """
        self._end_jobs()
        weights = f"{self._started_with}|{secrets.token_hex(16)}"
        self._namespace = replace(self._namespace, weights_revision=weights)

    def _end_jobs(self) -> None:
        with self._lock:
            futures = [future for _, future in self._jobs.values()]
        if wait(futures, DRAIN_TIMEOUT_S).not_done:
            self._give_up()

    def _give_up(self) -> None:
        """Fail what is under way. Its threads end by themselves, and touch no memory."""
        with self._lock:
            jobs, self._jobs = self._jobs, {}
            for job, future in jobs.values():
                future.cancel()
                self._finished.put(JobResult(job_id=job.job_id, success=False))
        self._outage.failed("a job", Unavailable("the store did not answer, jobs were given up"))
        self._threads.shutdown(wait=False)
        self._threads = ThreadPoolExecutor(THREADS, "objectcache-tier")
        logger.warning("%d jobs were given up", len(jobs))

    def shutdown(self) -> None:
        """Finish what is under way, or fail it as `drain_jobs` does, and end the threads. Repeating
        has no effect.
        """
        self._end_jobs()
        self._threads.shutdown(wait=False)
        # Closing waits for a request that a server that stands still does not answer.
        threading.Thread(target=self._store.close, daemon=True).start()
        self._asked.close()
        self._lookups.shutdown()

    # --- the tier's threads ---

    def _submit(self, job: Any, what: str, move: Callable[[Any], Any]) -> None:
        with self._lock:
            if len(self._jobs) >= JOBS_MAX:
                self._finished.put(JobResult(job_id=job.job_id, success=False))
                return
            self._jobs[job.job_id] = (job, self._threads.submit(self._run, job, what, move))

    def _run(self, job: Any, what: str, move: Callable[[Any], Any]) -> None:
        try:
            result = self._outage.call(what, partial(move, job))
        except Exception as error:  # whatever it is, the job must end
            self._complaints.add(error)
            result = JobResult(job_id=job.job_id, success=False)
        with self._lock:
            if self._is_under_way(job):
                del self._jobs[job.job_id]
                self._finished.put(result)

    def _is_under_way(self, job: Any) -> bool:
        """Whether it was not given up; with the lock held."""
        return job.job_id in self._jobs and self._jobs[job.job_id][0] is job

    @contextmanager
    def _memory_of(self, job: Any) -> Generator[Bytes]:
        """The primary tier's memory, for a job that was not given up: nothing is for the length of
        the block. Raises `Unavailable` otherwise.
        """
        with self._lock:
            if not self._is_under_way(job):
                raise Unavailable("the job was given up")
            yield self._memory

    def _match(self, keys: Sequence[bytes]) -> int:
        return match_prefix(self._asked.bucket(), self._namespace.keys(keys))

    def _put(self, job: Any) -> Any:
        keys = self._namespace.keys(list(job.keys))
        slots = [int(slot) for slot in job.chunk_ids]
        bucket = self._store.bucket()
        chunk_bytes = self._memory.shape[1]
        piece = max(1, PIECE_BYTES_MAX // chunk_bytes)
        for begin in range(0, len(keys), piece):
            with self._memory_of(job) as memory:
                chunks = memory[slots[begin : begin + piece]]  # a copy
            put_chunks_absent(bucket, keys[begin : begin + piece], chunks[:, None])
        return JobResult(job_id=job.job_id, success=True, transfer_bytes=len(keys) * chunk_bytes)

    def _fetch(self, job: Any) -> Any:
        names = list(job.keys)
        keys = self._namespace.keys(names)
        slots = [int(slot) for slot in job.chunk_ids]
        with self._store.bucket().fetch(
            keys, delivery="chunkwise", on_missing="truncate", compute_window_s=WHOLE_S
        ) as delivery:
            chunks = delivery.wait()[0]
            for first, count, slot in runs(slots[: len(chunks)]):
                with self._memory_of(job) as memory:
                    memory[slot : slot + count] = chunks[first : first + count]
        loaded = names[: len(chunks)]
        return JobResult(
            job_id=job.job_id,
            success=len(loaded) == len(names),
            successful_keys=loaded,
            transfer_bytes=chunks.nbytes,
        )

    def __repr__(self) -> str:
        return f"<ObjectCacheTier {self._namespace.prefix}, {len(self._jobs)} jobs>"


def _windows(groups: Sequence[Any]) -> dict[int, int | None]:
    """The chunks that each group needs in a run. vLLM before 0.33 does not tell a tier: then all of
    a group's chunks must be stored from the first on, which is never wrong, and finds less.
    """
    untold = [group for group in groups if not hasattr(group, "sliding_window_size_in_chunks")]
    if untold and len(groups) > 1:
        logger.warning(
            "vLLM %s does not tell which groups have a sliding window: their chunks are found only "
            "where all from the prompt's first on are stored; vLLM 0.33 tells",
            vllm_version,
        )
    return {
        group.group_id: getattr(group, "sliding_window_size_in_chunks", None) for group in groups
    }


def _namespace(config: Any, weights_revision: str, environment: Mapping[str, str]) -> KvNamespace:
    """Everything that vLLM tells a tier about its chunks is part of their keys, and what the
    model's files on this host tell of its weights and configuration.
    """
    if config.parallel.rank != 0:
        raise InvalidRequest("a tier belongs to the scheduler, whose rank is 0")
    parallel = config.parallel
    groups = [(group.tokens_per_block, group.layer_names) for group in config.groups]
    layout = (
        f"vllm-tier/{groups}/{asdict(config.cache)}/{config.worker_kv_bytes_per_block}"
        f"/tp={parallel.tp_size}/pp={parallel.pp_size}/pcp={parallel.pcp_size}"
        f"/dcp={parallel.dcp_size}/world={parallel.world_size}/{config.kv_cache_layout}"
        f"/canonical={config.canonical_layout}/replicated={config.replicated_layout}/{device_type}"
    )
    identity = identify(config.model.name, weights_revision, environment)
    return KvNamespace(
        model=identity.model,
        weights_revision=identity.weights_revision,
        dtype=config.model.dtype,
        layout=layout,
        hashing=f"vllm-{vllm_version}",
        configuration=identity.configuration,
    )
