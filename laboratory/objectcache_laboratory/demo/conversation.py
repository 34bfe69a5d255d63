"""A conversation whose turns are answered three ways: recomputed, fetched chunkwise, layerwise.

Turn 1 prefills everything and stores the whole chunks. A later turn's prompt is all that was said
before and a new question: its prefix is matched, fetched and reused, and only the rest is computed;
then its new chunks are stored too. Each way is measured in this process, on the same tokens, after
it ran once to warm up: recomputation once, because it is slow; both reuses by turns, and the median
counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from objectcache_laboratory.demo.results import LayerEvents, ReuseMeasurement, TurnMeasurement
from objectcache_laboratory.reference_engine.engine import (
    PrefillResult,
    ReferenceEngine,
    relative_difference,
)
from objectcache_laboratory.reference_engine.kv_chunks import LocalKv, to_chunks
from objectcache_laboratory.reference_engine.timeline import LayerTiming

if TYPE_CHECKING:
    from objectcache import KvBucket

Bytes = npt.NDArray[np.uint8]
Notify = Callable[[str], None]

DELIVERIES = ("chunkwise", "layerwise")
REUSE_RUNS = 3  # measured of each way; odd, so that the median is a run
SLOW_RUNS = 1  # over the slow link, where a run takes longer and varies less


@dataclass(frozen=True, slots=True)
class FetchPath:
    """One way from the server to this process, and the bucket seen over it."""

    name: str
    bucket: KvBucket


class DemoConversation:
    """What was said so far, and what of its KV is stored."""

    def __init__(
        self,
        engine: ReferenceEngine,
        paths: Sequence[FetchPath],
        chunk_tokens: int,
        answer_tokens: int,
        notify: Notify,
    ) -> None:
        """`paths` lead to one bucket, empty at first; puts and matches take the first of them.

        `notify` is told what happens next, in a few words.
        """
        self._engine = engine
        self._paths = paths
        self._bucket = paths[0].bucket
        self._chunk_tokens = chunk_tokens
        self._answer_tokens = answer_tokens
        self._notify = notify
        self._said = b""
        self._turn = 0
        self._stored: Bytes | None = None  # uint8[N, L, S], our copy of what was put

    def turn(self, text: bytes, slow_paths: Sequence[FetchPath] = ()) -> TurnMeasurement:
        """Say `text`, measure and check the answer, and store what is new.

        `slow_paths` lead to buckets in which the prefix is put before it is fetched, layerwise.
        """
        self._turn += 1
        prompt = self._said + text
        keys = self._reusable_keys(prompt)
        matched = self._bucket.match(keys)
        for path in slow_paths if matched else ():
            assert self._stored is not None
            path.bucket.put(keys[:matched], self._stored[:matched])
        measured = self._reused(prompt, matched, slow_paths) if matched else self._computed(prompt)
        self._said = prompt + bytes(measured.answer)
        return measured

    def _computed(self, prompt: bytes) -> TurnMeasurement:
        """A turn without a stored prefix."""
        self._notify("warming up")
        self._engine.prefill(prompt)
        ttft_s, result = self._recompute(prompt)
        answer = self._answer(result)
        return TurnMeasurement(
            turn=self._turn,
            prompt_tokens=len(prompt),
            hit_tokens=0,
            fetched_bytes=0,
            stored_chunks=self._store(prompt, answer, result, 0),
            recompute_ttft_s=ttft_s,
            answer=answer,
            recomputed_answer=answer,
        )

    def _reused(
        self, prompt: bytes, matched: int, slow_paths: Sequence[FetchPath]
    ) -> TurnMeasurement:
        """A turn whose first `matched` chunks are stored."""
        local = self._local_reuse(prompt, matched)
        window_s = statistics.mean(timing.compute_s for timing in local.timeline)
        ways = [(path, delivery) for path in self._paths for delivery in DELIVERIES]
        reuses, result = self._measured_reuses(ways, REUSE_RUNS, prompt, window_s, local)
        slow_ways = [(path, "layerwise") for path in slow_paths]
        slow_reuses, _ = self._measured_reuses(slow_ways, SLOW_RUNS, prompt, window_s, local)
        answer = self._answer(result)
        stored_chunks = self._store(prompt, answer, result, matched)
        recompute_ttft_s, recomputed = self._recompute(prompt)
        return TurnMeasurement(
            turn=self._turn,
            prompt_tokens=len(prompt),
            hit_tokens=matched * self._chunk_tokens,
            fetched_bytes=matched * self._bucket.layout.chunk_bytes,
            stored_chunks=stored_chunks,
            recompute_ttft_s=recompute_ttft_s,
            reuses=reuses,
            slow_reuses=slow_reuses,
            logits_difference=relative_difference(result.logits, recomputed.logits),
            answer=answer,
            recomputed_answer=self._answer(recomputed),
        )

    def _recompute(self, prompt: bytes) -> tuple[float, PrefillResult]:
        self._notify("recomputing the whole prompt")
        start_s = time.perf_counter()
        result = self._engine.prefill(prompt)
        return time.perf_counter() - start_s, result

    def _local_reuse(self, prompt: bytes, matched: int) -> PrefillResult:
        """The same reuse with the KV kept in this process; also the arithmetic's warm-up."""
        assert self._stored is not None
        prefix_tokens = matched * self._chunk_tokens
        source = LocalKv(self._stored[:matched])
        return self._engine.prefill_suffix(
            source, prompt[prefix_tokens:], prefix_tokens=prefix_tokens
        )

    def _measured_reuses(
        self,
        ways: Sequence[tuple[FetchPath, str]],
        count: int,
        prompt: bytes,
        window_s: float,
        local: PrefillResult,
    ) -> tuple[tuple[ReuseMeasurement, ...], PrefillResult]:
        """Paths with deliveries, so many runs of each, and what the last run left."""
        runs: list[list[ReuseMeasurement]] = [[] for _ in ways]
        result = local
        for run in range(1 + count):
            self._notify(f"fetching the prefix, run {run} of {count}")
            for way_runs, (path, delivery) in zip(runs, ways, strict=True):
                measured, result = self._fetch(path, delivery, prompt, window_s, local)
                way_runs.append(measured)
        return tuple(median_after_warm_up(way_runs) for way_runs in runs), result

    def _fetch(
        self,
        path: FetchPath,
        delivery_mode: str,
        prompt: bytes,
        window_s: float,
        local: PrefillResult,
    ) -> tuple[ReuseMeasurement, PrefillResult]:
        start_s = time.perf_counter()
        keys = self._reusable_keys(prompt)
        matched = path.bucket.match(keys)
        prefix_tokens = matched * self._chunk_tokens
        fetch_start_s = time.perf_counter()
        with path.bucket.fetch(
            keys[:matched], delivery=delivery_mode, compute_window_s=window_s
        ) as delivery:
            result = self._engine.prefill_suffix(
                delivery, prompt[prefix_tokens:], prefix_tokens=prefix_tokens
            )
            end_s = time.perf_counter()
            measured = ReuseMeasurement(
                path=path.name,
                delivery=delivery.mode,
                transport=delivery.transport,
                ttft_s=end_s - start_s,
                fetch_start_s=fetch_start_s - start_s,
                layers=layer_events(result.timeline, delivery.arrivals_s, fetch_start_s, start_s),
                wire_bytes=delivery.wire_bytes or delivery.delivered_bytes,
                bytes_identical=self._holds_what_was_put(delivery.wait_layer, matched),
                logits_identical=result.logits.tobytes() == local.logits.tobytes(),
            )
        return measured, result

    def _holds_what_was_put(self, wait_layer: Callable[[int], Bytes], matched: int) -> bool:
        stored = self._stored
        assert stored is not None
        return all(
            np.array_equal(wait_layer(layer), stored[:matched, layer])
            for layer in range(stored.shape[1])
        )

    def _answer(self, result: PrefillResult) -> tuple[int, ...]:
        self._notify("generating an answer")
        first = result.next_token
        return (first, *self._engine.decode(result.kv, [first], self._answer_tokens - 1))

    def _store(
        self, prompt: bytes, answer: Sequence[int], result: PrefillResult, matched: int
    ) -> int:
        """Put the whole chunks that are not stored yet, those of the answer included."""
        said = (prompt + bytes(answer))[: result.kv.length]
        chunks = to_chunks(result.kv, self._chunk_tokens, first_chunk=matched)
        self._notify(f"storing {chunks.shape[0]} chunks")
        if chunks.shape[0]:
            keys = self._bucket.chunk_keys(said)
            parent = keys[matched - 1] if matched else None
            self._bucket.put(keys[matched:], chunks, parent_key=parent)
        self._remember(chunks, matched)
        return len(chunks)

    def _remember(self, chunks: Bytes, matched: int) -> None:
        known = chunks[:0] if self._stored is None else self._stored[:matched]
        self._stored = np.concatenate([known, chunks])

    def _reusable_keys(self, prompt: bytes) -> list[str]:
        """Keys of the chunks before the last token, which must be computed to get its logits."""
        return self._bucket.chunk_keys(prompt[:-1])


def median_after_warm_up(runs: Sequence[ReuseMeasurement]) -> ReuseMeasurement:
    """The run of median time but for the first one; identical only if all runs were."""
    measured = sorted(runs[1:], key=lambda run: run.ttft_s)
    return replace(
        measured[len(measured) // 2],
        bytes_identical=all(run.bytes_identical for run in runs),
        logits_identical=all(run.logits_identical for run in runs),
    )


def layer_events(
    timeline: Sequence[LayerTiming],
    arrivals_s: Sequence[float | None],
    fetch_start_s: float,
    start_s: float,
) -> tuple[LayerEvents, ...]:
    """The engine's and the delivery's times on one axis that begins at `start_s`.

    `arrivals_s` count from `fetch_start_s`.
    """
    return tuple(
        LayerEvents(
            layer=timing.layer,
            arrival_s=_arrival_s(arrival_s, timing, fetch_start_s) - start_s,
            wait_start_s=timing.wait_start_s - start_s,
            compute_start_s=timing.ready_s - start_s,
            compute_end_s=timing.compute_end_s - start_s,
        )
        for timing, arrival_s in zip(timeline, arrivals_s, strict=True)
    )


def _arrival_s(arrival_s: float | None, timing: LayerTiming, fetch_start_s: float) -> float:
    # A layer that was computed has arrived, so its arrival is known.
    assert arrival_s is not None, timing.layer
    return fetch_start_s + arrival_s
