"""`GET /healthz`: whether the storage server behind this gateway answers. Unauthenticated.

Only the exact path, without a query and without an Authorization header, is this; a bucket called
healthz is reached by any signed request. Where there is no such bucket a signed GET is this, too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

import msgspec
from aiohttp import web

from objectcache_gateway.answering.http_exchange import Exchange
from objectcache_gateway.request.addressing import RequestTarget
from objectcache_schemas.errors import Busy, ObjectCacheError
from objectcache_schemas.operators.server_state import GetHealth, Health

PATH = "/healthz"
KEPT_S = 1.0


def is_health_check(request: web.BaseRequest, target: RequestTarget) -> bool:
    """Whether a request asks for the health."""
    return (
        request.method in ("GET", "HEAD")
        and target.raw_path == PATH
        and not target.raw_query
        and "Authorization" not in request.headers
    )


def is_signed_health_check(request: web.BaseRequest, error: ObjectCacheError) -> bool:
    """Whether a request that failed so, for want of a bucket of that name, asks for the health."""
    return request.method == "GET" and request.raw_path == PATH and error.code == "NoSuchBucket"


class HealthState(NamedTuple):
    """What a health check is answered with."""

    status: int
    body: Mapping[str, str]


class HealthCheck:
    """The storage server's health, asked for at most once in `KEPT_S`: nobody signs these requests,
    and the storage server has other work. `clock` is monotonic.
    """

    def __init__(
        self,
        ask: Callable[[GetHealth], Awaitable[Health]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._clock = clock
        self._asking = asyncio.Lock()
        self._state: HealthState | None = None
        self._kept_until_s = 0.0

    async def state(self) -> HealthState:
        """The health, at most `KEPT_S` old."""
        async with self._asking:
            if self._state is None or self._clock() >= self._kept_until_s:
                self._state = await self._asked()
                self._kept_until_s = self._clock() + KEPT_S
            return self._state

    async def _asked(self) -> HealthState:
        """200 when the storage server serves, else 503; the body says so.

        A gateway whose storage connections are all in use is busy, not ill, and one whose store
        takes no changes, or is full, still serves what is stored.
        """
        try:
            health = await self._ask(GetHealth())
        except Busy:
            return HealthState(200, {"status": "busy"})
        except ObjectCacheError as error:
            return HealthState(503, {"status": "unavailable", "message": error.message})
        if health.draining:
            return HealthState(503, {"status": "draining", "engine": health.engine})
        if health.flush_failure:
            body = {"status": "read_only", "engine": health.engine, "message": health.flush_failure}
            return HealthState(200, body)
        if health.degraded:
            body = {"status": "degraded", "engine": health.engine, "message": health.degraded}
            return HealthState(200, body)
        return HealthState(200, {"status": "ok", "engine": health.engine})

    def __repr__(self) -> str:
        return f"<HealthCheck {self._state}>"


def health_response(exchange: Exchange, state: HealthState) -> web.Response:
    """The answer, as JSON."""
    named = {**exchange.base_headers, "Content-Type": "application/json"}
    return web.Response(status=state.status, body=msgspec.json.encode(state.body), headers=named)
