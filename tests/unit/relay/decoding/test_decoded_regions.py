"""Who has memory to be decoded into: no engine more than it leaves to others."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest

from objectcache_relay.decoding.decoded_regions import DecodedRegions, RegionWish
from objectcache_relay.forwarding import PIECE_BYTES_MAX
from objectcache_relay.landing.landing_regions import LandingRegion
from objectcache_schemas.errors import ObjectCacheError

BOUND_S = 30.0
pytestmark = pytest.mark.asyncio


class Asked:
    """Regions that engines asked for, and got."""

    def __init__(self, pieces: int) -> None:
        self.regions = DecodedRegions(pieces * PIECE_BYTES_MAX)
        self.got = defaultdict[str, list[LandingRegion]](list)
        self.refused: list[ObjectCacheError] = []

    async def ask(self, engine: str, slice_bytes: int = 1) -> RegionWish:
        begin = self.got[engine].append
        wish = self.regions.ask(engine, slice_bytes, begin, self.refused.append)
        await self.made()
        return wish

    async def put(self, engine: str) -> None:
        self.regions.put(engine, self.got[engine].pop())
        await self.made()

    async def made(self) -> None:
        """Until no region is being made."""
        end_s = time.monotonic() + BOUND_S
        while self.regions.is_making:
            assert time.monotonic() < end_s, "it is made"
            await asyncio.sleep(0.001)

    @property
    def counts(self) -> dict[str, int]:
        return {engine: len(regions) for engine, regions in self.got.items()}


async def test_an_engine_has_no_more_than_it_leaves_to_others() -> None:
    asked = Asked(6)
    for _ in range(5):
        await asked.ask("slow")
    assert asked.counts == {"slow": 3}
    region_bytes = asked.got["slow"][0].length_bytes
    assert asked.regions.held_bytes == 3 * region_bytes
    assert asked.regions.waiting_bytes == 2 * region_bytes
    for _ in range(5):
        await asked.ask("other")
    assert asked.counts == {"slow": 3, "other": 1}
    for _ in range(4):  # which take theirs and ask again while the slow one takes nothing
        await asked.put("other")
    await asked.ask("third")
    assert asked.counts == {"slow": 3, "other": 1, "third": 1}
    await asked.put("third")
    await asked.put("slow")
    assert asked.counts == {"slow": 2, "other": 1, "third": 0}
    await asked.put("other")
    await asked.put("slow")
    await asked.put("slow")
    assert asked.counts == {"slow": 2, "other": 0, "third": 0}
    assert asked.regions.held_bytes == 2 * PIECE_BYTES_MAX


async def test_whoever_waits_for_more_than_is_free_is_passed_by_nobody() -> None:
    asked = Asked(4)
    await asked.ask("one")
    await asked.ask("large", 4 * PIECE_BYTES_MAX)
    await asked.ask("other")
    assert asked.counts == {"one": 1, "large": 0, "other": 0}
    await asked.put("one")
    assert asked.counts == {"one": 0, "large": 1, "other": 0}
    await asked.put("large")
    assert asked.counts["other"] == 1


async def test_a_slice_that_is_larger_than_all_of_it_comes_where_nothing_else_is_held() -> None:
    asked = Asked(1)
    await asked.ask("one")
    await asked.ask("large", 3 * PIECE_BYTES_MAX)
    assert asked.counts == {"one": 1, "large": 0}
    await asked.put("one")
    assert asked.got["large"][0].length_bytes == 3 * PIECE_BYTES_MAX


async def test_a_wish_that_is_forgotten_holds_nobody_up() -> None:
    asked = Asked(2)
    await asked.ask("one")
    wish = await asked.ask("large", 2 * PIECE_BYTES_MAX)
    await asked.ask("other")
    asked.regions.forget(wish)
    asked.regions.forget(wish)
    await asked.made()
    assert asked.counts == {"one": 1, "large": 0, "other": 1}


async def test_what_the_system_has_not_is_refused_and_held_by_nobody() -> None:
    asked = Asked(2)
    await asked.ask("huge", 1 << 62)
    assert len(asked.refused) == 1
    assert asked.regions.held_bytes == 0
    await asked.ask("one")
    assert asked.counts == {"huge": 0, "one": 1}


async def test_a_region_is_made_in_a_thread_and_kept_where_nobody_wants_it_any_more() -> None:
    asked, has_begun = Asked(1), threading.Event()
    with ThreadPoolExecutor(1) as thread:
        asyncio.get_running_loop().set_default_executor(thread)
        thread.submit(has_begun.wait)
        try:
            wish = asked.regions.ask("one", 1, asked.got["one"].append, asked.refused.append)
            assert asked.counts == {"one": 0}
            assert asked.regions.held_bytes == PIECE_BYTES_MAX
            asked.regions.forget(wish)
        finally:
            has_begun.set()
        await asked.made()
        assert asked.counts == {"one": 0}
        assert asked.regions.held_bytes == 0
        asked.regions.ask("other", 1, asked.got["other"].append, asked.refused.append)
        assert asked.counts == {"one": 0, "other": 1}
