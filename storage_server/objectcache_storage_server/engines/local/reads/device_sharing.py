"""How reader threads share a device: Dual-Blade IV-C.

A reader takes a fragment from the device and then lands it: checksums, and a copy where there was a
bounce buffer. *intra*: all readers use the device at once, which is best while it has bandwidth or
depth to spare. *cross*: one reads while the others land, which is best where concurrent reads only
slow each other down.

`SharingChooser` is pure: it is told when fragments began and ended and says which of the two is to
be used. `SharedDevice` enforces it on threads. There is one of each for a path.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple, Self

from objectcache_schemas.limits import MIB

WARM_UP_FRAGMENTS = 8  # that are not measured after a start or a change
WINDOW_BYTES = 64 * MIB  # a rate is measured over these bytes ...
WINDOW_FRAGMENTS = 16  # ... and fragments ...
WINDOW_S = 0.1  # ... and this time, of which a thread that is not scheduled misses a few ms
READERS_MIN = 2  # one reader alone shares with nobody
COLD_PART_MAX = 1 / 8  # of a fragment, read from the device on a path that is to be in memory
CROSS_GAIN_MIN = 1.05  # less is noise, and intra makes nobody wait
DRIFT_MAX = 0.25  # of the rate, to either side
LOAD_RATIO_MAX = 1.5  # of readers, or of bytes a fragment
DRIFTED_WINDOWS = 3  # one after another
WATCH_EVERY_S = 0.5  # between two windows once a choice is fixed: watching costs time too
REMEASURE_S = 60.0
# Bytes between two measurements, in those of the last one: what is measured may have been read in
# the worse way, so it is to be a small part of all.
MEASURED_RATIO = 16


class Sharing(enum.Enum):
    """Whether readers use the device at once, or one after another."""

    INTRA = "intra"
    CROSS = "cross"


def forced_sharing(setting: str) -> Sharing | None:
    """The value of `storage.overlap`; None is "auto"."""
    return None if setting == "auto" else Sharing(setting)


class _Load(NamedTuple):
    """What readers were doing: a rate is comparable only with that of a similar load."""

    readers: float
    fragment_bytes: float

    def is_like(self, other: _Load) -> bool:
        return all(
            max(mine, others) <= LOAD_RATIO_MAX * min(mine, others)
            for mine, others in zip(self, other, strict=True)
        )


class _Window:
    """The fragments that ended after a moment, over which one rate is measured.

    Busy is the time in which any of them was under way. It counts from the window's begin also for
    fragments that began before it: as many are under way at its end.
    """

    def __init__(self, begin_s: float) -> None:
        self._begin_s = begin_s
        self._busy: list[tuple[float, float]] = []  # disjoint, in order
        self._count = 0
        self._bytes = 0
        self._readers = 0

    def add(self, length_bytes: int, started_s: float, ended_s: float, readers: int) -> None:
        """Take a fragment that ended no earlier than those before it."""
        begin_s = max(started_s, self._begin_s)
        while self._busy and self._busy[-1][1] >= begin_s:
            begin_s = min(begin_s, self._busy.pop()[0])
        self._busy.append((begin_s, ended_s))
        self._count += 1
        self._bytes += length_bytes
        self._readers += readers

    @property
    def is_full(self) -> bool:
        is_enough = self._bytes >= WINDOW_BYTES and self._count >= WINDOW_FRAGMENTS
        return is_enough and self._busy_s >= WINDOW_S

    @property
    def load(self) -> _Load:
        return _Load(self._readers / self._count, self._bytes / self._count)

    @property
    def bytes_per_s(self) -> float:
        return self._bytes / self._busy_s

    @property
    def _busy_s(self) -> float:
        return sum(end_s - begin_s for begin_s, end_s in self._busy)


class SharingChooser:
    """Measures intra, then cross, and keeps the better one until something changes. Pure.

    Cross has to be better twice: where it is not, it makes readers wait for nothing.

    Not thread-safe: `SharedDevice` calls it under a lock. Times are of one monotonic clock.
    """

    def __init__(self, forced: Sharing | None = None) -> None:
        self.rates_bytes_per_s: dict[Sharing, float | None] = dict.fromkeys(Sharing)
        self._forced = forced
        self._sharing = forced or Sharing.INTRA  # what is used, measured or fixed
        self._is_measuring = forced is None
        self._is_confirming = False
        self._phase_s = float("-inf")  # fragments that began before it are not measured
        self._warm_up = WARM_UP_FRAGMENTS
        self._cold_fragments = 0
        self._window = _Window(self._phase_s)
        self._measured_bytes = 0  # in the last measurement, warm-up and all
        self._bytes_since = 0  # it ended
        self._intra_load = _Load(0.0, 0.0)
        self._fixed_s = 0.0
        self._fixed_load: _Load | None = None  # None: the last measurement came to nothing
        self._drifted_windows = 0

    def __repr__(self) -> str:
        rates = ", ".join(
            f"{sharing.value} {rate / MIB:.0f} MiB/s"
            for sharing, rate in self.rates_bytes_per_s.items()
            if rate is not None
        )
        return f"<SharingChooser {self.state}{', ' if rates else ''}{rates}>"

    @property
    def state(self) -> str:
        """ "intra", "cross" or "measuring"."""
        return "measuring" if self._is_measuring else self._sharing.value

    def now(self, readers: int) -> Sharing:
        """How the next fragment is to be read, with this many readers under way, it included."""
        if self._forced is None and readers < READERS_MIN:
            return Sharing.INTRA
        return self._sharing

    def finished(
        self,
        length_bytes: int,
        started_s: float,
        ended_s: float,
        readers: int,
        cold_bytes: int = 0,
    ) -> None:
        """A fragment has landed. `readers`: the fewest that were under way, it included.

        `cold_bytes` came from the device though the path is to be in memory: such a fragment says
        nothing about the path.
        """
        if readers < READERS_MIN:
            return
        if self._is_measuring:
            self._measured_bytes += length_bytes
        else:
            self._bytes_since += length_bytes
        if started_s < self._phase_s:
            return
        if cold_bytes > COLD_PART_MAX * length_bytes:
            self._count_cold(ended_s)
            return
        if self._warm_up:
            self._warm_up -= 1
            self._window = _Window(ended_s)
            return
        self._window.add(length_bytes, started_s, ended_s, readers)
        if self._window.is_full:
            self._close_window(ended_s)

    def _count_cold(self, now_s: float) -> None:
        """Give a measurement up that finds nothing in memory: it would go on in one way."""
        self._cold_fragments += 1
        if self._is_measuring and self._cold_fragments >= WINDOW_FRAGMENTS:
            self._fix(Sharing.INTRA, None, now_s)

    def _close_window(self, now_s: float) -> None:
        window, self._window = self._window, _Window(now_s)
        rate_bytes_per_s = window.bytes_per_s
        if not self._is_measuring:
            self._watch(window.load, rate_bytes_per_s, now_s)
            return
        self.rates_bytes_per_s[self._sharing] = rate_bytes_per_s
        if self._sharing is Sharing.INTRA:
            self._intra_load = window.load
            self._begin_phase(Sharing.CROSS, now_s)
        elif not window.load.is_like(self._intra_load):
            self._fix(Sharing.INTRA, None, now_s)  # the two rates cannot be compared
        elif self._better() is Sharing.INTRA:
            self._fix(Sharing.INTRA, window.load, now_s)
        elif self._is_confirming:
            self._fix(Sharing.CROSS, window.load, now_s)
        else:  # what is noisy seldom says so twice
            self._is_confirming = True
            self._begin_phase(Sharing.INTRA, now_s)

    def _better(self) -> Sharing:
        intra, cross = (self.rates_bytes_per_s[sharing] or 0.0 for sharing in Sharing)
        return Sharing.CROSS if cross >= CROSS_GAIN_MIN * intra else Sharing.INTRA

    def _watch(self, load: _Load, rate_bytes_per_s: float, now_s: float) -> None:
        """Measure again where it is no longer what was measured, or was long ago."""
        self._phase_s = now_s + WATCH_EVERY_S
        self._warm_up = 1
        if self._forced is not None:
            self.rates_bytes_per_s[self._forced] = rate_bytes_per_s
            return
        has_drifted = not self._is_as_measured(load, rate_bytes_per_s)
        self._drifted_windows = self._drifted_windows + 1 if has_drifted else 0
        is_due = self._drifted_windows >= DRIFTED_WINDOWS or now_s - self._fixed_s >= REMEASURE_S
        if is_due and self._bytes_since >= MEASURED_RATIO * self._measured_bytes:
            self._is_measuring = True
            self._measured_bytes = 0
            self._begin_phase(Sharing.INTRA, now_s)

    def _is_as_measured(self, load: _Load, rate_bytes_per_s: float) -> bool:
        fixed = self.rates_bytes_per_s[self._sharing]
        if self._fixed_load is None or fixed is None:
            return False
        is_as_fast = abs(rate_bytes_per_s - fixed) <= DRIFT_MAX * fixed
        return is_as_fast and load.is_like(self._fixed_load)

    def _fix(self, sharing: Sharing, load: _Load | None, now_s: float) -> None:
        self._is_measuring = self._is_confirming = False
        self._fixed_s = now_s
        self._fixed_load = load
        self._bytes_since = 0
        self._drifted_windows = 0
        self._begin_phase(sharing, now_s)

    def _begin_phase(self, sharing: Sharing, now_s: float) -> None:
        self._sharing = sharing
        self._phase_s = now_s
        self._warm_up = WARM_UP_FRAGMENTS
        self._cold_fragments = 0
        self._window = _Window(now_s)


class SharedDevice:
    """Lets readers at the device as the chooser says. Methods may be called from any thread.

    A reader holds a fragment from before its device part until it has landed:

        with device.fragment(length_bytes) as fragment:
            with fragment.reading():
                found_bytes = volume.read(transfers, path)
            verify(...)

    A change of strategy takes effect with each reader's next fragment, so nobody waits for anybody
    to notice it.
    """

    def __init__(
        self, chooser: SharingChooser, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.chooser = chooser
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._readers = 0
        self.turns = Turns()

    @property
    def readers(self) -> int:
        """Fragments that are under way."""
        return self._readers

    def __repr__(self) -> str:
        return f"<SharedDevice {self._readers} readers, {self.chooser!r}>"

    def fragment(self, length_bytes: int) -> RunningFragment:
        """A fragment of these bytes, to be entered once."""
        return RunningFragment(self, length_bytes)

    def enter(self, fragment: RunningFragment) -> None:
        """A reader begins."""
        with self._lock:
            self._readers += 1
            fragment.readers = self._readers
            fragment.sharing = self.chooser.now(self._readers)
            fragment.started_s = self._clock_s()

    def leave(self, fragment: RunningFragment, *, has_landed: bool) -> None:
        """A reader has ended, or failed; one that failed is not measured."""
        with self._lock:
            readers = min(fragment.readers, self._readers)
            self._readers -= 1
            if has_landed:
                self.chooser.finished(
                    fragment.length_bytes,
                    fragment.started_s,
                    self._clock_s(),
                    readers,
                    fragment.cold_bytes,
                )


class RunningFragment:
    """One fragment of one reader, from its begin until it has landed.

    What runs between two fragments runs from a cold cache, where each call costs about a
    microsecond: so there are few.
    """

    __slots__ = ("_device", "cold_bytes", "length_bytes", "readers", "sharing", "started_s")

    def __init__(self, device: SharedDevice, length_bytes: int) -> None:
        self._device = device
        self.length_bytes = length_bytes
        self.cold_bytes = 0  # set by the reader: see `SharingChooser.finished`
        self.sharing = Sharing.INTRA
        self.readers = 0
        self.started_s = 0.0

    def __enter__(self) -> Self:
        self._device.enter(self)
        return self

    def reading(self) -> AbstractContextManager[object]:
        """Encloses the device part, or a piece of it; waits where it is another reader's turn."""
        if self.sharing is Sharing.CROSS:
            return self._device.turns
        return threading.Lock()  # nobody else's; no Python runs to enter and leave it

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._device.leave(self, has_landed=kind is None)


class Turns:
    """One thread at a time, in the order of their arrival: `threading.Lock` promises no order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_taken = False
        self._waiting: deque[threading.Lock] = deque()

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def __enter__(self) -> None:
        with self._lock:
            if not self._is_taken:
                self._is_taken = True
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        turn.acquire()  # released by the thread whose turn it was, which stays taken

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._is_taken = False
