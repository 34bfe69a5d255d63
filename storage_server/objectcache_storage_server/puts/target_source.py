"""The payload of a put in a client's registered memory, written from there without a copy.

The client may change its memory meanwhile. What it changes is read twice, for the checksum and for
the device, and may differ: such a chunk is damage of its writer's own making. It fails its checksum
when it is read, is dropped, and reads as missing. No other chunk is touched by it.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Protocol

from objectcache_runtime.first_of import end
from objectcache_runtime.networking.stream_socket import ConnectionEnded
from objectcache_schemas.descriptor import MemoryTarget
from objectcache_schemas.errors import InvalidRequest, ObjectCacheError
from objectcache_schemas.limits import MIB
from objectcache_storage_server.conversations.conversation import Conversation
from objectcache_storage_server.engines.base import PrefixShape
from objectcache_storage_server.engines.block_checksums import slice_block_bytes
from objectcache_storage_server.puts.put_means import PutMeans

PIECE_BYTES = 32 * MIB  # written in one call: whole extents, so that a device is kept busy


class PayloadSink(Protocol):
    """What a payload is written into: a staged prefix, or what takes an encoded one apart."""

    def write(self, position_bytes: int, data: memoryview) -> None:
        """Take its next bytes."""
        ...


class TargetSource(ABC):
    """A lease on the payload, until `close`. The target's owner may end it at any time."""

    @abstractmethod
    async def write_all(self, talk: Conversation, sink: PayloadSink) -> None:
        """Write the whole payload, and close.

        Raises the engine's errors, `NotFound` (NoSuchTarget) where the target was released before
        the last byte was taken, `InvalidRequest` where its memory has lost pages, and
        `ConnectionEnded` when the gateway hung up.
        """

    @abstractmethod
    def close(self) -> None:
        """Let the target go, as soon as nobody reads it. Repeating has no effect."""


class MappedSource(TargetSource):
    """In a memory file. It is not read any more when `write_all` returns or raises."""

    def __init__(
        self, means: PutMeans, identity: str, asked: MemoryTarget, shape: PrefixShape
    ) -> None:
        """Raises `InvalidRequest` where the length is not the payload's or leaves the target,
        `NotFound` (NoSuchTarget) unless the identity registered it.
        """
        check_length(asked, shape)
        self._means = means
        self._piece_bytes = piece_bytes(shape)
        self._ended: ObjectCacheError | None = None
        self._lease = means.targets.lease(identity, asked, shape.wire_bytes)
        self._lease.on_release(self._end)

    def _end(self, error: ObjectCacheError) -> None:
        self._ended = error

    async def write_all(self, talk: Conversation, sink: PayloadSink) -> None:
        watching = asyncio.ensure_future(talk.stream.closed_by_peer())
        try:
            for start_bytes in range(0, len(self._lease.view), self._piece_bytes):
                self._check(watching)
                self._lease.target.check_whole()
                piece = self._lease.view[start_bytes : start_bytes + self._piece_bytes]
                await write_piece(self._means, sink, start_bytes, piece)
            self._check(watching)
        finally:
            await end(watching)
            self.close()

    def _check(self, watching: asyncio.Future[None]) -> None:
        if self._ended is not None:
            raise self._ended
        if watching.done():
            raise ConnectionEnded

    def close(self) -> None:
        self._lease.end()


async def write_piece(
    means: PutMeans, sink: PayloadSink, start_bytes: int, piece: memoryview
) -> None:
    """Have the engine write a piece; nobody reads its memory when this returns or raises."""
    writing = asyncio.ensure_future(means.calls.call(sink.write, start_bytes, piece))
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait([writing])
        raise


def piece_bytes(shape: PrefixShape) -> int:
    """How much of the payload is written at once: about PIECE_BYTES of whole chunks where it is
    chunkwise, else of whole slices, and at least one checksum block.
    """
    units = [shape.slice_bytes, slice_block_bytes(shape.slice_bytes)]
    if not shape.layerwise:
        units.insert(0, shape.chunk_bytes)
    for unit_bytes in units:
        if unit_bytes <= PIECE_BYTES:
            return PIECE_BYTES // unit_bytes * unit_bytes
    return units[-1]


def check_length(asked: MemoryTarget, shape: PrefixShape) -> None:
    """Raise `InvalidRequest` where the length is not the payload's."""
    if asked.length_bytes != shape.wire_bytes:
        raise InvalidRequest(
            f"rdma_target.length_bytes is {asked.length_bytes}, "
            f"the payload of the put has {shape.wire_bytes} bytes",
            code="InvalidDescriptor",
        )
