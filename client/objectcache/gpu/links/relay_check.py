"""Whether one device's link carries another's bytes, rightly and quickly enough."""

from __future__ import annotations

import time

import numpy as np

from objectcache.gpu.device import Device, Direction, Lane, Way
from objectcache.gpu.page_locked_memory import PageLockedMemory
from objectcache.gpu.pieces import Pieces
from objectcache.landing.memory_file import MemoryFile
from objectcache_schemas.errors import Unavailable

RATE_MIN = 0.8  # of the same bytes over the link to its own device
_ROUNDS = 3  # the fastest counts


def relay_check(device: Device, target: Device, task_bytes: int) -> str | None:
    """Copy random bytes to `target` and back over the link of `device`, and compare all of them.

    Returns why the link is not to relay, or None. `device` is the calling thread's device then.
    """
    page_locked = PageLockedMemory(target)  # on its node, as a copier's is
    places: list[tuple[Device, int]] = []
    try:
        for each in (target, device):
            each.enter_thread()
            places.append((each, each.allocate(task_bytes)))
        file = MemoryFile(2 * task_bytes)
        page_locked.lock_pages(file)
        return _checked(device, target, file, [place for _, place in places], task_bytes)
    except Unavailable as error:
        return error.message
    finally:
        for each, place in places:
            each.free(place)
        page_locked.close()


def _checked(
    device: Device, target: Device, file: MemoryFile, places: list[int], task_bytes: int
) -> str | None:
    host = file.array()
    sent, received = host[:task_bytes], host[task_bytes:]
    sent[:] = np.random.default_rng().integers(0, 256, task_bytes, np.uint8)
    theirs, own = places
    lanes = {own: device.lane(task_bytes, 1), theirs: device.relay(target, task_bytes, 1)}
    try:
        for direction, memory in ((Direction.LOAD, sent), (Direction.SAVE, received)):
            at = memory.ctypes.data
            took_s = {
                place: _fastest_s(lane, Pieces.of([(at, place, task_bytes)]), direction)
                for place, lane in lanes.items()
            }
            if direction is Direction.LOAD and target.read(theirs, task_bytes) != sent.tobytes():
                return "other bytes arrived than were sent"
            if took_s[own] < RATE_MIN * took_s[theirs]:
                share = took_s[own] / took_s[theirs]
                return f"{direction.value}s come at {share:.2f} of the link, not at {RATE_MIN}"
        if not np.array_equal(sent, received):
            return "other bytes came back than were there"
        return None
    finally:
        for lane in lanes.values():
            lane.close()


def _fastest_s(lane: Lane, pieces: Pieces, direction: Direction) -> float:
    times_s = []
    for _ in range(_ROUNDS):
        begun_s = time.monotonic()
        lane.copy(pieces, direction, Way.EACH)
        lane.wait_idle()
        times_s.append(time.monotonic() - begun_s)
    return min(times_s)
