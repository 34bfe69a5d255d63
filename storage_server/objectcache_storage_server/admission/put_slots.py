"""How many puts run and how many bytes they may take, together and of each tenant."""

from __future__ import annotations

from objectcache_runtime.settings import StorageSettings
from objectcache_runtime.shares.fair_shares import LENT_PER_FREE, RESERVED_PART, FairShares
from objectcache_schemas.errors import InvalidRequest
from objectcache_storage_server.admission.fair_line import Scarce


class PutSlots(Scarce[int]):
    """Puts that were admitted and have not ended; a wish is for one of so many bytes.

    A tenant has a share of the slots and one of the bytes. Half of the reserved bytes are shared
    out among the slots, so that a put of so many bytes is let in wherever a slot is. One put may
    take no more than a tenant alone may be lent: the small ones that pass it while it waits hold
    less than the rest, so it has its turn.
    """

    name = "a put's slot"

    def __init__(self, storage: StorageSettings) -> None:
        self._slots = FairShares(storage.puts_max)
        total_bytes = storage.put_staging_bytes_max
        self._little_bytes = max(1, total_bytes // RESERVED_PART // 2 // storage.puts_max)
        self._bytes = FairShares(total_bytes, self._little_bytes)
        self.put_bytes_max = -(-total_bytes * LENT_PER_FREE // (LENT_PER_FREE + 1))

    @property
    def puts(self) -> int:
        """Puts that hold a slot."""
        return self._slots.taken

    @property
    def staged_bytes(self) -> int:
        """Bytes that they may take."""
        return self._bytes.taken

    @property
    def is_exhausted(self) -> bool:
        return self._slots.free <= 0

    def check(self, staged_bytes: int) -> None:
        """Raises `InvalidRequest` (EntityTooLarge) for a put that could never be let in."""
        if staged_bytes > self.put_bytes_max:
            raise InvalidRequest(
                f"the put has {staged_bytes} bytes, one may have {self.put_bytes_max}: three "
                f"quarters of storage.put_staging_bytes_max, which is {self._bytes.total}",
                code="EntityTooLarge",
            )

    def take(self, tenant: str, wish: int) -> int | None:
        has_room = self._slots.may_take(tenant, 1) and self._bytes.may_take(tenant, wish)
        if not has_room:
            return None
        self._slots.take(tenant, 1)
        self._bytes.take(tenant, wish)
        return wish

    def give_back(self, tenant: str, taken: int) -> None:
        self._slots.give_back(tenant, 1)
        self._bytes.give_back(tenant, taken)

    def passes_freely(self, tenant: str, wish: int) -> bool:
        return self._bytes.held(tenant) + wish <= self._little_bytes

    def held(self, tenant: str) -> float:
        parts = (shares.held(tenant) / shares.total for shares in (self._slots, self._bytes))
        return max(parts)

    def shortage(self, tenant: str) -> str:
        slots, staged = self._slots, self._bytes
        return (
            f"{slots.taken} puts are running, storage.puts_max is {slots.total}; they hold "
            f"{staged.taken} bytes, storage.put_staging_bytes_max is {staged.total}; "
            f"{slots.held(tenant)} of them, of {staged.held(tenant)} bytes, are of {tenant!r}"
        )

    def __repr__(self) -> str:
        return f"<PutSlots {self.puts} puts of {self._slots.tenants} tenants>"
