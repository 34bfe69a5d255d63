"""The data of a put, as a gateway sends it: received and written by turns, then ended."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Callable

from objectcache_schemas.errors import Busy, InvalidRequest, ObjectCacheError
from objectcache_schemas.limits import MIB
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.messages.writes import CommitPut, SendData
from objectcache_storage_server.admission.client_pace import ClientPace
from objectcache_storage_server.conversations.conversation import Conversation
from objectcache_storage_server.puts.put_means import PutMeans

BUFFERS_BYTES = 4 * MIB  # of data received before it is written, in two buffers that take turns


class Receiver:
    """Takes the data frames of a put and has them written, in order, in a worker thread.

    One buffer is received into while the other is written, so a put holds two buffers however
    large it is. Every buffer but the last holds whole blocks. Where whoever writes keeps some of
    the data itself, the buffers are shorter by that, so that every put holds as much.
    """

    def __init__(
        self,
        means: PutMeans,
        write: Callable[[int, memoryview], None],
        block_bytes: int,
        tenant: str,
        *,
        kept_bytes: int = 0,
    ) -> None:
        """`kept_bytes` are the most that `write` keeps of the data from one call to the next."""
        self._means = means
        self._write = write
        self._tenant = tenant
        buffer_bytes = (BUFFERS_BYTES - kept_bytes) // 2
        buffer_bytes = max(block_bytes, buffer_bytes // block_bytes * block_bytes)
        self._buffers = [memoryview(mmap.mmap(-1, buffer_bytes)) for _ in range(2)]
        self._filled_bytes = 0
        self._written_bytes = 0
        self._writing: asyncio.Future[None] | None = None
        self.error: ObjectCacheError | None = None  # of a write; what comes after it is drained

    async def receive(self, talk: Conversation, bytes_max: int) -> int:
        """Receive until the empty frame; returns the bytes. An engine's error is raised at the
        end, once the data was drained, so that the conversation stays in step.
        """
        total_bytes = 0
        pace = self._means.gates.slow_puts.add(self._tenant)
        try:
            while (length_bytes := await pace.wait_for(talk.stream.receive_length())) > 0:
                total_bytes += length_bytes
                if total_bytes > bytes_max:
                    raise InvalidRequest(
                        f"the data is over {bytes_max} bytes", code="EntityTooLarge"
                    )
                await self._receive_frame(talk, pace, length_bytes)
            await self._flush()
            await self._written()
        finally:
            self._means.gates.slow_puts.remove(pace)
            if self._writing is not None:
                await asyncio.wait([self._writing])
        if self.error is not None:
            raise self.error
        return total_bytes

    async def _receive_frame(self, talk: Conversation, pace: ClientPace, length_bytes: int) -> None:
        while length_bytes:
            room = self._buffers[0][self._filled_bytes :][:length_bytes]
            await pace.wait_for(talk.stream.receive_into(room))
            pace.moved(len(room))
            self._filled_bytes += len(room)
            length_bytes -= len(room)
            if self._filled_bytes == len(self._buffers[0]):
                await self._flush()

    async def _flush(self) -> None:
        """Hand the filled buffer to a writer, once the one before is through."""
        await self._written()
        if self._filled_bytes and self.error is None:
            data = self._buffers[0][: self._filled_bytes]
            call = self._means.calls.call(self._write, self._written_bytes, data)
            self._writing = asyncio.ensure_future(call)
        self._written_bytes += self._filled_bytes
        self._filled_bytes = 0
        self._buffers.reverse()

    async def _written(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            try:
                await writing
            except ObjectCacheError as error:
                self.error = error


async def receive_all(
    talk: Conversation, receiver: Receiver, total_bytes: int | None, bytes_max: int
) -> tuple[int, CommitPut] | None:
    """Take the data and how it ends; None where the gateway aborted, which is acknowledged."""
    await talk.send(SendData())
    error: ObjectCacheError | None = None
    received_bytes = 0
    try:
        received_bytes = await receiver.receive(talk, bytes_max)
    except ObjectCacheError as caught:
        if caught is not receiver.error and isinstance(caught, InvalidRequest | Busy):
            talk.give_up()  # data beyond the limit, or of a client that is too slow, is under way
            raise
        error = caught
    end = await talk.receive_put_end()
    if not isinstance(end, CommitPut):
        await talk.send(Done())
        return None
    if error is not None:
        raise error
    if total_bytes is not None and received_bytes != total_bytes:
        raise InvalidRequest(
            f"the data ended after {received_bytes} of {total_bytes} bytes",
            code="IncompleteBody",
        )
    return received_bytes, end
