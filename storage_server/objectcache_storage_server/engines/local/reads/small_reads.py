"""Whole small objects out of the page cache, for callers that must not wait.

Nothing is held: what was looked up inside of `Holdings.looking_up` stays where it is until that
ends, so the look-up and the read are one step. What is not at hand is left to the ordinary way,
which waits for the device, and which drops what is damaged.
"""

from __future__ import annotations

from objectcache_schemas.records import Verification
from objectcache_storage_server.engines.local.reads.path_use import PathUse
from objectcache_storage_server.engines.local.reads.verified_reads import (
    DamagedVersion,
    ObjectSource,
    OpenExtent,
    Run,
    verify,
)
from objectcache_storage_server.engines.local.records import Version
from objectcache_storage_server.engines.local.space.holdings import Holdings
from objectcache_storage_server.engines.local.volumes.volume import IoPath


def read_resident(
    version: Version, holdings: Holdings, path_use: PathUse, verification: Verification
) -> bytes | None:
    """All bytes of an object that lies on its own and is in the page cache; None for any other.

    To be called inside of `holdings.looking_up`.
    """
    size_bytes = version.info.size_bytes
    if not size_bytes:
        return b""
    place = holdings.use_alone(version)
    if place is None or place[1] is not IoPath.PAGE_CACHE:
        return None
    memory = bytearray(size_bytes)
    extent = OpenExtent(version.extents[0], place[0], size_bytes, IoPath.PAGE_CACHE)
    source = ObjectSource(version, [Run(0, size_bytes, extent)])
    sample = path_use.sample()
    try:
        for piece in source.pieces(0, memoryview(memory)):
            if not path_use.volume.read_resident(piece.transfer):
                return None
            path_use.count_found(len(piece.transfer.memory))
            verify(piece, verification, sample)
    except (DamagedVersion, OSError):
        return None
    return bytes(memory)
