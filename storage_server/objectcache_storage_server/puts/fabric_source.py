"""The payload of a put in memory that a fabric reaches: read from there into staging memory, and
written by the engine while the next pieces are read.
"""

from __future__ import annotations

import asyncio
from collections import deque

from objectcache_fabrics.staged_moves import StagedMoves
from objectcache_runtime.first_of import end
from objectcache_runtime.networking.stream_socket import ConnectionEnded
from objectcache_schemas.descriptor import MemoryTarget
from objectcache_schemas.errors import InvalidRequest
from objectcache_storage_server.conversations.conversation import Conversation
from objectcache_storage_server.engines.base import PrefixShape
from objectcache_storage_server.engines.block_checksums import slice_block_bytes
from objectcache_storage_server.puts.put_means import PutMeans
from objectcache_storage_server.puts.target_source import (
    PayloadSink,
    TargetSource,
    check_length,
    write_piece,
)


class FabricSource(TargetSource):
    """A lease on the payload and staging memory to read it into, until `close`."""

    def __init__(self, means: PutMeans, moves: StagedMoves, piece_bytes: int) -> None:
        self._means = means
        self._moves = moves
        self._piece_bytes = piece_bytes

    @classmethod
    async def open(
        cls,
        means: PutMeans,
        talk: Conversation,
        identity: str,
        asked: MemoryTarget,
        shape: PrefixShape,
    ) -> FabricSource:
        """Wait for staging memory, and lease the target: in this order, because the lease of a
        target that is released is waited for.

        Raises as `Gates.staging_memory` and `TargetRegistry.lease`, and `InvalidRequest` where the
        length is not the payload's or a checksum block is larger than a staging buffer.
        """
        check_length(asked, shape)
        staging = means.staging
        piece_bytes = staged_piece_bytes(shape, staging.buffer_bytes)
        reserved = await means.gates.staging_memory(identity, shape.wire_bytes, talk.gone)
        try:
            lease = means.targets.lease(identity, asked, shape.wire_bytes)
        except BaseException:
            reserved.release()
            raise
        moves = StagedMoves(lease, staging, reserved, lease.target.owner.end)
        return cls(means, moves, piece_bytes)

    async def write_all(self, talk: Conversation, sink: PayloadSink) -> None:
        """As `TargetSource.write_all`; `DeliveryFailed` where the client's memory cannot be read
        any more. Whatever it raises to whom it answers, nothing is read then.
        """
        watching = asyncio.ensure_future(talk.stream.closed_by_peer())
        watching.add_done_callback(lambda _: self._moves.fail(ConnectionEnded()))
        try:
            await self._write_pieces(sink)
        except ConnectionEnded:
            raise  # nobody hears an answer: the lease ends with the last read
        except Exception:
            self.close()
            await self._moves.quiet()
            raise
        finally:
            self.close()
            await end(watching)

    async def _write_pieces(self, sink: PayloadSink) -> None:
        moves = self._moves
        ahead: deque[tuple[int, memoryview, asyncio.Future[None]]] = deque()
        asked_bytes = 0
        while True:
            while moves.has_room and asked_bytes < moves.length_bytes:
                piece = moves.take(min(self._piece_bytes, moves.length_bytes - asked_bytes))
                ahead.append((asked_bytes, piece, moves.read(asked_bytes, piece)))
                asked_bytes += len(piece)
            if not ahead:
                return
            start_bytes, piece, arrived = ahead.popleft()
            await moves.until(arrived.done)
            await write_piece(self._means, sink, start_bytes, piece)
            moves.give_back(piece)

    def close(self) -> None:
        self._moves.close()


def staged_piece_bytes(shape: PrefixShape, buffer_bytes: int) -> int:
    """How much of the payload is read and written at once: whole checksum blocks, as many as a
    buffer holds. Raises `InvalidRequest` where it holds none.
    """
    block_bytes = slice_block_bytes(shape.slice_bytes)
    if block_bytes > buffer_bytes:
        raise InvalidRequest(
            f"per_layer_chunk_bytes is {shape.slice_bytes}, which is verified in blocks of "
            f"{block_bytes} bytes; over a fabric storage.fragment_bytes, {buffer_bytes}, must hold "
            "one: raise it, or send the payload in the body"
        )
    return buffer_bytes // block_bytes * block_bytes
