"""Which way of copying, micro-task and depth is quickest on a device, for pieces of one size."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from objectcache.gpu.device import Device, Direction, Lane, Way
from objectcache.gpu.line import LineSettings
from objectcache.gpu.page_locked_memory import PageLockedMemory
from objectcache.gpu.pieces import Pieces
from objectcache.landing.memory_file import MemoryFile
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.limits import KIB, MIB

TASKS_BYTES = (4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB)
DEPTHS = (2, 4, 8)
# `MAPPED` slows down what a GPU computes (docs/gpu.md), and `ROWS` is for blocks in order.
WAYS = (Way.STAGED, Way.BATCH, Way.EACH)
_AS_QUICK = (
    0.98  # of the quickest: then less on the way is better, as what comes next is chosen later
)
PIECES_BYTES = tuple(size_kib * KIB for size_kib in (2, 4, 8, 16, 32, 64, 128, 256, 1024))
_ROUNDS = 3  # the fastest counts


@dataclass(frozen=True, slots=True)
class LineTrial:
    """How quick one direction was, copied so."""

    direction: Direction
    settings: LineSettings
    bytes_per_s: float
    piece_bytes: int = 0


def trials(device: Device, size_bytes: int, piece_bytes: int) -> Iterator[LineTrial]:
    """Copy so many bytes in pieces at random places by every setting that the device has. It is
    the calling thread's device afterwards.

    Raises `InvalidRequest` for fewer bytes than a piece, and `Unavailable`.
    """
    if not 1 <= piece_bytes <= size_bytes:
        raise InvalidRequest(f"pieces of {piece_bytes} bytes do not fit into {size_bytes}")
    with _memory(device, size_bytes) as (host, address):
        pieces = _scattered(host, address, size_bytes, piece_bytes)
        for way in (way for way in WAYS if way in device.ways):
            for task_bytes in TASKS_BYTES:
                for depth in DEPTHS:
                    settings = LineSettings(way, task_bytes, depth)
                    for direction in Direction:
                        yield _tried(device, pieces, direction, settings)


def way_trials(
    device: Device, size_bytes: int, best: Mapping[Direction, LineSettings]
) -> Iterator[LineTrial]:
    """By every way, with micro-tasks and depth as they are best, in pieces of every length of which
    there are at least two. It is the calling thread's device afterwards. Raises `Unavailable`.
    """
    with _memory(device, size_bytes) as (host, address):
        for piece_bytes in (each for each in PIECES_BYTES if 2 * each <= size_bytes):
            pieces = _scattered(host, address, size_bytes, piece_bytes)
            for way in (way for way in WAYS if way in device.ways):
                for direction, settings in best.items():
                    trial = _tried(device, pieces, direction, replace(settings, way=way, ways=()))
                    yield replace(trial, piece_bytes=piece_bytes)


def with_ways(line: LineSettings, tried: Sequence[LineTrial]) -> LineSettings:
    """The line with the way that is quickest for each length of pieces: `tried` is of one
    direction. Of those that are about as quick it is the one that longer pieces have.
    """
    chosen: list[tuple[int, Way]] = []
    for piece_bytes in sorted({trial.piece_bytes for trial in tried}, reverse=True):
        rates = {
            each.settings.way: each.bytes_per_s for each in tried if each.piece_bytes == piece_bytes
        }
        way = max(rates, key=rates.__getitem__)
        if chosen and rates[longer := chosen[-1][1]] >= _AS_QUICK * rates[way]:
            way = longer
        if not chosen or way is not chosen[-1][1]:
            chosen.append((piece_bytes, way))
    if not chosen:
        return line
    return replace(line, way=chosen[0][1], ways=tuple(reversed(chosen[1:])))


@contextlib.contextmanager
def _memory(device: Device, size_bytes: int) -> Generator[tuple[int, int]]:
    """Page-locked memory and the device's: where they begin."""
    device.enter_thread()
    locked = PageLockedMemory(device)
    file = MemoryFile(size_bytes)
    locked.lock_pages(file)
    address = device.allocate(size_bytes)
    try:
        yield file.array().ctypes.data, address
    finally:
        device.free(address)
        locked.close()


def _scattered(host: int, address: int, size_bytes: int, piece_bytes: int) -> Pieces:
    count = size_bytes // piece_bytes
    order = np.random.default_rng(0).permutation(count)
    sides = (host + np.arange(count) * piece_bytes, address + order * piece_bytes)
    sizes = np.full(count, piece_bytes)
    return Pieces(*(each.astype(np.uint64) for each in (*sides, sizes)))


def best_lines(tried: Iterable[LineTrial]) -> dict[Direction, LineTrial]:
    """Of each direction the one with the fewest bytes on the way that is about as quick as any."""
    every = list(tried)
    best: dict[Direction, LineTrial] = {}
    for direction in Direction:
        mine = [trial for trial in every if trial.direction is direction]
        quickest = max(trial.bytes_per_s for trial in mine)
        best[direction] = min(
            (trial for trial in mine if trial.bytes_per_s >= _AS_QUICK * quickest),
            key=lambda trial: (
                trial.settings.task_bytes * trial.settings.depth,
                -trial.bytes_per_s,
            ),
        )
    return best


def _tried(
    device: Device, pieces: Pieces, direction: Direction, settings: LineSettings
) -> LineTrial:
    tasks = pieces.joined().micro_tasks(settings.task_bytes, settings.pieces_max)
    lanes: list[Lane] = []
    try:
        for _ in range(settings.depth):  # as a `Line` makes them
            first = lanes[0] if lanes and not settings.takes_kernels else None
            lanes.append(device.lane(settings.task_bytes, settings.pieces_max, first))
        took_s = min(_copied_s(lanes, tasks, direction, settings) for _ in range(_ROUNDS))
    finally:
        for lane in reversed(lanes):
            lane.close()
    return LineTrial(direction, settings, pieces.total_bytes / took_s)


def _copied_s(
    lanes: Sequence[Lane], tasks: Sequence[Pieces], direction: Direction, settings: LineSettings
) -> float:
    begun_s = time.monotonic()
    for index, task in enumerate(tasks):
        lane = lanes[index % len(lanes)]
        lane.wait_idle()
        lane.copy(task, direction, settings.way_of(task))
    for lane in lanes:
        lane.wait_idle()
    return time.monotonic() - begun_s
