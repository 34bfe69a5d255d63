"""Deliveries into landing memory, each for any number of gets: read once, used as often.

A get is given what another one of the same prefix is having landed, or had landed a moment ago.
Where the upstream was asked before the get came, it is asked whether all of that is still stored
and may be read. Used in the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Hashable
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial
from typing import ParamSpec, TypeVar

from objectcache.deliveries.delivery import Delivery
from objectcache.routes.received_rate import ReceivedRate
from objectcache_relay.counts import RelayCounts
from objectcache_relay.landing.claims import LandedKey, has_claimed, may_claim
from objectcache_relay.landing.landed_rows import LandedRow, encoded_rows
from objectcache_relay.landing.landing_grants import (
    LandingGrant,
    LandingGrants,
    LandingState,
)
from objectcache_relay.landing.landing_regions import (
    LandingRegion,
    LandingRegions,
    region_bytes_for,
)
from objectcache_relay.landing.landing_ring import LayerRing
from objectcache_relay.landing.upstream import AskedForward, Upstream
from objectcache_runtime.first_of import first_of
from objectcache_schemas.descriptor import DeliveryMode
from objectcache_schemas.errors import Busy, DeliveryFailed, ObjectCacheError

P = ParamSpec("P")
T = TypeVar("T")
USERS_MAX = 32  # of one prefix: gets that take no landing memory of their own
HIT, MISS = "hit", "miss"

logger = logging.getLogger("objectcache.relay.landed_prefixes")


class Landings:
    """All that is landing, or held, and the means for it."""

    def __init__(
        self,
        upstream: Upstream,
        landing_bytes: int,
        wait_s: float,
        hold_s: float,
        threads: Executor,
    ) -> None:
        """`threads` are those in which upstream calls may block: one a delivery."""
        self.upstream = upstream
        self.grants = LandingGrants(landing_bytes)
        self.regions = LandingRegions(landing_bytes, upstream.memory)
        self.wait_s = wait_s
        self.hold_s = hold_s
        self.counts = RelayCounts()
        self.received = ReceivedRate(time.monotonic())
        self._ended_bytes = 0  # that had come of landings that are over
        self._threads = threads
        self._running: dict[LandedPrefix, asyncio.Task[None]] = {}
        self._claimable: defaultdict[LandedKey, list[LandedPrefix]] = defaultdict(list)

    async def use(
        self, asked: AskedForward, user: LandingUse, wait_s: float | None = None
    ) -> LandedPrefix:
        """What the get is sent, with an upstream that has accepted it; `user.leave` lets it go.
        `wait_s` for landing memory is the setting's where none is given.

        Raises the refusal, and `DeliveryFailed` where the user is gone before.
        """
        claimed = await self._claimed(asked, user)
        if claimed is not None:
            self.counts.claims.add(HIT)
            return claimed
        self.counts.claims.add(MISS)
        wait_s = self.wait_s if wait_s is None else wait_s
        landed = LandedPrefix(self, asked, wait_s, user.asker)
        self._claimable[landed.key].append(landed)
        user.join(landed)
        self._running[landed] = asyncio.create_task(landed.run())
        await user.accepted()
        return landed

    async def _claimed(self, asked: AskedForward, user: LandingUse) -> LandedPrefix | None:
        """What of another get's can be used, if anything."""
        for landed in list(self._claimable.get(LandedKey.of(asked), ())):
            if not landed.is_claimable or not may_claim(
                asked, landed.asked, has_arrived=landed.is_over
            ):
                continue
            user.join(landed)
            if await self._can_be_used(landed, asked, user) and landed.error is None:
                return landed
            user.leave()
        return None

    async def _can_be_used(
        self, landed: LandedPrefix, asked: AskedForward, user: LandingUse
    ) -> bool:
        was_accepted = landed.is_accepted
        try:
            await user.accepted()
        except ObjectCacheError:
            if user.gone.is_set():
                raise
            return False  # its own may fare better
        chunk_count = landed.delivery.chunk_count
        if not has_claimed(asked, landed.asked, DeliveryMode(landed.delivery.mode), chunk_count):
            return False
        if not was_accepted:  # the upstream opened it after the get came
            return True
        return await self.blocking(self.upstream.has_still, asked, chunk_count)

    @property
    def read_queue_bytes(self) -> int:
        """Bytes that were asked for, or wait for landing memory, and are not here yet. From any
        thread.
        """
        running = list(self._running)  # at one moment
        return self.grants.waiting_bytes + sum(one.awaited_bytes for one in running)

    @property
    def moved_bytes(self) -> int:
        """Bytes that have come, of layers that are not whole too where they come in bodies, and
        bytes that were sent on, since the start.
        """
        came_bytes = self._ended_bytes + sum(one.came_bytes for one in self._running)
        return came_bytes + int(sum(count for _, count in self.counts.forwarded_bytes.items()))

    def note_received(self, landed: LandedPrefix, received_bytes: int) -> None:
        """So much of it has arrived. Of a get that wants no more than a rate, neither bytes nor
        time say what the NIC could bring.
        """
        awaits = any(one.awaited_bytes for one in self._running if not one.is_rated)
        self.received.note(
            time.monotonic(), 0 if landed.is_rated else received_bytes, awaits=awaits
        )

    @property
    def rate_bytes_per_s(self) -> float:
        """At which bytes have come lately, where gets that name no rate awaited some; else 0."""
        return self.received.rate_bytes_per_s(time.monotonic())

    def have_looked_at(self, asked: AskedForward, layer: int, key: str) -> None:
        """See `Upstream.have_looked_at`; soon, in a thread."""
        self._threads.submit(self.upstream.have_looked_at, asked, layer, key)

    def close_to_claims(self, landed: LandedPrefix) -> None:
        """Nobody else may use it. A second call has no effect."""
        landed.is_claimable = False
        left = [one for one in self._claimable.get(landed.key, ()) if one is not landed]
        if left:
            self._claimable[landed.key] = left
        else:
            self._claimable.pop(landed.key, None)

    def ended(self, landed: LandedPrefix) -> None:
        """It has let its memory go."""
        del self._running[landed]
        self._ended_bytes += landed.came_bytes
        self.note_received(landed, 0)

    async def close(self) -> None:
        """Let go of what is held; no get uses any."""
        for landed in list(self._running):
            landed.let_go()
        if self._running:
            await asyncio.wait(self._running.values())

    async def blocking(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call in a thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, partial(function, *args, **kwargs))

    def __repr__(self) -> str:
        return f"<Landings {len(self._running)} prefixes, {self.grants!r}>"


class LandedPrefix:
    """One delivery from the upstream, from when memory is asked for until it is let go."""

    def __init__(
        self, landings: Landings, asked: AskedForward, wait_s: float, asker: Hashable
    ) -> None:
        self._landings = landings
        self._wait_s = wait_s
        self._asker = asker  # for whom there are turns
        self.asked = asked
        self.key = LandedKey.of(asked)
        self.is_claimable = not asked.ring_layers  # where later layers take the place of earlier
        self.is_over = False  # the upstream touches the memory no more
        self.error: ObjectCacheError | None = None  # of the upstream, once that is over
        self.refusal: ObjectCacheError | None = None  # it was never accepted
        self.settled = asyncio.Event()  # it is known whether it was
        self._users: dict[LandingUse, None] = {}
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._grant: LandingGrant | None = None
        self._region: LandingRegion | None = None
        self._ring: LayerRing | None = None
        self._delivery: Delivery | None = None
        self._arrived_end = asked.descriptor.first_layer
        self._arrived_bytes = 0
        self._is_let_go = False

    @property
    def is_rated(self) -> bool:
        """Whether its get wants no more than a rate."""
        return self.asked.descriptor.rate_bytes_per_s is not None

    @property
    def is_accepted(self) -> bool:
        """Whether the upstream has accepted it."""
        return self._delivery is not None

    @property
    def delivery(self) -> Delivery:
        """The upstream's, once it is accepted."""
        assert self._delivery is not None
        return self._delivery

    @property
    def region(self) -> LandingRegion:
        """Where it lands, for whoever uses it."""
        assert self._region is not None
        return self._region

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of the chunks that are delivered."""
        return self.delivery.chunk_count * self.delivery.slice_bytes

    def rows(self, begin_bytes: int, length_bytes: int) -> tuple[LandedRow, ...]:
        """Where bytes of one layer that has arrived lie: as many, from `begin_bytes` of the decoded
        payload on; of an encoded one whole slices. Raises `DeliveryFailed` where that cannot be
        known, because the directory is damaged.
        """
        directory = self.delivery.wait_directory(0.0)
        number = begin_bytes // self.layer_bytes
        if directory is not None:
            rows = tuple(encoded_rows(directory, begin_bytes, length_bytes))
            layer_begin_bytes = directory.layer_offsets[number]
        else:
            chunk = begin_bytes % self.layer_bytes // self.delivery.slice_bytes
            rows = (LandedRow(chunk, 1, begin_bytes, length_bytes, 0, length_bytes),)
            layer_begin_bytes = number * self.layer_bytes
        if self._ring is None:
            return rows
        layer_bytes = self._ring.layer_bytes(self.delivery.layers.start + number, directory)
        return tuple(row.moved(layer_bytes - layer_begin_bytes) for row in rows)

    def written(self, end_layer: int) -> None:
        """Its one user is through with all layers below: of a ring, others may take their place."""
        if self._ring is not None:
            self._ring.written(end_layer)

    @property
    def came_bytes(self) -> int:
        """How many bytes of it have come: those of whole layers, or more where they are seen."""
        seen_bytes = self.delivery.progress.came_bytes if self.is_accepted else 0
        return max(self._arrived_bytes, seen_bytes)

    def _came_bytes(self, end_layer: int) -> int:
        """Bytes that all layers below this were when they came."""
        begin = self.delivery.layers.start
        if not self.delivery.is_encoded or end_layer == begin:
            return (end_layer - begin) * self.layer_bytes
        directory = self.delivery.wait_directory(0.0)
        assert directory is not None
        return directory.layer_offsets[end_layer - begin]

    @property
    def awaited_bytes(self) -> int:
        """Bytes that memory was granted for, and that are to come from the upstream."""
        if self._grant is None or self.is_over:
            return 0
        if not self.is_accepted:
            return self.asked.payload_bytes
        return (self.delivery.layers.stop - self._arrived_end) * self.layer_bytes

    @property
    def arrived_end(self) -> int:
        """All layers below this are here; of a payload in chunks only once it is whole."""
        return self._arrived_end

    # --- its users ---

    def add(self, user: LandingUse) -> None:
        """One more."""
        self._users[user] = None
        if len(self._users) == USERS_MAX:
            self._landings.close_to_claims(self)
        if self._grant is not None and self._grant.state is LandingState.HELD:
            self._landings.grants.use_again(self._grant)
            self._changed.set()

    def remove(self, user: LandingUse) -> None:
        """One less. Where it was the last, and not all has arrived, the upstream is cancelled."""
        del self._users[user]
        self._changed.set()

    def let_go(self) -> None:
        """Hold it no longer."""
        self._landings.close_to_claims(self)
        self._is_let_go = True
        self._changed.set()

    # --- how it goes on ---

    async def run(self) -> None:
        """Carry it to its end, errors included."""
        try:
            await self._land(await self._granted())
        except ObjectCacheError as error:
            self.refusal = error
        except Exception:
            logger.exception("landing %r failed", self)
            self.refusal = ObjectCacheError("the relay failed; see its log")
        finally:
            self._landings.close_to_claims(self)
            self.is_over = True
            self.error = self.error or self.refusal
            self.settled.set()
            if self._grant is not None:
                self._landings.grants.end(self._grant)
            self._landings.ended(self)
            self._tell()

    async def _granted(self) -> LandingGrant:
        """Raises `Busy` where there is no landing memory in time."""
        landings = self._landings
        told = asyncio.Event()
        grant = landings.grants.ask(
            region_bytes_for(self.asked.landing_bytes),
            told.set,
            self._asker,
            is_rated=self.is_rated,
            is_ring=bool(self.asked.ring_layers),
        )
        if grant.state is LandingState.WAITING:
            try:
                await first_of(told.wait(), self._unwanted(), timeout_s=self._wait_s)
            finally:
                if grant.state is LandingState.WAITING or not self._users:
                    landings.grants.end(grant)
        if grant.state is LandingState.OVER:
            landings.counts.refused.add("landing memory")
            raise Busy(
                f"no landing memory for {grant.length_bytes} bytes within {self._wait_s:g} s "
                f"(relay.wait_s, or fetcher.wait_s): {landings.read_queue_bytes} bytes are to be "
                "read before; have it delivered directly",
                retry_after_s=1.0,
            )
        self._grant = grant
        landings.note_received(self, 0)
        return grant

    async def _unwanted(self) -> None:
        while self._users:
            self._changed.clear()
            await self._changed.wait()

    async def _land(self, grant: LandingGrant) -> None:
        landings = self._landings
        try:
            delivery = await landings.blocking(self._begin, grant)
            self._delivery = delivery
            self.settled.set()
            try:
                delivery.progress.listen(self._look_soon)
                await self._arrived()
            finally:
                await landings.blocking(delivery.close)
            self._note_upstream_is_over()
            await self._let_go(grant)
        finally:
            self._give_back()

    def _begin(self, grant: LandingGrant) -> Delivery:
        """In a thread. Raises what is in the way of a region, and the refusal."""
        landings = self._landings
        self._region = landings.regions.take(grant.length_bytes)
        if not self.asked.ring_layers:
            return landings.upstream.fetch(self.asked, self._region)
        delivery, self._ring = landings.upstream.fetch_into_ring(self.asked, self._region)
        return delivery

    async def _arrived(self) -> None:
        """Until all is here, or has failed, or nobody wants it."""
        progress = self.delivery.progress
        while True:
            self._changed.clear()
            self._note_arrived()
            if progress.ended:
                break
            if not self._users:
                self._landings.close_to_claims(self)
                break
            await self._changed.wait()
        if not progress.complete:
            self._landings.close_to_claims(self)

    def _look_soon(self) -> None:
        with suppress(RuntimeError):  # the loop has ended, and nobody looks
            self._loop.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        if self.is_over:
            return
        self._note_arrived()
        if self.delivery.progress.ended:
            self._changed.set()

    def _note_arrived(self) -> None:
        ready_end = self.delivery.progress.ready_end
        if ready_end > self._arrived_end:
            try:
                received_bytes = self._came_bytes(ready_end) - self._came_bytes(self._arrived_end)
            except ObjectCacheError:  # of the directory; whoever sends the first piece tells
                received_bytes = 0
            self._arrived_end = ready_end
            self._arrived_bytes += received_bytes
            self._landings.note_received(self, received_bytes)
            self._tell()

    def _note_upstream_is_over(self) -> None:
        self._note_arrived()
        failure = self.delivery.progress.failure
        self.error = failure
        if failure is not None and isinstance(failure.__cause__, ObjectCacheError):
            self.error = failure.__cause__
        self.is_over = True
        self._tell()

    def _tell(self) -> None:
        for user in list(self._users):
            user.changed()

    async def _let_go(self, grant: LandingGrant) -> None:
        """Until nobody uses it, nor has for relay.hold_s, or the memory is needed."""
        landings = self._landings
        while True:
            self._changed.clear()
            if self._users:
                await self._changed.wait()
                continue
            if not self.is_claimable or self._is_let_go or not landings.hold_s:
                return
            if grant.state is LandingState.GRANTED:
                landings.grants.hold(grant, self._taken)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(landings.hold_s):
                    await self._changed.wait()
                continue
            if not self._users:
                return

    def _taken(self) -> None:
        """Somebody needs the memory, and has it from now on."""
        self.let_go()
        self._give_back()

    def _give_back(self) -> None:
        """Repeating has no effect."""
        region, self._region = self._region, None
        if region is not None:
            self._landings.regions.put(region)

    def __repr__(self) -> str:
        return f"<LandedPrefix {self.asked.request_id}, {len(self._users)} users>"


class LandingUse:
    """One get's use of what lands. `gone` is set when whoever asked wants it no more."""

    def __init__(self, gone: asyncio.Event, changed: Callable[[], None], asker: Hashable) -> None:
        """`changed` is called whenever more is here, or the upstream is over. Gets of one asker
        wait in one line for landing memory.
        """
        self.asker = asker
        self.gone = gone
        self.changed = changed
        self._landed: LandedPrefix | None = None

    def join(self, landed: LandedPrefix) -> None:
        """Use it from now on; it stays where it is until `leave`."""
        assert self._landed is None
        self._landed = landed
        landed.add(self)

    async def accepted(self) -> None:
        """Until the upstream has accepted it. Raises the refusal, and `DeliveryFailed` where
        whoever asked is gone before.
        """
        landed = self._landed
        assert landed is not None
        if not landed.settled.is_set() and not self.gone.is_set():
            await first_of(landed.settled.wait(), self.gone.wait())
        if landed.refusal is not None:
            raise landed.refusal
        if not landed.is_accepted:
            raise DeliveryFailed("the delivery was cancelled")

    def leave(self) -> None:
        """Let it go. A second call has no effect."""
        landed, self._landed = self._landed, None
        if landed is not None:
            landed.remove(self)

    def __repr__(self) -> str:
        return f"<LandingUse of {self._landed!r}>"
