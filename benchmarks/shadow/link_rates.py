"""What a prefix takes over links of several rates, by what is stored and who decodes it."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from benchmarks.shadow.contents import CONTENTS, LOSSLESS, PLAIN, Content, Volume
from benchmarks.shadow.deliveries import Fetched, Way
from benchmarks.shadow.engine_process import fetch
from benchmarks.shadow.rig import SCALE, Rig, link_rate

COMPUTE_S = 0.005  # of a layer, given: an engine that computes less than a link takes
DELIVERED_GOAL = 0.95
HEADINGS = (
    "link, Gbps x 16",
    "stored as",
    "decoded",
    "first layer, ms",
    "last layer, ms",
    "TTFT, ms",
    "delivered GB/s",
    "of ratio x link",
    "wire MiB",
    "first layer later than plain, ms (goal)",
)
Cases = dict[tuple[Content, Way], list[Fetched]]


def cases() -> Iterator[tuple[Content, Way]]:
    """What is measured at each rate."""
    for content in CONTENTS:
        yield content, Way.ENGINE
        yield content, Way.FETCHER
        if content is not PLAIN:
            yield content, Way.WHOLE


def measure(rig: Rig, rates: Sequence[int], rounds: int) -> Iterator[Sequence[str]]:
    """Rows of a table; `rates` are the paper's, in Gbps."""
    for paper_gbps in rates:
        rig.bound(paper_gbps)
        fetched: Cases = defaultdict(list)
        for number in range(1 + rounds):
            for content, way in cases():
                one = rig.engine.call(fetch, content, way)
                if number:  # the first warms up
                    fetched[content, way].append(one)
        yield from _rows(rig, paper_gbps, fetched)
    rig.bound(None)


def _rows(rig: Rig, paper_gbps: int, fetched: Cases) -> Iterator[Sequence[str]]:
    rate = link_rate(paper_gbps)
    plain_bytes = median(fetched[PLAIN, Way.ENGINE], lambda one: one.wire_bytes)
    for (content, way), runs in fetched.items():
        last_s = median(runs, lambda one: one.last_s)
        wire_bytes = median(runs, lambda one: one.wire_bytes)
        delivered = rig.volume.delivered_bytes / last_s
        # Of the kernel's counts, so that headers are in neither.
        ratio = plain_bytes / wire_bytes
        yield (
            f"{paper_gbps} / {SCALE}",
            content.name,
            "-" if content is PLAIN and way is Way.ENGINE else way.value,
            f"{1e3 * median(runs, lambda one: one.first_s):.0f}",
            f"{1e3 * last_s:.0f}",
            f"{1e3 * median(runs, lambda one: one.ttft_s(COMPUTE_S)):.0f}",
            f"{delivered / 1e9:.3f}",
            f"{delivered / (ratio * rate):.2f}",
            f"{wire_bytes / (1 << 20):.1f}",
            _lateness(rig, rate, content, way, fetched),
        )


def _lateness(rig: Rig, rate: float, content: Content, way: Way, fetched: Cases) -> str:
    """The goal: at most a fragment's time later than plain by the same way."""
    if content is not LOSSLESS or way is Way.WHOLE:
        return ""
    plain_s, own_s = (
        median(fetched[one, way], lambda fetched: fetched.first_s) for one in (PLAIN, content)
    )
    return f"{1e3 * (own_s - plain_s):+.0f} ({1e3 * rig.fragment_bytes / rate:.0f})"


def median(runs: Sequence[Fetched], of: Callable[[Fetched], float]) -> float:
    """Of one figure of all runs."""
    return statistics.median(map(of, runs))


def first_words(volume: Volume, rounds: int) -> str:
    """What the table is of."""
    return (
        f"{volume.delivered_bytes / (1 << 20):.0f} MiB of bfloat16 in {volume.layers} layers, "
        f"median of {rounds}; rates are the paper's over {SCALE}. Wire bytes: the kernel's count, "
        f"headers and all. TTFT is modelled: {1e3 * COMPUTE_S:g} ms a layer, begun when the layer "
        f"is usable. Goals: {DELIVERED_GOAL} of ratio x link; the first layer at most one "
        "fragment later than plain."
    )
