"""The Buffer path (paper, section 4.1): one object into a client's target, through our memory.

The payload comes over a storage connection into this process' memory, piece after piece, and is
copied from there into the client's. The storage server lends the target's memory file for it, over
a second connection whose conversation lasts as long as the lease. That connection is closed only
when nothing is written any more, because the client may then use its memory for anything.

Memory that a fabric reaches has no file, and the gateway no way of its own into it: the payload
goes back over the lease's connection, and the storage server writes it (`FabricStagedTarget`).
"""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager

from objectcache_gateway.answering.http_exchange import Exchange
from objectcache_gateway.storage.storage_connection import StorageConnection
from objectcache_runtime.first_of import ended_after, first_done
from objectcache_runtime.memory_file_holes import has_holes
from objectcache_schemas.descriptor import Descriptor, MemoryTarget
from objectcache_schemas.errors import (
    DeliveryFailed,
    ObjectCacheError,
    Unavailable,
    Unsupported,
    WireError,
)
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.messages.kv import DeliveryEnded
from objectcache_schemas.messages.leases import EndLease, LeaseTarget, TargetLeased

SHARED_MEMORY = "shared_memory"  # the transport of targets that are memory files


class LeasedMemory:
    """The leased part of a target's memory file, mapped for as long as it is written."""

    def __init__(self, descriptor: int, offset_bytes: int, length_bytes: int) -> None:
        """Map no more than what is leased and the pages it lies in. The caller keeps (and closes)
        the descriptor. Raises `Unavailable`.
        """
        skipped_bytes = offset_bytes % mmap.ALLOCATIONGRANULARITY
        try:
            self._memory = mmap.mmap(
                descriptor,
                skipped_bytes + length_bytes,
                mmap.MAP_SHARED,
                offset=offset_bytes - skipped_bytes,
            )
            self._descriptor = os.dup(descriptor)
        except (OSError, ValueError) as error:
            raise Unavailable(f"the gateway cannot map the target: {error}") from error
        whole = memoryview(self._memory)
        self.view = whole[skipped_bytes:]
        whole.release()

    def write(self, offset_bytes: int, piece: memoryview) -> None:
        """Write a piece of the payload. Raises `DeliveryFailed` where the client has punched holes
        into its file, whose pages this process would make and pay for.
        """
        if has_holes(self._descriptor):
            raise DeliveryFailed(
                "the memory file has holes that it did not have when it was registered"
            )
        self.view[offset_bytes : offset_bytes + len(piece)] = piece

    def close(self) -> None:
        """Unmap."""
        os.close(self._descriptor)
        self.view.release()
        self._memory.close()


class StagedTarget:
    """A client's target, leased to this process."""

    def __init__(
        self, lease: StorageConnection, memory: LeasedMemory, first_layer: int, timeout_s: float
    ) -> None:
        self._lease = lease
        self._memory = memory
        self._first_layer = first_layer
        self._timeout_s = timeout_s

    async def fill(self, body: StorageConnection, piece: memoryview) -> DeliveryEnded:
        """Take the payload from `body`, write it by way of `piece`, and end the lease.

        Stops where the storage server ends the lease first. Nothing is written any more when this
        returns or raises.
        """
        answer = asyncio.ensure_future(self._lease.receive(Done, timeout_s=self._timeout_s))
        copying = asyncio.ensure_future(self._copy(body, piece))
        async with ended_after(answer, copying):
            await first_done(answer, copying)
            if copying.done() and not answer.done():
                await self._lease.send(EndLease(error=_copy_error(copying)))
                await asyncio.wait({answer})
        return self._ended(answer, copying)

    def _ended(self, answer: asyncio.Future[Done], copying: asyncio.Future[None]) -> DeliveryEnded:
        """What the storage server says of the lease counts before what the copying came to."""
        lease_error = answer.exception()
        if lease_error is not None:
            self._lease.close()
            if not isinstance(lease_error, ObjectCacheError):
                raise lease_error
        error = lease_error.to_wire() if lease_error else _copy_error(copying)
        if error is None:
            return DeliveryEnded(payload_bytes=len(self._memory.view))
        return DeliveryEnded(payload_bytes=0, error=error, failed_layer=self._first_layer)

    async def _copy(self, body: StorageConnection, piece: memoryview) -> None:
        """Raises `DeliveryFailed` where the payload ends early."""
        written_bytes, length_bytes = 0, len(self._memory.view)
        try:
            await body.ask_for_body(0, length_bytes)
            async with aclosing(body.receive_body(length_bytes, piece)) as pieces:
                async for received in pieces:
                    self._memory.write(written_bytes, received)
                    written_bytes += len(received)
        except ObjectCacheError as error:
            raise DeliveryFailed(
                f"the payload ended at byte {written_bytes} of {length_bytes}: {error.message}"
            ) from error


def _copy_error(copying: asyncio.Future[None]) -> WireError | None:
    """Why the payload is not in place; None where it is. Raises what is a defect of ours."""
    if copying.cancelled():
        return DeliveryFailed("the storage server ended the lease").to_wire()
    error = copying.exception()
    if error is None:
        return None
    if not isinstance(error, ObjectCacheError):
        raise error
    return error.to_wire()


@asynccontextmanager
async def leased_target(
    exchange: Exchange, descriptor: Descriptor, payload_bytes: int
) -> AsyncGenerator[StagedTarget | FabricStagedTarget]:
    """Lease the descriptor's target for a payload, and map it where it has a memory file, until the
    end of the block.

    Raises what the storage server refuses the lease with, `Unsupported` where it lends no memory
    file.
    """
    gateway, storage = exchange.settings.gateway, exchange.settings.storage
    timeout_s = storage.delivery_timeout_s + gateway.storage_timeout_s
    target = descriptor.rdma_target
    assert target is not None  # the storage server has accepted the path
    async with exchange.storage.conversation() as leasing:
        request = _lease_request(exchange.identity, descriptor, target, payload_bytes)
        if target.transport != SHARED_MEMORY:
            await leasing.begin(request, TargetLeased, timeout_s=exchange.admission_timeout_s)
            yield FabricStagedTarget(
                leasing.connection, payload_bytes, descriptor.first_layer, timeout_s
            )
            return
        _, file_descriptor = await leasing.begin_with_descriptor(request, TargetLeased)
        memory = _map(file_descriptor, target.offset_bytes, payload_bytes)
        try:
            yield StagedTarget(leasing.connection, memory, descriptor.first_layer, timeout_s)
        finally:
            memory.close()


def _map(file_descriptor: int | None, offset_bytes: int, length_bytes: int) -> LeasedMemory:
    if file_descriptor is None:
        raise Unsupported(
            "the path buffer needs the gateway on the storage server's host; use the path direct"
        )
    try:
        return LeasedMemory(file_descriptor, offset_bytes, length_bytes)
    finally:
        os.close(file_descriptor)


def _lease_request(
    identity: str, descriptor: Descriptor, target: MemoryTarget, payload_bytes: int
) -> LeaseTarget:
    return LeaseTarget(
        identity=identity,
        transport=target.transport,
        target_id=target.target_id,
        offset_bytes=target.offset_bytes,
        length_bytes=target.length_bytes,
        tag=target.tag,
        payload_bytes=payload_bytes,
        first_layer=descriptor.first_layer,
        end_layer=descriptor.end_layer,
    )


class FabricStagedTarget:
    """A client's target, leased, which takes its payload as data. Of its bytes there is a piece in
    this process' memory at a time.
    """

    def __init__(
        self, lease: StorageConnection, payload_bytes: int, first_layer: int, timeout_s: float
    ) -> None:
        self._lease = lease
        self._payload_bytes = payload_bytes
        self._first_layer = first_layer
        self._timeout_s = timeout_s

    async def fill(self, body: StorageConnection, piece: memoryview) -> DeliveryEnded:
        """Take the payload from `body`, pass it on by way of `piece`, and end the lease.

        Nothing is written any more when this returns. A lease that the storage server ends first
        is lost with its connection.
        """
        try:
            error = await self._pass_on(body, piece)
            await self._lease.end_data()
            await self._lease.ask(EndLease(error=error), Done, timeout_s=self._timeout_s)
        except ObjectCacheError as caught:
            self._lease.close()
            error = caught.to_wire()
        if error is None:
            return DeliveryEnded(payload_bytes=self._payload_bytes)
        return DeliveryEnded(payload_bytes=0, error=error, failed_layer=self._first_layer)

    async def _pass_on(self, body: StorageConnection, piece: memoryview) -> WireError | None:
        """Why the payload did not come whole; None where it did. Raises what is against the lease.

        A payload that is cut is told to the storage server, because what it has of it may still be
        on its way into the client's memory.
        """
        passed_bytes = 0
        await body.ask_for_body(0, self._payload_bytes)
        async with aclosing(body.receive_body(self._payload_bytes, piece)) as pieces:
            while passed_bytes < self._payload_bytes:
                try:
                    received = await anext(pieces)
                except ObjectCacheError as error:
                    return DeliveryFailed(
                        f"the payload ended at byte {passed_bytes} of {self._payload_bytes}: "
                        f"{error.message}"
                    ).to_wire()
                await self._lease.send_data([received])
                passed_bytes += len(received)
        return None
