"""What figure 16 had to reach, whether it did, and which of its rows are not to be trusted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.figures.experiments.workload_rows import (
    ALL,
    CALIBRATED,
    DYNAMIC,
    EQUAL,
    RATE_GOAL,
    WorkloadRow,
)

BELOW_EQUAL = {"A": 1.76, "B": 1.77, "C": 1.24}  # the paper's, of calibrated_stall_opt
DYNAMIC_OF_CALIBRATED = 0.6


def workload_notes(rows: Sequence[WorkloadRow], epoch_s: float, reruns_max: int) -> list[str]:
    """The goals of each workload, then the rows of runs that were not good."""
    totals = {(row.workload, row.policy): row for row in rows if row.request == ALL}
    lines: list[str] = []
    for workload in dict.fromkeys(row.workload for row in rows):
        judged = (totals[workload, policy] for policy in (EQUAL, CALIBRATED, DYNAMIC))
        lines += goal_notes(workload, *judged)
    return lines + [
        f"{row.workload}, {row.policy}: {problem}"
        for row in totals.values()
        for problem in _problems(row, epoch_s, reruns_max)
    ]


def goal_notes(
    workload: str, equal: WorkloadRow, calibrated: WorkloadRow, dynamic: WorkloadRow
) -> list[str]:
    """Both goals of a workload, by the added times over a base without epochs."""
    added = [row.added_ms or 0.0 for row in (equal, calibrated, dynamic)]
    wait_ms = (equal.base_ms or 0.0) - (dynamic.base_ms or 0.0)
    below = (added[0] + wait_ms) / (added[1] + wait_ms)
    of_calibrated = added[2] / (added[1] + wait_ms)
    goal = BELOW_EQUAL[workload]
    model = (equal.model_added_ms or 0.0) / (calibrated.model_added_ms or 1.0)
    paper = calibrated.paper_below_equal or 0.0
    return [
        f"{workload}: equal over calibrated_stall_opt {below:.3f}: {_met(below >= goal)} (goal at "
        f"least {goal}; the overlap model's own {model:.4f}, the paper's unrounded {paper:.4f}; "
        f"ours over a base that waits for an epoch too {added[0] / added[1]:.3f})",
        f"{workload}: stall_dynamic over calibrated_stall_opt {of_calibrated:.3f}: "
        f"{_met(of_calibrated <= DYNAMIC_OF_CALIBRATED)} (goal at most {DYNAMIC_OF_CALIBRATED}; "
        f"{added[2] / added[1]:.3f} over a base that waits for an epoch too)",
    ]


def _met(is_met: bool) -> str:
    return "met" if is_met else "missed"


def _problems(row: WorkloadRow, epoch_s: float, reruns_max: int) -> Iterator[str]:
    if not row.is_together:
        yield (
            f"not all were admitted in one epoch of {epoch_s:g} s in {reruns_max} reruns; its "
            "figures are not of this workload"
        )
    if not row.is_on_rate:
        yield (
            f"a request's rate was {row.off_percent or 0.0:+.1f} % off what it was assigned, in "
            f"{reruns_max} reruns too (goal {100 * RATE_GOAL:g} %); its figures are not the "
            "policy's"
        )
