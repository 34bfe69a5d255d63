"""What is left of a request's body once it is answered."""

from __future__ import annotations

import asyncio
import contextlib

from aiohttp import web

DRAIN_BYTES_MAX = 8 << 20
DRAIN_TIMEOUT_S = 2.0


async def drain_body(request: web.BaseRequest) -> None:
    """Read and forget what is left of a body, within bounds: a client that sends before it listens
    hears the answer, which a connection that is closed over unread bytes takes with it.
    """
    if request.content.at_eof():
        return
    left_bytes = DRAIN_BYTES_MAX
    with contextlib.suppress(TimeoutError, web.RequestPayloadError):
        async with asyncio.timeout(DRAIN_TIMEOUT_S):
            while left_bytes > 0 and not request.content.at_eof():
                left_bytes -= len(await request.content.readany())
