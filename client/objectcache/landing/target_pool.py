"""Shared memory that is handed out again: registered once, its pages already there."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from objectcache.landing.memory_file import MemoryFile, file_bytes_for
from objectcache.landing.regions import Landing, Region, SharedRegion, nothing
from objectcache_schemas.errors import Busy, InvalidRequest
from objectcache_schemas.limits import MIB

REGIONS_MAX = 128  # half of what a storage server lets one session register
OVERSIZE_MAX = 4  # a small delivery does not take a region this many times too big
_EXCESS_SHARE = 4  # of the bound, a part that regions may be too big by, all together
_ENDING_S = 0.2  # how long an ended delivery's arrays are waited for
_ENDING_POLL_S = 0.002


class MemoryInUse(Busy):
    """Earlier deliveries hold all memory that a client has for them. It says nothing of the server,
    which was not asked.
    """


def pool_bytes_for(promised_bytes: int) -> int:
    """The bound of a pool in which deliveries always find room whose sizes, each by
    `file_bytes_for`, are `promised_bytes` together, and REGIONS_MAX in number.
    """
    return -(-promised_bytes * _EXCESS_SHARE // (_EXCESS_SHARE - 1))


@dataclass(eq=False, slots=True)
class _Loan:
    """A region in use: by a delivery until it is settled, and by arrays until they are dead."""

    region: Region
    excess_bytes: int  # by which the region is larger than it need be
    arrays_dead: bool = False
    settled: bool = False
    lost: bool = False  # the server may write to it for ever


def memory_file_region(length_bytes: int) -> Region:
    """A memory file of so many bytes. Raises `Unavailable`."""
    return SharedRegion(MemoryFile(length_bytes))


class TargetPool:
    """Regions for deliveries, `bytes_max` in all. Thread-safe.

    A region comes back when its delivery is settled and every array over it is gone. Both are
    noted without a lock, because arrays die wherever the garbage collector runs.
    """

    def __init__(self, bytes_max: int, make: Callable[[int], Region] = memory_file_region) -> None:
        """`make` allocates a region of that many bytes; it raises `Unavailable`."""
        self._bytes_max = bytes_max
        self._make = make
        self._condition = threading.Condition()
        self._free: list[Region] = []  # least recently used first
        self._loans: set[_Loan] = set()
        self._dead_arrays: deque[_Loan] = deque()
        self._region_count = 0
        self._held_bytes = 0

    def lease(self, length_bytes: int, timeout_s: float) -> Landing:
        """Memory of at least `length_bytes` for one delivery.

        Waits up to `timeout_s` for memory that a server is about to let go, and a moment for arrays
        of deliveries that have just ended. Raises `InvalidRequest` where `length_bytes` is over the
        pool's bound; `MemoryInUse` where arrays of earlier deliveries fill it; `Unavailable` where
        the system has no shared memory.
        """
        file_bytes = file_bytes_for(length_bytes)
        if file_bytes > self._bytes_max:
            raise InvalidRequest(
                f"the payload needs {file_bytes} bytes of memory, "
                f"target_bytes_max is {self._bytes_max}"
            )
        region = self._take_free(length_bytes, file_bytes, timeout_s)
        if region is None:
            region = self._new(file_bytes)
        return self._lend(region, file_bytes)

    def stock(self, length_bytes: int, prepare: Callable[[Region], None]) -> bool:
        """Make a region before a delivery asks for it. `prepare` is called with it before anyone
        can lease it; what that raises is raised, and the region kept all the same.

        False where there is no room for one beside those that there are. Raises `Unavailable` where
        the system has no such memory.
        """
        file_bytes = file_bytes_for(length_bytes)
        with self._condition:
            fits = self._held_bytes + file_bytes <= self._bytes_max
            if not fits or self._region_count >= REGIONS_MAX:
                return False
            self._held_bytes += file_bytes
            self._region_count += 1
        region = self._new(file_bytes)
        try:
            prepare(region)
        finally:
            with self._condition:
                self._free.append(region)
                self._condition.notify_all()
        return True

    def _lend(self, region: Region, file_bytes: int) -> Landing:
        loan = _Loan(region, region.length_bytes - file_bytes)
        array = region.array()
        with self._condition:
            self._loans.add(loan)
        weakref.finalize(array, self._dead_arrays.append, loan).atexit = False

        def settled(quiet: bool) -> None:
            with self._condition:
                loan.settled, loan.lost = True, not quiet
                self._condition.notify_all()

        return Landing(array, region, settled)

    def _take_free(self, length_bytes: int, file_bytes: int, timeout_s: float) -> Region | None:
        """A free region that fits; None when the caller may make one, for which room is booked."""
        begun_s = time.monotonic()
        with self._condition:
            while True:
                self._collect()
                if (region := self._best_fit(length_bytes)) is not None:
                    self._free.remove(region)
                    return region
                if self._make_room(file_bytes):
                    self._held_bytes += file_bytes
                    self._region_count += 1
                    return None
                wait_s = self._wait_s(timeout_s, time.monotonic() - begun_s)
                if wait_s <= 0:
                    raise MemoryInUse(self._why_full(file_bytes))
                self._condition.wait(wait_s)

    def _wait_s(self, timeout_s: float, waited_s: float) -> float:
        """How long to wait before the next look; 0 where nothing is about to come back.

        Arrays of a delivery that goes on are not waited for: whoever waits may be the one that has
        them. Those of one that has ended may be held a moment longer by the thread that received
        it, or ended it. They die without a word, so they are looked at again and again.
        """
        if any(loan.settled for loan in self._loans) and waited_s < min(timeout_s, _ENDING_S):
            return _ENDING_POLL_S
        return timeout_s - waited_s if any(loan.arrays_dead for loan in self._loans) else 0.0

    def _new(self, file_bytes: int) -> Region:
        try:
            return self._make(file_bytes)
        except BaseException:
            with self._condition:
                self._forget(file_bytes)
            raise

    def _collect(self) -> None:
        while self._dead_arrays:
            self._dead_arrays.popleft().arrays_dead = True
        for loan in [loan for loan in self._loans if loan.settled and loan.arrays_dead]:
            self._loans.discard(loan)
            if loan.lost:
                self._forget(loan.region.length_bytes)
            else:
                self._free.append(loan.region)

    def _best_fit(self, length_bytes: int) -> Region | None:
        file_bytes = file_bytes_for(length_bytes)
        excess_bytes = sum(loan.excess_bytes for loan in self._loans)
        excess_left = self._bytes_max // _EXCESS_SHARE - excess_bytes
        longest = min(max(file_bytes, OVERSIZE_MAX * length_bytes), file_bytes + excess_left)
        fitting = [r for r in self._free if length_bytes <= r.length_bytes <= longest]
        return min(fitting, key=lambda region: region.length_bytes, default=None)

    def _make_room(self, file_bytes: int) -> bool:
        """Whether one more region of this size fits, after letting free ones go."""

        def fits() -> bool:
            return (
                self._held_bytes + file_bytes <= self._bytes_max
                and self._region_count < REGIONS_MAX
            )

        while self._free and not fits():
            region = self._free.pop(0)
            region.unregister(nothing)
            self._forget(region.length_bytes)
        return fits()

    def _why_full(self, file_bytes: int) -> str:
        remedy = (
            "drop them, copy what is needed of them, or fetch with transport='body', which takes "
            "memory of its own"
        )
        if self._region_count >= REGIONS_MAX:
            return (
                f"arrays of {self._region_count} earlier deliveries are in use, and a client has "
                f"memory for {REGIONS_MAX} deliveries at once; {remedy}"
            )
        return (
            f"no room for {file_bytes} bytes: arrays of earlier deliveries hold "
            f"{self._held_bytes} bytes, target_bytes_max is {self._bytes_max}; {remedy}"
        )

    def _forget(self, file_bytes: int) -> None:
        self._held_bytes -= file_bytes
        self._region_count -= 1

    def __repr__(self) -> str:
        with self._condition:
            self._collect()
            held, bound = self._held_bytes / MIB, self._bytes_max / MIB
            return (
                f"<TargetPool {len(self._free)}/{self._region_count} free, {held:g}/{bound:g} MiB>"
            )
