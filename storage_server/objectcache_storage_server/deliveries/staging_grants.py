"""The staging memory that a transfer over a fabric may hold."""

from __future__ import annotations

from objectcache_runtime.buffers import MemoryGrant
from objectcache_storage_server.admission.memory_line import MemoryWish
from objectcache_storage_server.conversations.conversation import Asker
from objectcache_storage_server.service import Service

STAGED_FRAGMENTS = 4  # read, being written, and one more of each: more would only leave the cache


async def grant_staging(
    service: Service, asker: Asker, tenant: str, payload_bytes: int
) -> MemoryGrant:
    """Wait for some of it: whole buffers, one at least. Raises as `MemoryGrants.grant`."""
    staging = service.fabrics.staging
    useful_bytes = min(
        STAGED_FRAGMENTS * staging.buffer_bytes, staging.charged_bytes(payload_bytes)
    )
    least_bytes = staging.buffer_bytes
    wish = MemoryWish(max(least_bytes, useful_bytes), least_bytes)
    return await service.staging_grants.grant(tenant, wish, asker.gone)
