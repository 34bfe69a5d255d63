"""Virtual time: arrivals are admitted, the scheduler chooses, links carry, GPUs compute."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from objectcache_schemas.errors import Busy
from objectcache_schemas.operators.schedule import ScheduleConfiguration, TenantShare
from objectcache_schemas.policy_names import EVERY_EPOCH, PolicyName, RatesName
from objectcache_storage_server.admission.delivery_turns import Admission, AdmissionLimits, Waiting
from objectcache_storage_server.scheduling.fragments import Fragment
from objectcache_storage_server.scheduling.scheduler import BYTES_PER_GBIT, NextFragment, Scheduler
from objectcache_storage_server.simulation.arrivals import Arrival
from objectcache_storage_server.simulation.machine import Machine, SimulatedClient

FRAGMENT_S = 0.005  # of the link: coarser than the server's, so that thousands of clients are quick
READ_AHEAD_S = 0.010  # so much the readers have asked for that has not gone


@dataclass(frozen=True, slots=True)
class SimulatedSchedule:
    """What is compared. With feedback the scheduler hears of each layer that a GPU is through
    with, as the SDK tells it.
    """

    policy: PolicyName
    margin_gbps: float
    epoch_s: float
    limits: AdmissionLimits
    fragment_s: float = FRAGMENT_S
    has_feedback: bool = True
    tenants: Mapping[str, TenantShare] = field(default_factory=dict[str, TenantShare])
    rates: RatesName = EVERY_EPOCH


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the requests. `events` is the number of the scheduler's decisions."""

    clients: list[SimulatedClient]  # that were served, in the order of their ends
    refused: list[Arrival]  # with SlowDown
    end_s: float
    sent_bytes: int
    events: int


def _nobody() -> None:
    """Is told of no end."""


def simulate(
    arrivals: Sequence[Arrival],
    machine: Machine,
    schedule: SimulatedSchedule,
    on_end: Callable[[], None] = _nobody,
) -> Outcome:
    """Serve all arrivals, which are in order of time, to their ends. `on_end` is called at each."""
    return _Simulation(arrivals, machine, schedule, on_end).run()


class _Simulation:
    def __init__(
        self,
        arrivals: Sequence[Arrival],
        machine: Machine,
        schedule: SimulatedSchedule,
        on_end: Callable[[], None],
    ) -> None:
        self._machine = machine
        self._on_end = on_end
        self._queue_timeout_s = schedule.limits.queue_timeout_s
        self._has_feedback = schedule.has_feedback
        self._scheduler: Scheduler[SimulatedClient] = Scheduler(
            _configuration(machine, schedule), 0.0
        )
        self._fragment_s = schedule.fragment_s
        self._admission = Admission(schedule.limits, schedule.tenants)
        self._at_entrance: dict[Waiting, Arrival] = {}
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = itertools.count()
        self._link_free_s = 0.0
        self._nic_free_s: dict[str, float] = dict.fromkeys(machine.nics, 0.0)
        self._served: list[SimulatedClient] = []
        self._refused: list[Arrival] = []
        self._sent_bytes = 0
        for arrival in arrivals:
            self._at(arrival.at_s, partial(self._arrive, arrival))

    def _at(self, at_s: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), act))

    def run(self) -> Outcome:
        """Until nothing can happen any more."""
        now_s, decisions = 0.0, 0
        while True:
            while self._events and self._events[0][0] <= now_s:
                heapq.heappop(self._events)[2](now_s)
            next_s = self._events[0][0] if self._events else math.inf
            busy_until_s = self._link_free_s - READ_AHEAD_S
            if busy_until_s > now_s:
                now_s = min(next_s, busy_until_s)
                continue
            step = self._scheduler.next(now_s)
            decisions += 1
            if isinstance(step, NextFragment):
                self._carry(step.job, step.fragment, now_s)
                continue
            if (wake_s := min(step.until_s, next_s)) == math.inf:
                break
            now_s = max(now_s, wake_s)
        assert not self._scheduler.flows()
        return Outcome(self._served, self._refused, now_s, self._sent_bytes, decisions)

    # --- requests ---

    def _arrive(self, arrival: Arrival, now_s: float) -> None:
        try:
            token = self._admission.enter(arrival.tenant, now_s)
        except Busy:
            self._refuse(arrival)
            return
        if token is None:
            self._begin(arrival, now_s)
            return
        self._at_entrance[token] = arrival
        self._at(token.expires_s, self._expire)

    def _refuse(self, arrival: Arrival) -> None:
        self._refused.append(arrival)
        self._on_end()

    def _expire(self, now_s: float) -> None:
        for token, _ in self._admission.expired(now_s):
            self._refuse(self._at_entrance.pop(token))

    def _begin(self, arrival: Arrival, now_s: float) -> None:
        rate = self._machine.alone_at_bytes_per_s(arrival.nic)
        client = SimulatedClient(arrival, self._machine, int(rate * self._fragment_s))
        told = self._machine.told_demand(arrival)
        self._scheduler.add(
            client,
            told,
            now_s,
            pooled=arrival.is_pooled,
            nic_bytes_per_s=self._machine.nics.get(arrival.nic),
        )
        if not client.is_admitted:
            self._at(now_s + self._queue_timeout_s, lambda at_s: self._give_up(client, at_s))

    def _give_up(self, client: SimulatedClient, now_s: float) -> None:
        if not client.is_admitted:
            self._refuse(client.arrival)
            self._leave(client, None, now_s)

    def _leave(self, client: SimulatedClient, duration_s: float | None, now_s: float) -> None:
        self._scheduler.remove(client, now_s)
        for token in self._admission.leave(client.arrival.tenant, duration_s):
            self._begin(self._at_entrance.pop(token), now_s)

    # --- bytes ---

    def _carry(self, client: SimulatedClient, fragment: Fragment, now_s: float) -> None:
        """Engine, network card and capped link carry it together: the slowest sets the pace."""
        machine, length_bytes = self._machine, fragment.length_bytes
        self._link_free_s = max(now_s, self._link_free_s) + length_bytes / machine.alone_bytes_per_s
        arrives_s = max(self._link_free_s, self._through_nic_s(client, length_bytes, now_s))
        arrives_s += machine.engine_latency_s
        self._sent_bytes += length_bytes
        before = client.arrived_layers
        client.arrived(fragment, arrives_s)
        if self._has_feedback and client.arrived_layers > before:
            layers = client.arrived_layers
            consume = partial(self._scheduler.consumed, client, layers)
            self._at(client.computed_s(layers), consume)
        if client.is_sent:
            self._at(arrives_s, lambda at_s: self._end(client, at_s))

    def _through_nic_s(self, client: SimulatedClient, length_bytes: int, now_s: float) -> float:
        """When a fragment that goes now is through the NIC that its client receives at."""
        nic = client.arrival.nic
        if nic not in self._nic_free_s:
            return now_s
        carrying_s = length_bytes / self._machine.nics[nic]
        self._nic_free_s[nic] = max(now_s, self._nic_free_s[nic]) + carrying_s
        return self._nic_free_s[nic]

    def _end(self, client: SimulatedClient, now_s: float) -> None:
        self._served.append(client)
        self._on_end()
        self._leave(client, now_s - client.arrival.at_s, now_s)


def _configuration(machine: Machine, schedule: SimulatedSchedule) -> ScheduleConfiguration:
    return ScheduleConfiguration(
        policy=schedule.policy,
        cap_gbps=machine.cap_bytes_per_s / BYTES_PER_GBIT,
        margin_gbps=schedule.margin_gbps,
        epoch_s=schedule.epoch_s,
        rates=schedule.rates,
        layerwise_threshold_bytes=0,
        tenants=dict(schedule.tenants),
    )
