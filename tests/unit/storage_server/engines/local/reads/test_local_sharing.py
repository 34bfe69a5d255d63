"""Which sharing is better, on simulated devices in virtual time, and how threads keep to it."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objectcache_schemas.limits import GIB, MIB
from objectcache_storage_server.engines.local.reads import device_sharing
from objectcache_storage_server.engines.local.reads.device_sharing import (
    SharedDevice,
    Sharing,
    SharingChooser,
    forced_sharing,
)
from tests.unit.examples import examples

Rate = Callable[[int], float]  # readers in the device part -> MiB/s of all together


def saturated(depth: int) -> float:
    """One reader takes all that the link has; more get in each other's way."""
    return 2000.0 / (1 + 0.3 * (depth - 1))


def deep(depth: int) -> float:
    """Every further reader adds its own rate."""
    return 1500.0 * depth


@dataclass
class Reader:
    """One simulated reader thread."""

    sharing: Sharing = Sharing.INTRA
    started_s: float = 0.0
    readers: int = 0
    waits: bool = False
    left_mib: float = 0.0  # to read
    lands_until_s: float | None = None


@dataclass
class Simulation:
    """Readers that take fragments one after another from a device in virtual time."""

    chooser: SharingChooser
    rate: Rate
    fragment_mib: int = 8
    land_mib_per_s: float = 6000.0  # slower than the device, intra would stagger by itself
    cold_bytes: int = 0
    now_s: float = 0.0
    used_mib: Counter[Sharing] = field(default_factory=Counter)
    shared_mib: Counter[str] = field(default_factory=Counter)  # by state, of two readers or more
    _turns: deque[Reader] = field(default_factory=deque)

    def run(self, total_mib: int, readers: int = 2) -> None:
        """Read so much, with so many readers at once; all have left at the end."""
        active = [self._begin(count + 1) for count in range(readers)]
        left_mib = total_mib
        while active:
            reader = self._next_landed(active)
            active.remove(reader)
            self._end(reader, len(active) + 1)
            left_mib -= self.fragment_mib
            if left_mib > 0:
                active.append(self._begin(len(active) + 1))

    def _begin(self, readers: int) -> Reader:
        chosen = self.chooser.now(readers)
        reader = Reader(chosen, self.now_s, readers, left_mib=self.fragment_mib)
        if chosen is Sharing.CROSS:
            self._turns.append(reader)
            reader.waits = len(self._turns) > 1
        return reader

    def _end(self, reader: Reader, readers: int) -> None:
        self.used_mib[reader.sharing] += self.fragment_mib
        if min(reader.readers, readers) > 1:
            self.shared_mib[self.chooser.state] += self.fragment_mib
        self.chooser.finished(
            self.fragment_mib * MIB,
            reader.started_s,
            self.now_s,
            min(reader.readers, readers),
            self.cold_bytes,
        )

    def _next_landed(self, active: list[Reader]) -> Reader:
        while True:
            reading = [one for one in active if not one.waits and one.lands_until_s is None]
            each_mib_per_s = self.rate(len(reading)) / len(reading) if reading else 1.0
            ends_s = [(self.now_s + one.left_mib / each_mib_per_s, one) for one in reading]
            ends_s += [(one.lands_until_s, one) for one in active if one.lands_until_s is not None]
            end_s, first = min(ends_s, key=lambda end: end[0])
            for one in reading:
                one.left_mib -= each_mib_per_s * (end_s - self.now_s)
            self.now_s = end_s
            if first.lands_until_s is not None:
                return first
            self._leave_device(first)

    def _leave_device(self, reader: Reader) -> None:
        reader.lands_until_s = self.now_s + self.fragment_mib / self.land_mib_per_s
        if reader.sharing is Sharing.CROSS:
            assert self._turns.popleft() is reader
            if self._turns:
                self._turns[0].waits = False


def test_a_saturated_link_ends_with_cross() -> None:
    simulation = Simulation(SharingChooser(), saturated)
    simulation.run(1024)
    assert simulation.chooser.state == "cross"
    rates = simulation.chooser.rates_bytes_per_s
    assert (rates[Sharing.CROSS] or 0) > 1.05 * (rates[Sharing.INTRA] or 0)


@pytest.mark.parametrize("readers", [2, 3, 8])
def test_a_device_that_scales_with_depth_ends_with_intra(readers: int) -> None:
    simulation = Simulation(SharingChooser(), deep)
    simulation.run(1024 * readers, readers)
    assert simulation.chooser.state == "intra"
    assert None not in simulation.chooser.rates_bytes_per_s.values()


@pytest.mark.parametrize(("first", "then"), [(saturated, deep), (deep, saturated)])
def test_a_device_that_changes_changes_the_choice(first: Rate, then: Rate) -> None:
    simulation = Simulation(SharingChooser(), first)
    simulation.run(4096)
    before = simulation.chooser.state
    simulation.rate = then
    simulation.run(128 * 1024)
    assert {before, simulation.chooser.state} == {"intra", "cross"}


def test_a_change_that_hardly_shows_in_the_rate_is_found_in_time() -> None:
    simulation = Simulation(SharingChooser(), deep)
    simulation.run(2048)
    intra_bytes_per_s = simulation.chooser.rates_bytes_per_s[Sharing.INTRA]
    assert intra_bytes_per_s is not None
    intra_mib_per_s = intra_bytes_per_s / MIB
    simulation.rate = lambda depth: 1.2 * intra_mib_per_s / depth**0.3
    while simulation.now_s < 1.2 * device_sharing.REMEASURE_S:
        assert simulation.chooser.state != "cross" or simulation.now_s > device_sharing.REMEASURE_S
        simulation.run(1024)
    simulation.run(4096)
    assert simulation.chooser.state == "cross"


@pytest.mark.parametrize(("rate", "best"), [(saturated, Sharing.CROSS), (deep, Sharing.INTRA)])
def test_measuring_stays_a_small_part_of_what_is_read(rate: Rate, best: Sharing) -> None:
    simulation = Simulation(SharingChooser(), rate)
    total_mib = 384 * 1024
    simulation.run(total_mib)
    assert simulation.now_s > 2 * device_sharing.REMEASURE_S  # so it was measured again and again
    first_mib = 2 * (64 + 9 * 8) + 64
    measuring_mib = simulation.shared_mib["measuring"]
    assert first_mib < measuring_mib < first_mib + total_mib / device_sharing.MEASURED_RATIO
    assert simulation.used_mib[best] > (1 - 1 / device_sharing.MEASURED_RATIO) * total_mib


def test_a_rate_that_swings_all_the_time_does_not_cost_more() -> None:
    simulation = Simulation(SharingChooser(), saturated)
    for _ in range(200):
        for rate in (saturated, deep):
            simulation.rate = rate
            simulation.run(200)
    total_mib = sum(simulation.used_mib.values())
    assert simulation.shared_mib["measuring"] < 1024 + total_mib / device_sharing.MEASURED_RATIO


def test_rates_are_what_the_device_gives() -> None:
    simulation = Simulation(SharingChooser(), lambda depth: 500.0, land_mib_per_s=1e9)
    simulation.run(2048)
    for rate in simulation.chooser.rates_bytes_per_s.values():
        assert rate == pytest.approx(500 * MIB, rel=0.02)


def test_a_difference_within_the_noise_stays_with_intra() -> None:
    simulation = Simulation(SharingChooser(), lambda depth: 500.0, land_mib_per_s=1e9)
    simulation.run(2048)
    assert simulation.chooser.state == "intra"


def test_one_reader_alone_is_not_measured_and_uses_intra() -> None:
    simulation = Simulation(SharingChooser(), saturated)
    simulation.run(4096, readers=1)
    assert simulation.chooser.state == "measuring"
    assert set(simulation.used_mib) == {Sharing.INTRA}


def test_one_reader_alone_uses_intra_after_cross_was_chosen() -> None:
    simulation = Simulation(SharingChooser(), saturated)
    simulation.run(4096)
    assert simulation.chooser.now(readers=2) is Sharing.CROSS
    assert simulation.chooser.now(readers=1) is Sharing.INTRA


def test_more_readers_are_measured_anew() -> None:
    simulation = Simulation(SharingChooser(), lambda depth: 2000.0 if depth < 5 else 200.0)
    simulation.land_mib_per_s = 1e9
    simulation.run(4096)
    assert simulation.chooser.state == "intra"
    simulation.run(16 * 1024, readers=8)
    assert simulation.chooser.state == "cross"


def test_fragments_that_were_not_in_memory_are_not_measured() -> None:
    simulation = Simulation(SharingChooser(), saturated, cold_bytes=2 * MIB)
    simulation.run(4096)
    assert list(simulation.chooser.rates_bytes_per_s.values()) == [None, None]
    assert set(simulation.used_mib) == {Sharing.INTRA}
    simulation.cold_bytes = 1 * MIB
    simulation.run(8192)
    assert simulation.chooser.state == "cross"


@pytest.mark.parametrize("forced", list(Sharing))
def test_a_forced_choice_is_kept_and_its_rate_is_shown(forced: Sharing) -> None:
    simulation = Simulation(SharingChooser(forced_sharing(forced.value)), saturated)
    assert simulation.chooser.state == forced.value
    simulation.run(1024)
    assert set(simulation.used_mib) == {forced}
    shown = {one for one, rate in simulation.chooser.rates_bytes_per_s.items() if rate is not None}
    assert shown == {forced}


def test_auto_forces_nothing() -> None:
    assert forced_sharing("auto") is None


def test_the_chooser_says_its_state_and_rates() -> None:
    chooser = SharingChooser()
    assert repr(chooser) == "<SharingChooser measuring>"
    simulation = Simulation(chooser, lambda depth: 512.0, land_mib_per_s=1e12)
    simulation.run(1024)
    assert repr(chooser) == "<SharingChooser intra, intra 512 MiB/s, cross 512 MiB/s>"


@settings(max_examples=examples(10))
@given(
    st.lists(
        st.tuples(
            st.integers(1, 6),
            st.integers(1, 64),
            st.sampled_from([saturated, deep]),
            st.sampled_from([0, 64 * MIB]),
        ),
        max_size=20,
    )
)
def test_whatever_is_read_measuring_is_bounded_and_one_reader_never_waits(
    phases: list[tuple[int, int, Rate, int]],
) -> None:
    simulation = Simulation(SharingChooser(), saturated)
    for readers, fragment_mib, rate, cold_bytes in phases:
        simulation.rate, simulation.cold_bytes = rate, cold_bytes
        simulation.fragment_mib = fragment_mib
        simulation.run(20 * fragment_mib, readers)
        assert simulation.chooser.now(1) is Sharing.INTRA
    # One measurement is free: two phases, each of what precedes it, warm-up, cold ones, a window
    # of 16 fragments or 0.1 s.
    largest_mib = max((phase[1] for phase in phases), default=0)
    once_mib = 2 * (6 + device_sharing.WARM_UP_FRAGMENTS + 15 + 16) * largest_mib + 2 * 800
    bound_mib = once_mib + sum(simulation.shared_mib.values()) / device_sharing.MEASURED_RATIO
    assert simulation.shared_mib["measuring"] <= bound_mib


# --- the device that they share -------------------------------------------------------------------


class Scripted(SharingChooser):
    """Changes its mind with every fragment, or never."""

    def __init__(self, *choices: Sharing) -> None:
        super().__init__()
        self._choices = choices
        self._asked = 0
        self.reported: list[tuple[int, int]] = []

    def now(self, readers: int) -> Sharing:
        self._asked += 1
        return self._choices[self._asked % len(self._choices)]

    def finished(
        self,
        length_bytes: int,
        started_s: float,
        ended_s: float,
        readers: int,
        cold_bytes: int = 0,
    ) -> None:
        self.reported.append((length_bytes, readers))


class Device:
    """Counts who is in the device part."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.readers = 0
        self.most = 0

    @contextmanager
    def entered(self) -> Iterator[None]:
        with self._lock:
            self.readers += 1
            self.most = max(self.most, self.readers)
        yield
        with self._lock:
            self.readers -= 1


def run_readers(shared: SharedDevice, device: Device, threads: int, fragments: int) -> list[int]:
    """Fragments that each thread has finished; a thread that is stuck shows."""
    done = [0] * threads
    begin = threading.Barrier(threads)

    def read(number: int) -> None:
        begin.wait()
        for _ in range(fragments):
            with shared.fragment(1) as fragment, fragment.reading(), device.entered():
                pass
            done[number] += 1

    running = [threading.Thread(target=read, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(60)
    return done


def test_in_cross_one_reader_is_in_the_device_part() -> None:
    shared, device = SharedDevice(Scripted(Sharing.CROSS)), Device()
    assert run_readers(shared, device, threads=6, fragments=300) == [300] * 6
    assert device.most == 1


def test_switching_while_readers_are_inside_stops_nobody() -> None:
    chooser = Scripted(Sharing.CROSS, Sharing.INTRA, Sharing.INTRA, Sharing.CROSS, Sharing.CROSS)
    assert run_readers(SharedDevice(chooser), Device(), threads=6, fragments=1000) == [1000] * 6
    assert len(chooser.reported) == 6000
    assert repr(SharedDevice(SharingChooser())) == (
        "<SharedDevice 0 readers, <SharingChooser measuring>>"
    )


def test_in_intra_readers_are_in_the_device_part_together() -> None:
    shared = SharedDevice(Scripted(Sharing.INTRA))
    together = threading.Barrier(3, timeout=60)

    def read() -> None:
        with shared.fragment(1) as fragment, fragment.reading():
            together.wait()

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not together.broken


def test_readers_take_the_device_in_the_order_in_which_they_came() -> None:
    shared = SharedDevice(Scripted(Sharing.CROSS))
    order: list[int] = []
    threads: list[threading.Thread] = []

    def read(number: int) -> None:
        with shared.fragment(1) as fragment, fragment.reading():
            order.append(number)

    with shared.fragment(1) as fragment, fragment.reading():
        for number in range(8):
            thread = threading.Thread(target=read, args=(number,))
            thread.start()
            threads.append(thread)
            while len(shared.turns) <= number:  # until it waits
                threading.Event().wait(0.0005)
    for thread in threads:
        thread.join(60)
    assert order == list(range(8))


@pytest.mark.parametrize("choice", list(Sharing))
def test_a_reader_that_fails_gives_its_turn_back_and_is_not_measured(choice: Sharing) -> None:
    chooser = Scripted(choice)
    shared = SharedDevice(chooser)
    with (
        pytest.raises(OSError, match="rotten"),
        shared.fragment(1) as fragment,
        fragment.reading(),
    ):
        raise OSError("rotten")
    with shared.fragment(7) as fragment, fragment.reading():
        pass
    assert chooser.reported == [(7, 1)]


def test_the_gate_reports_the_fewest_readers_that_shared_a_fragment() -> None:
    times_s = iter(range(100))
    chooser = Scripted(Sharing.INTRA)
    shared = SharedDevice(chooser, clock_s=lambda: float(next(times_s)))
    first, second = shared.fragment(1 * GIB), shared.fragment(2)
    with first:
        with second:
            assert (first.readers, second.readers) == (1, 2)
        with shared.fragment(3):
            pass
    assert chooser.reported == [(2, 2), (3, 2), (GIB, 1)]
