"""`GET /healthz`: whether the storage server behind this gateway answers. Unauthenticated.

Only the exact path, without a query and without an Authorization header, is this; a bucket called
healthz is reached by any signed request.
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from objectcache_gateway.exchange import Exchange
from objectcache_gateway.request.addressing import Target
from objectcache_schemas.errors import Busy, ObjectCacheError
from objectcache_schemas.messages import GetHealth, Health

PATH = "/healthz"


def is_health_check(request: web.BaseRequest, target: Target) -> bool:
    """Whether a request asks for the health."""
    return (
        request.method in ("GET", "HEAD")
        and target.raw_path == PATH
        and not target.raw_query
        and "Authorization" not in request.headers
    )


async def health_response(exchange: Exchange) -> web.Response:
    """200 when the storage server serves, else 503; the body says so as JSON.

    A gateway whose storage connections are all in use is busy, not ill.
    """
    try:
        health = await exchange.storage.call(GetHealth(), Health)
    except Busy:
        return _response(exchange, 200, {"status": "busy"})
    except ObjectCacheError as error:
        return _response(exchange, 503, {"status": "unavailable", "message": error.message})
    status = "draining" if health.draining else "ok"
    return _response(
        exchange, 503 if health.draining else 200, {"status": status, "engine": health.engine}
    )


def _response(exchange: Exchange, status: int, body: dict[str, str]) -> web.Response:
    named = {**exchange.base_headers, "Content-Type": "application/json"}
    return web.Response(status=status, body=msgspec.json.encode(body), headers=named)
