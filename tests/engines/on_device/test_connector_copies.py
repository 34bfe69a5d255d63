"""Copies of vLLM's and SGLang's connectors where the engine's tensors are: emulated, and CUDA's.

No engine is needed, torch alone: `python -m pytest tests/engines/on_device` is for a machine with a
GPU. What is in the blocks is compared with what the old copies make of the same tensors on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from objectcache.connectors.device.engine_copier import EngineCopier
from objectcache.connectors.sglang.device_pool import DevicePages, DevicePool
from objectcache.connectors.sglang.linked_loads import LinkedLoad, _beside
from objectcache.connectors.vllm.worker.beside_copies import BesideCopies
from objectcache.connectors.vllm.worker.block_copies import BlocksOut
from objectcache.connectors.vllm.worker.paged_layout import ContentShape, PagedLayer
from objectcache.deliveries.delivery import Delivery
from objectcache.deliveries.layer_progress import LayerProgress
from objectcache.gpu.copier import Copier
from objectcache.gpu.cuda_device import CudaDevice
from objectcache.gpu.device import Way
from objectcache.gpu.line import LineSettings
from objectcache.landing.regions import Region
from objectcache.payload import Bytes, PayloadShape
from objectcache_schemas.descriptor import DeliveryMode
from tests.engines.emulated_gpu import EmulatedGpu, emulated_copier

LAYERS, BLOCKS, TOKENS, HEADS, WIDTH = 3, 12, 16, 2, 64
IDS = [7, 0, 1, 9, 3]
LEFT_S = 60.0
ORDERS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}


@dataclass(frozen=True, slots=True)
class Where:
    """The device of an engine's tensors, and its copier."""

    device: torch.device
    copier: EngineCopier

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor on the CPU, of the same strides, when all that is queued is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return tensor.cpu()


def on_emulated(way: Way, ends: ExitStack) -> Where:
    gpu = EmulatedGpu()
    ends.callback(gpu.close)
    return Where(torch.device("cpu"), emulated_copier(gpu, way))


def on_cuda(way: Way, ends: ExitStack) -> Where:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    device = CudaDevice()
    if way not in device.ways:
        pytest.skip(f"{device!r} has no {way.value}")
    settings = LineSettings(way, task_bytes=8 << 10, depth=3, pieces_max=7)
    stream: Callable[[], int] = lambda: int(torch.cuda.current_stream().cuda_stream)  # noqa: E731
    copier = Copier(device, loads=settings, saves=settings)
    return Where(torch.device("cuda", device.number), EngineCopier(copier, stream))


@pytest.fixture(params=list(Way), ids=[way.value for way in Way])
def way(request: pytest.FixtureRequest) -> Way:
    found: Way = request.param
    return found


@pytest.fixture(params=[on_emulated, on_cuda], ids=["emulated", "cuda"])
def where(request: pytest.FixtureRequest, way: Way) -> Iterator[Where]:
    with ExitStack() as ends:
        found: Where = request.param(way, ends)
        ends.callback(found.copier.close)
        found.copier.enter_thread()
        yield found


def filled(shape: tuple[int, ...], where: Where) -> torch.Tensor:
    """Noise, the same at every call."""
    count = int(np.prod(shape))
    noise = np.random.default_rng(count).integers(0, 1 << 16, count, np.uint16)
    bits = torch.from_numpy(noise.view(np.int16)).view(torch.bfloat16)
    return bits.reshape(shape).to(where.device)


class Arrived:
    """A delivery all of whose layers are there, in memory that the device reaches."""

    def __init__(self, where: Where, slice_bytes: int) -> None:
        shape = PayloadShape(0, LAYERS, len(IDS), slice_bytes, DeliveryMode.LAYERWISE)
        self.region: Region = where.copier.region(shape.payload_bytes)
        memory = self.region.array()
        memory[:] = np.random.default_rng(3).integers(0, 256, len(memory), np.uint8)
        self.payload = shape.payload(memory)
        progress = LayerProgress(0, LAYERS)
        self.delivery = Delivery(progress, shape, memory, None, transport="shared_memory")
        progress.advance(LAYERS)


def caches_of(order: str, where: Where) -> tuple[list[torch.Tensor], ContentShape]:
    """A layer's tensor each, as vLLM registers them."""
    if order == "latent":
        return (
            [filled((BLOCKS, TOKENS, 8 * WIDTH), where) for _ in range(LAYERS)],
            ContentShape(8 * WIDTH, 0, latent=True),
        )
    content = ContentShape(WIDTH, WIDTH)
    if order == "K, V apart":
        shape: tuple[int, ...] = (2, BLOCKS, TOKENS, HEADS, WIDTH)
        return [filled(shape, where) for _ in range(LAYERS)], content
    if order == "K, V by block":
        shape = (BLOCKS, 2, TOKENS, HEADS, WIDTH)
        return [filled(shape, where) for _ in range(LAYERS)], content
    axes = ORDERS[order]
    sizes = (LAYERS, BLOCKS, HEADS, TOKENS, 2 * WIDTH)
    pool = filled(tuple(sizes[axis] for axis in axes), where)
    return list(pool.permute([axes.index(axis) for axis in range(5)])), content


@pytest.mark.parametrize("order", [*ORDERS, "K, V apart", "K, V by block", "latent"])
def test_vllms_blocks_are_what_the_old_copies_make_of_them(where: Where, order: str) -> None:
    caches, content = caches_of(order, where)
    before = [where.read(cache).clone() for cache in caches]
    layers = [PagedLayer(cache, BLOCKS, content) for cache in caches]
    copies = BesideCopies(layers, where.copier)
    arrived = Arrived(where, layers[0].slice_bytes)
    load = copies.load(arrived.delivery, IDS)
    for layer in range(LAYERS):
        assert load.wait(layer, LEFT_S) == len(IDS)
    load.close()
    for layer, cache in enumerate(caches):
        expected = before[layer]
        PagedLayer(expected, BLOCKS, content).load(IDS, arrived.payload[layer].copy())
        assert torch.equal(_bits(where.read(cache)), _bits(expected))
    assert_saved(where, copies, arrived)


def assert_saved(where: Where, copies: BesideCopies, arrived: Arrived) -> None:
    expected = arrived.payload.copy()
    arrived.payload[:] = 0
    saves = [
        copies.save(layer, [BlocksOut(IDS[:2], slices[:2]), BlocksOut(IDS[2:], slices[2:])])
        for layer, slices in enumerate(arrived.payload)
    ]
    for save in saves:
        assert save is not None  # the device copies
        save.wait()
    assert np.array_equal(arrived.payload, expected)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)  # noise is no number at times, which equals nothing


class MHATokenToKVPool(SimpleNamespace):
    """What the linker reads of SGLang's, which it knows by this name."""


class MLATokenToKVPool(SimpleNamespace):
    """The same."""


def pool_of(kind: str, where: Where) -> tuple[Any, list[list[torch.Tensor]]]:
    """A pool, and its tensors by component and layer."""
    slots = BLOCKS * TOKENS
    if kind == "mla":
        latents = [filled((slots, 1, 8 * WIDTH), where) for _ in range(LAYERS)]
        pool: Any = MLATokenToKVPool(use_dsa=False, kv_scale_buffer=None, kv_buffer=latents)
        parts = [latents]
    else:
        parts = [[filled((slots, HEADS, WIDTH), where) for _ in range(LAYERS)] for _ in range(2)]
        pool = MHATokenToKVPool(
            kv_cache_layout="nhd", k_scale_buffer=None, head_dim=WIDTH, v_head_dim=WIDTH
        )
        pool.k_buffer, pool.v_buffer = parts
    pool.store_dtype, pool.start_layer = torch.bfloat16, 0
    return pool, parts


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_sglangs_pages_are_what_the_old_copies_make_of_them(where: Where, kind: str) -> None:
    kvcache, parts = pool_of(kind, where)
    on_host, host_parts = pool_of(kind, Where(torch.device("cpu"), where.copier))
    pool, expected = DevicePool(kvcache, TOKENS), DevicePool(on_host, TOKENS)
    slots = torch.cat([torch.arange(id * TOKENS, (id + 1) * TOKENS) for id in IDS])
    there = slots.to(where.device)
    arrived = Arrived(where, pool.geometry.layer_bytes)
    with ExitStack() as stack:
        load = LinkedLoad([str(id) for id in IDS], there)
        arrive = _beside(pool, load, arrived.delivery, where.copier, stack)
        for layer in range(LAYERS):
            arrive(layer, LEFT_S)
    for layer in range(LAYERS):
        expected.write_layer(layer, expected.pages(slots), arrived.payload[layer])
    for part, host_part in zip(parts, host_parts, strict=True):
        for tensor, host_tensor in zip(part, host_part, strict=True):
            assert torch.equal(_bits(where.read(tensor)), _bits(host_tensor))
    assert np.array_equal(read_pages(pool, there), arrived.payload.swapaxes(0, 1))
    out = Arrived(where, pool.geometry.layer_bytes)  # its memory
    chunks = out.payload.reshape(len(IDS), LAYERS, -1)
    chunks[:] = 0
    assert where.copier.reaches(chunks)
    DevicePages(pool, there, where.copier).read(0, len(IDS), chunks)
    assert np.array_equal(chunks, arrived.payload.swapaxes(0, 1))


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_sglangs_pages_are_written_and_read_without_a_copier(where: Where, kind: str) -> None:
    kvcache, _ = pool_of(kind, where)
    pool = DevicePool(kvcache, TOKENS)
    slots = torch.cat([torch.arange(id * TOKENS, (id + 1) * TOKENS) for id in IDS])
    there = slots.to(where.device)
    arrived = Arrived(where, pool.geometry.layer_bytes)
    for layer in range(LAYERS):
        pool.write_layer(layer, pool.pages(there), arrived.payload[layer])
    assert np.array_equal(read_pages(pool, there), arrived.payload.swapaxes(0, 1))


def read_pages(pool: DevicePool, slots: torch.Tensor) -> Bytes:
    chunks = np.zeros((len(IDS), LAYERS, pool.geometry.layer_bytes), np.uint8)
    pool.read_pages(pool.pages(slots), chunks)
    return chunks
