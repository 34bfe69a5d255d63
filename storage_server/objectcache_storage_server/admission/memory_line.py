"""Where deliveries wait for memory, each tenant for its share.

Whoever waits holds its opened objects and its place at the entrance, no memory, and whoever holds
memory never waits here: so the line always moves on.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial

from objectcache_runtime.buffers import BufferPool, ReservedMemory
from objectcache_runtime.shares.fair_shares import FairShares
from objectcache_storage_server.admission.entrance import Gone
from objectcache_storage_server.admission.fair_line import Scarce
from objectcache_storage_server.admission.line_waits import LineWaits


@dataclass(frozen=True, slots=True)
class MemoryWish:
    """What a delivery can use: up to `wanted_bytes`, in steps of `least_bytes`, one at least."""

    wanted_bytes: int
    least_bytes: int


class SharedMemory(Scarce[MemoryWish]):
    """The memory of a pool, shared out among tenants. A buffer is what each may hold."""

    name = "memory"

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._shares = FairShares(pool.capacity_bytes, pool.buffer_bytes)
        self._whole_bytes = max(1, pool.capacity_bytes)

    @property
    def is_exhausted(self) -> bool:
        return self._pool.promised_bytes >= self._pool.capacity_bytes

    def take(self, tenant: str, wish: MemoryWish) -> int | None:
        self._shares.total = self._pool.capacity_bytes  # what a device kept is out of use
        reserved_bytes = self._pool.reserve(
            _fitting(self._shares.room(tenant, wish.least_bytes), wish), wish.least_bytes
        )
        self._shares.take(tenant, reserved_bytes)
        return reserved_bytes or None

    def give_back(self, tenant: str, taken: int) -> None:
        self._shares.give_back(tenant, taken)
        self._pool.release(taken)

    def held(self, tenant: str) -> float:
        return self._shares.held(tenant) / self._whole_bytes

    def shortage(self, tenant: str) -> str:
        return f"{self._pool.shortage}, and {tenant!r} holds {self._shares.held(tenant)} of them"


class MemoryLine(LineWaits[MemoryWish]):
    """The line of a server before one pool."""

    def __init__(
        self, pool: BufferPool, waiting_max: int, timeout_s: float, closed: asyncio.Event
    ) -> None:
        super().__init__(SharedMemory(pool), waiting_max, timeout_s, closed)
        self._pool = pool
        pool.on_release = self.advance

    async def reserve(self, tenant: str, wish: MemoryWish, gone: Gone) -> ReservedMemory:
        """Wait for memory, from `least_bytes` to `wanted_bytes` of it; raises what `take` does."""
        if not wish.least_bytes:
            return ReservedMemory(self._pool, 0)
        reserved_bytes = await self.take(tenant, wish, gone)
        return ReservedMemory(
            self._pool,
            reserved_bytes,
            partial(self.give_back, tenant),
            partial(self.is_wanted_more, tenant),
        )

    def __repr__(self) -> str:
        return f"<MemoryLine {self.waiting} waiting, {self._pool!r}>"


def _fitting(room_bytes: int, wish: MemoryWish) -> int:
    """All that is wanted, or as many steps as there is room for."""
    if wish.wanted_bytes <= room_bytes:
        return wish.wanted_bytes
    return room_bytes // wish.least_bytes * wish.least_bytes
