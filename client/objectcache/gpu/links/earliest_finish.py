"""What a link gets of what is left, where each goes to the link that finishes it first."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

_ROUNDING = 1e-9  # relative: times that are equal but for it are equal


@dataclass(frozen=True, slots=True)
class FreeLink:
    """When a link has carried what it has, and how long each micro-task more takes it."""

    number: int
    free_s: float  # from now
    task_s: float


def finished_before(link: FreeLink, others: Iterable[FreeLink]) -> int:
    """How many equal micro-tasks the others have finished before the link would finish one.

    If one after the other goes to where it is finished first, of equals to the lowest number, the
    link gets one of so many and one more, and none of fewer.
    """
    end_s = link.free_s + link.task_s
    slack_s = _ROUNDING * end_s
    count = 0
    for other in others:
        # Those of the others that end at the same time count where they go first.
        until_s = end_s + slack_s if other.number < link.number else end_s - slack_s
        if other.free_s < until_s:
            count += math.floor((until_s - other.free_s) / other.task_s)
    return count
