"""How little a schedule could cost: a judge of schedules, which shares no code with them.

A GPU that begins layer 0 after a delay of D seconds, and never waits again, needs layer l at
D + l c. So delays can be had if and only if, for every time t, the bytes due by t fit through the
link by t: serving the earliest due time first then meets all of them. What can be had can be had
with any longer delays. That makes branch and bound work: a box of delays holds nothing if its
longest delays cannot be had, and no delay in it is less than the least that goes with the longest
of the others.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from objectcache_storage_server.scheduling.demand import Demand

GAP = 0.01  # of the sum: close enough
NODES_MAX = 2000  # about a millisecond each for eight deliveries
ORDERS_MAX = 200  # that are tried for the upper bound
PRECISION_S = 1e-9  # of one delay

Seconds = NDArray[np.float64]


class Bounds(NamedTuple):
    """The least sum of weighted delays lies from `lower_s` to `upper_s`, which `delays_s` reach."""

    lower_s: float
    upper_s: float
    delays_s: tuple[float, ...]


def least_delay_sum(
    demands: Sequence[Demand],
    cap_bytes_per_s: float,
    gap: float = GAP,
    nodes_max: int = NODES_MAX,
) -> Bounds:
    """Bounds of the least sum of weight times delay of deliveries that all begin at 0 on one link,
    which can be divided at will. A delay is the seconds for which a GPU waits in all, for its first
    layer and later ones.

    `lower_s` is certified: no schedule of one link does better, even one that knows everything
    beforehand and has no overheads. It is within `gap` of `upper_s`, unless the search ended at
    `nodes_max` boxes; it holds all the same. An unknown compute window counts as 0.
    """
    if not demands:
        return Bounds(0.0, 0.0, ())
    layers = [_Layers.of(demand, cap_bytes_per_s) for demand in demands]
    weights = np.array([demand.weight for demand in demands])
    delays = _best_order_delays(layers, weights)
    upper_s = float(weights @ delays)
    lower_s = _Search(layers, weights, upper_s).lower_bound(upper_s * (1 - gap), nodes_max)
    return Bounds(min(lower_s, upper_s), upper_s, tuple(delays.tolist()))


class _Layers(NamedTuple):
    """One delivery's layers, in seconds of the whole link."""

    work_s: float  # of each layer
    window_s: float
    done_s: Seconds  # until each layer is through, on the link alone
    due_s: Seconds  # of each layer, without a delay

    @classmethod
    def of(cls, demand: Demand, cap_bytes_per_s: float) -> _Layers:
        work_s = demand.layer_bytes / cap_bytes_per_s
        window_s = demand.compute_window_s or 0.0
        numbers = np.arange(demand.num_layers, dtype=np.float64)
        return cls(work_s, window_s, (numbers + 1) * work_s, numbers * window_s)


class _Timeline(NamedTuple):
    """Due times in order, and the work that is due until each."""

    due_s: Seconds
    until_s: Seconds

    @classmethod
    def of(cls, layers: Sequence[_Layers], delays: Sequence[float]) -> _Timeline:
        if not layers:
            return cls(np.empty(0), np.empty(0))
        pairs = list(zip(layers, delays, strict=True))
        due_s = np.concatenate([part.due_s + delay for part, delay in pairs])
        work_s = np.concatenate([np.full(len(part.due_s), part.work_s) for part, _ in pairs])
        order = np.argsort(due_s, kind="stable")
        return cls(due_s[order], np.cumsum(work_s[order]))

    def holds(self) -> bool:
        """Whether all due times can be met."""
        return bool((self.until_s <= self.due_s * (1 + PRECISION_S) + PRECISION_S).all())

    def least_delay(self, layers: _Layers, from_s: float) -> float:
        """The least delay, at least `from_s`, with which these layers fit beside all others."""
        delay_s = max(from_s, layers.work_s, self._delay_for_others(layers))
        while True:  # rises to the least fixed point: what is due before a layer grows with it
            at = np.searchsorted(self.due_s, layers.due_s + delay_s, side="right")
            others_s = np.concatenate(([0.0], self.until_s))[at]
            needed_s = float((others_s + layers.done_s - layers.due_s).max())
            if needed_s <= delay_s + PRECISION_S:
                return delay_s
            delay_s = needed_s

    def _delay_for_others(self, layers: _Layers) -> float:
        """From when so few of the layers come before each due time that its slack bears them."""
        slack_s = self.due_s - self.until_s
        fitting = np.searchsorted(layers.done_s, slack_s + PRECISION_S, side="right")
        tight = fitting < len(layers.done_s)
        if not tight.any():
            return 0.0
        return float((self.due_s - fitting * layers.window_s)[tight].max()) + PRECISION_S


class _Search:
    """Boxes of delays, from the one with the least sum on."""

    def __init__(self, layers: Sequence[_Layers], weights: Seconds, upper_s: float) -> None:
        self._layers = layers
        self._weights = weights
        self._upper_s = upper_s
        self._twins = _twins(layers, weights)
        self._boxes: list[tuple[float, int, Seconds, Seconds]] = []
        self._count = 0

    def lower_bound(self, enough_s: float, nodes_max: int) -> float:
        """What no delays undercut, searched until it is enough."""
        shortest = np.array([part.work_s for part in self._layers])
        self._add(shortest, np.full(len(shortest), np.inf))
        for _ in range(nodes_max):
            if not self._boxes:
                return self._upper_s
            if self._boxes[0][0] >= enough_s:
                break
            _, _, shortest, longest = heapq.heappop(self._boxes)
            self._split(shortest, longest)
        return self._boxes[0][0] if self._boxes else self._upper_s

    def _split(self, shortest: Seconds, longest: Seconds) -> None:
        widest = int((self._weights * (longest - shortest)).argmax())
        below, above = longest.copy(), shortest.copy()
        below[widest] = above[widest] = (shortest[widest] + longest[widest]) / 2
        self._add(shortest, below)
        self._add(above, longest)

    def _add(self, shortest: Seconds, longest: Seconds) -> None:
        """Keep the box, made as small as it can be, unless nothing in it is of use."""
        for _ in range(2):
            tightened = self._tightened(shortest, longest)
            if tightened is None:
                return
            shortest, longest = tightened
        self._count += 1  # ties go to the older box: arrays have no order
        lower_s = float(self._weights @ shortest)
        heapq.heappush(self._boxes, (lower_s, self._count, shortest, longest))

    def _tightened(self, shortest: Seconds, longest: Seconds) -> tuple[Seconds, Seconds] | None:
        shortest = shortest.copy()
        spare_s = self._upper_s - float(self._weights @ shortest)
        longest = np.minimum(longest, shortest + spare_s / self._weights)
        for first, second in self._twins:  # who of two alike waits longer makes no difference
            shortest[second] = max(shortest[first], shortest[second])
            longest[first] = min(longest[first], longest[second])
        if spare_s <= 0 or not _Timeline.of(self._layers, longest.tolist()).holds():
            return None
        least = [self._least(index, shortest, longest) for index in range(len(shortest))]
        return np.minimum(least, longest), longest

    def _least(self, index: int, shortest: Seconds, longest: Seconds) -> float:
        """A delay's least value in the box, which is the one beside the longest of the others."""
        others = [*self._layers[:index], *self._layers[index + 1 :]]
        timeline = _Timeline.of(others, np.delete(longest, index).tolist())
        least_s = timeline.least_delay(self._layers[index], float(shortest[index]))
        return max(float(shortest[index]), least_s - 2 * PRECISION_S)


def _twins(layers: Sequence[_Layers], weights: Seconds) -> list[tuple[int, int]]:
    """Deliveries that are alike, each with the next one of its kind."""
    last: dict[tuple[float, float, int, float], int] = {}
    pairs: list[tuple[int, int]] = []
    for index, part in enumerate(layers):
        kind = (part.work_s, part.window_s, len(part.due_s), float(weights[index]))
        if kind in last:
            pairs.append((last[kind], index))
        last[kind] = index
    return pairs


def _best_order_delays(layers: Sequence[_Layers], weights: Seconds) -> Seconds:
    """The best delays found by placing deliveries one by one, each as early as those before it
    allow, in orders that differ by one move.
    """
    order = sorted(
        range(len(layers)), key=lambda index: _eagerness(layers[index], float(weights[index]))
    )
    best = _placed(layers, order)
    tries_left, improved = ORDERS_MAX, True
    while improved and tries_left > 0:
        improved = False
        for tried in _moves(order)[:tries_left]:
            tries_left -= 1
            delays = _placed(layers, tried)
            if weights @ delays < weights @ best - PRECISION_S:
                best, order, improved = delays, tried, True
                break
    return best


def _eagerness(layers: _Layers, weight: float) -> float:
    """The less, the sooner: work times the share of the link that it needs."""
    share = layers.work_s / max(layers.window_s, layers.work_s)
    return float(layers.done_s[-1]) * share / weight


def _moves(order: Sequence[int]) -> list[list[int]]:
    moved_orders: list[list[int]] = []
    for moved in order:
        rest = [index for index in order if index != moved]
        for place in range(len(order)):
            moved_orders.append([*rest[:place], moved, *rest[place:]])
    return moved_orders


def _placed(layers: Sequence[_Layers], order: Sequence[int]) -> Seconds:
    delays = np.zeros(len(layers))
    for count, index in enumerate(order):
        before = order[:count]
        timeline = _Timeline.of([layers[one] for one in before], delays[before].tolist())
        delays[index] = timeline.least_delay(layers[index], 0.0)
    return delays
