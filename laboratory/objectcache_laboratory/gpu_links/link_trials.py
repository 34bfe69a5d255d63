"""What several links to one device carry, how micro-tasks are best cut, and from where they pay."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from objectcache.gpu.device import Device, Direction
from objectcache.gpu.links.checked_links import CheckedLinks, checked_links
from objectcache.gpu.links.enough_links import enough_links
from objectcache.gpu.links.link_rates import LinkRates
from objectcache.gpu.links.pull_settings import OURS, PullSettings
from objectcache.gpu.page_locked_memory import PageLockedMemory
from objectcache.gpu.pieces import Pieces
from objectcache.landing.memory_file import MemoryFile
from objectcache_schemas.limits import MIB

CHUNKS_BYTES = (2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB)
DEPTHS = (2, 3)
_AS_QUICK = 0.98  # of the quickest: then less on the way is better
# A copy that is not cut takes a buffer of its length on the GPU, where kernels scatter it.
FALLBACK_BYTES_MAX = 64 * MIB
_FEWEST_BYTES = MIB  # that are tried over several links
_ROUNDS = 3  # the fastest counts
_RANDOM_SEED = 7


@dataclass(frozen=True, slots=True)
class LinksTrial:
    """How quick loads were over so many links."""

    links: int
    settings: PullSettings
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class LinksFound:
    """What was measured, and what a copier is best given; `pays` says whether it is quicker than
    the device's own link, else `links` has that alone.
    """

    tried: tuple[LinksTrial, ...]
    links: CheckedLinks

    @property
    def pays(self) -> bool:
        """Whether more than the own link is worth using."""
        return bool(self.links.relays)


@dataclass(frozen=True, slots=True)
class BesideOneCopy:
    """So many bytes over several links, and as one copy over the device's own."""

    size_bytes: int
    linked_bytes_per_s: float
    one_bytes_per_s: float


def pays_from(tried: Sequence[BesideOneCopy]) -> int:
    """The fewest bytes from which on several links were quicker at every size that was tried; twice
    the most where they were not even there.
    """
    least = 2 * max(each.size_bytes for each in tried)
    for each in sorted(tried, key=lambda each: -each.size_bytes):
        if each.linked_bytes_per_s <= each.one_bytes_per_s:
            break
        least = each.size_bytes
    return least


def try_links(
    device: Device,
    neighbours: Sequence[Device],
    size_bytes: int,
    piece_bytes: int,
    settings: PullSettings = OURS,
) -> LinksFound:
    """Copy so many bytes, in pieces that are at random places on the device, over the links that
    pass `relay_check`, one more at a time, in micro-tasks of every length: relays have one call a
    piece. It is the calling thread's device afterwards.

    Raises `Unavailable`.
    """
    checked = checked_links(device, neighbours, settings)
    locked = PageLockedMemory(device)
    file = MemoryFile(size_bytes)
    locked.lock_pages(file)
    address = device.allocate(size_bytes)
    try:
        whole = (file.array().ctypes.data, address, size_bytes)
        return _Trials(checked, whole, piece_bytes).found()
    finally:
        device.free(address)
        locked.close()


class _Trials:
    def __init__(
        self, checked: CheckedLinks, whole: tuple[int, int, int], piece_bytes: int
    ) -> None:
        self._checked = checked
        self._whole = whole
        self._piece_bytes = piece_bytes
        self._tried: list[LinksTrial] = []

    def found(self) -> LinksFound:
        relays = self._checked.relays
        size_bytes = self._whole[2]
        cut = replace(self._checked.settings, fallback_bytes=0)
        by_links = [
            self._trial(count, cut, size_bytes).bytes_per_s for count in range(len(relays) + 1)
        ]
        count = enough_links(by_links) - 1
        if not count:
            return LinksFound(tuple(self._tried), replace(self._checked, relays=()))
        sizes = [
            self._trial(count, replace(cut, chunk_bytes=chunk_bytes, depth=depth), size_bytes)
            for chunk_bytes in CHUNKS_BYTES
            for depth in DEPTHS
        ]
        quickest = max(trial.bytes_per_s for trial in sizes)
        best = min(
            (trial for trial in sizes if trial.bytes_per_s >= _AS_QUICK * quickest),
            key=lambda trial: (
                trial.settings.chunk_bytes * trial.settings.depth,
                -trial.bytes_per_s,
            ),
        ).settings
        fallback_bytes = pays_from(self._beside_one_copy(count, best))
        if fallback_bytes > FALLBACK_BYTES_MAX:
            return LinksFound(tuple(self._tried), replace(self._checked, relays=()))
        best = replace(best, fallback_bytes=fallback_bytes)
        kept = replace(self._checked, relays=relays[:count], settings=best)
        rates = {each: self._rates(kept, each) for each in Direction}
        return LinksFound(tuple(self._tried), replace(kept, rates=rates))

    def _beside_one_copy(self, count: int, settings: PullSettings) -> list[BesideOneCopy]:
        found: list[BesideOneCopy] = []
        size_bytes = self._whole[2]
        while size_bytes >= _FEWEST_BYTES:
            linked = self._trial(count, settings, size_bytes)
            one = self._trial(0, replace(settings, fallback_bytes=size_bytes + 1), size_bytes)
            found.append(BesideOneCopy(size_bytes, linked.bytes_per_s, one.bytes_per_s))
            size_bytes //= 2
        return found

    def _trial(self, relays: int, settings: PullSettings, size_bytes: int) -> LinksTrial:
        links = replace(self._checked, relays=self._checked.relays[:relays], settings=settings)
        took_s, _ = _copied(links, Direction.LOAD, self._pieces(size_bytes))
        trial = LinksTrial(relays + 1, settings, size_bytes / took_s)
        self._tried.append(trial)
        return trial

    def _rates(self, links: CheckedLinks, direction: Direction) -> LinkRates:
        first = links.rates[direction]
        _, learned = _copied(links, direction, self._pieces(self._whole[2]))
        return LinkRates(first.first_bytes_per_s, learned.known)

    def _pieces(self, size_bytes: int) -> Pieces:
        host, address, _ = self._whole
        piece_bytes = min(self._piece_bytes, size_bytes)
        count = size_bytes // piece_bytes
        places = piece_bytes * np.random.default_rng(_RANDOM_SEED).permutation(count)
        return Pieces.of(
            [
                (host + index * piece_bytes, address + int(place), piece_bytes)
                for index, place in enumerate(places)
            ]
        )


def _copied(links: CheckedLinks, direction: Direction, pieces: Pieces) -> tuple[float, LinkRates]:
    rates = LinkRates(links.rates[direction].first_bytes_per_s)
    times_s: list[float] = []
    with links.copies(direction, rates) as copies:
        for _ in range(_ROUNDS):
            begun_s = time.monotonic()
            copies.wait(copies.begin(0, pieces))
            times_s.append(time.monotonic() - begun_s)
    return min(times_s), rates
