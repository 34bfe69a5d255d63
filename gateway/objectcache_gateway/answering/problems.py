"""Refusals of the APIs that speak JSON, on connections that answer what cannot be parsed alike."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import msgspec
from aiohttp import web

from objectcache_gateway.connections.end_connections import BoundConnection, ConnectionBound
from objectcache_schemas.errors import InvalidRequest, ObjectCacheError
from objectcache_schemas.operators.admin_api import Problem

JSON = "application/json"
KEEPALIVE_TIMEOUT_S = 75.0
READ_BUFFER_BYTES = 64 << 10


def problem_response(error: ObjectCacheError) -> web.Response:
    """A refusal as JSON, with what HTTP says of it."""
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


def in_words(error: str, pattern_words: Mapping[str, str]) -> str:
    """An error of msgspec's with what a pattern allows in the pattern's place."""
    for pattern, words in pattern_words.items():
        error = error.replace(f"`str` matching regex {pattern!r}", words)
    return error


class ProblemConnection(BoundConnection):
    """aiohttp's side of one connection."""

    __slots__ = ("_line_bytes_max", "_name_response")

    def __init__(
        self,
        server: web.Server,
        bound: ConnectionBound | None,
        give_up: Callable[[], None] | None,
        *,
        logger: logging.Logger,
        name_response: Callable[[web.StreamResponse], None],
        line_bytes_max: int,
        lingering_s: float,
    ) -> None:
        """`name_response` sets the headers that every response has."""
        super().__init__(
            server,
            bound,
            give_up,
            logger=logger,
            keepalive_timeout_s=KEEPALIVE_TIMEOUT_S,
            line_bytes_max=line_bytes_max,
            field_bytes_max=line_bytes_max,
            head_bytes_max=4 * line_bytes_max,
            read_buffer_bytes=READ_BUFFER_BYTES,
            lingering_s=lingering_s,
        )
        self._line_bytes_max = line_bytes_max
        self._name_response = name_response

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what aiohttp could not parse, without a byte of it, which may be a token's."""
        is_defect = status >= 500  # what the handlers' own net has not caught
        level = logging.ERROR if is_defect else logging.INFO
        self.logger.log(level, "unreadable request: %s", type(exc).__name__)
        if request.writer.output_size > 0:
            raise ConnectionError("an answer was begun already")
        response = problem_response(
            ObjectCacheError("a defect of the server; its log has the kind of the error")
            if is_defect
            else InvalidRequest(
                "the request is not HTTP/1.1, or a line of its head is over "
                f"{self._line_bytes_max} bytes; is it TLS on a port without?",
                code="InvalidRequest",
            )
        )
        self._name_response(response)
        response.force_close()
        return response
