"""Which extents are read through the page cache, and which directly: Dual-Blade IV-A. Pure.

Heat is how often an extent's bytes were read, halved every `HEAT_HALF_LIFE_S`: an extent read once
from end to end has heat 1, whatever its size.

Nothing is replaced for having been read less recently. In a scan of more than the budget holds,
the heats of two extents differ by one read at most, and `REPLACING_READS` keeps that from counting:
what is resident stays, and is hit in every round. LRU would hit nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from objectcache_storage_server.engines.local.volumes.volume import IoPath

HEAT_HALF_LIFE_S = 600.0
HEAT_MIN = 1 / 64  # below it an extent counts as never read
REPLACING_RATIO = 2.0  # a replacement's heat to that of what it replaces ...
REPLACING_READS = 1.0  # ... each of which may be about to be read
FILL_ROUNDS_MAX = 16  # extents too large for the room that are passed over for smaller ones

Numbers = npt.NDArray[np.int64]


class Replan(NamedTuple):
    """Extents that change their path, by their row."""

    to_direct: Numbers
    to_page_cache: Numbers


def admits(resident_bytes: int, length_bytes: int, budget_bytes: int) -> bool:
    """Whether a new extent is written through the page cache."""
    return resident_bytes + length_bytes <= budget_bytes


def resident_bytes(extents: npt.NDArray[np.void]) -> int:
    """What the extents on the page-cache path take of the budget."""
    is_resident = _is_live(extents) & (extents["path"] == IoPath.PAGE_CACHE)
    return int(extents["length_bytes"][is_resident].sum())


def count_reads(extents: npt.NDArray[np.void], numbers: npt.ArrayLike) -> None:
    """Objects in these extents are being read: one number an object, repeated where they share one.

    Changes the heat of `extents` in place.
    """
    read = np.asarray(numbers, np.int64)
    np.add.at(extents["heat"], read, np.float32(1) / np.maximum(extents["slots"][read], 1))


def decay(extents: npt.NDArray[np.void], elapsed_s: float) -> None:
    """Let the heat of `extents` fall, in place."""
    heat = extents["heat"]
    heat *= np.float32(0.5 ** (elapsed_s / HEAT_HALF_LIFE_S))
    heat[heat < HEAT_MIN] = 0


def replan(extents: npt.NDArray[np.void], budget_bytes: int, moves_max: int) -> Replan:
    """What is to change its path now.

    `extents` are rows of `EXTENT_COLUMNS`. Over the budget, the coldest leave until the rest fits,
    however many. Below it, the hottest come in while they fit. Where nothing fits, at most
    `moves_max` direct extents replace resident ones that are clearly colder and not being read.
    """
    is_live = _is_live(extents)
    is_resident = is_live & (extents["path"] == IoPath.PAGE_CACHE)
    room_bytes = budget_bytes - int(extents["length_bytes"][is_resident].sum())
    if room_bytes < 0:
        return Replan(_coldest(extents, np.flatnonzero(is_resident), -room_bytes), _NONE)
    candidates = np.flatnonzero(
        is_live & (extents["path"] == IoPath.DIRECT) & (extents["heat"] >= HEAT_MIN)
    )
    entering = _fitting(extents, candidates, room_bytes)
    if len(entering):
        return Replan(_NONE, entering)
    return _replacements(extents, is_resident, candidates, room_bytes, moves_max)


_NONE: Numbers = np.empty(0, np.int64)


def _is_live(extents: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    live: npt.NDArray[np.bool_] = extents["is_used"] & ~extents["is_freed"]
    return live


def _by_heat(extents: npt.NDArray[np.void], numbers: Numbers, *, hottest_first: bool) -> Numbers:
    heat = extents["heat"][numbers]
    return numbers[np.argsort(-heat if hottest_first else heat, kind="stable")]


def _coldest(extents: npt.NDArray[np.void], residents: Numbers, excess_bytes: int) -> Numbers:
    ordered = _by_heat(extents, residents, hottest_first=False)
    gone_bytes = np.cumsum(extents["length_bytes"][ordered].astype(np.int64))
    return ordered[: int(np.searchsorted(gone_bytes, excess_bytes)) + 1]


def _fitting(extents: npt.NDArray[np.void], candidates: Numbers, room_bytes: int) -> Numbers:
    """The hottest while they fit; one that does not is passed over."""
    entering: list[Numbers] = []
    lengths_bytes = extents["length_bytes"].astype(np.int64)
    rest = candidates[lengths_bytes[candidates] <= room_bytes]
    rest = _by_heat(extents, rest, hottest_first=True)
    for _ in range(FILL_ROUNDS_MAX):
        taken_bytes = np.cumsum(lengths_bytes[rest])
        count = int(np.searchsorted(taken_bytes, room_bytes, side="right"))
        if count == 0:
            break
        entering.append(rest[:count])
        room_bytes -= int(taken_bytes[count - 1])
        rest = rest[count:]
        rest = rest[lengths_bytes[rest] <= room_bytes]
    return np.concatenate(entering) if entering else _NONE


def _replacements(
    extents: npt.NDArray[np.void],
    is_resident: npt.NDArray[np.bool_],
    candidates: Numbers,
    room_bytes: int,
    moves_max: int,
) -> Replan:
    """The hottest candidates for the coldest residents, each for as many as it needs."""
    heat = extents["heat"]
    hot = candidates[heat[candidates] >= REPLACING_RATIO * REPLACING_READS]
    if len(hot) == 0 or moves_max == 0:
        return Replan(_NONE, _NONE)
    hot = _by_heat(extents, hot, hottest_first=True)[:moves_max]
    colder = is_resident & (extents["readers"] == 0) & (heat < heat[hot[0]])
    victims = _Victims(extents, _by_heat(extents, np.flatnonzero(colder), hottest_first=False))
    entering = [
        number
        for number in hot.tolist()
        if victims.make_room(float(heat[number]), int(extents["length_bytes"][number]), room_bytes)
    ]
    return Replan(victims.leaving, np.array(entering, np.int64))


class _Victims:
    """The coldest residents in their order, of which some are to leave."""

    def __init__(self, extents: npt.NDArray[np.void], numbers: Numbers) -> None:
        lengths_bytes = extents["length_bytes"][numbers].astype(np.int64)
        # Each may be about to be read: it counts as if it had been.
        self._guarded = extents["heat"][numbers].astype(np.float64) + REPLACING_READS
        self._gained_bytes = np.concatenate(([0], np.cumsum(lengths_bytes)))
        self._lost = np.concatenate(([0.0], np.cumsum(self._guarded * lengths_bytes)))
        self._numbers = numbers
        self._count = 0  # that leave
        self._entered_bytes = 0

    @property
    def leaving(self) -> Numbers:
        return self._numbers[: self._count]

    def make_room(self, heat: float, length_bytes: int, room_bytes: int) -> bool:
        """Have as many leave as an extent of this heat needs, or none if it is not worth them.

        Each must be clearly colder, and together they must be hit less than the extent would be:
        a small extent is not worth a large one that is half as hot.
        """
        wanted_bytes = self._entered_bytes + length_bytes - room_bytes
        count = max(self._count, int(np.searchsorted(self._gained_bytes, wanted_bytes)))
        if count > len(self._numbers):
            return False
        if count > self._count and heat < REPLACING_RATIO * self._guarded[count - 1]:
            return False
        if heat * length_bytes < self._lost[count] - self._lost[self._count]:
            return False
        self._count = count
        self._entered_bytes += length_bytes
        return True
