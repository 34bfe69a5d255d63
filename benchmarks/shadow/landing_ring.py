"""A prefix of many times a fetcher's landing memory, which goes round in it, beside one that fits.

A fetcher for each size of the memory, by turns. In bodies, over a link that the kernel bounds; or
the storage server writes to the fetcher's shared memory, as fast as its scheduler lets it.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

from benchmarks.shadow.contents import LOSSLESS
from benchmarks.shadow.deliveries import Fetched
from benchmarks.shadow.engine_process import fetch_over
from benchmarks.shadow.fetcher_memory import FetcherMemory, taken_memory
from benchmarks.shadow.link_rates import COMPUTE_S, median
from benchmarks.shadow.rig import SCALE, Fetcher, Rig
from objectcache.deliveries.begun_fetch import BODY
from objectcache.landing.memory_file import file_bytes_for

TIMES, QUICK_TIMES = (1, 4, 16), (1, 8)  # the prefix, of the landing memory
LOOK_S = 0.01
HEADINGS = (
    "link, Gbps x 16",
    "prefix, of the landing memory",
    "first layer, ms",
    "last layer, ms",
    "TTFT, ms",
    "delivered GB/s",
    "of one that fits",
    "landing memory, MiB",
    "mapped of it, MiB",
    "own memory, more than before, MiB",
)


def measure(
    rig: Rig, rates: Sequence[int], rounds: int, sizes: Sequence[int], transport: str = BODY
) -> Iterator[Sequence[str]]:
    """Rows of a table; `rates` are the paper's, in Gbps, `transport` is the fetchers', and `sizes`
    say how many times their landing memory the prefix is; the first is 1.
    """
    bound = rig.bound if transport == BODY else rig.cap
    with ExitStack() as stack:
        fetchers = {
            times: stack.enter_context(
                rig.fetcher(
                    f"relay.landing_bytes={landing_bytes(rig, times)}",
                    f"relay.transport={transport}",
                )
            )
            for times in sizes
        }
        memory = {times: _memory(rig, bound, fetcher) for times, fetcher in fetchers.items()}
        for paper_gbps in rates:
            bound(paper_gbps)
            fetched: dict[int, list[Fetched]] = defaultdict(list)
            for number in range(1 + rounds):
                for times, fetcher in fetchers.items():
                    one = rig.engine.call(fetch_over, LOSSLESS, fetcher.url)
                    if number:  # the first warms up
                        fetched[times].append(one)
            yield from _rows(rig, paper_gbps, fetched, memory)
    bound(None)


def landing_bytes(rig: Rig, times: int) -> int:
    """Memory that the prefix is so many times as large as."""
    return file_bytes_for(rig.volume.delivered_bytes // times)


def _memory(rig: Rig, bound: Callable[[int | None], None], fetcher: Fetcher) -> FetcherMemory:
    """At most, over a slow link, and of its own above what it had after one such delivery."""
    bound(10)
    rig.engine.call(fetch_over, LOSSLESS, fetcher.url)
    engine_pid = rig.engine.pid
    before = taken_memory(fetcher.pid, engine_pid)
    most = [FetcherMemory(0, 0)]
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(LOOK_S):
            most[0] = most[0].most(taken_memory(fetcher.pid, engine_pid))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        rig.engine.call(fetch_over, LOSSLESS, fetcher.url)
    finally:
        ended.set()
        looking.join()
    return FetcherMemory(most[0].own_bytes - before.own_bytes, most[0].landing_bytes)


def _rows(
    rig: Rig,
    paper_gbps: int,
    fetched: dict[int, list[Fetched]],
    memory: dict[int, FetcherMemory],
) -> Iterator[Sequence[str]]:
    whole_s = median(fetched[1], lambda one: one.last_s)
    for times, runs in fetched.items():
        last_s = median(runs, lambda one: one.last_s)
        yield (
            f"{paper_gbps} / {SCALE}",
            "fits" if times == 1 else f"{times} times",
            f"{1e3 * median(runs, lambda one: one.first_s):.1f}",
            f"{1e3 * last_s:.1f}",
            f"{1e3 * median(runs, lambda one: one.ttft_s(COMPUTE_S)):.1f}",
            f"{rig.volume.delivered_bytes / last_s / 1e9:.3f}",
            f"{whole_s / last_s:.3f}",
            f"{landing_bytes(rig, times) / (1 << 20):.1f}",
            f"{memory[times].landing_bytes / (1 << 20):.1f}",
            f"{memory[times].own_bytes / (1 << 20):.1f}",
        )
