"""What one decision of the dispatch library costs: both workers and the route, reserved.

Processor time of the thread, without garbage collection, in clusters of nodes with
8 GPUs each.
"""

from __future__ import annotations

import gc
import random
import time
from collections import deque
from collections.abc import Iterator

from benchmarks.basis.bench import Bench
from benchmarks.basis.measure import Row
from objectcache_dispatch import (
    POLICIES,
    ClusterDispatcher,
    DispatchRequest,
    DispatchSettings,
    symmetric,
)

GROUP = "Dispatching"
CLUSTERS = ((48, 96, 50.0), (417, 833, 100.0))  # nodes for prefill, for decode; goal in us
REQUESTS, QUICK_REQUESTS, RUNNING = 3000, 700, 600
ARRIVAL_S = 1e-4
SEED = 1
LAYERS, TOKEN_LAYER_BYTES, CHUNK_TOKENS = 61, 656, 64  # DeepSeek-V3.2 in FP8
BETA_TOKENS = 200_000
SCAN_S_PER_WORKER, CALL_S, CALLS = 3e-9, 1e-6, 30  # of numpy: its loops, and calls of them


def measure_dispatching(bench: Bench) -> Iterator[Row]:
    """Rows for each policy and size of cluster."""
    count = QUICK_REQUESTS if bench.scale.is_quick else REQUESTS
    for prefill, decode, goal_us in CLUSTERS:
        for policy in POLICIES:
            yield _row(prefill, decode, policy, goal_us, count)


def _requests(count: int) -> Iterator[DispatchRequest]:
    chooser = random.Random(SEED)
    for number in range(count):
        chunks = chooser.randrange(8, 1024)
        layer_bytes = chunks * CHUNK_TOKENS * TOKEN_LAYER_BYTES
        yield DispatchRequest(
            f"r{number}",
            chunks * CHUNK_TOKENS,
            chooser.randrange(50, 900),
            layer_bytes * LAYERS,
            layer_bytes,
            LAYERS,
            compute_window_s=0.004,
            chunk_bytes=CHUNK_TOKENS * TOKEN_LAYER_BYTES * LAYERS,
        )


def _row(prefill: int, decode: int, policy: str, goal_us: float, count: int) -> Row:
    dispatcher = ClusterDispatcher(
        symmetric(prefill, decode), DispatchSettings(BETA_TOKENS), POLICIES[policy]
    )
    running, samples = deque[str](), list[float]()
    gc.collect()
    gc.disable()
    try:
        for number, request in enumerate(_requests(count)):
            now_s = number * ARRIVAL_S
            begun_s = time.thread_time()
            decision = dispatcher.select(request, now_s)
            samples.append(1e6 * (time.thread_time() - begun_s))
            assert decision is not None
            running.append(request.name)
            if len(running) > RUNNING:
                dispatcher.completed(running.popleft(), now_s)
    finally:
        gc.enable()
    workers = 8 * (prefill + decode)
    by_hand_us = 1e6 * (CALLS * CALL_S + SCAN_S_PER_WORKER * workers)
    return Row(
        group=GROUP,
        name=f"{policy}, {workers:,} workers",
        unit="us",
        samples=tuple(samples),
        ratio=sorted(samples)[len(samples) // 2] / goal_us,
        ratio_of=f"the median, to {goal_us:g} us",
        goal="at most 1",
        by_hand=f"{CALLS} calls of numpy and three scans of all workers: {by_hand_us:.0f} us",
    )
