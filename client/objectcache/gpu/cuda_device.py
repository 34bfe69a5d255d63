"""An NVIDIA GPU, by CUDA 12.8 or later (before that without batched copies)."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from ctypes import byref, c_uint32, c_void_p

import numpy as np

from objectcache.gpu import copy_kernel, cuda_library
from objectcache.gpu.cuda_library import CudaLibrary
from objectcache.gpu.device import (
    KERNEL_PIECE_BYTES,
    Device,
    Direction,
    Lane,
    Mark,
    StreamHold,
    Way,
)
from objectcache.gpu.host_nodes import HostNodes, put_on_node
from objectcache.gpu.pieces import Numbers, Pieces
from objectcache_schemas.errors import Unavailable

_MAPPED_EVERYWHERE = cuda_library.HOST_REGISTER_PORTABLE | cuda_library.HOST_REGISTER_MAPPED
_PAGE_BYTES = 4096
_WORD_BYTES = 4
_WORD_VALUES = 1 << 32
_ROW_BYTES = 24  # of the kernel's table
_KINDS = {
    Direction.LOAD: cuda_library.COPY_HOST_TO_DEVICE,
    Direction.SAVE: cuda_library.COPY_DEVICE_TO_HOST,
}
# What is loaded was written before the copy was asked for; what is saved is written in its stream.
_SOURCE_ORDERS = {
    Direction.LOAD: cuda_library.BATCH_SOURCE_IN_ANY_ORDER,
    Direction.SAVE: cuda_library.BATCH_SOURCE_IN_STREAM_ORDER,
}


class CudaDevice(Device):
    """One GPU. Its streams are CUDA's of any engine in this process."""

    def __init__(self, number: int = 0) -> None:
        """The calling thread's current device stays what it is. Raises `Unavailable` where there is
        no such device, and no CUDA.
        """
        self.cuda = CudaLibrary()
        self.number = number
        if number >= (count := self.cuda.device_count()):
            raise Unavailable(f"no CUDA device {number}, there are {count}")
        self.place = self.cuda.pci_address(number).lower()
        self.node = HostNodes().node_of_pci(self.place)
        self.kernel = 0
        before = self.cuda.current_device()
        try:
            self.enter_thread()
            self.ways = self._ways()
            ways = ", ".join(sorted(way.value for way in self.ways))
            self.kind = f"{self.cuda.name(number)}, CUDA {self.cuda.version}, {ways}"
        finally:
            if before != number:
                self.cuda.call("cudaSetDevice", before)
        self._lock = threading.Lock()
        self._free_words: deque[int] = deque()  # for holds; their memory is never given back

    def _ways(self) -> frozenset[Way]:
        """What works here; loads the kernel, where that does."""
        ways = {Way.EACH, Way.ROWS}
        if self.cuda.copies_batches:
            ways.add(Way.BATCH)
        try:
            self.kernel = self.cuda.kernel(copy_kernel.SOURCE, copy_kernel.NAME, self.number)
            ways.add(Way.STAGED)
            if self.cuda.attribute(cuda_library.KERNELS_USE_HOST_ADDRESSES, self.number):
                ways.add(Way.MAPPED)
        except Unavailable:  # without NVRTC the copy engines do it alone
            pass
        return frozenset(ways)

    def enter_thread(self) -> None:
        self.cuda.call("cudaSetDevice", self.number)
        self.cuda.call("cudaFree", None)  # makes the device's context

    def lock_pages(self, address: int, length_bytes: int) -> None:
        if self.node is not None:  # page-locked pages stay where they are
            put_on_node(address, length_bytes, self.node)
        self.cuda.call("cudaHostRegister", address, length_bytes, _MAPPED_EVERYWHERE)

    def unlock_pages(self, address: int) -> None:
        self.cuda.call("cudaHostUnregister", address)

    def lane(self, task_bytes_max: int, pieces_max: int, beside: Lane | None = None) -> Lane:
        return _CudaLane(self, task_bytes_max, pieces_max, beside)

    def relay(self, target: Device, task_bytes_max: int, pieces_max: int) -> Lane:
        if not isinstance(target, CudaDevice):
            raise Unavailable(f"{self!r} cannot reach {target!r}")
        self.cuda.reach_peer(self.number, target.number)
        return _CudaRelayLane(self, task_bytes_max, pieces_max, target.number)

    def mark(self, stream: int) -> Mark:
        mark = _CudaMark(self.cuda)
        self.cuda.call("cudaEventRecord", mark.event, stream)
        return mark

    def hold(self, stream: int, mark: Mark) -> None:
        assert isinstance(mark, _CudaMark)
        self.cuda.call("cudaStreamWaitEvent", stream, mark.event, 0)

    def stream_hold(self) -> StreamHold:
        with self._lock:
            if not self._free_words:
                page = self.cuda.created("cudaHostAlloc", _PAGE_BYTES, _MAPPED_EVERYWHERE)
                ctypes.memset(page, 0, _PAGE_BYTES)
                self._free_words.extend(range(page, page + _PAGE_BYTES, _WORD_BYTES))
            return _CudaStreamHold(self, self._free_words.popleft())

    def take_back(self, word: int) -> None:
        """A hold's word may be used again; it is for as long as can be what it was."""
        with self._lock:
            self._free_words.append(word)

    def allocate(self, length_bytes: int) -> int:
        return self.cuda.created("cudaMalloc", length_bytes)

    def free(self, address: int) -> None:
        self.cuda.call("cudaFree", address)

    def write(self, address: int, data: bytes) -> None:
        kind = cuda_library.COPY_HOST_TO_DEVICE
        self.cuda.call("cudaMemcpy", address, data, len(data), kind)

    def read(self, address: int, length_bytes: int) -> bytes:
        data = ctypes.create_string_buffer(length_bytes)
        kind = cuda_library.COPY_DEVICE_TO_HOST
        self.cuda.call("cudaMemcpy", ctypes.addressof(data), address, length_bytes, kind)
        return data.raw

    def __repr__(self) -> str:
        return f"<CudaDevice {self.number} at {self.place}, {self.kind}>"


class _CudaMark(Mark):
    """An event. Whoever waits for it sleeps."""

    def __init__(self, cuda: CudaLibrary) -> None:
        self._cuda = cuda
        flags = cuda_library.EVENT_BLOCKING_SYNC | cuda_library.EVENT_DISABLE_TIMING
        self.event = cuda.created("cudaEventCreateWithFlags", flags)

    def wait(self) -> None:
        self._cuda.call("cudaEventSynchronize", self.event)

    def __del__(self) -> None:
        # CUDA keeps what streams still wait for. An event that could not be made has no number.
        if event := getattr(self, "event", 0):
            self._cuda.call("cudaEventDestroy", event)


class _CudaLane(Lane):
    def __init__(
        self, device: CudaDevice, task_bytes_max: int, pieces_max: int, beside: Lane | None
    ) -> None:
        self._cuda = device.cuda
        self._device = device
        self._task_bytes_max = task_bytes_max
        self._owns_stream = beside is None
        if beside is None:
            flags = cuda_library.STREAM_NON_BLOCKING
            self.stream = self._cuda.created("cudaStreamCreateWithFlags", flags)
        else:
            self.stream = beside.stream
        self._buffer = 0  # on the device, made when it is first needed
        # Pieces are split for the kernel, each of them once at most but for whole buffers.
        self._rows_max = pieces_max + task_bytes_max // KERNEL_PIECE_BYTES + 1
        self._table = self._cuda.created(
            "cudaHostAlloc", self._rows_max * _ROW_BYTES, _MAPPED_EVERYWHERE
        )
        memory = (ctypes.c_uint64 * (self._rows_max * 3)).from_address(self._table)
        self._rows: Numbers = np.ctypeslib.as_array(memory).reshape(-1, 3)
        self._done = _CudaMark(self._cuda)

    def copy(self, task: Pieces, direction: Direction, way: Way) -> None:
        assert task.total_bytes <= self._task_bytes_max
        kind = _KINDS[direction]
        if way is Way.EACH:
            self._each(task, direction, kind)
        elif way is Way.ROWS:
            self._in_rows(task, direction, kind)
        elif way is Way.BATCH:
            sources, targets = _ordered(task, direction)
            order = _SOURCE_ORDERS[direction]
            self._cuda.copy_batch(targets, sources, task.sizes_bytes, order, self.stream)
        elif way is Way.MAPPED:
            pieces = task.split(KERNEL_PIECE_BYTES)
            self._run_kernel(*_ordered(pieces, direction), pieces.sizes_bytes)
        else:
            self._staged(task, direction, kind)
        self._cuda.call("cudaEventRecord", self._done.event, self.stream)

    def _each(self, task: Pieces, direction: Direction, kind: int) -> None:
        sources, targets = (column.tolist() for column in _ordered(task, direction))
        for source, target, size in zip(sources, targets, task.sizes_bytes.tolist(), strict=True):
            self._cuda.call("cudaMemcpyAsync", target, source, size, kind, self.stream)

    def _in_rows(self, task: Pieces, direction: Direction, kind: int) -> None:
        for row in task.rows():
            ends = [(row.device, row.device_pitch_bytes), (row.host, row.host_pitch_bytes)]
            target, source = ends if direction is Direction.LOAD else ends[::-1]
            shape = (row.width_bytes, row.count)
            self._cuda.call("cudaMemcpy2DAsync", *target, *source, *shape, kind, self.stream)

    def _staged(self, task: Pieces, direction: Direction, kind: int) -> None:
        if not self._buffer:
            self._buffer = self._cuda.created("cudaMalloc", self._task_bytes_max)
        sizes = task.sizes_bytes
        in_buffer = np.uint64(self._buffer) + np.cumsum(sizes) - sizes
        pieces = Pieces(in_buffer, task.device, sizes).joined()
        if direction is Direction.SAVE:
            self._between(pieces, direction)
        for host, offset, size in task.host_runs():
            places = (self._buffer + offset, host)
            target, source = places if direction is Direction.LOAD else places[::-1]
            self._cuda.call("cudaMemcpyAsync", target, source, size, kind, self.stream)
        if direction is Direction.LOAD:
            self._between(pieces, direction)

    def _between(self, pieces: Pieces, direction: Direction) -> None:
        """Between the buffer and where the pieces lie."""
        pieces = pieces.split(KERNEL_PIECE_BYTES)
        self._run_kernel(*_ordered(pieces, direction), pieces.sizes_bytes)

    def _run_kernel(self, sources: Numbers, targets: Numbers, sizes: Numbers) -> None:
        assert len(sizes) <= self._rows_max
        for column, values in enumerate((sources, targets, sizes)):
            self._rows[: len(sizes), column] = values
        arguments = (c_void_p * 2)(
            ctypes.cast(byref(table := c_void_p(self._table)), c_void_p).value,
            ctypes.cast(byref(count := c_uint32(len(sizes))), c_void_p).value,
        )
        blocks = min(len(sizes), copy_kernel.BLOCKS)
        self._cuda.drive(
            "cuLaunchKernel",
            self._device.kernel,
            *(blocks, 1, 1, copy_kernel.THREADS, 1, 1, 0, self.stream, arguments, None),
        )
        del table, count  # they had to live until the launch

    def follow(self, mark: Mark) -> None:
        self._device.hold(self.stream, mark)

    def wait_idle(self) -> None:
        self._done.wait()

    def close(self) -> None:
        self._cuda.call("cudaStreamSynchronize", self.stream)
        if self._owns_stream:
            self._cuda.call("cudaStreamDestroy", self.stream)
        if self._buffer:
            self._cuda.call("cudaFree", self._buffer)
        self._cuda.call("cudaFreeHost", self._table)


class _CudaRelayLane(_CudaLane):
    """By copy engines alone: over this device's link, and between the two devices."""

    def __init__(
        self, device: CudaDevice, task_bytes_max: int, pieces_max: int, target: int
    ) -> None:
        super().__init__(device, task_bytes_max, pieces_max, None)
        self._target = target

    def copy(self, task: Pieces, direction: Direction, way: Way) -> None:
        super().copy(task, direction, Way.STAGED)

    def _between(self, pieces: Pieces, direction: Direction) -> None:
        for buffer, device, size in pieces.triples():
            ends = [(device, self._target), (buffer, self._device.number)]
            target, source = ends if direction is Direction.LOAD else ends[::-1]
            self._cuda.call("cudaMemcpyPeerAsync", *target, *source, size, self.stream)


class _CudaStreamHold(StreamHold):
    """A word of host memory, which the device's front end polls: no multiprocessor does.

    Words are used again and go on from the number that they have: a stream that has not looked yet
    finds the number that it waits for, or a higher one. They are compared modulo 2 ** 32.
    """

    def __init__(self, device: CudaDevice, address: int) -> None:
        self._device = device
        self._address = address
        self._word = c_uint32.from_address(address)
        self._begin = self._word.value

    def hold(self, stream: int, number: int) -> None:
        flags = cuda_library.WAIT_GREATER_OR_EQUAL
        self._device.cuda.drive(
            "cuStreamWaitValue32_v2", stream, self._address, self._value(number), flags
        )

    def raise_behind(self, lane: Lane, number: int) -> None:
        self._device.cuda.drive(
            "cuStreamWriteValue32_v2", lane.stream, self._address, self._value(number), 0
        )

    def raise_now(self, number: int) -> None:
        value = self._value(number)
        if (value - self._word.value) % _WORD_VALUES < _WORD_VALUES // 2:
            self._word.value = value

    def _value(self, number: int) -> int:
        return (self._begin + number) % _WORD_VALUES

    def close(self) -> None:
        self._device.take_back(self._address)


def _ordered(pieces: Pieces, direction: Direction) -> tuple[Numbers, Numbers]:
    """Sources and targets."""
    if direction is Direction.LOAD:
        return pieces.host, pieces.device
    return pieces.device, pieces.host
