"""What copies between host memory and a device's need of the device.

Streams are known by their handles, integers, as engines give them: `torch.cuda.Stream.cuda_stream`.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod

from objectcache.gpu.pieces import Pieces
from objectcache_schemas.errors import Unavailable

KERNEL_PIECE_BYTES = 32 << 10  # a block of threads copies so much at a time


class DeviceFailed(Unavailable):
    """A device has failed, or a link to it. It says nothing of the store."""


class CopyFailed(DeviceFailed):
    """What was on a link failed with it, and is on its way no more; other copies go on."""


class Direction(enum.Enum):
    """From where to where."""

    LOAD = "load"  # host to device
    SAVE = "save"  # device to host


class Way(enum.Enum):
    """How the pieces of a micro-task are copied."""

    EACH = "each"  # a call a piece
    ROWS = "rows"  # a call a rectangle of pieces at equal distances
    BATCH = "batch"  # one call with a list of pieces
    STAGED = "staged"  # a call a run of host memory, by a buffer on the device, and a kernel there
    MAPPED = "mapped"  # a kernel on the device reads or writes host memory

    @property
    def takes_kernels(self) -> bool:
        """Whether it is done by kernels, which run beside each other in streams of their own."""
        return self in (Way.STAGED, Way.MAPPED)


class Mark(ABC):
    """A moment in a stream: everything queued on it before is done."""

    @abstractmethod
    def wait(self) -> None:
        """Sleep until then. Raises `Unavailable` where the device has failed."""

    def wait_on_way(self, timeout_s: float | None = None) -> bool:
        """Sleep until nothing is missing for it but what devices do by themselves, so that nobody
        sleeps in `Device.hold`; False where that took too long. Raises as `wait` does.
        """
        return True


class Lane(ABC):
    """A stream of the copier's own, and what one micro-task needs beside it. For one thread at a
    time, but for `mark`.
    """

    stream: int
    due: int = 0  # how soon what is copied next is needed, lower first: where lanes share links

    @abstractmethod
    def copy(self, task: Pieces, direction: Direction, way: Way) -> None:
        """Queue a micro-task; the lane is idle (`wait_idle`).

        The host's side of it is page-locked. It stays as it is until the copies are done, which a
        mark tells. Raises `Unavailable` where the device has failed.
        """

    @abstractmethod
    def follow(self, mark: Mark) -> None:
        """What is queued from now on comes behind `mark`."""

    @abstractmethod
    def wait_idle(self) -> None:
        """Sleep until everything is done that was copied here, or until nothing of it is on its
        way: `CopyFailed` then, after which the lane may be used. Raises `Unavailable` where the
        device has failed.
        """

    @abstractmethod
    def close(self) -> None:
        """Give up stream and memory, when idle."""


class StreamHold(ABC):
    """A number that streams wait for, before it is queued what raises it. It never falls."""

    @abstractmethod
    def hold(self, stream: int, number: int) -> None:
        """Have the stream wait for a number at least so high. None of the device's processors waits
        for it, but what shares a hardware queue with the stream does.
        """

    @abstractmethod
    def raise_behind(self, lane: Lane, number: int) -> None:
        """Raise it when everything is done that was queued on the lane until now."""

    @abstractmethod
    def raise_now(self, number: int) -> None:
        """Raise it at once, for whoever would wait for ever; nothing is queued that raises it."""

    @abstractmethod
    def close(self) -> None:
        """Give it up; it was raised as far as any stream waits."""


class Device(ABC):
    """Memory that host memory is copied into and out of. Thread-safe."""

    ways: frozenset[Way]  # that work here
    place: str  # in this machine, whatever number a process has it by: of a GPU its PCI address
    kind: str  # what it is, and by what it is reached: copies of others are as quick
    node: int | None = None  # of the host (NUMA), which it is nearest to, as far as that is known

    @abstractmethod
    def enter_thread(self) -> None:
        """Called once in each thread that makes lanes or copies."""

    @abstractmethod
    def lock_pages(self, address: int, length_bytes: int) -> None:
        """Let the device reach host memory, until `unlock_pages`. Raises `Unavailable`."""

    @abstractmethod
    def unlock_pages(self, address: int) -> None:
        """The memory is about to go, and nothing copies to or from it."""

    @abstractmethod
    def lane(self, task_bytes_max: int, pieces_max: int, beside: Lane | None = None) -> Lane:
        """A lane for micro-tasks of at most so much, with a stream of its own or the stream of
        `beside`, which is closed after it. Raises `Unavailable`.
        """

    @abstractmethod
    def relay(self, target: Device, task_bytes_max: int, pieces_max: int) -> Lane:
        """A lane between host memory and `target` over this device's link, through a buffer of
        this device's own; a task may have several pieces, and is copied in whatever way is asked
        for by calls for each. Raises `Unavailable` where this device cannot reach that one.
        """

    @abstractmethod
    def mark(self, stream: int) -> Mark:
        """The moment at which everything is done that was queued on the stream until now.

        The device is the calling thread's current one.
        """

    @abstractmethod
    def hold(self, stream: int, mark: Mark) -> None:
        """What is queued on the stream from now on comes behind `mark`; no thread waits."""

    @abstractmethod
    def stream_hold(self) -> StreamHold:
        """A hold whose number is 0."""

    @abstractmethod
    def allocate(self, length_bytes: int) -> int:
        """The address of new memory of the device's. Raises `Unavailable`."""

    @abstractmethod
    def free(self, address: int) -> None:
        """Give up what `allocate` gave."""

    @abstractmethod
    def write(self, address: int, data: bytes) -> None:
        """Put bytes into the device's memory, and wait for it; for checks."""

    @abstractmethod
    def read(self, address: int, length_bytes: int) -> bytes:
        """Take bytes out of it, and wait for them; for checks."""
