"""The staging memory that a transfer over a fabric may hold."""

from __future__ import annotations

from objectcache_storage_server.connections.conversation import Conversation
from objectcache_storage_server.memory_line import MemoryWish
from objectcache_storage_server.service import Service

STAGED_FRAGMENTS = 4  # read, being written, and one more of each: more would only leave the cache


async def grant_staging(service: Service, talk: Conversation, payload_bytes: int) -> int:
    """Wait for some of it; returns the bytes, whole buffers, one at least, which go back with
    `release`. Raises as `MemoryGrants.grant`.
    """
    staging = service.fabrics.staging
    useful_bytes = min(
        STAGED_FRAGMENTS * staging.buffer_bytes, staging.charged_bytes(payload_bytes)
    )
    least_bytes = staging.buffer_bytes
    wish = MemoryWish(max(least_bytes, useful_bytes), least_bytes)
    return await service.staging_grants.grant(wish, talk.stream.closed_by_peer)
