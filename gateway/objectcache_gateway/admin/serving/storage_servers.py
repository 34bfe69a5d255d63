"""What is asked of every storage server, where there are several: each knows its own deliveries."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from objectcache_gateway.storage.known_server import KnownServer
from objectcache_gateway.storage.storage_fleet import StorageFleet
from objectcache_gateway.storage.storage_pool import without_waiting
from objectcache_schemas.errors import InvalidRequest, NotFound, ObjectCacheError, Unavailable
from objectcache_schemas.messages.message import Message

R = TypeVar("R", bound=Message)

TIMEOUT_S = 5.0  # of one that others need not be waited for


async def answers_of(storage: StorageFleet, request: Message, reply_type: type[R]) -> list[R]:
    """What each server that can be asked answers. Where there is one only it is waited for, and
    what it refuses is raised; where there are several what all refuse is.
    """
    if not storage.has_several:
        return [await storage.call(request, reply_type)]
    answers = (await ask_each(storage, request, reply_type)).values()
    found = [one for one in answers if not isinstance(one, ObjectCacheError)]
    if not found:
        errors = [one for one in answers if isinstance(one, ObjectCacheError)]
        raise next((one for one in errors if isinstance(one, NotFound)), errors[0])
    return found


async def ask_each(
    storage: StorageFleet, request: Message, reply_type: type[R], timeout_s: float = TIMEOUT_S
) -> dict[KnownServer, R | ObjectCacheError]:
    """How each server answers within the time."""
    servers = list(storage.servers)
    asked = (_ask(server, request, reply_type, timeout_s) for server in servers)
    return dict(zip(servers, await asyncio.gather(*asked), strict=True))


async def _ask(
    server: KnownServer, request: Message, reply_type: type[R], timeout_s: float
) -> R | ObjectCacheError:
    try:
        with without_waiting():
            async with asyncio.timeout(timeout_s):
                return await server.pool.call(request, reply_type)
    except TimeoutError:
        return Unavailable("the storage server does not answer")
    except ObjectCacheError as error:
        return error


def named_server(storage: StorageFleet, name: str) -> KnownServer:
    """The server of this name; without a name the only one. Raises `InvalidRequest`."""
    names = {name_of(server): server for server in storage.servers}
    if not name and not storage.has_several:
        return storage.first
    if name not in names:
        raise InvalidRequest(f"server must be one of {', '.join(names)}, got {name!r}")
    return names[name]


def name_of(server: KnownServer) -> str:
    """What an operator calls it: as it names itself, or where it is reached."""
    return server.state.name if server.state is not None else server.name


def process_of(storage: StorageFleet, server: KnownServer) -> str:
    """How a server is called among the processes."""
    return f"storage {name_of(server)}" if storage.has_several else "storage"
