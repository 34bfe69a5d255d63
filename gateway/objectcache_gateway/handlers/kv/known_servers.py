"""Which storage servers there are, for clients that have several of them deliver at once."""

from __future__ import annotations

import msgspec
from aiohttp import web

from objectcache_gateway.answering.http_exchange import Exchange
from objectcache_gateway.storage.storage_fleet import Prefer, called, on_host
from objectcache_schemas import headers
from objectcache_schemas.descriptor import DESCRIPTOR_VERSION, SERVER_ID_BYTES
from objectcache_schemas.errors import InvalidRequest


class KnownServerId(msgspec.Struct, frozen=True, kw_only=True):
    """One of `ServerIds`."""

    server_id: bytes
    host_id: str  # boot id of its host


class ServerIds(msgspec.Struct, frozen=True, kw_only=True):
    """Body of the answer to `GET /?kv-servers`."""

    v: int
    servers: list[KnownServerId]


async def list_servers(exchange: Exchange) -> web.StreamResponse:
    """`GET /?kv-servers`: those that take requests, as this gateway knows them."""
    servers = [
        KnownServerId(server_id=one.server_id, host_id=one.host_id)
        for one in exchange.storage.serving
    ]
    body = msgspec.msgpack.encode(ServerIds(v=DESCRIPTOR_VERSION, servers=servers))
    return exchange.document(body, headers.MSGPACK)


def wanted_server(exchange: Exchange, otherwise: Prefer | None = None) -> Prefer:
    """With which server a session is wanted: the one that the request names, else `otherwise`, by
    default one on the client's host. Raises `InvalidRequest` for what is no id.
    """
    named = exchange.head.header(headers.SERVER_ID)
    if named is not None:
        return called(_server_id(named))
    return otherwise or on_host(exchange.head.header(headers.HOST_ID) or "")


def _server_id(text: str) -> bytes:
    try:
        server_id = bytes.fromhex(text)
    except ValueError:
        server_id = b""
    if len(server_id) != SERVER_ID_BYTES:
        raise InvalidRequest(
            f"{headers.SERVER_ID} must be {2 * SERVER_ID_BYTES} hexadecimal digits"
        )
    return server_id
