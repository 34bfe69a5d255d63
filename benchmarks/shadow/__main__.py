"""`python -m benchmarks.shadow`: encoded prefixes over slow links, and what decoding them costs.

The real server behind a link of a network namespace whose rate the kernel bounds, the real fetcher,
and an engine's process. Needs root and two processors. Every byte is compared. Prints Markdown.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from benchmarks.basis.report import commit, machine
from benchmarks.figures.experiment import NotPossible
from benchmarks.shadow import ablations, automatic, interference, landing_ring, link_rates
from benchmarks.shadow.contents import Volume
from benchmarks.shadow.rig import PAPER_GBPS, Rig, rig

FULL, FULL_RING = Volume(16, 32), Volume(32, 16)  # a sixteenth of the latter is two layers
QUICK = Volume(32, 2)  # for all parts, so that everything is started once
NOT_POSSIBLE = 3  # the exit status where this machine has no namespaces
Part = Callable[[Rig, bool], Iterator[str]]


def link_part(running: Rig, is_quick: bool) -> Iterator[str]:
    """Links of four rates."""
    rates, rounds = ((10, 40), 1) if is_quick else (PAPER_GBPS, 5)
    yield link_rates.first_words(running.volume, rounds)
    yield from table(link_rates.HEADINGS, link_rates.measure(running, rates, rounds))


def automatic_part(running: Rig, is_quick: bool) -> Iterator[str]:
    """Where the client chooses."""
    rates, rounds = ((40, None), 3) if is_quick else ((*PAPER_GBPS, None), 7)
    yield f"Lossless, decoded in the engine, by turns; median of {rounds}."
    yield from table(automatic.HEADINGS, automatic.measure(running, rates, rounds))
    yield f"The same by fetchers of one worker; median of {rounds}."
    begun = rates[:1] if is_quick else rates  # three fetchers for each
    yield from table(automatic.HEADINGS, automatic.measure_fetchers(running, begun, rounds))


def interference_part(running: Rig, is_quick: bool) -> Iterator[str]:
    """Steps of an engine while prefixes come."""
    windows = interference.QUICK_WINDOWS if is_quick else interference.WINDOWS
    yield interference.first_words(windows)
    yield from table(interference.HEADINGS, interference.measure(running, windows))


def ablation_part(running: Rig, is_quick: bool) -> Iterator[str]:
    """What each idea gains."""
    rounds = 3 if is_quick else 7
    yield f"{ablations.PAPER_GBPS} Gbps over 16, lossless, median of {rounds}."
    yield from table(ablations.HEADINGS, ablations.measure(running, rounds))


def ring_part(running: Rig, is_quick: bool) -> Iterator[str]:
    """Prefixes over the landing memory."""
    rates, repeats = ((40,), 2) if is_quick else (PAPER_GBPS, 9)
    times = landing_ring.QUICK_TIMES if is_quick else landing_ring.TIMES
    volume = running.volume
    yield (
        f"Lossless, {volume.delivered_bytes >> 20} MiB in {volume.layers} layers, by turns; median "
        f"of {repeats}."
    )
    for transport in ("body", "shared_memory"):
        yield f"Into the fetcher by {transport}."
        rows = landing_ring.measure(running, rates, repeats, times, transport)
        yield from table(landing_ring.HEADINGS, rows)


PARTS: dict[str, Part] = {
    "link": link_part,
    "automatic": automatic_part,
    "interference": interference_part,
    "ablations": ablation_part,
    "ring": ring_part,
}


def volume_of(part: str, is_quick: bool) -> Volume:
    """What a part fetches."""
    if is_quick:
        return QUICK
    return FULL_RING if part == "ring" else FULL


def table(headings: Sequence[str], rows: Iterator[Sequence[str]]) -> Iterator[str]:
    """Lines of Markdown."""
    yield ""
    yield f"| {' | '.join(headings)} |"
    yield f"| {' | '.join('---' for _ in headings)} |"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; 0 whatever the figures are."""
    parser = argparse.ArgumentParser("python -m benchmarks.shadow", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small volume, for a first look")
    parser.add_argument("--only", action="append", choices=PARTS, help="this part alone")
    asked = parser.parse_args(arguments)
    try:
        for volume, names in groupby(asked.only or PARTS, lambda one: volume_of(one, asked.quick)):
            run_parts(names, volume, asked.quick)
    except NotPossible as why:
        print(f"not here: {why}")
        return NOT_POSSIBLE
    facts = ", ".join(f"{name} {value}" for name, value in machine().items())
    print(f"commit {commit()}, {facts}, load {os.getloadavg()[0]:.1f} after")
    return 0


def run_parts(names: Iterable[str], volume: Volume, is_quick: bool) -> None:
    """Print the tables of parts with one rig. Raises `NotPossible`."""
    with (
        tempfile.TemporaryDirectory(prefix="objectcache-bench-") as folder,
        rig(volume, Path(folder)) as running,
    ):
        for name in names:
            print(f"**{name}**, load {os.getloadavg()[0]:.1f} before\n", flush=True)
            for line in PARTS[name](running, is_quick):
                print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
