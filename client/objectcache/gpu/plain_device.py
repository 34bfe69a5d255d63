"""Plain copies: one piece after the other out of any host memory, each waited for."""

from __future__ import annotations

import ctypes
import itertools

from objectcache.gpu.device import Device, Direction, Lane, Mark, Way
from objectcache.gpu.device_overlay import DeviceOverlay
from objectcache.gpu.pieces import Pieces


class PlainDevice(DeviceOverlay):
    """What a device's copies are where nothing else works: no page is locked, no stream of the
    copier's is there, and an engine's default stream stands still meanwhile (`cudaMemcpy`).
    """

    def __init__(self, under: Device) -> None:
        super().__init__(under)
        self.ways = frozenset({Way.EACH})
        self._handles = itertools.count(-1, -1)  # no stream of the device's has these

    def lock_pages(self, address: int, length_bytes: int) -> None:
        pass

    def unlock_pages(self, address: int) -> None:
        pass

    def lane(self, task_bytes_max: int, pieces_max: int, beside: Lane | None = None) -> Lane:
        stream = next(self._handles) if beside is None else beside.stream
        return _PlainLane(self.under, stream)

    def mark(self, stream: int) -> Mark:
        return _Reached() if stream < 0 else super().mark(stream)

    def hold(self, stream: int, mark: Mark) -> None:
        if not isinstance(mark, _Reached):
            super().hold(stream, mark)


class _Reached(Mark):
    def wait(self) -> None:
        pass


class _PlainLane(Lane):
    def __init__(self, device: Device, stream: int) -> None:
        self.stream = stream
        self._device = device

    def copy(self, task: Pieces, direction: Direction, way: Way) -> None:
        for host, device, size in task.triples():
            if direction is Direction.LOAD:
                self._device.write(device, ctypes.string_at(host, size))
            else:
                ctypes.memmove(host, self._device.read(device, size), size)

    def follow(self, mark: Mark) -> None:
        mark.wait()

    def wait_idle(self) -> None:
        pass

    def close(self) -> None:
        pass
