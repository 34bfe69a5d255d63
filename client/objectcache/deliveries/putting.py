"""Storing chunks: whole, or layer by layer as an engine finishes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np

from objectcache.channel import requests
from objectcache.channel.http_channel import Upload
from objectcache.channel.responses import PutResult, parse_reply
from objectcache.core import ClientCore
from objectcache_schemas.descriptor import Descriptor
from objectcache_schemas.errors import InvalidRequest


def put_chunks(
    core: ClientCore, bucket: str, descriptor: Descriptor, chunks: Any, timeout_s: float | None
) -> PutResult:
    """Store a whole payload in the descriptor's order; all chunks become visible, or none."""
    parts = payload_parts(chunks, descriptor.payload_bytes(len(descriptor.chunk_keys)), "chunks")
    reply = core.channel.call(requests.put(bucket, descriptor, parts), timeout_s)
    return parse_reply(reply.body, PutResult, "a put")


def payload_parts(data: Any, expected_bytes: int, name: str) -> list[memoryview]:
    """The bytes of an array, a buffer, or a sequence of those, without joining them.

    Raises `InvalidRequest` where they are not `expected_bytes` in all.
    """
    pieces: Iterable[Any] = data if isinstance(data, list | tuple) else (data,)
    try:
        parts = [_byte_view(piece) for piece in pieces]
    except (TypeError, ValueError, BufferError) as error:
        raise InvalidRequest(f"{name}: {error}") from error
    total_bytes = sum([len(part) for part in parts])
    if total_bytes != expected_bytes:
        raise InvalidRequest(f"{name} hold {total_bytes} bytes, the layout needs {expected_bytes}")
    return parts


def _byte_view(piece: Any) -> memoryview:
    if not isinstance(piece, bytes | bytearray | memoryview):
        array = np.ascontiguousarray(piece)
        if array.dtype == object:
            raise TypeError(f"{type(piece).__name__} holds no bytes")
        piece = array.reshape(-1).view(np.uint8)
    view = memoryview(piece)
    return view.cast("B") if view.nbytes else memoryview(b"")


class LayerPut:
    """A put that is sent while the engine computes. Use it in a `with` block, from one thread.

    Leaving the block stores the chunks, all or none; leaving it by an exception, or before the last
    layer was written, stores nothing. `result` is set then.
    """

    def __init__(
        self, core: ClientCore, bucket: str, descriptor: Descriptor, timeout_s: float | None
    ) -> None:
        self._core = core
        self._bucket = bucket
        self._descriptor = descriptor
        self._timeout_s = timeout_s
        self._written_layers = 0
        self._upload: Upload | None = None
        self._kept: list[memoryview] = []
        self._closed = False
        self.result: PutResult | None = None

    def write_layer(self, kv: Any) -> None:
        """Send the next layer: uint8[N, per_layer_chunk_bytes], or anything with that many bytes.

        The memory may be reused when the call returns. Raises `InvalidRequest` for another size or
        one layer too many, and whatever the server has against the put, which has failed then.
        """
        num_layers = self._descriptor.num_layers
        if self._closed or self._written_layers == num_layers:
            state = "the put is closed" if self._closed else f"all {num_layers} layers are written"
            raise InvalidRequest(f"write_layer: {state}")
        layer_bytes = len(self._descriptor.chunk_keys) * self._descriptor.per_layer_chunk_bytes
        parts = payload_parts(kv, layer_bytes, f"layer {self._written_layers}")
        if self._core.endpoint.protects_bodies:
            self._stream(parts)
        else:
            # The body's digest is part of the request's head here, so it can only be sent whole.
            self._kept += [memoryview(bytes(part)) for part in parts]
        self._written_layers += 1

    def _stream(self, parts: Sequence[memoryview]) -> None:
        try:
            if self._upload is None:
                request = requests.put_head(self._bucket, self._descriptor)
                self._upload = self._core.channel.start_upload(request, self._timeout_s)
            for part in parts:
                self._upload.write(part)
        except BaseException:
            self.abandon()
            raise

    def close(self) -> None:
        """Store what was written; raises `InvalidRequest` when layers are missing, or the server's
        error. Repeating has no effect.
        """
        if self._closed:
            return
        if self._written_layers < self._descriptor.num_layers:
            self.abandon()
            raise InvalidRequest(
                f"{self._written_layers} of {self._descriptor.num_layers} layers were written; "
                f"nothing is stored"
            )
        self._closed = True
        if self._upload is None:
            request = requests.put(self._bucket, self._descriptor, self._kept)
            reply = self._core.channel.call(request, self._timeout_s)
        else:
            reply = self._upload.finish()
        self.result = parse_reply(reply.body, PutResult, "a put")

    def abandon(self) -> None:
        """Store nothing. No effect once closed."""
        self._closed = True
        self._kept.clear()
        if self._upload is not None:
            self._upload.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        layers = f"{self._written_layers}/{self._descriptor.num_layers} layers"
        return f"<LayerPut {len(self._descriptor.chunk_keys)} chunks, {layers}, {state}>"
