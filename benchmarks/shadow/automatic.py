"""What chooses encodings by itself, a client or a fetcher, beside deliveries plain and encoded.

Over slow links and a fast one, all of one bucket, whose chunks are stored encoded: for plain
deliveries the server decodes them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack

from benchmarks.shadow.contents import LOSSLESS
from benchmarks.shadow.deliveries import Fetched, Way
from benchmarks.shadow.engine_process import fetch, fetch_over, forget_rates
from benchmarks.shadow.link_rates import median
from benchmarks.shadow.rig import SCALE, Rig

LEARNING = 3  # deliveries before those that count
HEADINGS = (
    "link, Gbps x 16",
    "plain, last layer, ms",
    "encoded, of plain",
    "auto, of plain (goal where encoding does not pay: 1.03)",
    "auto: wire MiB",
)
WAYS = {"plain": Way.SERVER, "encoded": Way.ENGINE, "auto": Way.AUTO}
FETCHERS = {"plain": "", "encoded": "planes-zstd", "auto": "auto"}  # their fetcher.encodings


def measure(rig: Rig, rates: Sequence[int | None], rounds: int) -> Iterator[Sequence[str]]:
    """Rows of a table; a rate of None is a link without a bound."""
    for paper_gbps in rates:
        rig.bound(paper_gbps)
        rig.engine.call(forget_rates)
        yield _row(paper_gbps, rounds, lambda name: rig.engine.call(fetch, LOSSLESS, WAYS[name]))
    rig.bound(None)


def measure_fetchers(rig: Rig, rates: Sequence[int | None], rounds: int) -> Iterator[Sequence[str]]:
    """The same of fetchers, each of which is begun for one rate."""
    for paper_gbps in rates:
        rig.bound(paper_gbps)
        with ExitStack() as stack:
            begun = {
                name: stack.enter_context(rig.fetcher(f"fetcher.encodings={encodings}"))
                for name, encodings in FETCHERS.items()
            }
            urls = {name: fetcher.url for name, fetcher in begun.items()}
            yield _row(paper_gbps, rounds, _over(rig, urls))
    rig.bound(None)


def _over(rig: Rig, urls: Mapping[str, str]) -> Callable[[str], Fetched]:
    return lambda name: rig.engine.call(fetch_over, LOSSLESS, urls[name])


def _row(paper_gbps: int | None, rounds: int, fetch_by: Callable[[str], Fetched]) -> Sequence[str]:
    fetched: dict[str, list[Fetched]] = defaultdict(list)
    for number in range(LEARNING + rounds):
        for name in WAYS:
            one = fetch_by(name)
            if number >= LEARNING:
                fetched[name].append(one)
    plain_s, encoded_s, auto_s = (median(fetched[name], lambda one: one.last_s) for name in WAYS)
    wire_bytes = median(fetched["auto"], lambda one: one.wire_bytes)
    return (
        "no bound" if paper_gbps is None else f"{paper_gbps} / {SCALE}",
        f"{1e3 * plain_s:.0f}",
        f"{encoded_s / plain_s:.2f}",
        f"{auto_s / plain_s:.2f}",
        f"{wire_bytes / (1 << 20):.1f}",
    )
