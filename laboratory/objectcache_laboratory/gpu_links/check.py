"""Whether copies to and from the GPUs of this machine are right, and how quick they are.

Every way of copying, every layout of blocks and every relay: all bytes are compared, and rates
stand beside that of one copy of the same bytes (`cudaMemcpyAsync`). What is reported is for a user
to read; nothing is decided by it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from objectcache.gpu.device import Device, Direction, Lane, Way
from objectcache.gpu.host_nodes import node_at, put_on_node
from objectcache.gpu.links.relay_check import relay_check
from objectcache.gpu.page_locked_memory import PageLockedMemory
from objectcache.gpu.pieces import BlockPart, PagedBlocks, Pieces
from objectcache.landing.memory_file import MemoryFile
from objectcache.payload import Bytes
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.limits import KIB, MIB

PART_BYTES = 32 * KIB  # K or V of a block: Llama-8B's with 16 tokens
LAYOUTS = ("K and V apart", "K and V by block", "one latent")
_LANES = 4
_TASK_BYTES = 16 * MIB
_PIECES_MAX = 4096
_RANDOM_SEED = 5


@dataclass(frozen=True, slots=True)
class GpuCheck:
    """One thing that was tried: whether its bytes are right, and of what rate."""

    gpu: int
    what: str
    is_right: bool
    bytes_per_s: float
    of_one_copy: float  # its share of the rate of one copy


@dataclass(frozen=True, slots=True)
class NodeVerdict:
    """Which NUMA node a GPU is nearest to, if that is known, and whether memory is put there."""

    gpu: int
    node: int | None
    why_not: str | None  # None is that it is


@dataclass(frozen=True, slots=True)
class RelayVerdict:
    """Whether one GPU's link may carry for another."""

    link: int
    gpu: int
    why_not: str | None  # None is that it may


def check_copies(devices: Sequence[Device], size_bytes: int) -> Iterator[GpuCheck]:
    """One GPU after the other; each is the calling thread's device meanwhile.

    Raises `InvalidRequest` for fewer bytes than two blocks, and `Unavailable`.
    """
    blocks = size_bytes // (2 * PART_BYTES)
    if blocks < 2:
        raise InvalidRequest(f"at least {4 * PART_BYTES} bytes are to be copied, got {size_bytes}")
    for gpu, device in enumerate(devices):
        device.enter_thread()
        yield from _Checked(gpu, device, blocks).all()


def check_nodes(devices: Sequence[Device]) -> Iterator[NodeVerdict]:
    """Where host memory for each GPU comes to lie. Raises `Unavailable`."""
    for gpu, device in enumerate(devices):
        if device.node is None:
            yield NodeVerdict(gpu, None, "the system names no NUMA node for it")
            continue
        file = MemoryFile(MIB)
        address = file.array().ctypes.data
        why_not = put_on_node(address, file.length_bytes, device.node)
        if why_not is None and (node := node_at(address)) not in (device.node, None):
            why_not = f"the system left it on node {node}"
        yield NodeVerdict(gpu, device.node, why_not)


def check_relays(devices: Sequence[Device], task_bytes: int) -> Iterator[RelayVerdict]:
    """Each pair of GPUs. What reaches nobody, or comes wrong or slowly, is not to relay."""
    for link, device in enumerate(devices):
        for gpu, target in enumerate(devices):
            if gpu != link:
                yield RelayVerdict(link, gpu, relay_check(device, target, task_bytes))


class _Checked:
    def __init__(self, gpu: int, device: Device, blocks: int) -> None:
        self._gpu = gpu
        self._device = device
        self._blocks = blocks
        self._size = blocks * 2 * PART_BYTES
        self._random = np.random.default_rng(_RANDOM_SEED)
        # Made once, since it takes longer than the copies. In each try they are others' places.
        self._some = self._random.integers(0, 256, 2 * self._size, np.uint8)

    def all(self) -> Iterator[GpuCheck]:
        device = self._device
        locked = PageLockedMemory(device)
        file = MemoryFile(self._size)
        locked.lock_pages(file)
        address = device.allocate(self._size)
        lanes = [device.lane(_TASK_BYTES, _PIECES_MAX) for _ in range(_LANES)]
        whole = device.lane(self._size, 1)
        try:
            host = file.array()
            single = Pieces.of([(host.ctypes.data, address, self._size)])
            for direction in Direction:
                order = np.arange(self._blocks)
                one = self._tried([whole], [single], direction, Way.EACH, host, address, order, 1)
                yield GpuCheck(self._gpu, f"{direction.value}, one copy", *one, 1.0)
                for way in sorted(device.ways, key=lambda each: each.value):
                    for layout in LAYOUTS:
                        order = self._random.permutation(self._blocks)
                        pieces = _blocks_of(layout, address, self._blocks).pieces(
                            order, host.reshape(self._blocks, -1)
                        )
                        tasks = pieces.joined().micro_tasks(_TASK_BYTES, _PIECES_MAX)
                        apart = 2 if layout == LAYOUTS[0] else 1
                        is_right, rate = self._tried(
                            lanes, tasks, direction, way, host, address, order, apart
                        )
                        what = f"{direction.value}, {way.value}, {layout}"
                        yield GpuCheck(self._gpu, what, is_right, rate, rate / one[1])
        finally:
            for lane in (*lanes, whole):
                lane.close()
            device.free(address)
            locked.close()

    def _tried(
        self,
        lanes: Sequence[Lane],
        tasks: Sequence[Pieces],
        direction: Direction,
        way: Way,
        host: Bytes,
        address: int,
        order: np.ndarray[tuple[int], np.dtype[np.int64]],
        apart: int,
    ) -> tuple[bool, float]:
        self._some = np.roll(self._some, 1 + int(self._random.integers(self._size)))
        host[:], there = self._some[: self._size], self._some[self._size :]
        self._device.write(address, there.tobytes())
        before = host.copy()
        begun_s = time.monotonic()
        for index, task in enumerate(tasks):
            lane = lanes[index % len(lanes)]
            lane.wait_idle()
            lane.copy(task, direction, way)
        for lane in lanes:
            lane.wait_idle()
        took_s = time.monotonic() - begun_s
        found = np.frombuffer(self._device.read(address, self._size), np.uint8)
        blocks = found.reshape(apart, self._blocks, -1)[:, order].swapaxes(0, 1).reshape(-1)
        is_right = np.array_equal(blocks, host)
        source = (host, before) if direction is Direction.LOAD else (found, there)
        return is_right and np.array_equal(*source), self._size / took_s


def _blocks_of(layout: str, address: int, count: int) -> PagedBlocks:
    if layout == LAYOUTS[0]:
        halves = [address, address + count * PART_BYTES]
        return PagedBlocks([BlockPart(each, PART_BYTES, PART_BYTES) for each in halves], count)
    if layout == LAYOUTS[1]:
        halves = [address, address + PART_BYTES]
        return PagedBlocks([BlockPart(each, 2 * PART_BYTES, PART_BYTES) for each in halves], count)
    return PagedBlocks([BlockPart(address, 2 * PART_BYTES, 2 * PART_BYTES)], count)
