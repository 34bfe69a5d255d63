"""The contract of a copier over several links, and of its plain copies: emulated, and CUDA's.

With one GPU it is its own neighbour. Bytes are compared with numpy's own scatter; no time is
judged.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from objectcache.deliveries.delivery import Delivery
from objectcache.gpu.copier import Copier
from objectcache.gpu.device import CopyFailed, Device, DeviceFailed, Direction, Way
from objectcache.gpu.layer_load import Places
from objectcache.gpu.links import relay_check
from objectcache.gpu.links.checked_links import CheckedLinks, checked_links
from objectcache.gpu.links.linked_copies import LinkedCopies
from objectcache.gpu.links.micro_tasks import DeviceTransfer
from objectcache.gpu.links.pull_settings import OURS, PAPERS, PullSettings
from objectcache.gpu.pieces import Pieces
from objectcache.landing.memory_file import MemoryFile
from objectcache_schemas.errors import DeliveryFailed, InvalidRequest
from objectcache_schemas.limits import MIB
from tests.contract.test_devices import (
    ALL_BYTES,
    BLOCKS,
    CHUNKS,
    LAYERS,
    ORDERS,
    PART,
    RANDOM,
    SLICE,
    TIMEOUT_S,
    Arriving,
    BusyEngine,
    blocks_on,
    paged,
    returned,
)
from tests.contract.test_links import COUNT, cuda, emulated
from tests.emulated_device import EmulatedDevice

RULES = [
    replace(each, chunk_bytes=SLICE, pieces_max=3, fallback_bytes=0) for each in (OURS, PAPERS)
]
EVERY_LINK = {(number, 0) for number in range(COUNT)}


@pytest.fixture(autouse=True)
def any_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_check, "RATE_MIN", 0.0)


@pytest.fixture(params=[emulated, cuda], ids=["emulated", "cuda"])
def devices(request: pytest.FixtureRequest) -> list[Device]:
    make: Callable[[], list[Device]] = request.param
    return make()


@pytest.fixture
def base(devices: list[Device]) -> Iterator[int]:
    address = devices[0].allocate(ALL_BYTES)
    devices[0].write(address, bytes(ALL_BYTES))
    yield address
    devices[0].free(address)


def linked(devices: list[Device], settings: PullSettings) -> CheckedLinks:
    links = checked_links(devices[0], devices[1:], settings)
    assert links.relays == tuple(devices[1:])
    return links


def copier_over(devices: list[Device], rule: str | PullSettings) -> Copier:
    if isinstance(rule, PullSettings):
        return Copier(devices[0], links=linked(devices, rule))
    return Copier(devices[0], links="host")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("rule", ["host", *RULES], ids=["host", "ours", "paper's"])
def test_layers_are_laid_into_their_blocks_and_saved_out_of_them(
    devices: list[Device], rule: str | PullSettings, order: str, base: int
) -> None:
    device = devices[0]
    blocks = RANDOM.permutation(BLOCKS)[:CHUNKS].tolist()
    with copier_over(devices, rule) as copier:
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


def test_a_stream_waits_for_what_every_link_has_of_a_layer_and_no_thread_does(
    devices: list[Device], base: int
) -> None:
    """Six micro-tasks fit on three links, and all of them are held back."""
    device, links = devices[0], linked(devices, RULES[1])
    if isinstance(last := devices[-1], EmulatedDevice):
        last.peer_link.limit(20 * SLICE)  # what is not waited for is seen to be missing
    with Copier(device, links=links) as copier, BusyEngine(device) as engine:
        arriving = Arriving(copier, ORDERS[2], base, range(0, 12, 2))
        seen_file = MemoryFile(BLOCKS * SLICE)
        copier.page_locked.lock_pages(seen_file)
        seen = seen_file.array()
        reading = device.lane(len(seen), 8)
        with copier.load(arriving.delivery, arriving.places, engine.stream) as load:
            arriving.progress.advance(1)
            load.wait(0, reading.stream, TIMEOUT_S)
            pieces = Pieces.of([(seen.ctypes.data, base, len(seen))])
            reading.copy(pieces, Direction.SAVE, Way.EACH)
            assert not blocks_on(device, ORDERS[2], base).any()
            engine.go_on()
            reading.wait_idle()
            there = seen.reshape(BLOCKS, 2, PART)
            assert np.array_equal(there[0:12:2], arriving.slices()[0])
            arriving.progress.advance(LAYERS)
            load.finish()
        reading.close()
    assert set(links.rates[Direction.LOAD].known) >= EVERY_LINK


def test_no_thread_waits_for_links_longer_than_it_may(devices: list[Device], base: int) -> None:
    with (
        Copier(devices[0], links=linked(devices, RULES[1])) as copier,
        BusyEngine(devices[0]) as engine,
    ):
        arriving = Arriving(copier, ORDERS[2], base, range(0, 18, 2))  # more than links take
        reading = devices[0].lane(MIB, 8)
        load = copier.load(arriving.delivery, arriving.places, engine.stream)
        arriving.progress.advance(LAYERS)
        with pytest.raises(DeviceFailed, match=r"all of layer 0 within 0\.1 s"):
            load.wait(0, reading.stream, 0.1)
        engine.go_on()
        load.wait(0, reading.stream, TIMEOUT_S)
        load.close()
        reading.close()


@pytest.mark.parametrize("rule", ["host", *RULES], ids=["host", "ours", "paper's"])
def test_a_layer_comes_where_another_was_behind_what_reads_that(
    devices: list[Device], rule: str | PullSettings, base: int
) -> None:
    device = devices[0]
    with copier_over(devices, rule) as copier:
        arriving = Arriving(copier, ORDERS[2], base, range(CHUNKS))
        arriving.progress.advance(LAYERS)
        places = paged(ORDERS[2], base, 0)
        engine = device.lane(BLOCKS * SLICE, 8)
        seen_file = MemoryFile(LAYERS * BLOCKS * SLICE)
        copier.page_locked.lock_pages(seen_file)
        if not isinstance(rule, PullSettings):
            device.lock_pages(seen_file.array().ctypes.data, seen_file.length_bytes)
        seen = seen_file.array().reshape(LAYERS, -1)
        with copier.load(
            arriving.delivery, lambda _, slices: places.pieces(arriving.blocks, slices), ahead=1
        ) as load:
            for layer in range(LAYERS):
                load.wait(layer, engine.stream, TIMEOUT_S)
                pieces = Pieces.of([(seen[layer].ctypes.data, base, BLOCKS * SLICE)])
                engine.copy(pieces, Direction.SAVE, Way.EACH)
                load.release(layer, engine.stream)
            load.finish()
            engine.wait_idle()
        there = seen.reshape(LAYERS, BLOCKS, 2, PART)[:, :CHUNKS]
        assert np.array_equal(there, arriving.slices())
        if not isinstance(rule, PullSettings):
            device.unlock_pages(seen_file.array().ctypes.data)
        engine.close()


def test_few_bytes_are_one_copy_over_the_own_link(devices: list[Device], base: int) -> None:
    links = linked(devices, replace(RULES[1], fallback_bytes=CHUNKS * SLICE + 1))
    with Copier(devices[0], links=links) as copier:
        arriving = Arriving(copier, ORDERS[0], base, range(CHUNKS))
        arriving.progress.advance(LAYERS)
        with copier.load(arriving.delivery, arriving.places) as load:
            load.finish()
        there = blocks_on(devices[0], ORDERS[0], base)[:, :CHUNKS]
        assert np.array_equal(there, arriving.slices())
    assert set(links.rates[Direction.LOAD].known) == {(0, 0)}


def test_a_later_loads_first_layer_is_due_before_an_earlier_loads_last(
    devices: list[Device], base: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dues: list[int] = []
    begin = LinkedCopies.begin

    def noted(copies: LinkedCopies, *arguments: Any, due: int, **others: Any) -> DeviceTransfer:
        dues.append(due)
        return begin(copies, *arguments, due=due, **others)

    monkeypatch.setattr(LinkedCopies, "begin", noted)
    with copier_over(devices, RULES[0]) as copier:
        for _ in range(2):
            with copier.load(*arrived(copier, base)) as load:
                load.finish()
    assert dues == [*range(LAYERS)] * 2


@pytest.mark.parametrize("rule", RULES, ids=["ours", "paper's"])
def test_a_load_that_is_closed_early_writes_nothing_more(
    devices: list[Device], rule: PullSettings, base: int
) -> None:
    device = devices[0]
    with copier_over(devices, rule) as copier, BusyEngine(device) as engine:
        arriving = Arriving(copier, ORDERS[0], base, range(CHUNKS))
        arriving.progress.advance(LAYERS)
        load = copier.load(arriving.delivery, arriving.places, engine.stream)
        while len(arriving.asked) < LAYERS:
            threading.Event().wait(0.001)
        closed = returned(load.close)
        engine.go_on()
        assert closed.wait(TIMEOUT_S)
        there = blocks_on(device, ORDERS[0], base).copy()
        arriving.payload[:] ^= 0xFF  # whoever has the memory next
        with copier.load(*arrived(copier, base)) as other:
            other.finish()
        after = blocks_on(device, ORDERS[0], base)
        assert np.array_equal(after[:, :CHUNKS], there[:, :CHUNKS])


def test_a_closed_copier_has_nothing_on_its_way_and_fails_its_loads(
    devices: list[Device], base: int
) -> None:
    with copier_over(devices, RULES[0]) as copier:
        arriving = Arriving(copier, ORDERS[0], base, range(CHUNKS))
        arriving.progress.advance(1)
        load = copier.load(arriving.delivery, arriving.places)
    there = blocks_on(devices[0], ORDERS[0], base).copy()
    arriving.payload[:] ^= 0xFF
    with pytest.raises(InvalidRequest, match="closed"):
        load.finish()
    load.close()
    assert np.array_equal(blocks_on(devices[0], ORDERS[0], base), there)
    with pytest.raises(InvalidRequest, match="closed"):
        copier.load(arriving.delivery, arriving.places)


@pytest.mark.parametrize("rule", ["host", *RULES], ids=["host", "ours", "paper's"])
def test_a_delivery_that_fails_fails_its_load_alone(
    devices: list[Device], rule: str | PullSettings, base: int
) -> None:
    with copier_over(devices, rule) as copier:
        failing = Arriving(copier, ORDERS[0], base, range(CHUNKS))
        lane = devices[0].lane(MIB, 8)
        with copier.load(failing.delivery, failing.places) as load:
            failing.progress.advance(1)
            load.wait(0, lane.stream, TIMEOUT_S)
            failing.progress.fail("the server died")
            with pytest.raises(DeliveryFailed, match="the server died"):
                load.wait(1, lane.stream, TIMEOUT_S)
        with copier.load(*arrived(copier, base)) as load:
            load.finish()
        lane.close()
        there = blocks_on(devices[0], ORDERS[0], base)
        assert np.array_equal(there[0, :CHUNKS], failing.slices()[0])
        assert not there[1:, :CHUNKS].any()


@pytest.mark.parametrize("rule", ["host", RULES[0]], ids=["host", "several"])
def test_a_stream_cannot_hold_ahead(
    devices: list[Device], rule: str | PullSettings, base: int
) -> None:
    with copier_over(devices, rule) as copier:
        arriving = Arriving(copier, ORDERS[0], base, range(CHUNKS))
        lane = devices[0].lane(MIB, 8)
        with (
            copier.load(arriving.delivery, arriving.places) as load,
            pytest.raises(InvalidRequest, match="cannot hold"),
        ):
            load.hold(0, lane.stream)
        lane.close()


def test_plain_copies_lock_no_pages() -> None:
    device = EmulatedDevice()
    with Copier(device, links="host") as copier:
        copier.page_locked.region(MIB)
        assert device.locked_bytes == 0
    with Copier(device) as copier:
        region = copier.page_locked.region(MIB)
        assert device.locked_bytes == MIB
        del region


def test_memory_is_held_until_all_links_are_through(devices: list[Device], base: int) -> None:
    with copier_over(devices, RULES[1]) as copier, BusyEngine(devices[0]) as engine:
        file = MemoryFile(CHUNKS * SLICE)
        copier.page_locked.lock_pages(file)
        slices = file.array().reshape(CHUNKS, SLICE)
        pieces = paged(ORDERS[0], base, 0).pieces(range(CHUNKS), slices)
        save = copier.save(pieces, engine.stream)
        del file, slices
        gc.collect()
        assert "1 regions" in repr(copier.page_locked)
        engine.go_on()
        save.wait()
        gc.collect()
        assert "0 regions" in repr(copier.page_locked)


# --- which links, and links that fail: emulated ones can be broken ---


def test_links_are_left_out_that_did_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    first = EmulatedDevice(100 * MIB)
    slow = EmulatedDevice(100 * MIB, beside=first)
    slow.peer_link.limit(5 * MIB)
    alone = EmulatedDevice(100 * MIB)
    links = checked_links(first, [slow, alone], replace(RULES[0], chunk_bytes=MIB))
    assert links.relays == ()
    assert "loads come at" in links.refused[slow]
    assert "cannot reach" in links.refused[alone]
    with pytest.raises(InvalidRequest, match="the links are of"):
        Copier(slow, links=links)


def test_others_carry_what_a_link_cannot_that_fails_before_any_stream_waits() -> None:
    devices = emulated()
    base = devices[0].allocate(ALL_BYTES)
    with copier_over(devices, RULES[1]) as copier, BusyEngine(devices[0]) as engine:
        breaks(devices[1])
        arriving = Arriving(copier, ORDERS[2], base, range(0, 12, 2))
        arriving.progress.advance(LAYERS)
        with copier.load(arriving.delivery, arriving.places, engine.stream) as load:
            engine.go_on()
            load.finish()
        there = blocks_on(devices[0], ORDERS[2], base)[:, 0:12:2]
        assert np.array_equal(there, arriving.slices())
    devices[0].free(base)


def test_a_link_that_fails_behind_a_waiting_stream_fails_the_load() -> None:
    """Others would bring the bytes after the stream has read them."""
    devices = emulated()
    base = devices[0].allocate(ALL_BYTES)
    with copier_over(devices, RULES[1]) as copier, BusyEngine(devices[0]) as engine:
        arriving = Arriving(copier, ORDERS[2], base, range(0, 12, 2))
        reading = devices[0].lane(MIB, 8)
        load = copier.load(arriving.delivery, arriving.places, engine.stream)
        arriving.progress.advance(1)
        load.wait(0, reading.stream, TIMEOUT_S)
        breaks(devices[2])
        engine.go_on()
        arriving.progress.advance(LAYERS)
        with pytest.raises(CopyFailed, match="broken"):
            load.finish()
        with pytest.raises(CopyFailed, match="broken"):
            load.close()
        reading.close()
        for _ in range(2):  # the links that are left
            arriving = Arriving(copier, ORDERS[2], base, range(BLOCKS))
            arriving.progress.advance(LAYERS)
            with copier.load(arriving.delivery, arriving.places) as other:
                other.finish()
            assert np.array_equal(blocks_on(devices[0], ORDERS[2], base), arriving.slices())
            breaks(devices[1])
    devices[0].free(base)


def test_a_load_where_all_links_have_failed_is_told_which_and_what_to_do() -> None:
    devices = emulated()
    base = devices[0].allocate(ALL_BYTES)
    with copier_over(devices, RULES[1]) as copier:
        for device in devices:
            breaks(device)
        for said in ("broken", r"no link to device 0 is left.*'gpu_copies' to 'off'"):
            load = copier.load(*arrived(copier, base))
            with pytest.raises(DeviceFailed, match=said), load:
                load.finish()
    devices[0].free(base)


def test_a_load_knows_nothing_of_a_link_that_failed_with_anothers_bytes() -> None:
    devices = emulated()
    base = devices[0].allocate(ALL_BYTES)
    with copier_over(devices, RULES[1]) as copier, BusyEngine(devices[0]) as engine:
        arriving = Arriving(copier, ORDERS[2], base, range(0, 12, 2))
        reading = devices[0].lane(MIB, 8)
        load = copier.load(arriving.delivery, arriving.places, engine.stream)
        arriving.progress.advance(1)
        load.wait(0, reading.stream, TIMEOUT_S)
        breaks(devices[2])
        with copier.load(*arrived(copier, base)) as other:
            engine.go_on()
            other.finish()
        with pytest.raises(CopyFailed, match="broken"):
            load.close()
        reading.close()
    devices[0].free(base)


def breaks(device: Device) -> None:
    assert isinstance(device, EmulatedDevice)
    device.breaks.set()


def arrived(copier: Copier, base: int) -> tuple[Delivery, Places]:
    arriving = Arriving(copier, ORDERS[0], base, [BLOCKS - 1])
    arriving.progress.advance(LAYERS)
    return arriving.delivery, arriving.places
