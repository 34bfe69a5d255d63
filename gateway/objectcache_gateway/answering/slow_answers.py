"""Answers to requests that move an object's bytes within the storage server.

Most are quick and keep their real status. One that is not is answered with 200 and white space, as
S3 does, so that neither the client nor what is between takes the silence for the end; what the
request ends with is then in the body, an `<Error>` document where it failed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable

from aiohttp import web

from objectcache_gateway.answering.http_exchange import Exchange
from objectcache_gateway.xml.xml_render import PROLOG, XML, error_document
from objectcache_runtime.first_of import ended_after
from objectcache_runtime.settings import GatewaySettings
from objectcache_schemas.errors import ObjectCacheError
from objectcache_schemas.limits import MIB

COPY_BYTES_PER_S_MIN = 8 * MIB  # of the slowest disk that is worth waiting for
_WHITE_SPACE = b" "

logger = logging.getLogger("objectcache.gateway.slow_answers")


def copy_timeout_s(gateway: GatewaySettings, copied_bytes: int) -> float:
    """How long the storage server may be silent while it copies so many bytes."""
    return gateway.storage_timeout_s + copied_bytes / COPY_BYTES_PER_S_MIN


async def answer_when_done(exchange: Exchange, work: Awaitable[bytes]) -> web.StreamResponse:
    """The response with the XML document that `work` ends with.

    What `work` raises before gateway.slow_answer_after_s is raised; a later `ObjectCacheError` is
    the body of the response that was begun.
    """
    interval_s = exchange.settings.gateway.slow_answer_after_s
    task = asyncio.ensure_future(work)
    async with ended_after(task):
        await asyncio.wait({task}, timeout=interval_s)
        if task.done():
            return exchange.xml(await task)
        return await _answer_early(exchange, task, interval_s)


async def _answer_early(
    exchange: Exchange, task: asyncio.Future[bytes], interval_s: float
) -> web.StreamResponse:
    # White space may follow XML's declaration and must not precede it.
    response = exchange.stream(200, {"Content-Type": XML})
    await exchange.start(response)
    await response.write(PROLOG)
    while not task.done():
        await response.write(_WHITE_SPACE)
        await asyncio.wait({task}, timeout=interval_s)
    document = await _outcome(exchange, task)
    await response.write(document.removeprefix(PROLOG))
    exchange.sent_bytes = response.body_length
    return response


async def _outcome(exchange: Exchange, task: asyncio.Future[bytes]) -> bytes:
    try:
        return await task
    except ObjectCacheError as error:
        logger.info("request %s: failed after its answer had begun: %r", exchange.request_id, error)
        exchange.failed(error)
        path = exchange.request.raw_path.partition("?")[0]
        return error_document(error, path, exchange.request_id)
