"""The storage servers as one tenant's requests reach them: over its share of the connections."""

from __future__ import annotations

from typing import TypeVar

from objectcache_gateway.storage.storage_connection import StorageConnection
from objectcache_gateway.storage.storage_fleet import Prefer, StorageFleet, nobody
from objectcache_gateway.storage.storage_pool import StorageConversation
from objectcache_schemas.messages.message import Message
from objectcache_schemas.operators.server_list import ServerState

R = TypeVar("R", bound=Message)


class TenantStorage:
    """A fleet on behalf of a tenant."""

    def __init__(self, fleet: StorageFleet, tenant: str) -> None:
        self._fleet = fleet
        self._tenant = tenant

    def conversation(self, prefer: Prefer = nobody) -> StorageConversation:
        """As `StorageFleet.conversation`; entering raises `Busy` past the tenant's share."""
        return self._fleet.conversation(self._tenant, prefer)

    async def call(
        self,
        request: Message,
        reply_type: type[R],
        *,
        timeout_s: float | None = None,
        prefer: Prefer = nobody,
    ) -> R:
        """As `StorageFleet.call`, to a server that is preferred where there is one."""
        async with self.conversation(prefer) as conversation:
            return await conversation.begin(request, reply_type, timeout_s=timeout_s)

    async def connect_with(
        self, request: Message, reply_type: type[Message], prefer: Prefer = nobody
    ) -> StorageConnection:
        """As `StorageFleet.connect_with`; for a session, of which its server keeps count."""
        return await self._fleet.connect_with(request, reply_type, prefer)

    @property
    def serving(self) -> list[ServerState]:
        """The storage servers that may be asked, as they last told of themselves."""
        servers = self._fleet.servers
        return [one.state for one in servers if one.serves and one.state is not None]

    def __repr__(self) -> str:
        return f"<TenantStorage of {self._tenant!r}, {self._fleet!r}>"
