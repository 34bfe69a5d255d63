"""The gateway's own memory for deliveries that are staged in it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from objectcache_schemas.errors import Busy
from objectcache_schemas.limits import KIB

PIECE_BYTES = 256 * KIB  # of one delivery; a local socket gives little more at once
PIECES_MAX = 64


class StagingMemory:
    """At most `pieces_max` pieces at a time, one for each staged delivery."""

    def __init__(self, pieces_max: int = PIECES_MAX) -> None:
        self._pieces_max = pieces_max
        self._in_use = 0

    @contextmanager
    def piece(self, payload_bytes: int) -> Generator[memoryview]:
        """Memory for one delivery, no more than its payload needs. Raises `Busy` where all is in
        use.
        """
        if self._in_use >= self._pieces_max:
            raise Busy(
                f"{self._in_use} deliveries are staged in the gateway, which is its limit; "
                "the path direct needs no staging",
                retry_after_s=1.0,
            )
        self._in_use += 1
        try:
            yield memoryview(bytearray(min(payload_bytes, PIECE_BYTES)))
        finally:
            self._in_use -= 1

    def __repr__(self) -> str:
        kib = PIECE_BYTES // KIB
        return f"<StagingMemory {self._in_use}/{self._pieces_max} in use, {kib} KiB each>"
