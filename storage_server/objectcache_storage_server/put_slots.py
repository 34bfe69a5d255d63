"""How many puts run and how many bytes they may take, together and of each tenant."""

from __future__ import annotations

from dataclasses import dataclass

from objectcache_schemas.errors import Busy, InvalidRequest
from objectcache_schemas.settings import StorageSettings

RETRY_AFTER_S = 1.0


@dataclass(slots=True)
class _Held:
    puts: int = 0
    staged_bytes: int = 0

    def add(self, puts: int, staged_bytes: int) -> None:
        self.puts += puts
        self.staged_bytes += staged_bytes


class PutSlots:
    """Puts that were admitted and have not ended. Not safe for threads.

    A tenant has a share of the slots and of the bytes, so that one whose bodies arrive slowly
    leaves the rest to the others. Its first put is not refused for the share, whatever its size.
    """

    def __init__(self, storage: StorageSettings) -> None:
        self._storage = storage
        self._all = _Held()
        self._tenants: dict[str, _Held] = {}

    @property
    def puts(self) -> int:
        """Puts that hold a slot."""
        return self._all.puts

    @property
    def staged_bytes(self) -> int:
        """Bytes that they may take."""
        return self._all.staged_bytes

    def take(self, staged_bytes: int, identity: str) -> None:
        """Count a put in. Raises `Busy`, and `InvalidRequest` (EntityTooLarge) for one that could
        never be counted in.
        """
        bytes_max = self._storage.put_staging_bytes_max
        if staged_bytes > bytes_max:
            raise InvalidRequest(
                f"the put has {staged_bytes} bytes, storage.put_staging_bytes_max is {bytes_max}",
                code="EntityTooLarge",
            )
        self._check_all(staged_bytes)
        held = self._tenants.get(identity)
        if held is not None:
            self._check_tenant(held, staged_bytes, identity)
        self._all.add(1, staged_bytes)
        self._tenants.setdefault(identity, _Held()).add(1, staged_bytes)

    def give_back(self, staged_bytes: int, identity: str) -> None:
        """Count a put out."""
        self._all.add(-1, -staged_bytes)
        held = self._tenants[identity]
        held.add(-1, -staged_bytes)
        if not held.puts:
            del self._tenants[identity]

    def _check_all(self, staged_bytes: int) -> None:
        puts_max, bytes_max = self._storage.puts_max, self._storage.put_staging_bytes_max
        if self.puts >= puts_max:
            raise Busy(
                f"{self.puts} puts are running, storage.puts_max is {puts_max}",
                retry_after_s=RETRY_AFTER_S,
            )
        if self.staged_bytes + staged_bytes > bytes_max:
            raise Busy(
                f"unfinished puts hold {self.staged_bytes} bytes, storage.put_staging_bytes_max "
                f"is {bytes_max}",
                retry_after_s=RETRY_AFTER_S,
            )

    def _check_tenant(self, held: _Held, staged_bytes: int, identity: str) -> None:
        share = self._storage.tenant_put_share_max
        puts_max = share * self._storage.puts_max
        bytes_max = share * self._storage.put_staging_bytes_max
        if held.puts + 1 > puts_max or held.staged_bytes + staged_bytes > bytes_max:
            raise Busy(
                f"{identity!r} has {held.puts} unfinished puts of {held.staged_bytes} bytes; "
                f"storage.tenant_put_share_max leaves a tenant {puts_max:g} puts and "
                f"{bytes_max:.0f} bytes",
                retry_after_s=RETRY_AFTER_S,
            )

    def __repr__(self) -> str:
        return f"<PutSlots {self.puts} puts of {len(self._tenants)} tenants>"
