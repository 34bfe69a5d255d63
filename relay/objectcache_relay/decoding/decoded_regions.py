"""Memory that workers decode into on the way to engines whose memory they do not map: pieces leave
it over a fabric, or in a body.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial

from objectcache.landing.memory_file import MemoryFile
from objectcache.landing.targets import PlainTarget
from objectcache_relay.forwarding import PIECE_BYTES_MAX
from objectcache_relay.landing.landing_regions import (
    LandingMemory,
    LandingRegion,
    LandingRegions,
    region_bytes_for,
)
from objectcache_schemas.errors import ObjectCacheError


@dataclass(eq=False, frozen=True, slots=True)
class RegionWish:
    """A region that somebody waits for: `begin` is called with it, or `refused` where the system
    has none.
    """

    engine: Hashable
    length_bytes: int
    begin: Callable[[LandingRegion], None]
    refused: Callable[[ObjectCacheError], None]


class DecodedRegions:
    """`bytes_max` of it (relay.in_flight_bytes_max), of a piece each. Used in the event loop.

    An engine has no more than is left for others, so that one which takes its pieces slowly, or not
    at all, keeps nobody from the rest; one region it may always have. Whoever waits for what is
    not free yet is passed by nobody.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._regions = LandingRegions(bytes_max, _made)
        self.held_bytes = 0  # of regions that pieces are in; this and the next other threads read
        self.waiting_bytes = 0  # of regions that are wished for and not free
        self._had = Counter[Hashable]()  # bytes, by engine
        self._wishes: deque[RegionWish] = deque()
        self._making: dict[RegionWish, bool] = {}  # whether somebody wants it still
        self._is_serving = False

    @property
    def is_making(self) -> bool:
        """Whether a region is on its way in a thread."""
        return bool(self._making)

    def ask(
        self,
        engine: Hashable,
        slice_bytes: int,
        begin: Callable[[LandingRegion], None],
        refused: Callable[[ObjectCacheError], None],
    ) -> RegionWish:
        """Wish for a region for a piece of slices of this length, which may come at once, and goes
        back with `put`. One that is not there yet is made in a thread; those of one engine are
        given, or made, in the order in which they were asked for.
        """
        length_bytes = region_bytes_for(max(PIECE_BYTES_MAX, slice_bytes))
        wish = RegionWish(engine, length_bytes, begin, refused)
        self._wishes.append(wish)
        self.waiting_bytes += length_bytes
        self._serve()
        return wish

    def forget(self, wish: RegionWish) -> None:
        """Nobody waits for it any more; no effect where it was given."""
        if wish in self._making:
            self._making[wish] = False
        if wish in self._wishes:
            self._wait_no_more(wish)
            self._serve()

    def put(self, engine: Hashable, region: LandingRegion) -> None:
        """Nothing reads or writes it any more."""
        self._regions.put(region)
        self._has_less(engine, region.length_bytes)

    def _has_less(self, engine: Hashable, length_bytes: int) -> None:
        self._had[engine] -= length_bytes
        self.held_bytes -= length_bytes
        if not self._had[engine]:
            del self._had[engine]
        self._serve()

    def _serve(self) -> None:
        if self._is_serving:  # whoever begins may give back, and ask again
            return
        self._is_serving = True
        try:
            while (wish := self._next()) is not None:
                self._wait_no_more(wish)
                self._give(wish)
        finally:
            self._is_serving = False

    def _wait_no_more(self, wish: RegionWish) -> None:
        self._wishes.remove(wish)
        self.waiting_bytes -= wish.length_bytes

    def _give(self, wish: RegionWish) -> None:
        self._had[wish.engine] += wish.length_bytes
        self.held_bytes += wish.length_bytes
        region = self._regions.take_free(wish.length_bytes)
        if region is not None:
            wish.begin(region)
            return
        self._making[wish] = True
        loop = asyncio.get_running_loop()
        making = loop.run_in_executor(None, self._regions.take, wish.length_bytes)
        making.add_done_callback(partial(self._was_made, wish))

    def _was_made(self, wish: RegionWish, making: asyncio.Future[LandingRegion]) -> None:
        is_wanted = self._making.pop(wish)
        try:
            region = making.result()
        except ObjectCacheError as error:
            self._has_less(wish.engine, wish.length_bytes)
            if is_wanted:
                wish.refused(error)
            return
        if is_wanted:
            wish.begin(region)
        else:
            self.put(wish.engine, region)

    def _next(self) -> RegionWish | None:
        """The first that may have what is free."""
        free_bytes = self._bytes_max - self.held_bytes
        waiting: set[Hashable] = set()  # engines that have their share
        for wish in self._wishes:
            had_bytes = self._had[wish.engine]
            if wish.engine in waiting:
                continue
            left_bytes = free_bytes - wish.length_bytes
            if had_bytes and had_bytes + wish.length_bytes > left_bytes:
                waiting.add(wish.engine)
            elif left_bytes >= 0 or not self.held_bytes:
                return wish
            else:
                return None
        return None

    def close(self) -> None:
        """Let all go that nobody uses."""
        self._regions.close()

    def __repr__(self) -> str:
        return (
            f"<DecodedRegions {self.held_bytes}/{self._bytes_max} bytes, {len(self._wishes)} wait>"
        )


def _made(length_bytes: int) -> LandingMemory:
    file = MemoryFile(length_bytes)
    return LandingMemory(PlainTarget(file.array()), file)
