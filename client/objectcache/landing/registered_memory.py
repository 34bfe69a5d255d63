"""Memory of one client that a storage server reaches by one transport, and what it lies in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from objectcache.arguments import checked_count
from objectcache.landing.fabric_regions import FabricRegion, GivenRegion, device_memory_of
from objectcache.landing.held_targets import HeldTargets
from objectcache.landing.memory_file import MemoryFile
from objectcache.landing.regions import Region, SharedRegion
from objectcache.landing.target_pool import TargetPool
from objectcache.landing.targets import FabricTarget, SharedMemoryTarget
from objectcache.sessions.server_sessions import ServerSessions
from objectcache.sessions.session_keeper import SessionKeeper
from objectcache_schemas.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class RegisteredMemory:
    """What deliveries of one transport need: a session, and memory that it has registered.
    `servers` are sessions with several storage servers, for deliveries that these share.
    """

    transport: str
    sessions: SessionKeeper
    pool: TargetPool
    targets: HeldTargets
    servers: ServerSessions

    def stock(self, lengths_bytes: Sequence[int]) -> int:
        """Make and register memory for deliveries of these lengths; how many bytes there was room
        for. Raises `Unavailable`.
        """
        session = self.sessions.session()

        def register(region: Region) -> None:
            region.target_id(session)

        return sum(length for length in lengths_bytes if self.pool.stock(length, register))


def shared_memory_target(memory: RegisteredMemory, length_bytes: int) -> SharedMemoryTarget:
    """Shared memory of the caller's own, registered. Raises `Unavailable`."""
    length_bytes = checked_count("length_bytes", length_bytes)
    session = memory.sessions.session()
    region = SharedRegion(MemoryFile(length_bytes))
    region.target_id(session)
    target = SharedMemoryTarget(region)
    memory.targets.add(target)
    return target


def fabric_target(memory: RegisteredMemory, length_bytes: int | None, buffer: Any) -> FabricTarget:
    """Memory that the fabric reaches: as many bytes of our own, or the caller's `buffer`."""
    if (length_bytes is None) == (buffer is None):
        raise InvalidRequest("give either length_bytes or buffer")
    region: Region
    if buffer is not None:
        region = GivenRegion(*device_memory_of(buffer))
    else:
        region = FabricRegion(checked_count("length_bytes", length_bytes))
    region.target_id(memory.sessions.session())
    target = FabricTarget(region, memory.transport)
    memory.targets.add(target)
    return target
