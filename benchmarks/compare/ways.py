"""The ways to fetch a prefix, and what follows from the design of each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Way:
    """One way to fetch a prefix: a line of the table.

    `copies` is how often a payload byte is copied by a processor between the server's memory and
    the client's target, by design (`copies_why` counts them), not measured. Where `layerwise` is
    false no layer is whole before everything is, so the first layer comes with the last.
    """

    name: str
    layerwise: bool
    is_ours: bool  # the layerwise request; ObjectCache asked as plain S3 is a peer's way
    is_s3: bool
    persists: bool
    copies: int
    copies_why: str
    ranged: bool = False  # one request for each chunk and layer

    def requests(self, chunk_count: int, num_layers: int) -> int:
        """HTTP requests of a fetch; 1 where it is not made of S3's reads."""
        if not self.is_s3:
            return 1
        return chunk_count * (num_layers if self.ranged else 1)


SHARED_MEMORY = Way(
    "ObjectCache, layerwise, shared memory",
    *(True, True, False, True),
    copies=1,
    copies_why="page cache to the target",
)
BODY = Way(
    "ObjectCache, layerwise, body",
    *(True, True, False, True),
    copies=3,
    copies_why="page cache to buffer, buffer to socket, socket to the target",
)
NIXL = Way(
    "ObjectCache, layerwise, NIXL",
    *(True, True, False, True),
    copies=2,
    copies_why="page cache to staging, staging to the target (UCX: shared memory or CMA)",
)
MOONCAKE_WHOLE = Way(
    "Mooncake Store, TCP, whole gets",
    *(False, False, False, False),
    copies=2,
    copies_why="segment to socket, socket to the target",
)
MOONCAKE_LAYERS = Way(
    "Mooncake Store, TCP, per-layer session",
    *(True, False, False, False),
    copies=2,
    copies_why="segment to socket, socket to the target",
)
REDIS_LIBRARY = Way(
    "Redis, redis-py, MGET",
    *(False, False, False, True),
    copies=6,
    copies_why="value to reply, reply to socket, socket to bytes, bytes to the library's buffer, "
    "buffer to a value, value to the target",
)
REDIS_IN_PLACE = Way(
    "Redis, MGET received in place",
    *(False, False, False, True),
    copies=3,
    copies_why="value to reply, reply to socket, socket to the target",
)

OURS_AS_S3 = "ObjectCache as S3"
RADOSGW = "radosgw"
_SERVER_COPIES = {
    OURS_AS_S3: (2, "page cache to buffer, buffer to socket"),
    RADOSGW: (3, "OSD's memory to socket, socket to gateway, gateway to socket"),
}


def lmcache_way(server: str) -> Way:
    """LMCache's S3 connector on a server."""
    return _s3_way(
        f"LMCache S3 connector, {server}",
        server,
        layerwise=False,
        client=(3, "socket to the library's buffer, buffer to bytes, bytes to the target"),
    )


def nixl_obj_way(server: str, layerwise: bool) -> Way:
    """NIXL's OBJ plugin on a server."""
    how = "ranged GETs, layer by layer" if layerwise else "whole GETs"
    client = (2, "socket to curl's buffer, curl's buffer to the target")
    return _s3_way(f"NIXL OBJ, {how}, {server}", server, layerwise, client)


def _s3_way(name: str, server: str, layerwise: bool, client: tuple[int, str]) -> Way:
    copies, why = _SERVER_COPIES[server]
    return Way(
        name,
        *(layerwise, False, True, True),
        copies=copies + client[0],
        copies_why=f"{why}, {client[1]}",
        ranged=layerwise,
    )
