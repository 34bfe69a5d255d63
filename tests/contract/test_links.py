"""The contract of copies over several links: emulated ones, and CUDA's where there is a GPU.

With one GPU it is its own neighbour: relays' code runs, between places of the same memory. Bytes
are compared with numpy's own scatter; no time is judged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from objectcache.gpu.cuda_device import CudaDevice
from objectcache.gpu.device import Device, DeviceFailed, Direction, Lane, Mark, Way
from objectcache.gpu.links.link_rates import LinkRates
from objectcache.gpu.links.linked_copies import LinkedCopies
from objectcache.gpu.links.micro_tasks import DeviceTransfer
from objectcache.gpu.links.pull_settings import OURS, PAPERS, PullSettings
from objectcache.gpu.links.relay_check import relay_check
from objectcache.gpu.page_locked_memory import PageLockedMemory
from objectcache.gpu.pieces import Pieces
from objectcache.landing.memory_file import MemoryFile
from objectcache.payload import Bytes
from objectcache_schemas.errors import InvalidRequest, Unavailable
from objectcache_schemas.limits import MIB
from tests.emulated_device import EmulatedDevice

COUNT = 3
CHUNK, PIECE, SLOT = 64 << 10, 4096, 4608
RANDOM = np.random.default_rng(11)
RULES = [
    replace(each, chunk_bytes=CHUNK, pieces_max=40, fallback_bytes=100_000)
    for each in (OURS, PAPERS)
]
RATE = 1e9
EVERY_RELAY = frozenset((n, to) for n in range(COUNT) for to in range(COUNT) if n != to)


def emulated() -> list[Device]:
    first = EmulatedDevice(400 * MIB)
    return [first, *(EmulatedDevice(400 * MIB, beside=first) for _ in range(COUNT - 1))]


def cuda() -> list[Device]:
    try:
        there = CudaDevice().cuda.device_count()
        return [CudaDevice(number % there) for number in range(COUNT)]
    except Unavailable as error:
        pytest.skip(f"no CUDA device: {error.message}")


@pytest.fixture(params=[emulated, cuda], ids=["emulated", "cuda"])
def devices(request: pytest.FixtureRequest) -> list[Device]:
    make: Callable[[], list[Device]] = request.param
    return make()


class Places:
    """Random pieces of page-locked memory, and of one device; both with random bytes."""

    def __init__(self, device: Device, locked: PageLockedMemory, count: int) -> None:
        self.device = device
        self.file = MemoryFile(count * SLOT)
        locked.lock_pages(self.file)
        self.host = self.file.array()
        self.host[:] = RANDOM.integers(0, 256, count * SLOT, np.uint8)
        device.enter_thread()
        self.address = device.allocate(count * SLOT)
        self.before = RANDOM.integers(0, 256, count * SLOT, np.uint8)
        device.write(self.address, self.before.tobytes())
        self.rows = [RANDOM.permutation(count)[: count * 3 // 4] for _ in range(2)]
        begins = [row * SLOT for row in self.rows]
        host = self.host.ctypes.data
        self.pieces = Pieces.of(
            [
                (host + int(at_host), self.address + int(at_device), PIECE)
                for at_host, at_device in zip(*begins, strict=True)
            ]
        )

    def there(self) -> Bytes:
        return np.frombuffer(self.device.read(self.address, len(self.before)), np.uint8)

    def expected(self, direction: Direction) -> Bytes:
        sides = [self.before, self.host]
        rows = self.rows[::-1]
        if direction is Direction.SAVE:
            sides, rows = sides[::-1], rows[::-1]
        result = sides[0].copy().reshape(-1, SLOT)
        result[rows[0], :PIECE] = sides[1].reshape(-1, SLOT)[rows[1], :PIECE]
        return result.reshape(-1)


class Linked:
    """Links of some devices, and memory for them."""

    def __init__(self, devices: list[Device]) -> None:
        self.devices = devices
        self.locked = PageLockedMemory(devices[0])
        self._places: list[Places] = []

    def places(self, device: int, count: int) -> Places:
        places = Places(self.devices[device], self.locked, count)
        self._places.append(places)
        return places

    def copies(
        self,
        direction: Direction,
        settings: PullSettings,
        relays: frozenset[tuple[int, int]] = EVERY_RELAY,
    ) -> LinkedCopies:
        return LinkedCopies(self.devices, direction, settings, LinkRates(RATE), relays=relays)

    def close(self) -> None:
        for places in self._places:
            places.device.free(places.address)
        self.locked.close()


@pytest.fixture
def linked(devices: list[Device]) -> Iterator[Linked]:
    made = Linked(devices)
    yield made
    made.close()


@pytest.mark.parametrize("rule", RULES, ids=["ours", "paper's"])
@pytest.mark.parametrize("direction", list(Direction), ids=[d.value for d in Direction])
def test_pieces_arrive_over_all_links_and_nothing_beside_them(
    linked: Linked, direction: Direction, rule: PullSettings
) -> None:
    counts = [(0, 300), (0, 200), (1, 120), (2, 4)]
    all_places = [linked.places(device, count) for device, count in counts]
    expected = [places.expected(direction) for places in all_places]
    with linked.copies(direction, rule) as copies:
        transfers = [
            copies.begin(device, places.pieces, due=due)
            for due, ((device, _), places) in enumerate(zip(counts, all_places, strict=True))
        ]
        for transfer, places, each in zip(transfers, all_places, expected, strict=True):
            copies.wait(transfer)
            found = places.there() if direction is Direction.LOAD else places.host
            assert np.array_equal(found, each)


def test_without_relays_each_device_has_its_own_link_alone(linked: Linked) -> None:
    with linked.copies(Direction.LOAD, RULES[0], relays=frozenset()) as copies:
        places = linked.places(1, 300)
        transfer = copies.begin(1, places.pieces)
        assert transfer.links == {1}
        copies.wait(transfer)
    assert np.array_equal(places.there(), places.expected(Direction.LOAD))


def test_relays_carry_for_a_device_whose_own_link_is_not_there(linked: Linked) -> None:
    """Every byte goes through a relay's buffer."""
    devices = linked.devices
    lanes = [(to, devices[0].relay(devices[to], CHUNK, 16)) for to in range(1, COUNT)]
    for to, lane in lanes:
        for direction in (Direction.LOAD, Direction.SAVE):
            places = linked.places(to, 16)
            expected = places.expected(direction)
            devices[0].enter_thread()
            lane.copy(places.pieces, direction, Way.EACH)
            lane.wait_idle()
            found = places.there() if direction is Direction.LOAD else places.host
            assert np.array_equal(found, expected)
        lane.close()


def test_copies_come_behind_a_mark(linked: Linked) -> None:
    devices = linked.devices
    places = linked.places(0, 300)
    devices[0].enter_thread()
    hold, lane = devices[0].stream_hold(), devices[0].lane(MIB, 8)
    hold.hold(lane.stream, 1)
    with linked.copies(Direction.LOAD, RULES[0]) as copies:
        transfer = copies.begin(0, places.pieces, behind=[devices[0].mark(lane.stream)])
        assert not transfer.is_quiet
        assert np.array_equal(places.there(), places.before)
        hold.raise_now(1)
        copies.wait(transfer)
    assert np.array_equal(places.there(), places.expected(Direction.LOAD))
    lane.close()
    hold.close()


def test_an_abort_returns_when_nothing_is_written_any_more(linked: Linked) -> None:
    devices = linked.devices
    places = linked.places(0, 400)
    devices[0].enter_thread()
    hold, lane = devices[0].stream_hold(), devices[0].lane(MIB, 8)
    hold.hold(lane.stream, 1)
    with linked.copies(Direction.LOAD, RULES[1]) as copies:
        transfer = copies.begin(0, places.pieces, behind=[devices[0].mark(lane.stream)])
        while not transfer.in_flight:  # by and by a link takes something, and it is held
            threading.Event().wait(0.001)
        in_flight: list[int] = []

        def abort() -> None:
            copies.abort(transfer)
            in_flight.append(transfer.in_flight)

        aborting = threading.Thread(target=abort)
        aborting.start()
        while not transfer.is_aborted:
            threading.Event().wait(0.001)
        hold.raise_now(1)
        aborting.join()
        assert in_flight == [0]
        places.host[:] = ~places.host  # what is written from now on would be seen
        there = places.there().copy()
        with pytest.raises(InvalidRequest, match="aborted"):
            copies.wait(transfer)
    assert np.array_equal(places.there(), there)
    lane.close()
    hold.close()


def test_closing_ends_what_is_under_way(linked: Linked) -> None:
    places = linked.places(0, 400)
    copies = linked.copies(Direction.LOAD, RULES[0])
    transfer = copies.begin(0, places.pieces)
    copies.close()
    assert transfer.is_quiet
    with pytest.raises(InvalidRequest, match="closed"):
        copies.begin(0, places.pieces)


def test_closing_leaves_alone_what_is_there(linked: Linked) -> None:
    places = linked.places(0, 300)
    copies = linked.copies(Direction.LOAD, RULES[0])
    transfer = copies.begin(0, places.pieces)
    while not transfer.is_quiet:
        threading.Event().wait(0.001)
    copies.close()
    copies.wait(transfer)
    assert np.array_equal(places.there(), places.expected(Direction.LOAD))


def test_nothing_is_learned_from_a_copy_that_waited_for_the_engine(linked: Linked) -> None:
    devices = linked.devices
    places = linked.places(0, 20)  # one copy over the own link
    devices[0].enter_thread()
    hold, lane = devices[0].stream_hold(), devices[0].lane(MIB, 8)
    hold.hold(lane.stream, 1)
    rates = LinkRates(RATE)
    with LinkedCopies(devices, Direction.LOAD, RULES[0], rates) as copies:
        transfer = copies.begin(0, places.pieces, behind=[devices[0].mark(lane.stream)])
        hold.raise_now(1)
        copies.wait(transfer)
        assert not rates.known
        copies.wait(copies.begin(0, places.pieces))
        assert rates.known.keys() == {(0, 0)}
    lane.close()
    hold.close()


# --- links that fail: emulated ones can be broken ---


class _WithoutMemory(EmulatedDevice):
    """Has no more memory for lanes."""

    def lane(self, task_bytes_max: int, pieces_max: int, beside: Lane | None = None) -> Lane:
        raise MemoryError("no buffer")


def test_links_without_memory_for_their_lanes_are_refused() -> None:
    first = EmulatedDevice()
    devices = [first, _WithoutMemory(beside=first)]
    with pytest.raises(MemoryError, match="no buffer"):
        LinkedCopies(devices, Direction.LOAD, RULES[0], LinkRates(RATE))


def broken(number: int) -> list[Device]:
    found = emulated()
    device = found[number]
    assert isinstance(device, EmulatedDevice)
    device.breaks.set()
    return found


def carried_with(number: int) -> tuple[Linked, LinkedCopies, DeviceTransfer, Places]:
    linked = Linked(broken(number))
    places = linked.places(0, 300)
    copies = linked.copies(Direction.LOAD, RULES[1])
    return linked, copies, copies.begin(0, places.pieces), places


@pytest.mark.parametrize("number", range(COUNT))
def test_others_carry_what_was_on_a_link_that_fails(number: int) -> None:
    linked, copies, transfer, places = carried_with(number)
    with copies:
        copies.wait(transfer)
    assert np.array_equal(places.there(), places.expected(Direction.LOAD))
    linked.close()


def test_what_no_link_can_carry_fails() -> None:
    linked = Linked(broken(1))
    places = linked.places(1, 300)
    with linked.copies(Direction.LOAD, RULES[0], relays=frozenset()) as copies:
        transfer = copies.begin(1, places.pieces)
        with pytest.raises(Unavailable, match="broken"):
            copies.wait(transfer)
        with pytest.raises(DeviceFailed, match=r"no link to device 1 is left.*of devices 1\).*off"):
            copies.begin(1, places.pieces)
    linked.close()


# --- whether a link may relay ---


def test_a_relay_is_checked_by_all_of_its_bytes(devices: list[Device]) -> None:
    found = relay_check(devices[0], devices[1], 4 * MIB)
    assert found is None or "of the link" in found  # how quick it is no test judges


class _OnNode(EmulatedDevice):
    """Notes the node that it puts host memory on."""

    put_on: int | None = None

    def lock_pages(self, address: int, length_bytes: int) -> None:
        self.put_on = self.node
        super().lock_pages(address, length_bytes)


def test_a_relay_is_checked_with_memory_where_a_copiers_is() -> None:
    target = _OnNode(node=0)
    relay = _OnNode(beside=target, node=1)
    relay_check(relay, target, MIB)
    assert (target.put_on, relay.put_on) == (0, None)


class _Forgetting(EmulatedDevice):
    """Its relays lose the last bytes: of one, what was there before is the same now and then."""

    def relay(self, target: Device, task_bytes_max: int, pieces_max: int) -> Lane:
        return _ShortLane(super().relay(target, task_bytes_max, pieces_max))


class _ShortLane(Lane):
    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self.stream = lane.stream

    def copy(self, task: Pieces, direction: Direction, way: Way) -> None:
        sizes = task.sizes_bytes.copy()
        sizes[-1] -= np.uint64(16)
        self._lane.copy(Pieces(task.host, task.device, sizes), direction, way)

    def follow(self, mark: Mark) -> None:
        self._lane.follow(mark)

    def wait_idle(self) -> None:
        self._lane.wait_idle()

    def close(self) -> None:
        self._lane.close()


def test_a_relay_that_loses_bytes_is_slow_or_out_of_reach_is_refused() -> None:
    target = EmulatedDevice(400 * MIB)
    assert relay_check(_Forgetting(beside=target), target, MIB) == (
        "other bytes arrived than were sent"
    )
    slow = EmulatedDevice(400 * MIB, beside=target)
    slow.peer_link.limit(5 * MIB)
    assert "loads come at" in str(relay_check(slow, target, MIB))
    assert "cannot reach" in str(relay_check(EmulatedDevice(), target, MIB))
