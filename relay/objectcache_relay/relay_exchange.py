"""One request of an engine and the means to answer it: who signed, its body, the response."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from aiohttp import web

from objectcache_gateway.answering.http_exchange import request_head
from objectcache_gateway.bodies.body import BodyDecoder
from objectcache_gateway.bodies.descriptor_body import bounded_descriptor
from objectcache_gateway.request.addressing import check_authority, split_target
from objectcache_gateway.request.request_head import RequestHead
from objectcache_gateway.signing.sigv4 import Authenticated, SigningKeys, authenticate
from objectcache_relay.forward_get import ForwardedGet
from objectcache_runtime.settings import Settings
from objectcache_schemas import headers
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.messages.request_labels import adopted_request_id, new_request_id

SERVER_NAME = "ObjectCache"


class RelayExchange:
    """A request, and its response once that has begun."""

    def __init__(self, settings: Settings, request: web.BaseRequest) -> None:
        self._settings = settings
        self.request = request
        self.request_id = (
            adopted_request_id(request.headers.get(headers.REQUEST_ID)) or new_request_id()
        )
        self.is_signed = False  # with the job's key
        self.has_begun = False  # from here on an error can only cut the connection
        self._head: RequestHead | None = None
        self._response: web.StreamResponse | None = None

    @property
    def head(self) -> RequestHead:
        """The request's head, once it is known who signed."""
        assert self._head is not None
        return self._head

    @property
    def named(self) -> dict[str, str]:
        """Headers of every response."""
        return {
            "Server": SERVER_NAME,
            "x-amz-request-id": self.request_id,
            headers.REQUEST_ID: self.request_id,
        }

    def authenticated(
        self, secret_for: Callable[[str], str | None], signing_keys: SigningKeys
    ) -> Authenticated:
        """Who signed, by the gateway's own verification, which takes as long for a key that there
        is not. Raises as `authenticate` does.
        """
        target = split_target(self.request.raw_path)
        head = request_head(self.request, target.raw_path, target.raw_query)
        check_authority(target, head.header("host") or "")
        self._head = head
        authenticated = authenticate(
            head,
            secret_for,
            time.time(),
            self._settings.gateway.clock_skew_s,
            signing_keys=signing_keys,
        )
        self.is_signed = True
        return authenticated

    async def read_body(self, authenticated: Authenticated) -> bytes:
        """A descriptor, or the keys of a match, as they were signed. Raises `InvalidRequest`, also
        for a body that has not come within gateway.body_stall_timeout_s.
        """
        limits = self._settings.limits
        with bounded_descriptor(limits):
            return await self._read_body(authenticated, limits.descriptor_bytes_max)

    async def _read_body(self, authenticated: Authenticated, bytes_max: int) -> bytes:
        decoder = BodyDecoder(self.head, authenticated, bytes_max, etag=False)
        payload: list[bytes | memoryview] = []
        timeout_s = self._settings.gateway.body_stall_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                async for data in self.request.content.iter_any():
                    payload += decoder.feed(data)
        except TimeoutError as error:
            raise InvalidRequest(
                f"the body did not come within {timeout_s:g} s (gateway.body_stall_timeout_s)",
                code="RequestTimeout",
            ) from error
        except web.RequestPayloadError as error:
            raise InvalidRequest(
                "the body is not framed as HTTP/1.1 asks", code="InvalidRequest"
            ) from error
        decoder.finish()
        return b"".join(payload)

    def msgpack(self, body: bytes) -> web.Response:
        """A response with a message."""
        return web.Response(body=body, headers={**self.named, "Content-Type": headers.MSGPACK})

    async def begin(
        self, get: ForwardedGet, transport: str, body_bytes: int | None
    ) -> web.StreamResponse:
        """Answer that a get runs: with its payload as the body, or, with None, with its outcome
        when it has ended.
        """
        delivery = get.delivery
        named = {
            **self.named,
            headers.DELIVERY: delivery.mode,
            headers.CHUNK_COUNT: str(delivery.chunk_count),
            headers.LAYER_BYTES: str(
                delivery.chunk_count * get.asked.as_written.per_layer_chunk_bytes
            ),
            headers.TRANSPORT: transport,
            "Content-Type": headers.MSGPACK,
        }
        if body_bytes is not None:
            named["Content-Type"] = "application/octet-stream"
            named["Content-Length"] = str(body_bytes)
        if delivery.rate_bytes_per_s is not None:
            named[headers.RATE] = str(delivery.rate_bytes_per_s)
        if delivery.path is not None:
            named[headers.PATH] = delivery.path
        if delivery.content is not None:
            named[headers.CONTENT] = delivery.content
        if delivery.window_source is not None:
            named[headers.WINDOW_SOURCE] = delivery.window_source
        response = self._response = web.StreamResponse(headers=named)
        self.has_begun = True
        await response.prepare(self.request)
        return response

    async def finish(self, last_bytes: bytes) -> web.StreamResponse:
        """End the response that was begun."""
        assert self._response is not None
        await self._response.write_eof(last_bytes)
        return self._response

    def __repr__(self) -> str:
        return f"<RelayExchange {self.request_id} {self.request.method}>"
