"""What links carry in a second, learned from what they carried. Pure; time is an argument."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

_WEIGHT = 1 / 8  # of the last micro-task
_CONTENDED_WEIGHT = 1 / 32  # of one behind which the link was left to others
_HALF_LIFE_S = 10.0  # of what was learned: whatever slowed a link down may have ended unseen


@dataclass(frozen=True, slots=True)
class _Learned:
    seconds_per_byte: float
    at_s: float


class LinkRates:
    """Bytes a second of each link from and to each NUMA node, kept between transfers.

    What a link takes for each micro-task apart from its bytes is in them. What was learned ages:
    by and by it counts less beside the rate that the link is known to have, or, of one of which
    nothing is known, `first_bytes_per_s`. So a link that was slow is tried again, though it takes
    nothing from which it could be seen that it is quick.
    """

    def __init__(
        self, first_bytes_per_s: float, known: Mapping[tuple[int, int], float] | None = None
    ) -> None:
        """`known` is by (link, node), as it was measured once; it does not age."""
        self.first_bytes_per_s = first_bytes_per_s
        self._known = dict(known or {})
        self._learned: dict[tuple[int, int], _Learned] = {}

    def bytes_per_s(self, link: int, node: int, now_s: float) -> float:
        """Of the link, for host memory of the node."""
        return 1 / self._seconds_per_byte((link, node), now_s)

    def learn(
        self,
        link: int,
        node: int,
        size_bytes: int,
        took_s: float,
        now_s: float,
        *,
        was_contended: bool = False,
    ) -> None:
        """A micro-task took so long, from when the link was free for it."""
        if size_bytes <= 0 or took_s <= 0:
            return
        at = link, node
        weight = _CONTENDED_WEIGHT if was_contended else _WEIGHT
        if at not in self._known:  # there is nothing but what was learned before, as far as it is
            weight = max(weight, 1 - self._fresh(at, now_s))
        before = self._seconds_per_byte(at, now_s)
        seconds_per_byte = weight * took_s / size_bytes + (1 - weight) * before
        self._learned[at] = _Learned(seconds_per_byte, now_s)

    def _seconds_per_byte(self, at: tuple[int, int], now_s: float) -> float:
        base = 1 / self._known.get(at, self.first_bytes_per_s)
        if (learned := self._learned.get(at)) is None:
            return base
        return base + (learned.seconds_per_byte - base) * self._fresh(at, now_s)

    def _fresh(self, at: tuple[int, int], now_s: float) -> float:
        """What is left of what was learned, of 1."""
        if (learned := self._learned.get(at)) is None:
            return 0.0
        return math.exp2(-max(0.0, now_s - learned.at_s) / _HALF_LIFE_S)

    @property
    def known(self) -> dict[tuple[int, int], float]:
        """Bytes a second by (link, node), as they were learned last, of those that were used or
        known before.
        """
        learned = {at: 1 / each.seconds_per_byte for at, each in self._learned.items()}
        return self._known | learned

    def __repr__(self) -> str:
        each = ", ".join(
            f"{link}/{node}: {rate / 1e9:.1f}" for (link, node), rate in sorted(self.known.items())
        )
        return f"<LinkRates GB/s by link/node {each or 'unknown'}>"
