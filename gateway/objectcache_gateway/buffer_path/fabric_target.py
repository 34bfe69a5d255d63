"""The Buffer path into memory that a fabric reaches: staged in this process, written by the storage
server.

The gateway has no way of its own into such memory. The payload comes over one storage connection,
lies in a piece of this process' memory, and goes back over the lease's; the storage server writes
it into the client's memory, and says when nothing of it moves any more.
"""

from __future__ import annotations

from contextlib import aclosing

from objectcache_gateway.storage.storage_connection import StorageConnection
from objectcache_schemas.errors import DeliveryFailed, ObjectCacheError, WireError
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.messages.kv import DeliveryEnded
from objectcache_schemas.messages.leases import EndLease


class FabricStagedTarget:
    """A client's target, leased, which takes its payload as data."""

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
