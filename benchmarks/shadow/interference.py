"""What an engine's steps take while prefixes are decoded, beside the same steps alone.

Windows alternate: alone, then with one of the conditions, and again, so that what else the machine
does falls on both.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.shadow.engine_steps import Loop, Window, run_window
from benchmarks.shadow.rig import OWN, SHARED, Rig

PAPER_GBPS = 40
GOAL = 1.03
HEADINGS = (
    "step",
    "prefixes are decoded",
    "mean step, of alone",
    "p99, of alone",
    "alone: mean, p99, ms",
    "delivered GB/s",
    "other threads for a layer: wakes, us",
)


@dataclass(frozen=True, slots=True)
class Windows:
    """How many of each, and how long."""

    count: int
    window_s: float


QUICK_WINDOWS, WINDOWS = Windows(1, 0.1), Windows(30, 0.3)


@dataclass(frozen=True, slots=True)
class Condition:
    """Who decodes: a fetcher by its name, or a thread of the engine's process; or nothing comes.
    The engine waits for each layer, or for the whole, as where a request is parked until then.
    """

    name: str
    fetcher: str | None
    waits_for_whole: bool = False
    comes: bool = True


CONDITIONS = (
    Condition("nothing comes: alone again", None, comes=False),
    Condition("by the fetcher, on the other processor, layer by layer", OWN),
    Condition("by the fetcher, on the other processor, waited for as a whole", OWN, True),
    Condition("by a thread of the engine's process, free to run on both", None),
    Condition("by the fetcher, on the engine's processor", SHARED),
)


def measure(rig: Rig, windows: Windows) -> Iterator[Sequence[str]]:
    """Rows of a table."""
    rig.bound(PAPER_GBPS)
    both = set(rig.processors)
    for loop in Loop:
        alone: list[Window] = []
        during: dict[str, list[Window]] = defaultdict(list)
        ratios: dict[str, list[float]] = defaultdict(list)
        rig.engine.call(run_window, loop, None, both, windows.window_s)  # warms up
        for _ in range(windows.count):
            for condition in CONDITIONS:
                before = rig.engine.call(run_window, loop, None, set(), windows.window_s)
                beside = rig.engine.call(
                    run_window,
                    loop,
                    condition.fetcher,
                    both if condition.comes else set[int](),
                    windows.window_s,
                    condition.waits_for_whole,
                )
                alone.append(before)
                during[condition.name].append(beside)
                ratios[condition.name].append(mean_s([beside]) / mean_s([before]))
        for name, taken in during.items():
            delivered = statistics.mean(one.delivered_bytes_per_s for one in taken)
            yield (
                loop.value,
                name,
                f"{statistics.median(ratios[name]):.2f}",
                f"{p99_s(taken) / p99_s(alone):.2f}",
                f"{1e3 * mean_s(alone):.2f}, {1e3 * p99_s(alone):.2f}",
                f"{delivered / 1e9:.2f}",
                of_layers(taken),
            )
    rig.bound(None)


def mean_s(windows: Sequence[Window]) -> float:
    """Of all steps."""
    return statistics.mean(step_s for one in windows for step_s in one.steps_s)


def p99_s(windows: Sequence[Window]) -> float:
    """Of all steps."""
    steps_s = sorted(step_s for one in windows for step_s in one.steps_s)
    return steps_s[min(len(steps_s) - 1, len(steps_s) * 99 // 100)]


def of_layers(windows: Sequence[Window]) -> str:
    """What the process's other threads were woken and took for a layer."""
    layers = sum(one.delivered_layers for one in windows)
    if not layers:
        return "-"
    wakes = sum(one.beside_waits for one in windows) / layers
    return f"{wakes:.1f}, {1e6 * sum(one.beside_cpu_s for one in windows) / layers:.0f}"


def first_words(windows: Windows) -> str:
    """What the table is of."""
    return (
        f"A link of {PAPER_GBPS} Gbps over 16; {windows.count} windows of {windows.window_s:g} s "
        "of each condition, each behind one alone, with a pause before. Means: the median of the "
        "windows' ratios. The server is on the other processor. Goal for the fetcher there: "
        f"{GOAL}."
    )
