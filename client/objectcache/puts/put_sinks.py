"""Where the layers of a put go until the last one was written: memory, or a request under way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from objectcache.channel import requests
from objectcache.channel.http_channel import BodyUpload
from objectcache.channel.responses import PutResult, parse_reply
from objectcache.core import ClientCore, TransportChoice
from objectcache.landing.refusals import may_fall_back
from objectcache.payload import Bytes
from objectcache.puts.put_request import PutRequest
from objectcache.puts.registered_put import RegisteredPayload, memory_for_payload, put_registered
from objectcache_schemas.errors import NotFound, Unavailable
from objectcache_schemas.limits import KIB

# A session costs two round trips, once. With it, smaller payloads take as long by either way, and
# from 2 MiB on a put through memory takes less than half of one by body.
COPIED_BYTES_MIN = 256 * KIB


class PutSink(ABC):
    """Takes a payload in order. It ends with `finish`, `abandon`, or a `write` that raises."""

    @abstractmethod
    def write(self, parts: Sequence[memoryview]) -> None:
        """Take the next bytes; their memory is free again when this returns."""

    @abstractmethod
    def finish(self) -> PutResult:
        """Store the whole payload; raises the server's error."""

    @abstractmethod
    def abandon(self) -> None:
        """Store nothing. No effect once ended."""


class UploadSink(PutSink):
    """Sends the bytes as they come."""

    def __init__(self, core: ClientCore, put: PutRequest) -> None:
        request = requests.put_head(put.bucket, put.descriptor)
        self._upload: BodyUpload = core.channel.start_upload(request, put.timeout_s)

    def write(self, parts: Sequence[memoryview]) -> None:
        for part in parts:
            self._upload.write(part)

    def finish(self) -> PutResult:
        return parse_reply(self._upload.finish().body, PutResult, "a put")

    def abandon(self) -> None:
        self._upload.abandon()


class KeptSink(PutSink):
    """Keeps copies, and sends all at the end."""

    def __init__(self, core: ClientCore, put: PutRequest) -> None:
        self._core = core
        self._put = put
        self._kept: list[memoryview] = []

    def write(self, parts: Sequence[memoryview]) -> None:
        self._kept += [memoryview(bytes(part)) for part in parts]

    def finish(self) -> PutResult:
        return put_body(self._core, self._put, self._kept)

    def abandon(self) -> None:
        self._kept.clear()


class RegisteredSink(PutSink):
    """Lays the bytes into memory that the server reads at the end."""

    def __init__(self, core: ClientCore, put: PutRequest, payload: RegisteredPayload) -> None:
        self._core = core
        self._put = put
        self._payload = payload
        self._memory: Bytes = payload.landing.array[: put.payload_bytes]
        self._written_bytes = 0

    def write(self, parts: Sequence[memoryview]) -> None:
        for part in parts:
            end_bytes = self._written_bytes + len(part)
            self._memory[self._written_bytes : end_bytes] = np.frombuffer(part, np.uint8)
            self._written_bytes = end_bytes

    def finish(self) -> PutResult:
        try:
            return put_registered(self._core, self._put, self._payload)
        except (Unavailable, NotFound) as error:
            if self._put.demands_registered_memory or not may_fall_back(error):
                raise
        return put_body(self._core, self._put, [self._memory.data])

    def abandon(self) -> None:
        self._payload.landing.settle()

    def __del__(self) -> None:
        # A put that was dropped half written. After an end it has no effect.
        self.abandon()


def open_registered_sink(core: ClientCore, put: PutRequest) -> RegisteredSink | None:
    """A sink in registered memory where the put may and can have one, and gains by it.

    Raises `Unavailable`, `Busy` or `InvalidRequest` with the reason where it was demanded.
    """
    if put.transport is TransportChoice.BODY:
        return None
    if put.payload_bytes < COPIED_BYTES_MIN and not put.demands_registered_memory:
        return None
    try:
        payload = memory_for_payload(core, put)
    except Unavailable:
        if put.demands_registered_memory:
            raise
        return None
    return None if payload is None else RegisteredSink(core, put, payload)


def put_body(core: ClientCore, put: PutRequest, parts: Sequence[memoryview]) -> PutResult:
    """Send the whole payload as the request's body."""
    request = requests.put(put.bucket, put.descriptor, parts)
    reply = core.channel.call(request, put.timeout_s)
    return parse_reply(reply.body, PutResult, "a put")


def put_parts(core: ClientCore, put: PutRequest, parts: Sequence[memoryview]) -> PutResult:
    """Send the whole payload by the way that the put has: copied into memory that the server
    reads, or as the request's body.
    """
    sink = open_registered_sink(core, put)
    if sink is None:
        return put_body(core, put, parts)
    sink.write(parts)
    return sink.finish()
