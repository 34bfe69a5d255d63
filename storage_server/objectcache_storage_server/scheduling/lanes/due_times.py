"""The plan of stall_dynamic: from when each GPU should be fed, so that together they wait least.

A GPU that begins layer 0 at `origin` needs layer l at `origin + l * c`, and every layer that comes
later pushes the origin back. So a schedule is a choice of origins, and the added TTFT is how far
they lie behind the earliest possible ones. Origins can be kept if and only if, for every time t,
the bytes that are due by t fit through the link by t; then serving the earliest due time first
keeps them. `OriginSearch` chooses origins one delivery after the other, each as early as those
before it allow. The order is by bytes left times the share of the link that a delivery needs:
whoever needs little of the link, or is soon through, goes first, and fits beside the others. Few
deliveries are also tried in other orders.

What goes to a storage NIC that is slower than the link has to fit through the NIC as well, so it is
promised twice: an origin is one that breaks no promise of the link nor of the NIC.

Rates that hold for a life (paper, section 3.6) cannot use what a GPU far behind its bytes leaves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from objectcache_storage_server.scheduling.demand import Demand
from objectcache_storage_server.scheduling.lanes.nic_paces import Destination

PLANNED_MAX = 10  # deliveries: placing one costs tens of microseconds, and more gain nothing
SEARCHED_MAX = 8
ORDERS_MAX = 64  # that are tried
PATIENCE, PATIENCE_MIN_S = 3.0, 1.0  # times the computing, or that: a wait that counts
_ROUNDING_S = 1e-9

Seconds = npt.NDArray[np.float64]


class Standing(NamedTuple):
    """Where a delivery stands. `next_layer` counts its own layers from 0, and is less than their
    number. `origin_s` is when the GPU could have begun layer 0, by what has arrived.
    `nic_bytes_per_s` is what its storage NIC carries at most.
    """

    demand: Demand
    next_layer: int
    left_bytes: int  # of the next layer
    origin_s: float
    begun_s: float
    nic_bytes_per_s: float = math.inf

    @property
    def destination(self) -> Destination:
        """Those that have the same share a NIC."""
        return self.demand.tenant, self.demand.nic


def due_s(standing: Standing, origin_s: float) -> float:
    """When the GPU needs the next layer."""
    return origin_s + standing.next_layer * (standing.demand.compute_window_s or 0.0)


def urgency(standing: Standing, cap_bytes_per_s: float, now_s: float) -> float:
    """The lower the sooner: bytes left times the rate needed, less for who has waited long."""
    demand = standing.demand
    layers_left = demand.num_layers - standing.next_layer - 1
    left_bytes = standing.left_bytes + layers_left * demand.layer_bytes
    rate = min(demand.zero_stall_rate, cap_bytes_per_s, standing.nic_bytes_per_s)
    return left_bytes * rate / _patient_weight(standing, now_s)


def _patient_weight(standing: Standing, now_s: float) -> float:
    """The weight, which grows with the time that a GPU has waited: nobody waits for ever."""
    demand = standing.demand
    window_s = demand.compute_window_s or 0.0
    origin_s = max(standing.origin_s, now_s - standing.next_layer * window_s)
    patience_s = PATIENCE * max(PATIENCE_MIN_S, demand.num_layers * window_s)
    waited = max(0.0, origin_s - standing.begun_s) / patience_s
    return demand.weight * (1.0 + waited) ** 2


class _Layers(NamedTuple):
    """The layers that are left of one delivery, in seconds of the whole link and from now."""

    done_s: Seconds  # work until each of them is through, this delivery alone
    after_first_s: Seconds  # due times less the first one's
    earliest_s: float  # first due time, without a delay
    window_s: float
    weight: float

    @classmethod
    def of(cls, standing: Standing, cap_bytes_per_s: float, now_s: float) -> _Layers:
        demand = standing.demand
        window_s = demand.compute_window_s or 0.0
        numbers: Seconds = np.arange(demand.num_layers - standing.next_layer, dtype=np.float64)
        first_s = standing.left_bytes / cap_bytes_per_s
        done_s = first_s + numbers * (demand.layer_bytes / cap_bytes_per_s)
        due_from_now_s = due_s(standing, standing.origin_s) - now_s
        weight = _patient_weight(standing, now_s)
        return cls(done_s, numbers * window_s, due_from_now_s, window_s, weight)


class _Commitments:
    """Due times that are promised already, and the work until each."""

    def __init__(self) -> None:
        self._due_s: Seconds = np.empty(0)
        self._work_s: Seconds = np.empty(0)
        self._until_s: Seconds = np.empty(0)

    def place(self, layers: _Layers, from_s: float = -math.inf) -> float:
        """The least first due time, `from_s` or later, with which no promise is broken."""
        first_s = max(layers.earliest_s, float(layers.done_s[0]), from_s)
        if len(self._due_s):
            first_s = max(first_s, self._after_promises(layers))
        while True:  # rises to the least fixed point: work before a due time grows with it
            needed_s = layers.done_s - layers.after_first_s
            if len(self._due_s):
                at = np.searchsorted(self._due_s, first_s + layers.after_first_s, side="right")
                needed_s = needed_s + np.concatenate(([0.0], self._until_s))[at]
            least_s = float(needed_s.max())
            if least_s <= first_s + _ROUNDING_S:
                return first_s
            first_s = least_s

    def _after_promises(self, layers: _Layers) -> float:
        """From when so few layers fall before each promised due time that its slack bears them."""
        slack_s = self._due_s - self._until_s
        fitting = np.searchsorted(layers.done_s, slack_s + _ROUNDING_S, side="right")
        tight = fitting < len(layers.done_s)
        if not tight.any():
            return 0.0
        return float((self._due_s - fitting * layers.window_s)[tight].max()) + _ROUNDING_S

    def lead_s(self, first_s: float) -> float:
        """How much sooner than its due time a layer that is due then has to be through, so that all
        that are due after it can be in time, too.
        """
        if not len(self._due_s):
            return 0.0
        at = min(int(np.searchsorted(self._due_s, first_s)), len(self._due_s) - 1)
        slack_s = float((self._due_s[at:] - self._until_s[at:]).min())
        return max(0.0, first_s - float(self._until_s[at]) - slack_s)

    def add(self, layers: _Layers, first_s: float) -> None:
        """Promise the layers from `first_s` on."""
        due = np.concatenate((self._due_s, first_s + layers.after_first_s))
        work = np.concatenate((self._work_s, np.diff(layers.done_s, prepend=0.0)))
        order = np.argsort(due, kind="stable")
        self._due_s, self._work_s = due[order], work[order]
        self._until_s = np.cumsum(self._work_s)


class _ByNic:
    """What is promised of each NIC that is slower than the link."""

    def __init__(self, standings: Sequence[Standing], cap_bytes_per_s: float, now_s: float) -> None:
        self._slow = {  # their layers, in seconds of the NIC
            index: (standing.destination, _Layers.of(standing, standing.nic_bytes_per_s, now_s))
            for index, standing in enumerate(standings)
            if standing.nic_bytes_per_s < cap_bytes_per_s
        }
        self._commitments: dict[Destination, _Commitments] = {}

    def forget(self) -> None:
        """Nothing is promised any more."""
        self._commitments = {}

    def place(self, index: int, layers: _Layers, link: _Commitments, first_s: float) -> float:
        """Promise the layers of this delivery: the least first due time, from what the link allows
        on, that both allow.
        """
        if index not in self._slow:
            return first_s
        destination, slow = self._slow[index]
        nic = self._commitments.setdefault(destination, _Commitments())
        while (least_s := nic.place(slow, first_s)) > first_s + _ROUNDING_S:
            first_s = link.place(layers, least_s)
        nic.add(slow, first_s)
        return first_s

    def lead_s(self, index: int, first_s: float) -> float:
        """How much sooner than that the link has to send a layer to keep the NIC busy enough."""
        if index not in self._slow:
            return 0.0
        return self._commitments[self._slow[index][0]].lead_s(first_s)

    def __bool__(self) -> bool:
        return bool(self._slow)


def _delays(layers: Sequence[_Layers], order: Sequence[int], nics: _ByNic) -> list[float]:
    link = _Commitments()
    nics.forget()
    delays = [0.0] * len(layers)
    for index in order:
        first_s = nics.place(index, layers[index], link, link.place(layers[index]))
        link.add(layers[index], first_s)
        delays[index] = first_s - layers[index].earliest_s
    return delays


class OriginSearch:
    """Origins by the order of urgency, and then by better orders, which are tried one at a time:
    a search takes as long as many decisions, and must not hold one up.
    """

    def __init__(
        self,
        standings: Sequence[Standing],
        cap_bytes_per_s: float,
        now_s: float,
        order: Sequence[int] | None = None,
    ) -> None:
        """`order` is one to begin with."""
        self._standings = standings
        self._layers = [_Layers.of(standing, cap_bytes_per_s, now_s) for standing in standings]
        self.order = list(order) if order is not None else self._by_urgency(cap_bytes_per_s, now_s)
        self._nics = _ByNic(standings, cap_bytes_per_s, now_s)
        self._delays = _delays(self._layers, self.order, self._nics)
        self._cost = self._cost_of(self._delays)
        self._moves = _moves(self.order) if len(self.order) <= SEARCHED_MAX else iter(())
        self.left = ORDERS_MAX  # orders to try
        self.is_over = len(self.order) < 2 or len(self.order) > SEARCHED_MAX

    def _by_urgency(self, cap_bytes_per_s: float, now_s: float) -> list[int]:
        keys = [urgency(standing, cap_bytes_per_s, now_s) for standing in self._standings]
        return sorted(range(len(keys)), key=keys.__getitem__)

    def _cost_of(self, delays: Sequence[float]) -> float:
        return sum(part.weight * delay for part, delay in zip(self._layers, delays, strict=True))

    def origins_s(self) -> list[float]:
        """The origin of each delivery, by the best order so far."""
        return [
            standing.origin_s + delay_s
            for standing, delay_s in zip(self._standings, self._delays, strict=True)
        ]

    def leads_s(self) -> list[float]:
        """How much sooner than they are due the layers of each delivery go, because its NIC is
        slower than the link: whatever else is due first, the NIC would be idle meanwhile.
        """
        if not self._nics:
            return [0.0] * len(self._standings)
        _delays(self._layers, self.order, self._nics)  # what is promised by the best order
        return [
            self._nics.lead_s(index, layers.earliest_s + delay_s)
            for index, (layers, delay_s) in enumerate(zip(self._layers, self._delays, strict=True))
        ]

    def try_one(self) -> bool:
        """Try another order; returns whether it is the best one so far."""
        tried = next(self._moves, None)
        if tried is None or self.left == 0:
            self.is_over = True
            return False
        self.left -= 1
        delays = _delays(self._layers, tried, self._nics)
        if (cost := self._cost_of(delays)) >= self._cost - _ROUNDING_S:
            return False
        self.order, self._delays, self._cost = tried, delays, cost
        self._moves = _moves(tried)
        return True

    def __repr__(self) -> str:
        return f"<OriginSearch {len(self.order)} deliveries, {self.left} orders left>"


def _moves(order: Sequence[int]) -> Iterator[list[int]]:
    """Orders in which one delivery has another place."""
    for moved in order:
        rest = [index for index in order if index != moved]
        for place in range(len(order)):
            tried = [*rest[:place], moved, *rest[place:]]
            if tried != list(order):
                yield tried
