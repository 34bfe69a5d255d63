"""A refusal of the admin API as a response, and what every response says of the server."""

from __future__ import annotations

import msgspec
from aiohttp import web

from objectcache_gateway.admin.serving.media_types import JSON
from objectcache_schemas.errors import ObjectCacheError
from objectcache_schemas.headers import ADMIN_API
from objectcache_schemas.operators.admin_api import Problem

SERVER_NAME = "ObjectCache-admin"
API_VERSION = "1"


def name_the_server(response: web.StreamResponse) -> None:
    """Set the headers that every response has."""
    response.headers["Server"] = SERVER_NAME
    response.headers[ADMIN_API] = API_VERSION
    response.headers["Cache-Control"] = "no-store"
    response.headers["X-Content-Type-Options"] = "nosniff"


def problem_response(error: ObjectCacheError) -> web.Response:
    """A refusal as the API says it."""
    retry_after_s = error.details.retry_after_s
    problem = Problem(code=error.code, message=error.message, retry_after_s=retry_after_s)
    headers: dict[str, str] = {}
    if retry_after_s is not None:
        headers["Retry-After"] = str(max(1, round(retry_after_s)))
    if error.code == "Unauthorized":
        headers["WWW-Authenticate"] = "Bearer"
    status = error.row.http_status
    return web.Response(
        status=status, body=msgspec.json.encode(problem), content_type=JSON, headers=headers
    )
