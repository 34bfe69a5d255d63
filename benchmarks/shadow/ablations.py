"""ShadowServe's figure 14 in our terms: the fetcher with one thing left out at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from benchmarks.shadow.contents import LOSSLESS
from benchmarks.shadow.deliveries import Fetched, Way
from benchmarks.shadow.engine_process import fetch
from benchmarks.shadow.link_rates import COMPUTE_S, median
from benchmarks.shadow.rig import Rig

PAPER_GBPS = 20
HEADINGS = ("what", "first layer, ms", "last layer, ms", "TTFT, ms", "TTFT of all of it")
WAYS = {
    Way.FETCHER: "all of it",
    Way.FETCHER_WHOLE: "not layer by layer: the engine begins with the whole",
    Way.FETCHER_BY_LAYER: "one layer at a time: asked for, fetched, decoded, then the next",
    Way.FETCHER_REGISTERS: "memory made and registered for each fetch",
}


def measure(rig: Rig, rounds: int) -> Iterator[Sequence[str]]:
    """Rows of a table."""
    rig.bound(PAPER_GBPS)
    fetched: dict[Way, list[Fetched]] = defaultdict(list)
    for number in range(1 + rounds):
        for way in WAYS:
            one = rig.engine.call(fetch, LOSSLESS, way)
            if number:
                fetched[way].append(one)
    rig.bound(None)
    whole_s = median(fetched[Way.FETCHER], lambda one: one.ttft_s(COMPUTE_S))
    for way, name in WAYS.items():
        runs = fetched[way]
        ttft_s = median(runs, lambda one: one.ttft_s(COMPUTE_S))
        yield (
            name,
            f"{1e3 * median(runs, lambda one: one.first_s):.0f}",
            f"{1e3 * median(runs, lambda one: one.last_s):.0f}",
            f"{1e3 * ttft_s:.0f}",
            f"{ttft_s / whole_s:.2f}",
        )
