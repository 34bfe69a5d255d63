"""Whatever links take, finish and lose, every byte is carried once, and those of its own first."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from objectcache.gpu.device import DeviceFailed
from objectcache.gpu.links.link_pulls import LinkPulls
from objectcache.gpu.links.link_rates import LinkRates
from objectcache.gpu.links.micro_tasks import DeviceLink, DeviceTransfer, MicroTask, Pull
from objectcache.gpu.links.pull_settings import OURS, PAPERS, PullSettings
from objectcache.gpu.pieces import Pieces
from objectcache_schemas.errors import InvalidRequest
from tests.unit.examples import examples

RATE = 1000.0  # bytes a second of a link of which nothing is known


def gpu_links(count: int) -> list[DeviceLink]:
    """Each direct for its own device and a relay for the others."""
    devices = frozenset(range(count))
    return [DeviceLink(n, frozenset({n}), devices - {n}) for n in range(count)]


def run_of(size_bytes: int, base: int = 1) -> Pieces:
    return Pieces.of([(base, base, size_bytes)])


def bytes_of(pieces: Pieces) -> list[tuple[int, int]]:
    """(host, device) address of every byte."""
    return [
        (int(host) + index, int(device) + index)
        for host, device, size in zip(pieces.host, pieces.device, pieces.sizes_bytes, strict=True)
        for index in range(int(size))
    ]


@dataclass(eq=False)
class Asked:
    transfer: DeviceTransfer
    pieces: Pieces
    links: frozenset[int]
    carried: list[tuple[int, int]]
    is_lost: bool = False
    is_aborted: bool = False

    @property
    def queued(self) -> int:
        return self.transfer.left - self.transfer.in_flight


class AnyCourse(RuleBasedStateMachine):
    """Transfers come, links take and finish and fail, transfers are aborted, in any order."""

    @initialize(
        gpus=st.integers(1, 4),
        has_nic=st.booleans(),
        by_finish_time=st.booleans(),
        is_background=st.booleans(),
        depth=st.integers(1, 3),
        fallback_bytes=st.sampled_from([0, 40]),
    )
    def links(
        self,
        gpus: int,
        has_nic: bool,
        by_finish_time: bool,
        is_background: bool,
        depth: int,
        fallback_bytes: int,
    ) -> None:
        self.all_links = gpu_links(gpus)
        if has_nic:
            self.all_links.append(DeviceLink(gpus, frozenset(range(gpus))))
        self.settings = PullSettings(
            chunk_bytes=16,
            pieces_max=3,
            depth=depth,
            fallback_bytes=fallback_bytes,
            by_finish_time=by_finish_time,
            is_background=is_background,
        )
        self.gpus = gpus
        self.pulls = LinkPulls(self.all_links, self.settings, LinkRates(RATE))
        self.on: dict[int, list[Pull]] = {link.number: [] for link in self.all_links}
        self.lost: set[int] = set()
        self.asked: list[Asked] = []
        self.now_s = 0.0
        self.base = 1

    @rule(data=st.data(), due=st.integers(0, 3), is_any=st.booleans())
    def begin(self, data: st.DataObject, due: int, is_any: bool) -> None:
        device = data.draw(st.integers(0, self.gpus - 1))
        runs = []
        for size in data.draw(st.lists(st.integers(1, 50), max_size=4)):
            gap = data.draw(st.sampled_from([0, 5]))
            runs.append((self.base, self.base + 7, size))
            self.base += size + gap
        self.base += 100
        pieces = Pieces.of(runs)
        numbers = [link.number for link in self.all_links]
        only = None if is_any else data.draw(st.sets(st.sampled_from(numbers), min_size=1))
        can = frozenset(numbers if only is None else only)
        reach = frozenset(
            link.number
            for link in self.all_links
            if link.number in can and device in link.direct | link.relayed
        )
        if not reach - self.lost:
            with pytest.raises(DeviceFailed if reach else InvalidRequest, match="no link"):
                self.pulls.begin(device, pieces, links=only)
            return
        transfer = self.pulls.begin(device, pieces, due=due, links=only)
        self.asked.append(Asked(transfer, pieces, reach, []))

    @rule(data=st.data(), passes_s=st.sampled_from([0.0, 0.001, 0.1]))
    def take(self, data: st.DataObject, passes_s: float) -> None:
        self.now_s += passes_s
        self._pull(data.draw(st.sampled_from(self.all_links)))

    def _pull(self, link: DeviceLink) -> bool:
        busy = len(self.on[link.number])
        own = [
            asked
            for asked in self.asked
            if asked.queued and asked.transfer.device in link.direct and link.number in asked.links
        ]
        pull = self.pulls.pull(link.number, self.now_s)
        if pull is None:
            return False
        assert link.number not in self.lost
        assert busy < self.settings.depth
        assert not pull.task.transfer.is_aborted
        assert link.number in self.of(pull.task.transfer).links, "it has not got these bytes"
        assert len(pull.task.pieces) <= self.settings.pieces_max
        device = pull.task.transfer.device
        assert pull.is_relayed == (device not in link.direct)
        assert not (pull.is_relayed and own), "relays while its own device has something queued"
        if pull.is_relayed:
            assert pull.task.size_bytes <= self.settings.chunk_bytes
            assert pull.relay_buffer in range(self.settings.relay_buffers)
        self.on[link.number].append(pull)
        return True

    @precondition(lambda self: any(self.on.values()))
    @rule(data=st.data(), took_s=st.sampled_from([0.001, 0.02, 0.5]))
    def finish(self, data: st.DataObject, took_s: float) -> None:
        number = data.draw(st.sampled_from([number for number, on in self.on.items() if on]))
        self.now_s += took_s
        self._finish(number)

    def _finish(self, number: int) -> None:
        task = self.on[number].pop(0).task
        self.of(task.transfer).carried += bytes_of(task.pieces)
        self.pulls.done(number, task, self.now_s)

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        link = data.draw(st.sampled_from(self.all_links))
        self.lost.add(link.number)
        self.on[link.number].clear()
        for transfer in self.pulls.lose(link.number):
            asked = self.of(transfer)
            assert not asked.links - self.lost
            assert not asked.is_aborted
            assert transfer.is_aborted
            asked.is_lost = True

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        asked = data.draw(st.sampled_from(self.asked))
        asked.is_aborted = True
        self.pulls.abort(asked.transfer)

    def of(self, transfer: DeviceTransfer) -> Asked:
        return next(asked for asked in self.asked if asked.transfer is transfer)

    @invariant()
    def memory_is_in_use_exactly_while_something_is_on_its_way(self) -> None:
        for asked in self.asked:
            on = sum(p.task.transfer is asked.transfer for on in self.on.values() for p in on)
            assert asked.transfer.in_flight == on
            if asked.is_aborted or asked.is_lost:
                assert asked.transfer.is_quiet == (on == 0)
                assert not asked.transfer.is_done or not asked.is_lost

    def teardown(self) -> None:
        if not hasattr(self, "pulls"):
            return
        while True:
            while [link for link in self.all_links if self._pull(link)]:
                pass
            busy = [number for number, on in self.on.items() if on]
            if busy:
                self.now_s += 0.01
                self._finish(busy[0])
            elif (again_s := self.pulls.ask_again_s(self.now_s)) is not None:
                self.now_s = again_s
            else:
                break
        for asked in self.asked:
            expected = sorted(bytes_of(asked.pieces))
            carried = sorted(asked.carried)
            assert asked.transfer.is_quiet
            if asked.is_aborted or asked.is_lost:
                assert len(set(carried)) == len(carried)
                assert set(carried) <= set(expected)
            else:
                assert asked.transfer.is_done
                assert carried == expected
        assert repr(self.pulls).endswith("0 queued, 0 on links>")


TestAnyCourse = AnyCourse.TestCase
TestAnyCourse.settings = settings(max_examples=examples(15), stateful_step_count=40)


# --- by finish time ---


def last_end_s(rates: list[float], sizes: list[int], settings: PullSettings) -> float:
    """When links of these rates, the first of them the device's own, have carried everything."""
    known = {(number, 0): rate for number, rate in enumerate(rates)}
    pulls = LinkPulls(gpu_links(len(rates)), settings, LinkRates(RATE, known))
    pulls.begin(0, run_of(sum(sizes)))
    return end_s(pulls, rates)


def end_s(pulls: LinkPulls, rates: list[float]) -> float:
    """When links of these rates have carried what was begun."""
    free_s = [0.0] * len(rates)
    on: list[tuple[float, int, int, MicroTask]] = []
    now_s, count = 0.0, 0
    while True:
        took = True
        while took:
            took = False
            for number, rate in enumerate(rates):
                if (pull := pulls.pull(number, now_s)) is not None:
                    free_s[number] = max(free_s[number], now_s) + pull.task.size_bytes / rate
                    heapq.heappush(on, (free_s[number], count := count + 1, number, pull.task))
                    took = True
        if not on:
            return now_s
        now_s, _, number, task = heapq.heappop(on)
        pulls.done(number, task, now_s)


def listed_end_s(rates: list[float], sizes: list[int]) -> float:
    """Each micro-task in turn to the link that finishes it first."""
    free_s = [0.0] * len(rates)
    for size in sizes:
        ends = [free + size / rate for free, rate in zip(free_s, rates, strict=True)]
        first = min(range(len(rates)), key=ends.__getitem__)
        free_s[first] = ends[first]
    return max(free_s)


@settings(max_examples=examples(40))
@given(
    st.lists(st.sampled_from([1.0, 1.5, 2.0, 3.0, 6.0, 20.0]), min_size=1, max_size=8),
    st.integers(10_000, 800_000),
)
def test_with_known_rates_it_is_through_as_soon_as_by_list_scheduling(
    speeds: list[float], size_bytes: int
) -> None:
    count = -(-size_bytes // 10_000)
    each = -(-size_bytes // count)
    sizes = [each] * (size_bytes // each) + [size_bytes % each]
    rates = [100 * speed for speed in speeds]
    ours = replace(OURS, chunk_bytes=10_000, fallback_bytes=0)
    assert last_end_s(rates, sizes, ours) <= 1.05 * listed_end_s(rates, sizes)


def test_the_papers_links_wait_for_the_slowest_where_ours_do_not() -> None:
    sizes, rates = [100] * 12, [1000.0, 1000.0, 50.0]
    ours = replace(OURS, chunk_bytes=100, fallback_bytes=0)
    papers = replace(PAPERS, chunk_bytes=100, fallback_bytes=0)
    assert last_end_s(rates, sizes, ours) == pytest.approx(0.6)
    assert last_end_s(rates, sizes, papers) == pytest.approx(4.0)  # two of 2 s each


def pulled_dues(settings: PullSettings) -> list[int]:
    pulls = LinkPulls(gpu_links(1), replace(settings, depth=9), LinkRates(RATE))
    for due in (3, 1, 2):
        pulls.begin(0, run_of(10, due * 100), due=due)
    taken = [pulls.pull(0, 0.0) for _ in range(3)]
    return [pull.task.transfer.due for pull in taken if pull is not None]


def test_the_layer_that_is_due_first_goes_first_and_by_the_paper_the_one_that_came_first() -> None:
    assert pulled_dues(OURS) == [1, 2, 3]
    assert pulled_dues(PAPERS) == [3, 1, 2]


@pytest.mark.parametrize("by_finish_time", [False, True])
def test_a_relay_takes_from_the_longest_queue(by_finish_time: bool) -> None:
    chosen = replace(OURS, chunk_bytes=10, fallback_bytes=0, depth=1, by_finish_time=by_finish_time)
    pulls = LinkPulls(gpu_links(3), chosen, LinkRates(RATE))
    pulls.begin(0, run_of(200, 1000))
    pulls.begin(1, run_of(300, 5000))
    pull = pulls.pull(2, 0.0)
    assert pull is not None
    assert pull.is_relayed
    assert pull.task.transfer.device == 1


@pytest.mark.parametrize("chosen", [OURS, PAPERS])
def test_few_bytes_are_one_copy_over_the_devices_own_link(chosen: PullSettings) -> None:
    chosen = replace(chosen, chunk_bytes=10, fallback_bytes=100)
    for size_bytes, links in ((99, {0}), (100, {0, 1, 2})):
        pulls = LinkPulls(gpu_links(3), chosen, LinkRates(RATE))
        pulls.begin(0, run_of(size_bytes))
        taken = {number: pulls.pull(number, 0.0) for number in range(3)}
        assert {number for number, pull in taken.items() if pull is not None} == links
        first = taken[0]
        assert first is not None
        assert first.task.size_bytes == (99 if size_bytes == 99 else 10)


def test_of_many_small_copies_at_once_links_share_and_by_the_paper_they_do_not() -> None:
    for chosen, links in ((OURS, {0, 1, 2}), (PAPERS, {0})):
        small = replace(chosen, chunk_bytes=10, fallback_bytes=100)
        pulls = LinkPulls(gpu_links(3), small, LinkRates(RATE))
        for layer in range(30):
            pulls.begin(0, run_of(60, layer * 100), due=layer)
        taken = {number for number in range(3) if pulls.pull(number, 0.0) is not None}
        taken |= {number for number in range(3) if pulls.pull(number, 0.0) is not None}
        assert taken == links


def test_a_storage_nic_carries_what_it_can_beside_the_devices_link() -> None:
    nic = DeviceLink(9, frozenset({0, 1}))
    rates = LinkRates(RATE, {(9, 0): RATE / 4})
    chosen = replace(OURS, chunk_bytes=10, fallback_bytes=0)
    pulls = LinkPulls([*gpu_links(2), nic], chosen, rates)
    from_host = pulls.begin(0, run_of(100), links=[0, 1])
    assert pulls.pull(9, 0.0) is None  # it has no host memory's bytes
    pulls.abort(from_host)
    stored = pulls.begin(0, run_of(100, 1000))
    pull = pulls.pull(9, 0.0)
    assert pull is not None
    assert not pull.is_relayed
    assert pull.task.transfer is stored
    pulls.abort(stored)
    pulls.begin(0, run_of(20, 2000))
    assert pulls.pull(9, 0.0) is None  # the device's own link has carried both before it would


@given(
    st.sampled_from([0.1, 0.25, 0.5, 1.0, 2.0, 4.0]),
    st.integers(0, 100),
    st.integers(0, 100),
    st.booleans(),
)
def test_a_nic_and_the_devices_link_are_through_as_soon_as_they_could_be(
    speed: float, in_host_only: int, in_both: int, stored_first: bool
) -> None:
    """Some bytes are in host memory alone, and a NIC has not got them."""
    rates = [RATE, speed * RATE]
    links = [DeviceLink(0, frozenset({0})), DeviceLink(1, frozenset({0}))]
    chosen = replace(OURS, chunk_bytes=10, fallback_bytes=0)
    pulls = LinkPulls(
        links, chosen, LinkRates(RATE, dict(zip([(0, 0), (1, 0)], rates, strict=True)))
    )
    parts = [(10 * in_both, 1, (0, 1)), (10 * in_host_only, 10_000, (0,))]
    for size_bytes, base, can in parts if stored_first else parts[::-1]:
        pulls.begin(0, run_of(size_bytes, base), links=can)
    total_bytes = 10 * (in_both + in_host_only)
    soonest_s = max(total_bytes / sum(rates), 10 * in_host_only / RATE)
    assert end_s(pulls, rates) <= 1.05 * soonest_s + 2 * 10 / min(rates)


def test_of_a_layer_a_link_takes_first_what_it_alone_has() -> None:
    links = [DeviceLink(0, frozenset({0})), DeviceLink(9, frozenset({0}))]  # a GPU's, and a NIC's
    rates = LinkRates(RATE, {(9, 0): RATE / 100})
    pulls = LinkPulls(links, replace(OURS, fallback_bytes=0, depth=3), rates)
    stored = pulls.begin(0, run_of(10, 2000), due=2)
    in_host = pulls.begin(0, run_of(10, 3000), due=2, links=[0])
    sooner = pulls.begin(0, run_of(10, 4000), due=1, links=[0])
    assert pulls.pull(9, 0.0) is None
    taken = [pulls.pull(0, 0.0) for _ in range(3)]
    assert [pull.task.transfer for pull in taken if pull is not None] == [sooner, in_host, stored]


def test_a_link_pauses_behind_what_took_long_in_background_mode_alone() -> None:
    for is_background in (False, True):
        chosen = replace(OURS, chunk_bytes=10, fallback_bytes=0, is_background=is_background)
        pulls = LinkPulls(gpu_links(1), chosen, LinkRates(RATE))  # 10 bytes in 10 ms
        pulls.begin(0, run_of(100))
        first = pulls.pull(0, 0.0)
        assert first is not None
        pulls.done(0, first.task, 0.016)  # 1.6 times that
        if is_background:
            assert pulls.ask_again_s(0.016) == pytest.approx(0.026)
        assert (pulls.pull(0, 0.02) is None) == is_background
        assert pulls.pull(0, 0.0261) is not None


def test_a_whole_copy_whose_link_is_lost_is_cut_for_relays() -> None:
    pulls = LinkPulls(
        gpu_links(2), replace(OURS, chunk_bytes=10, fallback_bytes=100), LinkRates(RATE)
    )
    transfer = pulls.begin(0, run_of(35))
    first = pulls.pull(0, 0.0)
    assert first is not None
    assert first.task.size_bytes == 35
    assert transfer.left == 1
    assert pulls.lose(0) == []
    assert transfer.left == 4
    pull = pulls.pull(1, 0.0)
    assert pull is not None
    assert pull.is_relayed
    assert pull.task.size_bytes == 9


def test_rates_are_learned_from_what_links_carried() -> None:
    rates = LinkRates(RATE)
    pulls = LinkPulls(gpu_links(2), replace(PAPERS, chunk_bytes=10, fallback_bytes=0), rates)
    pulls.begin(0, run_of(400), node=1)
    now_s = 0.0
    on = [pulls.pull(1, 0.0), pulls.pull(1, 0.0)]
    for _ in range(20):
        now_s += 0.05  # 200 bytes a second, whatever else is on the link
        pull = on.pop(0)
        assert pull is not None
        pulls.done(1, pull.task, now_s)
        on.append(pulls.pull(1, now_s))
    assert rates.bytes_per_s(1, 1, now_s) == pytest.approx(200, rel=0.03)
    assert rates.bytes_per_s(1, 0, now_s) == rates.bytes_per_s(0, 1, now_s) == RATE


def test_no_rate_is_learned_from_how_long_a_link_waited_for_the_engine() -> None:
    rates = LinkRates(RATE)
    pulls = LinkPulls(gpu_links(2), replace(PAPERS, chunk_bytes=10, fallback_bytes=0), rates)
    pulls.begin(0, run_of(50), is_behind=True)
    on = [(number, pulls.pull(number, 0.0)) for number in (0, 0, 1, 1)]
    ends_s = [5.01, 5.03, 5.04, 5.08]  # the engine was through after 5 s
    for (number, pull), now_s in zip(on, ends_s, strict=True):
        assert pull is not None
        pulls.done(number, pull.task, now_s)
        seconds = {(0, 0): 5.03, (1, 0): 5.08}
        assert rates.known.keys() == {at for at, end_s in seconds.items() if now_s >= end_s}
    assert rates.known[0, 0] == pytest.approx(10 / 0.02)  # by what came behind what had waited
    assert rates.known[1, 0] == pytest.approx(10 / 0.04)


def test_a_link_that_waits_for_the_engine_is_not_taken_to_be_late() -> None:
    """Else its own device's bytes would go to the others when the engine is through."""
    chosen = replace(OURS, chunk_bytes=10, fallback_bytes=0, depth=1)
    pulls = LinkPulls(gpu_links(2), chosen, LinkRates(RATE, {(1, 0): RATE / 4}))
    pulls.begin(0, run_of(30), is_behind=True)
    assert pulls.pull(0, 0.0) is not None
    assert pulls.pull(1, 5.0) is None


def test_links_need_numbers_of_their_own() -> None:
    link = gpu_links(1)[0]
    with pytest.raises(InvalidRequest, match="numbers"):
        LinkPulls([link, link], OURS, LinkRates(RATE))


def test_settings_of_nothing_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="chunk_bytes"):
        PullSettings(chunk_bytes=0)
    with pytest.raises(InvalidRequest, match="depth"):
        PullSettings(depth=0)
    with pytest.raises(InvalidRequest, match="fallback_bytes"):
        PullSettings(fallback_bytes=-1)


def test_what_was_aborted_is_not_copied_again_when_its_link_is_lost() -> None:
    pulls = LinkPulls(
        gpu_links(2), replace(OURS, chunk_bytes=10, fallback_bytes=0), LinkRates(RATE)
    )
    transfer = pulls.begin(0, run_of(10))
    assert pulls.pull(0, 0.0) is not None
    pulls.abort(transfer)
    assert not transfer.is_quiet
    assert pulls.lose(0) == []
    assert transfer.is_quiet
    assert pulls.pull(1, 0.0) is None
