"""Routes of the storage servers: which there are, and how they are."""

from __future__ import annotations

from objectcache_gateway.admin.serving.routes import Call, Nothing, Route
from objectcache_gateway.admin.serving.storage_servers import ask_each, name_of
from objectcache_schemas.errors import ObjectCacheError
from objectcache_schemas.operators.admin_api import ServersReply, StorageServerView
from objectcache_schemas.operators.server_list import GetServers, Servers


async def list_servers(call: Call[Nothing, Nothing]) -> ServersReply:
    """Every storage server, asked now."""
    answers = await ask_each(call.storage, GetServers(), Servers)
    return ServersReply(
        servers=tuple(server_view(name_of(one), answer) for one, answer in answers.items())
    )


def server_view(asked: str, answer: Servers | ObjectCacheError) -> StorageServerView:
    """A server by its name, and what it answered. `asked`: its name where it did not."""
    if isinstance(answer, ObjectCacheError):
        return StorageServerView(server=asked, ok=False, message=answer.message)
    state = answer.answering
    return StorageServerView(
        server=state.name,
        ok=True,
        message=state.store_failure,
        host_id=state.host_id,
        load=state.load,
        in_flight_bytes=state.in_flight_bytes,
        sessions=state.sessions,
        draining=state.draining,
        writer=f"{state.writer:016x}" if state.writer else "",
        lag_records=state.lag_records,
        lag_is_known=state.lag_is_known,
    )


ROUTES = (
    Route(
        *("GET", "/v1/servers", "server:read", "All storage servers", list_servers, ServersReply),
    ),
)
