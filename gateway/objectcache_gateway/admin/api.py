"""Every route of the admin API."""

from __future__ import annotations

from aiohttp import web

from objectcache_gateway.admin.accounts import keys, tokens, usage, users
from objectcache_gateway.admin.processes import metrics_page, processes, servers, status
from objectcache_gateway.admin.serving.openapi import openapi_document
from objectcache_gateway.admin.serving.routes import Call, Nothing, Route
from objectcache_gateway.admin.serving.scopes import ANY
from objectcache_gateway.admin.store import backup, buckets, engine_checks, schedule

RESOURCES = (
    *(
        users,
        keys,
        tokens,
        buckets,
        usage,
        engine_checks,
        schedule,
        processes,
        servers,
        metrics_page,
        backup,
        status,
    ),
)


async def get_openapi(call: Call[Nothing, Nothing]) -> web.Response:
    """What this API takes and answers, for programs."""
    return web.json_response(openapi_document(ROUTES))


ROUTES: tuple[Route, ...] = (
    *(route for resource in RESOURCES for route in resource.ROUTES),
    Route("GET", "/openapi.json", ANY, "What this API takes and answers", get_openapi),
)
