"""The storage server as one tenant's requests reach it: over its share of the connections."""

from __future__ import annotations

from typing import TypeVar

from objectcache_gateway.storage.storage_connection import (
    StorageConnection,
    StorageConversation,
    StoragePool,
)
from objectcache_schemas.messages.message import Message

R = TypeVar("R", bound=Message)


class TenantStorage:
    """A pool on behalf of a tenant."""

    def __init__(self, pool: StoragePool, tenant: str) -> None:
        self._pool = pool
        self._tenant = tenant

    def conversation(self) -> StorageConversation:
        """As `StoragePool.conversation`; entering raises `Busy` past the tenant's share."""
        return StorageConversation(self._pool, self._tenant)

    async def call(
        self, request: Message, reply_type: type[R], *, timeout_s: float | None = None
    ) -> R:
        """As `StoragePool.call`."""
        async with self.conversation() as conversation:
            return await conversation.begin(request, reply_type, timeout_s=timeout_s)

    async def connect(self) -> StorageConnection:
        """As `StoragePool.connect`; for a session, of which the storage server keeps count."""
        return await self._pool.connect()

    def __repr__(self) -> str:
        return f"<TenantStorage of {self._tenant!r}, {self._pool!r}>"
