"""The contract of devices and of the copier over them: emulated, and CUDA where there is a GPU.

Bytes are compared with numpy's own scatter; where order matters the device is slow or held back.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from objectcache.deliveries.delivery import Delivery
from objectcache.deliveries.layer_progress import LayerProgress
from objectcache.gpu import cuda_device
from objectcache.gpu.copier import BlockSave, Copier
from objectcache.gpu.cuda_device import CudaDevice
from objectcache.gpu.device import Device, Direction, Lane, Mark, Way
from objectcache.gpu.layer_load import LayerLoad
from objectcache.gpu.line import Job, Line, LineSettings
from objectcache.gpu.page_locked_memory import PageLockedMemory
from objectcache.gpu.pieces import BlockPart, PagedBlocks, Pieces
from objectcache.landing.memory_file import MemoryFile
from objectcache.payload import Bytes, PayloadShape
from objectcache_schemas.descriptor import DeliveryMode
from objectcache_schemas.errors import DeliveryFailed, InvalidRequest, Unavailable
from objectcache_schemas.limits import MIB
from tests.emulated_device import EmulatedDevice

LAYERS, CHUNKS, BLOCKS, PART = 3, 7, 19, 4096
SLICE = 2 * PART
TIMEOUT_S = 20.0
RANDOM = np.random.default_rng(7)


def emulated() -> Device:
    return EmulatedDevice()


def cuda() -> Device:
    try:
        return CudaDevice()
    except Unavailable as error:
        pytest.skip(f"no CUDA device: {error.message}")


@pytest.fixture(params=[emulated, cuda], ids=["emulated", "cuda"])
def device(request: pytest.FixtureRequest) -> Device:
    make: Callable[[], Device] = request.param
    return make()


@pytest.fixture(params=list(Way), ids=[way.value for way in Way])
def way(request: pytest.FixtureRequest, device: Device) -> Way:
    if request.param not in device.ways:
        pytest.skip(f"{device!r} has no way {request.param.value}")
    return Way(request.param)


class Memory:
    """Page-locked host memory, and memory of the device, both with random bytes."""

    def __init__(self, copier: Copier, host_bytes: int, device_bytes: int) -> None:
        self.device = copier.device
        self.file = MemoryFile(host_bytes)
        copier.page_locked.lock_pages(self.file)
        self.host = self.file.array()
        self.host[:] = RANDOM.integers(0, 256, host_bytes, np.uint8)
        self.address = self.device.allocate(device_bytes)
        self.before = RANDOM.integers(0, 256, device_bytes, np.uint8)
        self.device.write(self.address, self.before.tobytes())

    def there(self) -> Bytes:
        return np.frombuffer(self.device.read(self.address, len(self.before)), np.uint8)


def copier_of(device: Device, way: Way = Way.EACH, **settings: Any) -> Copier:
    both = LineSettings(way, **settings)
    return Copier(device, loads=both, saves=both)


def scattered(memory: Memory, sizes: Sequence[int], alignment: int) -> Pieces:
    """Pieces at random places that do not overlap, on either side."""
    slots = max(sizes) + 2 * alignment
    places = [RANDOM.permutation(len(sizes) * 2)[: len(sizes)] for _ in range(2)]
    offsets = [place * slots + alignment for place in places]
    host, device = memory.host.ctypes.data, memory.address
    return Pieces.of(
        [
            (host + int(at_host), device + int(at_device), size)
            for at_host, at_device, size in zip(*offsets, sizes, strict=True)
        ]
    )


@pytest.mark.parametrize("alignment", [16, 1])
@pytest.mark.parametrize("direction", list(Direction), ids=[d.value for d in Direction])
def test_scattered_pieces_arrive_and_nothing_beside_them(
    device: Device, way: Way, direction: Direction, alignment: int
) -> None:
    sizes = [4096, 48, 70_000 // 16 * 16, 16, 32 << 10, 4096, 4096] * 5
    if alignment == 1:
        sizes = [size - index % 3 for index, size in enumerate(sizes)]
    room = len(sizes) * 2 * (max(sizes) + 2 * alignment) + alignment
    with copier_of(device, way, task_bytes=256 << 10, pieces_max=11) as copier:
        memory = Memory(copier, room, room)
        pieces = scattered(memory, sizes, alignment)
        sides = {Direction.LOAD: (memory.host, memory.before.copy())}
        sides[Direction.SAVE] = (memory.before, memory.host.copy())
        source, expected = sides[direction]
        for host, there, size in zip(pieces.host, pieces.device, pieces.sizes_bytes, strict=True):
            ends = (int(host) - memory.host.ctypes.data, int(there) - memory.address)
            at_source, at_target = ends if direction is Direction.LOAD else ends[::-1]
            expected[at_target : at_target + int(size)] = source[at_source : at_source + int(size)]
        if direction is Direction.LOAD:
            lane = device.lane(pieces.total_bytes, len(pieces))
            lane.copy(pieces, direction, way)
            lane.wait_idle()
            lane.close()
            assert np.array_equal(memory.there(), expected)
        else:
            copier.save(pieces).wait()
            assert np.array_equal(memory.host, expected)
        device.free(memory.address)


def test_rows_at_equal_distances_arrive(device: Device, way: Way) -> None:
    with copier_of(device, way) as copier:
        memory = Memory(copier, 64 * SLICE, 64 * SLICE)
        host = memory.host.ctypes.data
        pieces = Pieces.of(
            [(host + i * SLICE, memory.address + i * 3 * PART, PART) for i in range(20)]
        )
        lane = device.lane(MIB, 100)
        lane.copy(pieces, Direction.LOAD, way)
        lane.wait_idle()
        lane.close()
        expected = memory.before.copy()
        for i in range(20):
            expected[i * 3 * PART :][:PART] = memory.host[i * SLICE :][:PART]
        assert np.array_equal(memory.there(), expected)
        device.free(memory.address)


def test_memory_that_is_not_locked_is_refused(device: Device) -> None:
    with copier_of(device) as copier:
        memory = Memory(copier, MIB, MIB)
        stray = np.zeros(64, np.uint8)
        for host in (stray.ctypes.data, memory.host.ctypes.data + MIB - 32):
            with pytest.raises(InvalidRequest, match="page-locked"):
                copier.save(Pieces.of([(host, memory.address, 64)]))
        copier.save(Pieces.of([(memory.host.ctypes.data + MIB - 64, memory.address, 64)])).wait()
        assert np.array_equal(memory.host[-64:], memory.before[:64])
        device.free(memory.address)


def test_a_memory_file_is_page_locked_once_and_until_it_goes(device: Device) -> None:
    with copier_of(device) as copier:
        file = MemoryFile(MIB)
        copier.page_locked.lock_pages(file)
        copier.page_locked.lock_pages(file)
        assert repr(copier.page_locked) == f"<PageLockedMemory 1 regions, {MIB} bytes>"
        del file
        assert repr(copier.page_locked) == "<PageLockedMemory 0 regions, 0 bytes>"


def test_a_region_of_a_target_pool_is_page_locked(device: Device) -> None:
    with copier_of(device) as copier:
        region = copier.page_locked.region(MIB)
        place = device.allocate(64)
        copier.save(Pieces.of([(region.address, place, 64)])).wait()
        device.free(place)


def test_a_stream_that_holds_for_a_mark_sees_what_came_before_it(device: Device) -> None:
    with copier_of(device) as copier:
        memory = Memory(copier, 32 * MIB, 32 * MIB)
        loading, reading = device.lane(16 * MIB, 8), device.lane(16 * MIB, 8)
        begin, end = memory.host.ctypes.data, memory.host.ctypes.data + 16 * MIB
        for _ in range(5):
            sent = RANDOM.integers(0, 256, 16 * MIB, np.uint8)
            memory.host[: 16 * MIB] = sent
            loading.copy(Pieces.of([(begin, memory.address, 16 * MIB)]), Direction.LOAD, Way.EACH)
            device.hold(reading.stream, device.mark(loading.stream))
            reading.copy(Pieces.of([(end, memory.address, 16 * MIB)]), Direction.SAVE, Way.EACH)
            reading.wait_idle()
            assert np.array_equal(memory.host[16 * MIB :], sent)
            loading.wait_idle()
        loading.close()
        reading.close()
        device.free(memory.address)


def test_a_stream_is_held_until_the_number_is_raised_far_enough(device: Device) -> None:
    with copier_of(device) as copier:
        memory = Memory(copier, MIB, MIB)
        lanes = [device.lane(MIB, 8), device.lane(MIB, 8)]
        pieces = Pieces.of([(memory.host.ctypes.data, memory.address, PART)])
        for _ in range(3):  # their numbers go on from the last ones, unseen
            hold = device.stream_hold()
            memory.host[:PART] = 0
            for lane, number in zip(lanes, (1, 2), strict=True):
                hold.hold(lane.stream, number)
            lanes[1].copy(pieces, Direction.SAVE, Way.EACH)
            hold.raise_behind(lanes[0], 2)  # behind a hold for 1, which comes from here
            assert not memory.host[:PART].any()
            hold.raise_now(1)
            lanes[1].wait_idle()
            assert np.array_equal(memory.host[:PART], memory.before[:PART])
            hold.close()
        for lane in lanes:
            lane.close()
        device.free(memory.address)


# --- layers of deliveries ---


def paged(order: str, base: int, layer: int) -> PagedBlocks:
    """One layer's blocks, of all layers one after the other from `base` on."""
    base += layer * BLOCKS * SLICE
    if order == "K and V apart":
        parts = [BlockPart(base + half * BLOCKS * PART, PART, PART) for half in (0, 1)]
    elif order == "K and V by block":
        parts = [BlockPart(base + half * PART, SLICE, PART) for half in (0, 1)]
    else:
        parts = [BlockPart(base, SLICE, SLICE)]
    return PagedBlocks(parts, BLOCKS)


def as_tensor(order: str, there: Bytes) -> Bytes:
    """The same as uint8[layer, block, K or V, part]."""
    if order == "K and V apart":
        return there.reshape(LAYERS, 2, BLOCKS, PART).transpose(0, 2, 1, 3)
    return there.reshape(LAYERS, BLOCKS, 2, PART)


class Arriving:
    """A delivery whose layers arrive when the test says so."""

    def __init__(
        self,
        copier: Copier,
        order: str,
        base: int,
        blocks: Sequence[int],
        silence_s_max: float | None = None,
    ) -> None:
        shape = PayloadShape(0, LAYERS, len(blocks), SLICE, DeliveryMode.LAYERWISE)
        self.file = MemoryFile(shape.payload_bytes or 1)
        copier.page_locked.lock_pages(self.file)
        self.payload = self.file.array()
        self.payload[:] = RANDOM.integers(0, 256, len(self.payload), np.uint8)
        self.progress = LayerProgress(0, LAYERS, silence_s_max=silence_s_max)
        self.delivery = Delivery(
            self.progress, shape, self.payload, None, transport="shared_memory"
        )
        self.blocks = list(blocks)
        self._order = order
        self._base = base
        self.asked: list[int] = []

    def places(self, layer: int, slices: Bytes) -> Pieces:
        self.asked.append(layer)
        return paged(self._order, self._base, layer).pieces(self.blocks, slices)

    def slices(self) -> Bytes:
        return self.payload.reshape(LAYERS, len(self.blocks), 2, PART)


ORDERS = ["K and V apart", "K and V by block", "one latent"]
ALL_BYTES = LAYERS * BLOCKS * SLICE


@pytest.fixture
def base(device: Device) -> Iterator[int]:
    address = device.allocate(ALL_BYTES)
    device.write(address, bytes(ALL_BYTES))
    yield address
    device.free(address)


def blocks_on(device: Device, order: str, base: int) -> Bytes:
    return as_tensor(order, np.frombuffer(device.read(base, ALL_BYTES), np.uint8))


@pytest.mark.parametrize("order", ORDERS)
def test_layers_are_laid_into_their_blocks_and_saved_out_of_them(
    device: Device, way: Way, order: str, base: int
) -> None:
    blocks = RANDOM.permutation(BLOCKS)[:CHUNKS].tolist()
    with copier_of(device, way, task_bytes=5 * PART, pieces_max=4, depth=3) as copier:
        arriving = Arriving(copier, order, base, blocks)
        engine = device.lane(MIB, 8)
        with copier.load(arriving.delivery, arriving.places, engine.stream) as load:
            for layer in range(LAYERS):
                arriving.progress.advance(layer + 1)
                load.wait(layer, engine.stream, TIMEOUT_S)
            load.finish()
            device.mark(engine.stream).wait()
        expected = np.zeros((LAYERS, BLOCKS, 2, PART), np.uint8)
        expected[:, blocks] = arriving.slices()
        assert np.array_equal(blocks_on(device, order, base), expected)
        assert arriving.asked == list(range(LAYERS))
        back = MemoryFile(len(arriving.payload))
        copier.page_locked.lock_pages(back)
        saved = back.array().reshape(LAYERS, CHUNKS, SLICE)
        saves = [
            copier.save(paged(order, base, layer).pieces(blocks, saved[layer]), engine.stream)
            for layer in range(LAYERS)
        ]
        for save in saves:
            save.wait()
        assert np.array_equal(back.array(), arriving.payload)
        engine.close()


def test_layers_that_were_there_before_are_copied_at_once(device: Device, base: int) -> None:
    with copier_of(device) as copier:
        arriving = Arriving(copier, ORDERS[0], base, range(CHUNKS))
        arriving.progress.advance(LAYERS)
        with copier.load(arriving.delivery, arriving.places) as load:
            load.finish()
        there = blocks_on(device, ORDERS[0], base)
        assert np.array_equal(there[:, :CHUNKS], arriving.slices())


def test_a_layer_comes_where_another_was_behind_what_reads_that(device: Device, base: int) -> None:
    with copier_of(device) as copier:
        arriving = Arriving(copier, ORDERS[2], base, range(CHUNKS))
        arriving.progress.advance(LAYERS)
        places = paged(ORDERS[2], base, 0)
        engine = device.lane(MIB, 8)
        reads = device.stream_hold()
        read = arriving.slices()

        def load_at_one_place(layer: int, slices: Bytes) -> Pieces:
            return places.pieces(arriving.blocks, slices)

        def there() -> Bytes:
            return blocks_on(device, ORDERS[2], base)[0, :CHUNKS]

        with copier.load(arriving.delivery, load_at_one_place, ahead=1) as load:
            load.wait(0, engine.stream, TIMEOUT_S)
            device.mark(engine.stream).wait()
            with pytest.raises(DeliveryFailed, match="layer 1 did not arrive"):
                load.wait(1, engine.stream, 0.01)  # it has, but its place is taken
            for layer in range(1, LAYERS):
                reads.hold(engine.stream, layer)
                load.release(layer - 1, engine.stream)
                load.wait(layer, engine.stream, TIMEOUT_S)
                assert np.array_equal(there(), read[layer - 1])
                reads.raise_now(layer)
                device.mark(engine.stream).wait()
                assert np.array_equal(there(), read[layer])
            load.finish()
        reads.close()
        engine.close()


def test_it_is_told_whether_memory_is_page_locked(device: Device) -> None:
    with copier_of(device) as copier:
        files = [MemoryFile(MIB) for _ in range(2)]
        copier.page_locked.lock_pages(files[0])
        locked, plain = (file.array() for file in files)
        rows = locked.reshape(16, 4, -1)
        assert copier.page_locked.reaches(locked)
        assert copier.page_locked.reaches(rows[:, 3])
        assert copier.page_locked.reaches(locked[:0])
        assert not copier.page_locked.reaches(plain)
        longer = np.lib.stride_tricks.as_strided(locked[MIB - 8 :], (2, 4), (8, 1))
        assert not copier.page_locked.reaches(longer)


def test_a_delivery_without_chunks_is_over_when_it_has_arrived(device: Device, base: int) -> None:
    with copier_of(device) as copier:
        arriving = Arriving(copier, ORDERS[0], base, [])
        lane = device.lane(MIB, 8)
        with copier.load(arriving.delivery, arriving.places) as load:
            arriving.progress.advance(LAYERS)
            load.wait(LAYERS - 1, lane.stream, TIMEOUT_S)
            load.finish()
        lane.close()
        assert not blocks_on(device, ORDERS[0], base).any()


def test_a_stream_may_be_given_all_its_work_before_the_first_layer_has_arrived(
    device: Device, base: int
) -> None:
    """It reads each layer when that is in its blocks, and no thread waited for one."""
    with copier_of(device) as copier:
        arriving = Arriving(copier, ORDERS[2], base, range(BLOCKS))
        seen_file = MemoryFile(ALL_BYTES)
        copier.page_locked.lock_pages(seen_file)
        seen = seen_file.array()
        layer_bytes = BLOCKS * SLICE
        lanes = [device.lane(layer_bytes, 8) for _ in range(LAYERS)]
        with copier.load(arriving.delivery, arriving.places) as load:
            for layer, lane in enumerate(lanes):
                load.hold(layer, lane.stream)
                place = layer * layer_bytes
                pieces = Pieces.of([(seen.ctypes.data + place, base + place, layer_bytes)])
                lane.copy(pieces, Direction.SAVE, Way.EACH)
            for layer in range(LAYERS):
                arriving.progress.advance(layer + 1)
            for lane in lanes:
                lane.wait_idle()
            load.finish()
        for lane in lanes:
            lane.close()
        assert np.array_equal(seen, arriving.payload)


def test_a_stream_cannot_hold_for_kernels_that_may_stand_behind_it(
    device: Device, base: int
) -> None:
    for way in (Way.STAGED, Way.MAPPED):
        if way in device.ways:
            with copier_of(device, way) as copier:
                arriving = Arriving(copier, ORDERS[0], base, range(CHUNKS))
                lane = device.lane(MIB, 8)
                with (
                    copier.load(arriving.delivery, arriving.places) as load,
                    pytest.raises(InvalidRequest, match="cannot hold for copies by"),
                ):
                    load.hold(0, lane.stream)
                lane.close()


def test_what_holds_for_a_delivery_that_failed_goes_on_and_the_load_tells(
    device: Device, base: int
) -> None:
    with copier_of(device) as copier:
        arriving = Arriving(copier, ORDERS[0], base, range(CHUNKS))
        lane = device.lane(MIB, 8)
        with copier.load(arriving.delivery, arriving.places) as load:
            load.hold(LAYERS - 1, lane.stream)
            arriving.progress.advance(1)
            load.wait(0, lane.stream, TIMEOUT_S)
            arriving.progress.fail("the server died")
            with pytest.raises(DeliveryFailed, match="the server died") as failure:
                load.wait(1, lane.stream, TIMEOUT_S)
            assert failure.value.details.layer == 1
            load.wait(0, lane.stream, TIMEOUT_S)  # that one is there all the same
            with pytest.raises(DeliveryFailed, match="the server died"):
                load.finish()
            device.mark(lane.stream).wait()
        lane.close()
        assert not blocks_on(device, ORDERS[0], base)[1:].any()


def test_a_delivery_in_which_nothing_arrives_fails_for_whoever_waits(
    device: Device, base: int
) -> None:
    with copier_of(device) as copier:
        arriving = Arriving(copier, ORDERS[0], base, range(CHUNKS), silence_s_max=1.0)
        lane = device.lane(MIB, 8)
        with copier.load(arriving.delivery, arriving.places) as load:
            arriving.progress.advance(1)
            load.wait(0, lane.stream, TIMEOUT_S)
            with pytest.raises(DeliveryFailed, match=r"nothing arrived for 1\.0 s") as failure:
                load.wait(1, lane.stream, TIMEOUT_S)
            assert failure.value.details.layer == 1
            with pytest.raises(DeliveryFailed, match=r"nothing arrived for 1\.0 s"):
                load.finish()
        lane.close()


def test_a_wait_that_takes_too_long_ends_and_the_load_goes_on(device: Device, base: int) -> None:
    with copier_of(device) as copier:
        arriving = Arriving(copier, ORDERS[0], base, range(CHUNKS))
        lane = device.lane(MIB, 8)
        with copier.load(arriving.delivery, arriving.places) as load:
            with pytest.raises(DeliveryFailed, match="did not arrive within 0 s"):
                load.wait(0, lane.stream, 0)
            arriving.progress.advance(LAYERS)
            load.wait(0, lane.stream, TIMEOUT_S)
            load.finish()
        lane.close()


def test_a_load_that_is_closed_early_writes_nothing_more(
    device: Device, way: Way, base: int
) -> None:
    with copier_of(device, way, task_bytes=PART) as copier:
        arriving = Arriving(copier, ORDERS[0], base, range(CHUNKS))
        lane = device.lane(MIB, 8)
        load = copier.load(arriving.delivery, arriving.places)
        if not way.takes_kernels:
            load.hold(LAYERS - 1, lane.stream)
        arriving.progress.advance(1)
        load.wait(0, lane.stream, TIMEOUT_S)
        arriving.progress.advance(LAYERS)
        load.close()
        load.close()
        device.mark(lane.stream).wait()
        there = blocks_on(device, ORDERS[0], base).copy()
        arriving.payload[:] ^= 0xFF  # whoever has the memory next
        device.mark(lane.stream).wait()
        other = copier.load(*_arrived(copier, base))
        other.finish()
        other.close()
        assert np.array_equal(blocks_on(device, ORDERS[0], base)[:, :CHUNKS], there[:, :CHUNKS])
        lane.close()


def test_a_load_that_is_closed_waits_for_what_is_on_its_way() -> None:
    """Over a slow link, whose copies read the memory late: what whoever has it next writes there is
    in no block.
    """
    device = EmulatedDevice(rate_bytes_per_s=2e6)
    base = device.allocate(ALL_BYTES)
    with copier_of(device, task_bytes=PART) as copier:
        arriving = Arriving(copier, ORDERS[0], base, range(CHUNKS))
        before = arriving.slices().copy()
        arriving.progress.advance(LAYERS)
        load = copier.load(arriving.delivery, arriving.places)
        lane = device.lane(MIB, 8)
        load.wait(0, lane.stream, TIMEOUT_S)
        load.close()
        arriving.payload[:] ^= 0xFF
        with copier.load(*_arrived(copier, base)) as after:
            after.finish()
        lane.close()
    there = blocks_on(device, ORDERS[0], base)[:, :CHUNKS]
    is_there = (there == before).all(axis=-1)
    assert is_there[0].all()
    assert not there[~is_there].any()


def _arrived(copier: Copier, base: int) -> tuple[Delivery, Callable[[int, Bytes], Pieces]]:
    """One into the last block, behind which nothing of an earlier load can be."""
    arriving = Arriving(copier, ORDERS[0], base, [BLOCKS - 1])
    arriving.progress.advance(LAYERS)
    return arriving.delivery, arriving.places


def test_the_layer_that_is_needed_first_goes_first(device: Device, base: int) -> None:
    """Of two loads that are held up, the later one is at an earlier layer."""
    with copier_of(device, depth=1, task_bytes=PART) as copier:
        first = Arriving(copier, ORDERS[0], base, range(CHUNKS))
        second = Arriving(copier, ORDERS[0], base, range(CHUNKS, 2 * CHUNKS))
        order: list[tuple[str, int]] = []
        inside, go_on = threading.Event(), threading.Event()

        def places(name: str, arriving: Arriving) -> Callable[[int, Bytes], Pieces]:
            def noted(layer: int, slices: Bytes) -> Pieces:
                order.append((name, layer))
                if order == [("first", 0), ("first", 1)]:
                    inside.set()
                    assert go_on.wait(TIMEOUT_S)
                return arriving.places(layer, slices)

            return noted

        loads: list[LayerLoad] = [copier.load(first.delivery, places("first", first))]
        first.progress.advance(LAYERS)
        assert inside.wait(TIMEOUT_S)
        second.progress.advance(1)
        loads.append(copier.load(second.delivery, places("second", second)))
        go_on.set()
        loads[0].finish()
        second.progress.advance(LAYERS)
        for load in loads:
            load.finish()
            load.close()
        assert order[:4] == [("first", 0), ("first", 1), ("second", 0), ("first", 2)]


def test_a_delivery_into_memory_that_is_not_locked_fails_its_load(
    device: Device, base: int
) -> None:
    with copier_of(device) as copier, copier_of(device) as other:
        arriving = Arriving(other, ORDERS[0], base, range(CHUNKS))
        arriving.progress.advance(LAYERS)
        with (
            copier.load(arriving.delivery, arriving.places) as load,
            pytest.raises(InvalidRequest, match="page-locked"),
        ):
            load.finish()
        assert not blocks_on(device, ORDERS[0], base).any()


def test_places_that_raise_fail_their_load_alone(device: Device, base: int) -> None:
    with copier_of(device) as copier:
        failing = Arriving(copier, ORDERS[0], base, [BLOCKS])
        failing.progress.advance(LAYERS)
        with (
            copier.load(failing.delivery, failing.places) as load,
            pytest.raises(InvalidRequest, match="blocks must be within"),
        ):
            load.finish()
        with copier.load(*_arrived(copier, base)) as load:
            load.finish()


def test_a_closed_copier_fails_what_is_under_way(device: Device, base: int) -> None:
    with copier_of(device) as copier:
        arriving = Arriving(copier, ORDERS[0], base, range(CHUNKS))
        load = copier.load(arriving.delivery, arriving.places)
    with pytest.raises(InvalidRequest, match="closed"):
        load.finish()
    load.close()
    with pytest.raises(InvalidRequest, match="closed"):
        copier.load(arriving.delivery, arriving.places)


def test_a_way_that_a_device_has_not_is_refused(device: Device) -> None:
    device.ways = frozenset({Way.EACH})
    with pytest.raises(InvalidRequest, match="by each, not by batch"):
        copier_of(device, Way.BATCH)


def test_a_device_without_kernels_or_batches_copies_each_piece(device: Device) -> None:
    for ways, best in (({Way.EACH, Way.BATCH}, Way.BATCH), ({Way.EACH}, Way.EACH)):
        device.ways = frozenset(ways)
        assert LineSettings.best_of(device).way is best


# --- what fails or is let go while the device is busy ---


class BusyEngine:
    """A stream of an engine that stands still until `go_on`."""

    def __init__(self, device: Device) -> None:
        self._hold = device.stream_hold()
        self._lane = device.lane(MIB, 8)
        self.stream = self._lane.stream
        self._hold.hold(self.stream, 1)

    def go_on(self) -> None:
        self._hold.raise_now(1)

    def __enter__(self) -> BusyEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.go_on()
        self._lane.close()
        self._hold.close()


def returned(call: Callable[[], object]) -> threading.Event:
    """Set when a call in a thread of its own has returned."""
    has = threading.Event()

    def run() -> None:
        call()
        has.set()

    threading.Thread(target=run, daemon=True).start()
    return has


def test_a_second_close_returns_when_the_first_has_ended_the_load(
    device: Device, base: int
) -> None:
    with copier_of(device) as copier, BusyEngine(device) as engine:
        arriving = Arriving(copier, ORDERS[0], base, range(CHUNKS))
        arriving.progress.advance(LAYERS)
        load = copier.load(arriving.delivery, arriving.places, engine.stream)
        while len(arriving.asked) < LAYERS:
            threading.Event().wait(0.001)
        first = returned(load.close)
        while not load._closed:
            threading.Event().wait(0.001)
        second = returned(load.close)
        assert not second.wait(0.2)
        engine.go_on()
        assert first.wait(TIMEOUT_S)
        assert second.wait(TIMEOUT_S)
    with pytest.raises(InvalidRequest, match="closed"):
        load.hold(0, 0)


def test_a_load_that_fails_behind_a_busy_engine_holds_up_no_other() -> None:
    device = EmulatedDevice()
    base = device.allocate(ALL_BYTES)
    with copier_of(device, Way.STAGED, depth=8) as copier, BusyEngine(device) as engine:
        failing = Arriving(copier, ORDERS[0], base, range(CHUNKS))
        load = copier.load(failing.delivery, failing.places, engine.stream)
        failing.progress.advance(1)
        load.wait(0, engine.stream, TIMEOUT_S)
        failing.progress.fail("the server died")
        with pytest.raises(DeliveryFailed, match="the server died"):
            load.wait(1, engine.stream, TIMEOUT_S)
        others: list[LayerLoad] = []

        def another() -> None:
            other = Arriving(copier, ORDERS[0], base, [BLOCKS - 1])
            others.append(copier.load(other.delivery, other.places))
            other.progress.advance(LAYERS)
            others[0].finish()

        assert returned(another).wait(TIMEOUT_S)
        engine.go_on()
        others[0].close()
        load.close()
    device.free(base)


class Broken(Job):
    """Nobody foresaw what it raises."""

    def __init__(self) -> None:
        self.files = []
        self.failed_with: list[Exception] = []

    @property
    def over(self) -> bool:
        return bool(self.failed_with)

    def due(self) -> int | None:
        raise RuntimeError("broken")

    def next_task(self, lane: Lane) -> Pieces:
        raise AssertionError

    def queued(self, lane: Lane) -> None:
        raise AssertionError

    def fail(self, error: Exception) -> None:
        self.failed_with.append(error)


def test_a_job_that_raises_something_unforeseen_fails_alone(device: Device) -> None:
    line = Line(device, Direction.SAVE, LineSettings(Way.EACH))
    with copier_of(device) as copier:
        memory = Memory(copier, MIB, MIB)
        broken = Broken()
        line.add(broken)
        pieces = Pieces.of([(memory.host.ctypes.data, memory.address, PART)])
        save = BlockSave(line, device, copier.page_locked.by_file(pieces), None)
        line.add(save)
        ended = returned(save.wait)
        assert ended.wait(TIMEOUT_S)
        assert [str(error) for error in broken.failed_with] == ["broken"]
        assert np.array_equal(memory.host[:PART], memory.before[:PART])
        line.close()
        device.free(memory.address)


def test_whoever_waits_for_a_load_that_is_closed_is_told(device: Device, base: int) -> None:
    with copier_of(device) as copier:
        arriving = Arriving(copier, ORDERS[0], base, range(CHUNKS))
        lane = device.lane(MIB, 8)
        load = copier.load(arriving.delivery, arriving.places)
        told: list[str] = []

        def tell(call: Callable[[], None]) -> None:
            try:
                call()
            except InvalidRequest as error:
                told.append(error.message)

        waits: list[Callable[[], None]] = [load.finish, lambda: load.wait(0, lane.stream)]
        waiting = [returned(lambda call=call: tell(call)) for call in waits]  # type: ignore[misc]
        load.close()
        waiting += [returned(lambda call=call: tell(call)) for call in waits]  # type: ignore[misc]
        assert all(each.wait(TIMEOUT_S) for each in waiting)
        assert told == ["the load is closed"] * 4
        lane.close()


def test_a_save_keeps_its_memory_until_the_bytes_are_there(device: Device) -> None:
    with copier_of(device, depth=1) as copier, BusyEngine(device) as engine:
        memory = Memory(copier, MIB, MIB)
        left = MemoryFile(MIB)
        copier.page_locked.lock_pages(left)
        gone = weakref.ref(left)
        place = left.array().ctypes.data
        copier.save(Pieces.of([(place, memory.address, PART)]), engine.stream)
        del left
        gc.collect()
        assert gone() is not None
        assert repr(copier.page_locked) == f"<PageLockedMemory 2 regions, {2 * MIB} bytes>"
        engine.go_on()
        save = copier.save(Pieces.of([(memory.host.ctypes.data, memory.address, PART)]))
        save.wait()
        gc.collect()
        assert gone() is None
        assert repr(copier.page_locked) == f"<PageLockedMemory 1 regions, {MIB} bytes>"
        device.free(memory.address)


def test_a_load_keeps_its_memory_until_its_copies_are_done(device: Device, base: int) -> None:
    with copier_of(device, depth=LAYERS) as copier, BusyEngine(device) as engine:
        arriving = Arriving(copier, ORDERS[0], base, range(CHUNKS))
        gone = weakref.ref(arriving.file)
        arriving.progress.advance(LAYERS)
        load = copier.load(arriving.delivery, arriving.places, engine.stream)
        load.wait(LAYERS - 1, engine.stream, TIMEOUT_S)
        del arriving, load
        gc.collect()
        assert gone() is not None
        engine.go_on()
        with copier.load(*_arrived(copier, base)) as other:
            other.finish()
        gc.collect()
        assert gone() is None


def test_a_save_that_has_ended_and_a_load_that_is_closed_keep_no_memory(
    device: Device, base: int
) -> None:
    with copier_of(device) as copier:
        file = MemoryFile(MIB)
        copier.page_locked.lock_pages(file)
        save = copier.save(Pieces.of([(file.array().ctypes.data, base, PART)]))
        save.wait()
        arriving = Arriving(copier, ORDERS[0], base, range(CHUNKS))
        arriving.progress.advance(LAYERS)
        load = copier.load(arriving.delivery, arriving.places)
        load.finish()
        files = load.files
        assert files == [arriving.file]
        load.close()
        del file, arriving, load
        gc.collect()
        assert repr(copier.page_locked) == "<PageLockedMemory 0 regions, 0 bytes>"
        assert not save.files
        assert not files


def test_a_save_that_has_ended_cannot_fail(device: Device) -> None:
    with copier_of(device) as copier:
        memory = Memory(copier, MIB, MIB)
        save = copier.save(Pieces.of([(memory.host.ctypes.data, memory.address, PART)]))
        save.wait()
        save.fail(Unavailable("too late"))
        save.wait()
        device.free(memory.address)


class LittersOnLocking(EmulatedDevice):
    """While it locks memory, other locked memory is collected."""

    litter: list[MemoryFile]

    def lock_pages(self, address: int, length_bytes: int) -> None:
        self.litter.clear()
        super().lock_pages(address, length_bytes)


def test_memory_may_be_collected_while_other_memory_is_locked() -> None:
    device = LittersOnLocking()
    device.litter = []
    page_locked = PageLockedMemory(device)
    litter = MemoryFile(MIB)
    page_locked.lock_pages(litter)
    device.litter.append(litter)
    del litter
    file = MemoryFile(2 * MIB)
    assert returned(lambda: page_locked.lock_pages(file)).wait(TIMEOUT_S)
    assert repr(page_locked) == f"<PageLockedMemory 1 regions, {2 * MIB} bytes>"


class FilePart(MemoryFile):
    """Memory that lies right behind or before other memory."""

    def __init__(self, whole: MemoryFile, begin: int, end: int) -> None:
        self.length_bytes = end - begin
        self._whole = whole
        self._part = slice(begin, end)

    def array(self) -> Bytes:
        return self._whole.array()[self._part]


@pytest.mark.parametrize("way", list(Way), ids=[way.value for way in Way])
def test_neighbours_in_two_regions_are_copied_apart(way: Way) -> None:
    device = EmulatedDevice()
    base = device.allocate(ALL_BYTES)
    with copier_of(EmulatedDevice()) as elsewhere, copier_of(device, way) as copier:
        arriving = Arriving(elsewhere, ORDERS[2], base, range(CHUNKS))
        border = (CHUNKS + 3) * SLICE  # within layer 1
        parts = [FilePart(arriving.file, 0, border)]
        parts.append(FilePart(arriving.file, border, len(arriving.payload)))
        for part in parts:
            copier.page_locked.lock_pages(part)
        arriving.progress.advance(LAYERS)
        with copier.load(arriving.delivery, arriving.places) as load:
            assert returned(load.finish).wait(TIMEOUT_S)
            there = blocks_on(device, ORDERS[2], base)
            assert np.array_equal(there[:, :CHUNKS], arriving.slices())
        sent = arriving.payload.copy()
        slices = arriving.payload.reshape(LAYERS, CHUNKS, SLICE)
        arriving.payload[:] = 0
        for layer in range(LAYERS):
            save = copier.save(arriving.places(layer, slices[layer]))
            assert returned(save.wait).wait(TIMEOUT_S)
        assert np.array_equal(arriving.payload, sent)


class FewLanes(EmulatedDevice):
    """Has room for so many lanes, and counts them."""

    def __init__(self, lanes_max: int) -> None:
        super().__init__()
        self.left = lanes_max
        self.open: set[int] = set()

    def lane(self, task_bytes_max: int, pieces_max: int, beside: Lane | None = None) -> Lane:
        if not self.left:
            raise Unavailable("no more memory on the device")
        self.left -= 1
        lane = super().lane(task_bytes_max, pieces_max, beside)
        self.open.add(lane.stream)
        return lane

    def closed(self, handle: int) -> None:
        super().closed(handle)
        self.open.remove(handle)


@pytest.mark.parametrize("way", [Way.EACH, Way.STAGED])
def test_a_line_that_cannot_have_all_its_lanes_gives_up_those_that_it_has(way: Way) -> None:
    device = FewLanes(3)
    with pytest.raises(Unavailable, match="no more memory"):
        Line(device, Direction.LOAD, LineSettings(way, depth=4))
    assert not device.left
    assert not device.open


class SlowMarks(EmulatedDevice):
    """Takes its time to mark a stream, once it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = False
        self.begun, self.go_on = threading.Event(), threading.Event()

    def mark(self, stream: int) -> Mark:
        if self.slow:
            self.begun.set()
            assert self.go_on.wait(TIMEOUT_S)
        return super().mark(stream)


def test_a_stream_is_not_marked_when_a_copier_that_is_closed_has_given_it_up() -> None:
    device = SlowMarks()
    copier = copier_of(device)
    base = device.allocate(ALL_BYTES)
    arriving = Arriving(copier, ORDERS[0], base, range(CHUNKS))
    load = copier.load(arriving.delivery, arriving.places)
    device.slow = True
    load_closed = returned(load.close)
    assert device.begun.wait(TIMEOUT_S)
    copier_closed = returned(copier.close)
    copier_closed.wait(0.2)  # it would go on, were it not for the mark
    device.go_on.set()
    assert copier_closed.wait(TIMEOUT_S)
    assert load_closed.wait(TIMEOUT_S)


class TwoDevices:
    """A CUDA library of a machine with two GPUs and no compiler."""

    version = 13000
    copies_batches = True

    def __init__(self) -> None:
        self.devices_of_calls: list[int] = []
        self.current = 0

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return self.current

    def pci_address(self, device: int) -> str:
        return f"ffff:0{device}:00.0"  # which this machine has not

    def name(self, device: int) -> str:
        return f"GPU {device}"

    def call(self, name: str, *arguments: Any) -> None:
        if name == "cudaSetDevice":
            (self.current,) = arguments
        else:
            self.devices_of_calls.append(self.current)

    def kernel(self, source: str, name: str, device: int) -> int:
        self.devices_of_calls.append(self.current)
        raise Unavailable("no compiler")


def test_the_current_device_of_whoever_opens_one_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    library = TwoDevices()
    monkeypatch.setattr(cuda_device, "CudaLibrary", lambda: library)
    device = CudaDevice(1)
    assert library.current == 0
    assert set(library.devices_of_calls) == {1}
    assert device.ways == {Way.EACH, Way.ROWS, Way.BATCH}
    assert (device.place, device.kind) == ("ffff:01:00.0", "GPU 1, CUDA 13000, batch, each, rows")
    device.enter_thread()
    assert library.current == 1
