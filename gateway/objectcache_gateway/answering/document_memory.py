"""The gateway's own memory for documents: descriptors, matches, and XML that requests carry."""

from __future__ import annotations

from objectcache_runtime.settings import Settings
from objectcache_runtime.shares.fair_shares import RESERVED_PART, FairShares
from objectcache_schemas.errors import Busy
from objectcache_schemas.limits import KIB

UNCOUNTED_BYTES_MAX = 64 * KIB  # of one document, as much as any request may have on its way


class DocumentMemory:
    """Bytes of larger documents, shared among tenants."""

    def __init__(self, settings: Settings) -> None:
        bytes_max = settings.gateway.document_bytes_max
        largest_bytes = settings.limits.descriptor_bytes_max
        self._shares = FairShares(bytes_max, min(largest_bytes, bytes_max // RESERVED_PART))

    def take(self, tenant: str, size_bytes: int) -> None:
        """Count so many more as held. Raises `Busy` where the tenant may not have them."""
        shares = self._shares
        if not shares.may_take(tenant, size_bytes):
            raise Busy(
                f"documents of requests hold {shares.taken} bytes of this gateway, "
                f"{shares.held(tenant)} of them this user's; gateway.document_bytes_max is "
                f"{shares.total}",
                retry_after_s=1.0,
            )
        shares.take(tenant, size_bytes)

    def give_back(self, tenant: str, size_bytes: int) -> None:
        """Count them as held no more."""
        self._shares.give_back(tenant, size_bytes)

    def __repr__(self) -> str:
        return f"<DocumentMemory {self._shares!r}>"


class RequestDocument:
    """What one request's document holds, until the request ends."""

    def __init__(self, memory: DocumentMemory) -> None:
        self._memory = memory
        self._tenant = ""
        self._held_bytes = 0

    def hold(self, tenant: str, arrived_bytes: int) -> None:
        """So much has arrived of it, all in all, for the same tenant each time. Raises `Busy`."""
        if arrived_bytes <= max(UNCOUNTED_BYTES_MAX, self._held_bytes):
            return
        self._memory.take(tenant, arrived_bytes - self._held_bytes)
        self._tenant, self._held_bytes = tenant, arrived_bytes

    def release(self) -> None:
        """The request has ended. Repeating has no effect."""
        self._memory.give_back(self._tenant, self._held_bytes)
        self._held_bytes = 0

    def __repr__(self) -> str:
        return f"<RequestDocument of {self._held_bytes} bytes>"
