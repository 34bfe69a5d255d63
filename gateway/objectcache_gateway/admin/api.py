"""Every route of the admin API."""

from __future__ import annotations

from aiohttp import web

from objectcache_gateway.admin import (
    backup,
    buckets,
    engine,
    keys,
    metrics_page,
    processes,
    schedule,
    status,
    tokens,
    usage,
    users,
)
from objectcache_gateway.admin.openapi import openapi_document
from objectcache_gateway.admin.routes import Call, Nothing, Route
from objectcache_gateway.admin.scopes import ANY

RESOURCES = (
    *(
        users,
        keys,
        tokens,
        buckets,
        usage,
        engine,
        schedule,
        processes,
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
