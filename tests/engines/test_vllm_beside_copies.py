"""What vLLM's connector copies beside the engine: ahead of it, and no longer than it may."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from objectcache.connectors.device.engine_copier import EngineCopier
from objectcache.connectors.vllm.before_schedule.parked_loads import ParkedLoads
from objectcache.connectors.vllm.before_schedule.side_copies import HostCopies
from objectcache.connectors.vllm.plans import LoadPlan
from objectcache.connectors.vllm.worker import beside_copies
from objectcache.connectors.vllm.worker.beside_copies import BesideCopies
from objectcache.connectors.vllm.worker.loads import Loads
from objectcache.connectors.vllm.worker.paged_layout import ContentShape, PagedLayer
from objectcache.deliveries.delivery import Delivery
from objectcache.deliveries.layer_progress import LayerProgress
from objectcache.gpu.copier import Copier
from objectcache.gpu.device import Direction, Way
from objectcache.gpu.layer_load import LayerLoad
from objectcache.gpu.line import LineSettings
from objectcache.gpu.links import relay_check
from objectcache.gpu.links.checked_links import CheckedLinks, checked_links
from objectcache.gpu.links.pull_settings import PAPERS
from objectcache.payload import PayloadShape
from objectcache_schemas.descriptor import DeliveryMode
from tests.emulated_device import EmulatedDevice

LAYERS, BLOCKS, TOKENS, WIDTH = 4, 6, 16, 576
IDS = (4, 0, 2)  # no two in a run
SLICE = TOKENS * WIDTH * 2
TIMEOUT_S = 20.0
PLAN = LoadPlan("r", IDS, (b"a", b"b", b"c"), 100, "w")


class GatedDevice(EmulatedDevice):
    """A device whose link stands still until it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.begun = self.copied = 0

    def moves(self, direction: Direction, host: int, device: int, count_bytes: int) -> None:
        self.begun += 1
        assert self.open.wait(TIMEOUT_S)
        super().moves(direction, host, device, count_bytes)
        self.copied += 1


class Parts:
    """Blocks of latents, a copier, and a delivery whose layers arrive when the test says so."""

    def __init__(
        self, device: GatedDevice | None = None, links: CheckedLinks | None = None
    ) -> None:
        self.device = device or GatedDevice()
        settings = LineSettings(Way.EACH, pieces_max=1, depth=LAYERS * len(IDS))
        copier = Copier(self.device, loads=settings, saves=settings, links=links or "direct")
        self.engine = self.device.lane(1, 1)
        self.copier = EngineCopier(copier, lambda: self.engine.stream)
        self.caches = [
            torch.zeros((BLOCKS, TOKENS, WIDTH), dtype=torch.bfloat16) for _ in range(LAYERS)
        ]
        content = ContentShape(WIDTH, 0, latent=True)
        self.layers = [PagedLayer(cache, BLOCKS, content) for cache in self.caches]
        self.copies = BesideCopies(self.layers, self.copier)
        shape = PayloadShape(0, LAYERS, len(IDS), SLICE, DeliveryMode.LAYERWISE)
        self.region = self.copier.region(shape.payload_bytes)
        memory = self.region.array()
        memory[:] = np.random.default_rng(3).integers(0, 256, len(memory), np.uint8)
        self.payload = shape.payload(memory)
        self.progress = LayerProgress(0, LAYERS)
        self.delivery = Delivery(self.progress, shape, memory, None, transport="shared_memory")

    def there(self, layer: int) -> bool:
        """Whether the layer is in its blocks, byte for byte."""
        slices = np.zeros((len(IDS), SLICE), np.uint8)
        self.layers[layer].store(IDS, slices)
        return np.array_equal(slices, self.payload[layer])

    def close(self) -> None:
        self.device.open.set()
        self.copies.close()
        self.engine.close()


@pytest.fixture
def parts() -> Iterator[Parts]:
    found = Parts()
    yield found
    found.close()


@pytest.fixture
def closing(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when a load of the copier is about to be closed."""
    reached = threading.Event()
    close = LayerLoad.close

    def noted(load: LayerLoad) -> None:
        reached.set()
        close(load)

    monkeypatch.setattr(LayerLoad, "close", noted)
    return reached


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline_s
        threading.Event().wait(0.001)


def loads_of(parts: Parts) -> Loads:
    return Loads(lambda plan: parts.delivery, parts.copies, timeout_s=TIMEOUT_S)


def test_later_layers_are_copied_while_the_engine_computes_on_the_first(parts: Parts) -> None:
    loads = loads_of(parts)
    loads.start([PLAN])
    parts.progress.advance(LAYERS)
    loads.wait(0)  # returns while nothing is copied yet: the engine's stream waits for it
    assert parts.device.copied == 0
    read = parts.device.mark(parts.engine.stream)
    parts.device.open.set()
    read.wait()
    assert parts.there(0)
    wait_until(lambda: parts.device.copied == LAYERS * len(IDS))
    assert all(parts.there(layer) for layer in range(LAYERS))
    for layer in range(1, LAYERS):
        loads.wait(layer)
    loads.end_step()
    assert loads.take_failed_blocks() == set()
    assert loads.loaded_blocks == len(IDS)
    loads.close()


def test_blocks_are_told_as_failed_when_nothing_is_written_to_them_any_more(
    parts: Parts, closing: threading.Event
) -> None:
    loads = loads_of(parts)
    loads.start([PLAN])
    parts.progress.advance(1)
    loads.wait(0)
    parts.progress.fail("the server died")
    copied: list[int] = []

    def go_on() -> None:
        loads.wait(1)
        loads.end_step()
        assert loads.take_failed_blocks() == set(IDS)
        copied.append(parts.device.copied)

    engine = threading.Thread(target=go_on)
    engine.start()
    assert closing.wait(TIMEOUT_S)
    parts.device.open.set()
    engine.join(TIMEOUT_S)
    assert copied == [parts.device.copied]
    loads.close()
    assert parts.device.copied == copied[0]


def test_a_load_that_is_given_up_ends_when_nothing_is_written_to_its_blocks_any_more(
    parts: Parts, closing: threading.Event
) -> None:
    loads = ParkedLoads(lambda plan: parts.delivery, parts.copies, TIMEOUT_S, HostCopies())
    loads.start([PLAN])
    parts.progress.advance(2)
    wait_until(lambda: bool(parts.device.begun))
    loads.give_up(["r"])
    parts.progress.fail("closed")
    assert closing.wait(TIMEOUT_S)
    assert loads.take_ended() == set()
    parts.device.open.set()
    wait_until(lambda: bool(loads._ended))
    copied = parts.device.copied
    assert loads.take_ended() == {"r"}
    assert loads.take_failed_blocks() == set(IDS)
    loads.close()
    assert parts.device.copied == copied


def test_memory_of_a_load_goes_when_its_copies_have_ended(parts: Parts) -> None:
    loads = loads_of(parts)
    loads.start([PLAN])
    parts.progress.advance(LAYERS)
    for layer in range(LAYERS):
        loads.wait(layer)
    loads.end_step()
    (closed,) = loads._shared.closing()
    assert not closed.done()
    parts.device.open.set()
    closed.result(TIMEOUT_S)
    assert all(parts.there(layer) for layer in range(LAYERS))
    loads.close()


def test_blocks_behind_a_link_that_fails_after_the_engine_waited_are_failed_and_the_store_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relay_check, "RATE_MIN", 0.0)
    device = GatedDevice()
    device.open.set()
    neighbour = EmulatedDevice(beside=device)
    rule = replace(PAPERS, chunk_bytes=SLICE, fallback_bytes=0)
    parts = Parts(device, checked_links(device, [neighbour], rule))
    loads = loads_of(parts)
    device.open.clear()
    relaying, free = threading.Event(), threading.Event()

    def held_back(count_bytes: int) -> None:
        relaying.set()
        assert free.wait(TIMEOUT_S)

    monkeypatch.setattr(neighbour.peer_link, "passes", held_back)
    loads.start([PLAN])
    parts.progress.advance(LAYERS)

    def compute() -> None:
        for layer in range(LAYERS):
            loads.wait(layer)

    engine = threading.Thread(target=compute)
    engine.start()
    assert relaying.wait(TIMEOUT_S)
    device.open.set()
    engine.join()
    assert len(loads._under_way[0]._installed) == LAYERS
    neighbour.breaks.set()
    free.set()
    loads.end_step()
    assert loads.take_failed_blocks() == set(IDS)
    assert loads._outage.rest_s == 0.0
    loads.close()
    parts.close()


@pytest.mark.parametrize(("is_linked", "ahead"), [(False, 2), (True, 4)])
def test_as_many_layers_are_copied_at_once_as_the_links_take(
    monkeypatch: pytest.MonkeyPatch, is_linked: bool, ahead: int
) -> None:
    monkeypatch.setattr(relay_check, "RATE_MIN", 0.0)
    monkeypatch.setattr(beside_copies, "DIRECT_BYTES_MIN", SLICE + 1)  # by way of buffers
    device = GatedDevice()
    device.open.set()
    links = checked_links(device, [EmulatedDevice(beside=device)]) if is_linked else None
    parts = Parts(device, links)
    parts.progress.advance(LAYERS)
    load = parts.copies.load(parts.delivery, IDS)
    assert isinstance(load, beside_copies._BufferedLoad)
    copying = load._load
    assert copying is not None
    wait_until(lambda: len(copying._marks) == ahead)
    assert copying.due() is None  # until one is laid into its blocks
    load.close()
    parts.close()
