"""Replaying requests: match, fetch the matched prefix layer by layer, check it, put the rest."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

from objectcache_laboratory.replay.kv_bytes import Bytes, KvBytes
from objectcache_laboratory.replay.trace import TraceRequest
from objectcache_laboratory.replay.workload import chunk_keys, tokens_of
from objectcache_schemas.errors import ObjectCacheError
from objectcache_schemas.layout import KvLayout
from objectcache_schemas.limits import MIB

PUT_BYTES_MAX = 128 * MIB  # generated and sent at once, for each concurrent request
PUT_CHUNKS_MAX = 1024  # below limits.put_chunks_max


class ReplayDelivery(Protocol):
    """What a replay needs of a delivery."""

    @property
    def arrivals_s(self) -> Sequence[float | None]:
        """Seconds from the fetch to each layer being usable."""
        ...

    def wait_layer(self, layer: int) -> Bytes:
        """uint8[chunk_count, per_layer_chunk_bytes]."""
        ...


class ReplayBucket(Protocol):
    """What a replay needs of a bucket."""

    def match(self, keys: Sequence[str], /) -> int:
        """The longest stored prefix."""
        ...

    def fetch(
        self, keys: Sequence[str], /, *, delivery: str
    ) -> AbstractContextManager[ReplayDelivery]:
        """Begin a delivery."""
        ...

    def put(self, keys: Sequence[str], chunks: Bytes, /, *, parent_key: str | None) -> object:
        """Store chunks that follow another."""
        ...


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """What became of one request; times that did not happen are None."""

    block_count: int
    token_count: int
    matched_blocks: int = 0
    matched_tokens: int = 0
    fetched_bytes: int = 0
    put_bytes: int = 0
    wrong_bytes: int = 0
    match_s: float | None = None
    first_layer_s: float | None = None
    last_layer_s: float | None = None
    put_s: float | None = None
    late_s: float = 0.0  # begun after its arrival in the trace, because others were in the way
    begun_s: float = 0.0  # of a monotonic clock
    ended_s: float = 0.0
    error: ObjectCacheError | None = None


@dataclass(frozen=True, slots=True)
class _Fetched:
    wrong_bytes: int
    first_layer_s: float | None
    last_layer_s: float | None


class Replay:
    """A layout's requests against one bucket."""

    def __init__(self, bucket: ReplayBucket, layout: KvLayout) -> None:
        self._bucket = bucket
        self._layout = layout
        self._bytes = KvBytes(layout)

    def request(self, request: TraceRequest, late_s: float = 0.0) -> RequestOutcome:
        """Replay one request; an error of the store is an outcome, not raised."""
        blocks, tokens = len(request.hash_ids), request.input_length
        begun_s = time.monotonic()
        try:
            outcome = self._replayed(request, late_s)
        except ObjectCacheError as error:
            outcome = RequestOutcome(blocks, tokens, late_s=late_s, error=error)
        return replace(outcome, begun_s=begun_s, ended_s=time.monotonic())

    def _replayed(self, request: TraceRequest, late_s: float) -> RequestOutcome:
        keys = chunk_keys(self._layout, request)
        matched, match_s = _timed(lambda: self._bucket.match(keys))
        fetched = self._fetch(keys[:matched]) if matched else _Fetched(0, None, None)
        missing = keys[matched:]
        put_s = self._put(keys, matched) if missing else None
        chunk_bytes = self._layout.chunk_bytes
        return RequestOutcome(
            block_count=len(keys),
            token_count=request.input_length,
            matched_blocks=matched,
            matched_tokens=tokens_of(request, matched, self._layout.chunk_tokens),
            fetched_bytes=matched * chunk_bytes,
            put_bytes=len(missing) * chunk_bytes,
            wrong_bytes=fetched.wrong_bytes,
            match_s=match_s,
            first_layer_s=fetched.first_layer_s,
            last_layer_s=fetched.last_layer_s,
            put_s=put_s,
            late_s=late_s,
        )

    def _fetch(self, keys: Sequence[str]) -> _Fetched:
        """Take all layers first and check them then, so that checking delays no arrival."""
        with self._bucket.fetch(keys, delivery="layerwise") as delivery:
            layers = [delivery.wait_layer(n) for n in range(self._layout.num_layers)]
            wrong_bytes = sum(
                self._bytes.wrong_bytes(keys, layer, kv) for layer, kv in enumerate(layers)
            )
            arrivals_s = delivery.arrivals_s
            return _Fetched(wrong_bytes, arrivals_s[0], arrivals_s[-1])

    def _put(self, keys: Sequence[str], matched: int) -> float:
        """Store the chunks behind what is stored, in the prefix's order; seconds, without making
        the bytes.
        """
        chunks_each = max(1, min(PUT_CHUNKS_MAX, PUT_BYTES_MAX // self._layout.chunk_bytes))
        total_s = 0.0
        for first in range(matched, len(keys), chunks_each):
            some = keys[first : first + chunks_each]
            parent = keys[first - 1] if first else None
            chunks = self._bytes.chunks(some)
            begin_s = time.perf_counter()
            self._bucket.put(some, chunks, parent_key=parent)
            total_s += time.perf_counter() - begin_s
        return total_s


def replay_all(
    replay: Replay,
    requests: Sequence[TraceRequest],
    concurrency: int,
    speed: float,
    on_outcome: Callable[[RequestOutcome], None] = lambda _: None,
) -> list[RequestOutcome]:
    """Replay in the trace's order, `concurrency` at a time; outcomes in the same order.

    `speed` 0 begins each request as soon as there is room; otherwise not before its arrival in the
    trace, divided by `speed`.
    """
    begin_s = time.monotonic()
    given_up = threading.Event()

    def at_its_time(request: TraceRequest) -> RequestOutcome:
        due_s = begin_s + due_after_s(request, requests[0], speed)
        given_up.wait(max(0.0, due_s - time.monotonic()))
        late_s = max(0.0, time.monotonic() - due_s) if speed else 0.0
        outcome = replay.request(request, late_s)
        on_outcome(outcome)
        return outcome

    with ThreadPoolExecutor(concurrency, thread_name_prefix="replay") as pool:
        pending = [pool.submit(at_its_time, request) for request in requests]
        try:
            return [future.result() for future in pending]
        except BaseException:
            given_up.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def due_after_s(request: TraceRequest, first: TraceRequest, speed: float) -> float:
    """Seconds after the beginning at which a request arrives; 0 without a speed."""
    return (request.arrival_s - first.arrival_s) / speed if speed else 0.0


def _timed(call: Callable[[], int]) -> tuple[int, float]:
    begin_s = time.perf_counter()
    result = call()
    return result, time.perf_counter() - begin_s
