"""Every gate of a storage server. A get asks `Gates.get`, a put `Gates.put`; the block's end gives
back what it held, however it ends.

In this order: the quotas of what is in flight, the tenant's turn or the put's slot, and memory,
which is asked for once it is known how much. A put's place in its quota comes before its slot, so
that whoever may store nothing waits for nothing.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from objectcache_runtime.buffers import BufferPool, ReservedMemory
from objectcache_runtime.settings import Settings
from objectcache_schemas.operators.schedule import TenantShare
from objectcache_schemas.records import BucketInfo
from objectcache_storage_server.admission.client_pace import ClientPace, SlowClients, watch
from objectcache_storage_server.admission.entrance import Entrance, Gone, drained, stopping
from objectcache_storage_server.admission.holders import get_holder
from objectcache_storage_server.admission.line_waits import LineWaits
from objectcache_storage_server.admission.memory_line import MemoryLine, MemoryWish
from objectcache_storage_server.admission.put_slots import PutSlots
from objectcache_storage_server.admission.recent_bytes import RecentBytes
from objectcache_storage_server.quotas.in_flight import Flight, InFlight
from objectcache_storage_server.quotas.stored_ledger import Reservation, StoredLedger

FRAGMENTS_AHEAD = 16  # of a body: under a cap a fragment is half a millisecond of it
# Over a fabric: read, being written, and one more of each. More would only leave the cache.
STAGED_FRAGMENTS = 4

Call = Callable[..., Awaitable[Any]]  # runs a blocking function in a worker thread


@dataclass(frozen=True, slots=True)
class BodyMemory:
    """Memory that a body may fill, and the pace of the client that it is for."""

    clients: SlowClients
    reserved: ReservedMemory
    pace: ClientPace

    def release(self) -> None:
        """Nothing is held any more. A second call has no effect."""
        self.unwatch()
        self.reserved.release()

    def unwatch(self) -> None:
        """The client is waited for no more."""
        self.clients.remove(self.pace)


@dataclass(frozen=True, slots=True)
class AdmittedGet:
    """A get that has its turn. What it asks for besides waits for memory and may be refused."""

    gates: Gates
    holder: str  # of its turn and its memory
    gone: Gone
    flight: Flight
    waited: Callable[[float], object]  # is told the seconds of each wait

    def begins(self, payload_bytes: int) -> None:
        """So much is going to be moved."""
        self.gates.recent.add(payload_bytes, time.monotonic())

    async def body_memory(self, payload_bytes: int, fragment_bytes: int) -> BodyMemory:
        """Memory for a body; whoever has it releases it. Raises as `Flight.add_bytes` and
        `LineWaits.take`.
        """
        wish = self.gates.body_wish(payload_bytes, fragment_bytes)
        self.flight.add_bytes(min(payload_bytes, wish.wanted_bytes))
        asked_s = time.monotonic()
        reserved = await self.gates.bodies.reserve(self.holder, wish, self.gone)
        self.waited(time.monotonic() - asked_s)
        return BodyMemory(self.gates.slow_bodies, reserved, self.gates.slow_bodies.add(self.holder))

    async def target_memory(self, payload_bytes: int, *, is_staged: bool) -> ReservedMemory | None:
        """Count what is written into a client's memory; staging memory where it is on its way
        there, otherwise None. Whoever has it releases it. Raises as `body_memory`.
        """
        self.flight.add_bytes(payload_bytes)
        self.begins(payload_bytes)
        if not is_staged:
            return None
        asked_s = time.monotonic()
        reserved = await self.gates.staging_memory(self.holder, payload_bytes, self.gone)
        self.waited(time.monotonic() - asked_s)
        return reserved


@dataclass(frozen=True, slots=True)
class AdmittedPut:
    """A put under way that quotas leave room for."""

    reservation: Reservation
    call: Call

    async def confirm(self, size_bytes: int) -> None:
        """Judge it again before it is committed: a quota may have changed, and its size was perhaps
        not known. Raises `StorageFull` (QuotaExceeded).
        """
        if not self.reservation.confirm_known(size_bytes):
            await self.call(self.reservation.confirm, size_bytes)


class Gates:
    """The state of all of them. `draining` is set when the server stops."""

    def __init__(
        self,
        settings: Settings,
        shares: Mapping[str, TenantShare],
        in_flight: InFlight,
        stored: StoredLedger,
        staging: BufferPool,
        call: Call,
    ) -> None:
        """`shares` are the tenants' of the schedule in force, `staging` what fabrics write from."""
        storage, scheduler = settings.storage, settings.scheduler
        self.draining = False
        self.entrance = Entrance(settings, shares)
        self.pool = BufferPool(
            storage.fragment_bytes,
            storage.server_in_flight_bytes_max,
            "storage.server_in_flight_bytes_max",
        )
        line = (scheduler.queue_max, scheduler.queue_timeout_s, self.entrance.closed)
        self.bodies = MemoryLine(self.pool, *line)
        self.staging = MemoryLine(staging, *line)
        self.slots = PutSlots(storage)
        self.recent = RecentBytes()
        self.puts = LineWaits(self.slots, *line)
        rate_min = storage.client_rate_bytes_per_s_min
        self.slow_bodies = SlowClients("took a body", rate_min, self._holds_bodies_up)
        self.slow_puts = SlowClients("sent a put", rate_min, self.puts.is_held_from_others)
        self._delivery_in_flight_bytes_max = storage.delivery_in_flight_bytes_max
        self._object_bytes_max = settings.limits.object_bytes_max
        self._in_flight = in_flight
        self._stored = stored
        self._staging = staging
        self._call = call

    # --- gets ---

    @asynccontextmanager
    async def get(
        self,
        tenant: str,
        bucket: str,
        payload_bytes: int,
        gone: Gone,
        waited: Callable[[float], object],
    ) -> AsyncGenerator[AdmittedGet]:
        """A delivery of a prefix of at most so many bytes, for the length of the block.

        Raises `Busy` where a quota or a line leaves no room or the wait is too long, `Unavailable`
        once the server drains, and `ConnectionEnded` when `gone` returns first.
        """
        holder = get_holder(tenant, is_small=self.is_small(payload_bytes))
        async with (
            self.flight(tenant, bucket, deliveries=1) as flight,
            self.entrance.admitted(holder, gone) as waited_s,
        ):
            waited(waited_s)
            yield AdmittedGet(self, holder, gone, flight, waited)

    def is_small(self, payload_bytes: int) -> bool:
        """Whether a get of so many bytes is one of its tenant's small ones (`holders`): it fits in
        one buffer.
        """
        return payload_bytes <= self.pool.buffer_bytes

    def flight(
        self, tenant: str, bucket: str, *, deliveries: int = 0
    ) -> AbstractAsyncContextManager[Flight]:
        """What is in flight for a tenant and a bucket. See `InFlight.flight`."""
        return self._in_flight.flight(tenant, bucket, self._call, deliveries=deliveries)

    def body_wish(self, payload_bytes: int, fragment_bytes: int) -> MemoryWish:
        """What a body can use: a few fragments, and no more than the settings allow."""
        least_bytes = self.pool.charged_bytes(min(fragment_bytes, payload_bytes))
        useful_bytes = min(FRAGMENTS_AHEAD * least_bytes, self.pool.charged_bytes(payload_bytes))
        allowed_bytes = self._delivery_in_flight_bytes_max
        return MemoryWish(max(least_bytes, min(useful_bytes, allowed_bytes)), least_bytes)

    async def staging_memory(self, tenant: str, payload_bytes: int, gone: Gone) -> ReservedMemory:
        """Staging memory for a transfer over a fabric: whole buffers, one at least. Whoever has it
        releases it. Raises as `LineWaits.take`.
        """
        least_bytes = self._staging.buffer_bytes
        useful_bytes = min(
            STAGED_FRAGMENTS * least_bytes, self._staging.charged_bytes(payload_bytes)
        )
        wish = MemoryWish(max(least_bytes, useful_bytes), least_bytes)
        return await self.staging.reserve(tenant, wish, gone)

    # --- puts ---

    @asynccontextmanager
    async def put(
        self,
        bucket: BucketInfo,
        tenant: str,
        object_count: int,
        size_bytes: int | None,
        slot_bytes: int,
        gone: Gone | None = None,
    ) -> AsyncGenerator[AdmittedPut]:
        """A put, for the length of the block, which ends after its commit. It waits for a slot of
        `slot_bytes`, what it may take until then.

        Raises as `counted`, as `PutSlots.check` and as `LineWaits.take`.
        """
        async with self.counted(bucket, tenant, object_count, size_bytes) as admitted:
            self._check_put(slot_bytes)
            await self.puts.take(tenant, slot_bytes, gone)
            self.recent.add(size_bytes or 0, time.monotonic())
            try:
                yield admitted
            finally:
                self.puts.give_back(tenant, slot_bytes)

    @asynccontextmanager
    async def counted(
        self, bucket: BucketInfo, tenant: str, object_count: int, size_bytes: int | None
    ) -> AsyncGenerator[AdmittedPut]:
        """A put as quotas see it: a size that is not known is judged at the commit.

        Raises `StorageFull` (QuotaExceeded) where it would exceed what the bucket or its owner may
        store, and `Busy` where too much is in flight for the tenant or the bucket.
        """
        async with self.flight(tenant, bucket.name) as flight:
            if size_bytes is None:
                flight.add_unknown(self._object_bytes_max)
            else:
                flight.add_bytes(size_bytes)
            reservation = self._stored.empty(bucket)
            try:
                reservation.object_count = object_count
                admitted = AdmittedPut(reservation, self._call)
                await admitted.confirm(size_bytes or 0)
                yield admitted
            finally:
                self._stored.release(reservation)

    @contextmanager
    def put_now(self, slot_bytes: int, tenant: str) -> Generator[None]:
        """A slot alone, in a worker thread, which must not wait: raises `Busy` instead."""
        self._check_put(slot_bytes)
        self.puts.take_now(tenant, slot_bytes)
        try:
            yield
        finally:
            self.puts.give_back(tenant, slot_bytes)

    def _check_put(self, slot_bytes: int) -> None:
        if self.draining:
            raise stopping()
        if self.entrance.drained:
            raise drained()
        self.slots.check(slot_bytes)

    # --- the whole ---

    @property
    def waiting(self) -> int:
        """Requests for deliveries that wait, for their turn or for memory of bodies."""
        return self.entrance.waiting + self.bodies.waiting

    @property
    def takes_no_work(self) -> bool:
        """Whether the server stops, or an operator drains it."""
        return self.draining or self.entrance.drained

    async def watch_slow_clients(self) -> None:
        """Cut those that hold others up, for as long as it is not cancelled."""
        kinds = {self.slow_bodies: lambda: self.waiting, self.slow_puts: lambda: self.puts.waiting}
        await watch(kinds)

    def _holds_bodies_up(self, tenant: str) -> bool:
        return self.bodies.is_held_from_others(tenant) or self.entrance.is_held_from_others(tenant)

    def __repr__(self) -> str:
        return f"<Gates {self.entrance!r}, {self.slots!r}>"
