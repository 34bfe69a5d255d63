"""The gateway's own memory for deliveries that are staged in it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from objectcache_runtime.shares.fair_shares import FairShares
from objectcache_schemas.errors import Busy
from objectcache_schemas.limits import KIB

PIECE_BYTES = 256 * KIB  # of one delivery; a local socket gives little more at once
PIECES_MAX = 64


class BufferPathMemory:
    """At most `pieces_max` pieces at a time, one for each staged delivery, shared among tenants."""

    def __init__(self, pieces_max: int = PIECES_MAX) -> None:
        self._pieces_max = pieces_max
        self._shares = FairShares(pieces_max)

    @contextmanager
    def piece(self, payload_bytes: int, tenant: str) -> Generator[memoryview]:
        """Memory for one delivery, no more than its payload needs. Raises `Busy` where there is
        none for the tenant.
        """
        if not self._shares.may_take(tenant, 1):
            raise Busy(
                f"{self._shares.taken} deliveries are staged in the gateway, "
                f"{self._shares.held(tenant)} of them this user's, and at most {self._pieces_max} "
                "may be; the path direct needs no staging",
                retry_after_s=1.0,
            )
        self._shares.take(tenant, 1)
        try:
            yield memoryview(bytearray(min(payload_bytes, PIECE_BYTES)))
        finally:
            self._shares.give_back(tenant, 1)

    def __repr__(self) -> str:
        kib = PIECE_BYTES // KIB
        return f"<BufferPathMemory {self._shares.taken}/{self._pieces_max} in use, {kib} KiB each>"
