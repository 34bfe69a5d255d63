"""Memory that a fabric reaches: this process' own, a caller's, and a GPU's."""

from __future__ import annotations

import math
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from objectcache.landing.regions import Region
from objectcache.payload import Bytes
from objectcache.sessions.fabric_session import FabricSession
from objectcache.sessions.target_session import TargetSession
from objectcache_fabrics.registered_memory import VRAM, DeviceMemory
from objectcache_schemas.errors import InvalidRequest, Unavailable

_MADV_POPULATE_WRITE = 23  # linux/mman.h, from 5.14 on
LOST_KEPT_S = 120.0  # far above a server's heartbeat and its storage.fabric_timeout_s together


class FabricRegion(Region):
    """Memory of this process that a fabric reaches, page-aligned."""

    def __init__(self, length_bytes: int) -> None:
        """Allocate. Raises `Unavailable` where the system has no such memory."""
        super().__init__(length_bytes)
        _LOST.let_go(time.monotonic())
        try:
            self._memory = _populated(length_bytes)
        except (OSError, OverflowError, ValueError) as error:
            raise Unavailable(f"no {length_bytes} bytes of memory: {error}") from error
        self._fabric: dict[TargetSession, Any] = {}

    def array(self) -> Bytes:
        return np.frombuffer(self._memory, np.uint8)

    def _device_memory(self) -> DeviceMemory:
        array = self.array()
        return DeviceMemory(array.ctypes.data, array.nbytes, array)

    def unregister(self, on_end: Callable[[bool], None]) -> None:
        super().unregister(self._keeping(on_end))

    def unregister_from(self, session: TargetSession, on_end: Callable[[bool], None]) -> None:
        super().unregister_from(session, self._keeping(on_end))

    def _keeping(self, on_end: Callable[[bool], None]) -> Callable[[bool], None]:
        def ended(quiet: bool) -> None:
            if not quiet:
                _LOST.keep(self._kept_alive(), time.monotonic())
            on_end(quiet)

        return ended

    def _kept_alive(self) -> object:
        return self._memory

    def _register(self, session: TargetSession) -> bytes:
        assert isinstance(session, FabricSession)
        target_id, registered = session.register_memory(self._device_memory())
        self._fabric = {one: at for one, at in self._fabric.items() if not one.ended}
        self._fabric[session] = registered
        return target_id

    def _unregistered(self, session: TargetSession) -> None:
        assert isinstance(session, FabricSession)
        fabric = self._fabric.pop(session, None)
        if fabric is not None:
            session.unregister_memory(fabric)


def _populated(length_bytes: int) -> mmap.mmap:
    """Memory whose pages are there. A page that a write from another process has to make costs the
    writer ten times what the copy into it does, measured.
    """
    memory = mmap.mmap(-1, length_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (mmap.MADV_HUGEPAGE, _MADV_POPULATE_WRITE):
        with suppress(OSError):  # a kernel without it; then they are made when they are written
            memory.madvise(advice)
    return memory


class GivenRegion(FabricRegion):
    """Memory that the caller has: a writable buffer, or an array or tensor of a GPU."""

    def __init__(self, memory: DeviceMemory, array: Bytes) -> None:
        Region.__init__(self, memory.length_bytes)
        self._given = memory
        self._array = array
        self._fabric = {}

    def array(self) -> Bytes:
        return self._array

    @property
    def address(self) -> int:
        return self._given.address

    def _device_memory(self) -> DeviceMemory:
        return self._given

    def _kept_alive(self) -> object:
        return self._given.owner


class _LostMemory:
    """Memory that a server may still write to for a while, though nobody uses it any more.

    Between processes of one host no registration protects what is mapped at its address next, so
    it stays where it is until every server has given its session up.
    """

    def __init__(self) -> None:
        self._kept: deque[tuple[float, object]] = deque()
        self._lock = threading.Lock()

    def keep(self, memory: object, now_s: float) -> None:
        self.let_go(now_s)
        with self._lock:
            self._kept.append((now_s + LOST_KEPT_S, memory))

    def let_go(self, now_s: float) -> None:
        """Of what was lost long ago."""
        with self._lock:
            while self._kept and self._kept[0][0] <= now_s:
                self._kept.popleft()


_LOST = _LostMemory()


def device_memory_of(buffer: Any) -> tuple[DeviceMemory, Bytes]:
    """A caller's memory, and its bytes as an array, which is empty where a GPU has them.

    Raises `InvalidRequest` for what is neither a writable C-contiguous buffer nor a contiguous
    array of a GPU.
    """
    described = getattr(buffer, "__cuda_array_interface__", None)
    if described is not None:
        return _gpu_memory(buffer, described), np.empty(0, np.uint8)
    try:
        view = memoryview(buffer)
    except TypeError as error:
        raise InvalidRequest(f"buffer: {error}") from error
    if view.readonly or not view.c_contiguous or not view.nbytes:
        raise InvalidRequest("buffer: it must be writable, C-contiguous and not empty")
    array: Bytes = np.frombuffer(view, np.uint8)
    return DeviceMemory(array.ctypes.data, array.nbytes, buffer), array


def _gpu_memory(buffer: Any, described: dict[str, Any]) -> DeviceMemory:
    address, is_readonly = described["data"]
    item_bytes = int(described["typestr"][2:])
    if is_readonly or described.get("strides") is not None:
        raise InvalidRequest("buffer: a GPU's array must be writable and C-contiguous")
    length_bytes = item_bytes * math.prod(described["shape"])
    device: Any = getattr(buffer, "device", None)
    device_id = getattr(device, "index", None) or getattr(device, "id", None) or 0
    return DeviceMemory(address, length_bytes, buffer, memory=VRAM, device_id=int(device_id))
