"""What every response of the admin API says of the server."""

from __future__ import annotations

from aiohttp import web

from objectcache_schemas.headers import ADMIN_API

SERVER_NAME = "ObjectCache-admin"
API_VERSION = "1"


def name_the_server(response: web.StreamResponse) -> None:
    """Set the headers that every response has."""
    response.headers["Server"] = SERVER_NAME
    response.headers[ADMIN_API] = API_VERSION
    response.headers["Cache-Control"] = "no-store"
    response.headers["X-Content-Type-Options"] = "nosniff"
