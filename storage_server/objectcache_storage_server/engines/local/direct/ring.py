"""io_uring by its system calls: a submission and a completion queue shared with the kernel.

    ring = Ring(entries=32)
    sqes = ring.prepare(2)               # zeroed; fill `opcode`, `fd`, `off`, `addr`, `len`, ...
    results = ring.run(sqes)             # int32[2]: what each returned, or minus its errno

A ring belongs to the thread that made it: it alone calls `run`; when nobody does, any thread may
`close`. `run` takes any number of entries and returns when all are complete, also where it raises:
until then the kernel writes to the memory that the entries name, so their owner keeps it alive.
`user_data` is the ring's. The interpreter lock is not held inside the kernel.

For NVMe commands (OP_URING_CMD) make `Ring(entries, sqe128=True, cqe32=True)`: its entries have
`cmd`, uint8[80], and the low half of `off` is the command's opcode (`cmd_op`). A result is then the
command's status.

io_uring_setup(2) and io_uring_enter(2) give the layout.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

OP_READ, OP_WRITE, OP_URING_CMD = 22, 23, 46
ENTRIES_MAX = 32768  # the kernel's

_SYS_SETUP, _SYS_ENTER = 425, 426  # on every 64-bit Linux
_ENTER_GETEVENTS = 1
_SETUP_SUBMIT_ALL, _SETUP_SQE128, _SETUP_CQE32 = 1 << 7, 1 << 10, 1 << 11
_SETUP_SINGLE_ISSUER, _SETUP_DEFER_TASKRUN = 1 << 12, 1 << 13
# Completions are then posted by the thread that waits for them: nobody interrupts it, and no other
# processor writes to the queue that it reads.
_SETUP_PREFERRED = _SETUP_SUBMIT_ALL | _SETUP_SINGLE_ISSUER | _SETUP_DEFER_TASKRUN
_FEATURE_SINGLE_MMAP = 1
_MAP_SUBMISSIONS, _MAP_COMPLETIONS, _MAP_ENTRIES = 0, 0x8000000, 0x10000000
_COUNTER_MASK = 0xFFFFFFFF  # heads and tails are free-running uint32
_U32 = ctypes.c_uint32

_SQE_HEAD: list[Any] = [
    ("opcode", "u1"),
    ("flags", "u1"),
    ("ioprio", "u2"),
    ("fd", "i4"),
    ("off", "u8"),
    ("addr", "u8"),
    ("len", "u4"),
    ("op_flags", "u4"),
    ("user_data", "u8"),
    ("buf_index", "u2"),
    ("personality", "u2"),
    ("file_index", "u4"),
]
SQE_DTYPE = np.dtype([*_SQE_HEAD, ("rest", "u1", 16)])
SQE128_DTYPE = np.dtype([*_SQE_HEAD, ("cmd", "u1", 80)])
_CQE_HEAD: list[Any] = [("user_data", "u8"), ("res", "i4"), ("flags", "u4")]
_CQE_DTYPE = np.dtype(_CQE_HEAD)
_CQE32_DTYPE = np.dtype([*_CQE_HEAD, ("rest", "u1", 16)])

Sqes = npt.NDArray[np.void]
_Counter = npt.NDArray[np.uint32]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class _QueueOffsets(ctypes.Structure):
    _fields_ = (
        ("head", _U32),
        ("tail", _U32),
        ("ring_mask", _U32),
        ("ring_entries", _U32),
        ("flags_or_overflow", _U32),
        ("dropped_or_cqes", _U32),
        ("array_or_flags", _U32),
        ("reserved", _U32),
        ("user_address", ctypes.c_uint64),
    )


class _Parameters(ctypes.Structure):
    _fields_ = (
        ("sq_entries", _U32),
        ("cq_entries", _U32),
        ("flags", _U32),
        ("sq_thread_cpu", _U32),
        ("sq_thread_idle", _U32),
        ("features", _U32),
        ("wq_fd", _U32),
        ("reserved", _U32 * 3),
        ("sq_off", _QueueOffsets),
        ("cq_off", _QueueOffsets),
    )


@dataclass(frozen=True, slots=True)
class _Queues:
    """The memory shared with the kernel; unmapped when the last array goes."""

    entries: int
    sq_head: _Counter
    sq_tail: _Counter
    sqes: Sqes
    cq_head: _Counter
    cq_tail: _Counter
    cqes: Sqes


class Ring:
    """One io_uring; see the head of this module."""

    def __init__(self, entries: int, *, sqe128: bool = False, cqe32: bool = False) -> None:
        """Room for `entries` requests in flight, rounded up to a power of two.

        Raises `OSError`: ENOSYS or EPERM where io_uring is not allowed, EINVAL where the kernel
        knows no such entries, ENOMEM over the limit on locked memory.
        """
        assert 0 < entries <= ENTRIES_MAX
        shape_flags = _SETUP_SQE128 * sqe128 | _SETUP_CQE32 * cqe32
        self.sqe_dtype = SQE128_DTYPE if sqe128 else SQE_DTYPE
        self._file_descriptor, parameters = _set_up(entries, shape_flags)
        self._close = weakref.finalize(self, os.close, self._file_descriptor)
        cqe_dtype = _CQE32_DTYPE if cqe32 else _CQE_DTYPE
        self._queues: _Queues | None = _map_queues(
            self._file_descriptor, parameters, self.sqe_dtype, cqe_dtype
        )
        self.entries: int = self._queues.entries

    def __repr__(self) -> str:
        return f"<Ring {'closed' if self._queues is None else f'of {self.entries}'}>"

    def prepare(self, count: int) -> Sqes:
        """Zeroed entries to fill and give to `run`: void[count] of `sqe_dtype`."""
        return np.zeros(count, self.sqe_dtype)

    def run(self, sqes: Sqes) -> npt.NDArray[np.int32]:
        """Submit all, at most `entries` in flight, and wait for all.

        Returns what each completed with, in the order of `sqes`; a negative result is an errno.
        Raises `OSError` where the kernel takes no more requests, with none left in flight.
        """
        queues = self._queues
        assert queues is not None, "the ring is closed"
        results = np.zeros(len(sqes), np.int32)
        sqes["user_data"] = np.arange(len(sqes))
        pushed = done = 0
        try:
            while done < len(sqes):
                room = queues.entries - _outstanding(queues)
                pushed += _push(queues, sqes[pushed : pushed + room])
                self._enter(queues, is_last=pushed == len(sqes))
                done += _reap(queues, results)
        except BaseException:
            self._abandon(queues, results)
            raise
        return results

    def close(self) -> None:
        """Release the ring; repeating it does nothing."""
        self._queues = None
        self._close()

    def _enter(self, queues: _Queues, *, is_last: bool) -> None:
        """Hand over what is queued, and wait: for all of it if nothing follows, else for half, so
        that the device has work while the next are queued.
        """
        queued, outstanding = _queued(queues), _outstanding(queues)
        wait_for = outstanding if is_last else max(1, outstanding // 2)
        try:
            _system_enter(self._file_descriptor, queued, wait_for)
        except BlockingIOError:  # the kernel is out of requests until some complete
            if queued == outstanding:
                raise
            _system_enter(self._file_descriptor, 0, 1)

    def _abandon(self, queues: _Queues, results: npt.NDArray[np.int32]) -> None:
        """Withdraw what the kernel has not taken, and wait for what it has. What is in flight is
        read from the queues, because a signal's exception may have come between any two steps.
        """
        queues.sq_tail[0] = queues.sq_head[0]
        _reap(queues, results)
        while _outstanding(queues):
            _system_enter(self._file_descriptor, 0, _outstanding(queues))
            _reap(queues, results)


def _push(queues: _Queues, sqes: Sqes) -> int:
    tail = int(queues.sq_tail[0])
    queues.sqes[(tail + np.arange(len(sqes))) & (queues.entries - 1)] = sqes
    queues.sq_tail[0] = (tail + len(sqes)) & _COUNTER_MASK
    return len(sqes)


def _queued(queues: _Queues) -> int:
    """Entries that the kernel has not taken."""
    return (int(queues.sq_tail[0]) - int(queues.sq_head[0])) & _COUNTER_MASK


def _outstanding(queues: _Queues) -> int:
    """Entries queued or in flight: each that was queued yields one completion."""
    return (int(queues.sq_tail[0]) - int(queues.cq_head[0])) & _COUNTER_MASK


def _reap(queues: _Queues, results: npt.NDArray[np.int32]) -> int:
    head, tail = int(queues.cq_head[0]), int(queues.cq_tail[0])
    count = (tail - head) & _COUNTER_MASK
    completed = queues.cqes[(head + np.arange(count)) & (len(queues.cqes) - 1)]
    results[completed["user_data"]] = completed["res"]
    queues.cq_head[0] = tail
    return count


def _set_up(entries: int, shape_flags: int) -> tuple[int, _Parameters]:
    """Make a ring, on older kernels without what they do not know."""
    try:
        return _system_setup(entries, shape_flags | _SETUP_PREFERRED)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return _system_setup(entries, shape_flags)


def _system_setup(entries: int, flags: int) -> tuple[int, _Parameters]:
    parameters = _Parameters(flags=flags)
    file_descriptor: int = _libc.syscall(
        ctypes.c_long(_SYS_SETUP), ctypes.c_long(entries), ctypes.byref(parameters)
    )
    if file_descriptor < 0:
        raise _last_error("io_uring_setup")
    return file_descriptor, parameters


def _system_enter(file_descriptor: int, submit: int, wait_for: int) -> None:
    """Submit and wait; returns early after a signal. Raises `OSError`."""
    result: int = _libc.syscall(
        ctypes.c_long(_SYS_ENTER),
        ctypes.c_long(file_descriptor),
        ctypes.c_long(submit),
        ctypes.c_long(wait_for),
        ctypes.c_long(_ENTER_GETEVENTS),
        ctypes.c_void_p(None),
        ctypes.c_long(0),
    )
    if result < 0 and ctypes.get_errno() == errno.EBUSY:
        raise BlockingIOError(errno.EAGAIN, "io_uring_enter: the completion queue is full")
    if result < 0 and ctypes.get_errno() != errno.EINTR:
        raise _last_error("io_uring_enter")


def _last_error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")


def _map_queues(
    file_descriptor: int,
    parameters: _Parameters,
    sqe_dtype: np.dtype[np.void],
    cqe_dtype: np.dtype[np.void],
) -> _Queues:
    sq_off, cq_off = parameters.sq_off, parameters.cq_off
    entries, cqe_count = parameters.sq_entries, parameters.cq_entries
    sq_bytes = sq_off.array_or_flags + 4 * entries
    cq_bytes = cq_off.dropped_or_cqes + cqe_dtype.itemsize * cqe_count
    if parameters.features & _FEATURE_SINGLE_MMAP:
        sq = cq = _mapped(file_descriptor, max(sq_bytes, cq_bytes), _MAP_SUBMISSIONS)
    else:
        sq = _mapped(file_descriptor, sq_bytes, _MAP_SUBMISSIONS)
        cq = _mapped(file_descriptor, cq_bytes, _MAP_COMPLETIONS)
    sqes = _mapped(file_descriptor, sqe_dtype.itemsize * entries, _MAP_ENTRIES)
    # Entry n of the ring is always entry n of the array of entries.
    _array(sq, np.dtype(np.uint32), sq_off.array_or_flags, entries)[:] = np.arange(entries)
    return _Queues(
        entries=entries,
        sq_head=_counter(sq, sq_off.head),
        sq_tail=_counter(sq, sq_off.tail),
        sqes=_array(sqes, sqe_dtype, 0, entries),
        cq_head=_counter(cq, cq_off.head),
        cq_tail=_counter(cq, cq_off.tail),
        cqes=_array(cq, cqe_dtype, cq_off.dropped_or_cqes, cqe_count),
    )


def _mapped(file_descriptor: int, length_bytes: int, offset_bytes: int) -> mmap.mmap:
    return mmap.mmap(file_descriptor, length_bytes, offset=offset_bytes)


def _counter(memory: mmap.mmap, offset_bytes: int) -> _Counter:
    return np.frombuffer(memory, np.uint32, 1, offset_bytes)


def _array(
    memory: mmap.mmap, dtype: np.dtype[Any], offset_bytes: int, count: int
) -> npt.NDArray[Any]:
    return np.frombuffer(memory, dtype, count, offset_bytes)
