"""A request's head, body and query, read and checked."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec
from aiohttp import web

from objectcache_gateway.admin.serving.routes import Nothing
from objectcache_gateway.answering.problems import in_words
from objectcache_gateway.request.addressing import split_target
from objectcache_gateway.request.request_head import RequestHead
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.operators.admin_api import PATTERN_WORDS, Body

BODY_TIMEOUT_S = 30.0

T = TypeVar("T", bound=Body)


def request_head(request: web.Request) -> RequestHead:
    """The head as it came, for the signature."""
    target = split_target(request.raw_path)
    headers = tuple((name.lower(), value) for name, value in request.headers.items())
    return RequestHead(request.method, target.raw_path, target.raw_query, headers)


async def read_body(request: web.Request, bytes_max: int) -> bytes:
    """The whole body; raises `InvalidRequest` over the bound, or where it does not come."""
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for piece in request.content.iter_any():
                data += piece
                if len(data) > bytes_max:
                    raise InvalidRequest(
                        f"the body is over {bytes_max} bytes", code="EntityTooLarge"
                    )
    except TimeoutError as error:
        raise InvalidRequest("the body stopped arriving", code="RequestTimeout") from error
    except web.RequestPayloadError as error:
        raise InvalidRequest(
            "the body is not framed as HTTP/1.1 asks", code="InvalidRequest"
        ) from error
    return bytes(data)


def decode_body(data: bytes, kind: type[T]) -> T:
    """The body as the route takes it. Raises `InvalidRequest` naming the field."""
    if kind is Nothing:
        if data:
            raise InvalidRequest("this takes no body", code="InvalidRequest")
        return kind()
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, InvalidRequest, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"body: {in_words(str(error), PATTERN_WORDS)}") from error


def decode_query(request: web.Request, kind: type[T]) -> T:
    """The query as the route takes it. Raises `InvalidRequest` naming the parameter."""
    values = dict(request.query)
    if len(values) != len(request.query):
        raise InvalidRequest("query: a parameter is given twice")
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"query: {in_words(str(error), PATTERN_WORDS)}") from error
