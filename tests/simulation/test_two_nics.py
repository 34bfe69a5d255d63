"""Two storage NICs at 70 %: what due times for each are worth, under virtual time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest

from objectcache_schemas.limits import BYTES_PER_GBIT
from objectcache_storage_server.admission.delivery_turns import AdmissionLimits
from objectcache_storage_server.scheduling.ttft_model import ttft_of_arrivals
from objectcache_storage_server.simulation.arrivals import Arrival
from objectcache_storage_server.simulation.machine import Machine
from objectcache_storage_server.simulation.mix import poisson_arrivals, rate_for, read_mix
from objectcache_storage_server.simulation.run import SimulatedSchedule, simulate

CAP_GBPS = 400.0  # of the storage server: more than both NICs
REQUESTS, UTILISATION = 400, 0.7
LIMITS = AdmissionLimits(256, 256, 1000, 60.0)
SCHEDULE = SimulatedSchedule("stall_dynamic", 5.0, 0.01, LIMITS)

Nics = Mapping[str, float]
Choice = Callable[[Arrival, Machine, Mapping[str, float]], str]


def nics_of(*gbps: float) -> dict[str, float]:
    return {f"nic{number}": rate * BYTES_PER_GBIT for number, rate in enumerate(gbps)}


def fewer_queued_bytes(arrival: Arrival, machine: Machine, backlog_s: Nics) -> str:
    """The paper's choice (DualPath, section 6.1)."""
    return min(machine.nics, key=lambda nic: backlog_s[nic] * machine.nics[nic])


def least_lateness(arrival: Arrival, machine: Machine, backlog_s: Nics) -> str:
    """As the dispatch library's: only the first and the last layer can be the latest."""
    demand = machine.demand(arrival)
    window_s = demand.compute_window_s or 0.0

    def late_s(nic: str) -> float:
        layer_s = demand.layer_bytes / machine.nics[nic]
        last = demand.num_layers - 1
        first_s = backlog_s[nic] + layer_s
        return max(first_s, first_s + last * (layer_s - window_s))

    return min(machine.nics, key=late_s)


def routed(arrivals: Sequence[Arrival], machine: Machine, choose: Choice) -> list[Arrival]:
    """Each request with its NIC, chosen as it comes by what was given to each before."""
    busy_until_s = dict.fromkeys(machine.nics, 0.0)
    chosen: list[Arrival] = []
    for arrival in arrivals:
        backlog_s = {nic: max(0.0, at_s - arrival.at_s) for nic, at_s in busy_until_s.items()}
        nic = choose(arrival, machine, backlog_s)
        carrying_s = machine.demand(arrival).payload_bytes / machine.nics[nic]
        busy_until_s[nic] = arrival.at_s + backlog_s[nic] + carrying_s
        chosen.append(replace(arrival, nic=nic))
    return chosen


def first_come_added_s(arrivals: Sequence[Arrival], machine: Machine) -> float:
    """Where each NIC is read to for one request after the other: mean added TTFT."""
    free_s, added_s = dict.fromkeys(machine.nics, 0.0), 0.0
    for arrival in arrivals:
        demand = machine.demand(arrival)
        begun_s = max(arrival.at_s, free_s[arrival.nic])
        layer_s = demand.layer_bytes / machine.nics[arrival.nic]
        arrivals_s = [begun_s + (layer + 1) * layer_s for layer in range(demand.num_layers)]
        free_s[arrival.nic] = arrivals_s[-1]
        ttft_s = ttft_of_arrivals(arrivals_s, demand.compute_window_s or 0.0) - arrival.at_s
        added_s += ttft_s - alone_s(arrival, machine)
    return added_s / len(arrivals)


def scheduled_added_s(arrivals: Sequence[Arrival], machine: Machine) -> float:
    outcome = simulate(arrivals, machine, SCHEDULE)
    assert not outcome.refused
    added = [client.ttft_s - alone_s(client.arrival, machine) for client in outcome.clients]
    return sum(added) / len(added)


def alone_s(arrival: Arrival, machine: Machine) -> float:
    """At the faster NIC."""
    fastest = max(machine.nics, key=lambda nic: machine.nics[nic])
    return machine.alone_ttft_s(replace(arrival, nic=fastest))


@pytest.mark.parametrize(
    ("gbps", "choose", "goal"),
    [((50.0, 50.0), fewer_queued_bytes, 0.25), ((25.0, 75.0), least_lateness, 0.20)],
    ids=["equal", "unequal"],
)
def test_due_times_for_each_nic_add_a_fraction_of_what_the_papers_choice_does(
    gbps: tuple[float, ...], choose: Choice, goal: float
) -> None:
    machine = Machine(CAP_GBPS * BYTES_PER_GBIT, nics=nics_of(*gbps))
    tokens_per_s = sum(machine.nics.values()) / machine.token_bytes
    mix = read_mix(None)
    arrivals = poisson_arrivals(mix, REQUESTS, rate_for(mix, UTILISATION, tokens_per_s), seed=1)
    paper_s = first_come_added_s(routed(arrivals, machine, fewer_queued_bytes), machine)
    ours_s = scheduled_added_s(routed(arrivals, machine, choose), machine)
    print(f"{1e3 * ours_s:.0f} ms of {1e3 * paper_s:.0f}: {ours_s / paper_s:.2f}")
    assert ours_s <= goal * paper_s


def test_what_goes_to_one_nic_is_as_on_a_link_of_its_own() -> None:
    """The other one is busy, and the cap has room for both."""
    machine = Machine(CAP_GBPS * BYTES_PER_GBIT, nics=nics_of(25.0, 75.0))
    arrivals = routed(poisson_arrivals(read_mix(None), 60, 2.0, seed=2), machine, least_lateness)
    outcome = simulate(arrivals, machine, SCHEDULE)
    for nic, rate in machine.nics.items():
        alone = [replace(one, nic="") for one in arrivals if one.nic == nic]
        assert len(alone) > 5
        expected = simulate(alone, Machine(rate), SCHEDULE)
        found_s = sum(one.ttft_s for one in outcome.clients if one.arrival.nic == nic)
        assert found_s == pytest.approx(sum(one.ttft_s for one in expected.clients), rel=0.02)
