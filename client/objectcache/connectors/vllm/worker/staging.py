"""Memory for blocks on their way to the store, which the server reads by itself where it can."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np

from objectcache.landing.targets import SessionTarget
from objectcache.payload import Bytes
from objectcache_schemas.errors import ObjectCacheError
from objectcache_schemas.layout import KvLayout

logger = logging.getLogger("objectcache.connectors.vllm")
RETRY_S = 60.0


class SlotStaging:
    """`slot_count` slots of one chunk each: uint8[slot_count, layers, slice_bytes].

    Registered with the server, or plain memory, out of which puts go in bodies. The owner gives no
    slot out while it calls `renew`.
    """

    def __init__(
        self,
        register: Callable[[int], SessionTarget] | None,
        slot_count: int,
        layout: KvLayout,
    ) -> None:
        """`register` makes so many bytes of memory that the server reaches, or raises
        `ObjectCacheError`; without it the memory is plain.
        """
        self._register = register
        self._layout = layout
        self._target: SessionTarget | None = None
        self._retry_s = float("-inf")
        self.slot_count = slot_count
        self.slots = self._memory()

    @property
    def is_spoilt(self) -> bool:
        """Whether no slot may be used again: the server may still read what a put that ended
        without an answer had in one, or has lost the memory with the session.
        """
        return self._target is not None and (self._target.is_lost or self._target.is_read)

    @property
    def could_be_better(self) -> bool:
        """Whether plain memory stands in for memory that could not be registered a while ago."""
        plain = self._register is not None and self._target is None
        return plain and time.monotonic() >= self._retry_s

    def renew(self) -> None:
        """Take other memory. Waits for the server; nothing is in a slot."""
        self.close()
        self.slots = self._memory()

    def _memory(self) -> Bytes:
        if self._register is not None:
            try:
                self._target = self._register(self.slot_count * self._layout.chunk_bytes)
                return self._target.chunks(self.slot_count, self._layout)
            except ObjectCacheError as error:
                self._retry_s = time.monotonic() + RETRY_S
                logger.info("blocks are sent to the store in bodies: %s", error.message)
        layers = self._layout.num_layers
        return np.empty((self.slot_count, layers, self._layout.per_layer_chunk_bytes), np.uint8)

    def close(self) -> None:
        """Take the memory away from the server. Repeating has no effect."""
        target, self._target = self._target, None
        if target is not None:
            target.close()

    def __repr__(self) -> str:
        kind = "plain" if self._target is None else "registered"
        return f"<SlotStaging {self.slot_count} slots, {kind}>"
