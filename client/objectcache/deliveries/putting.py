"""Storing chunks: whole, or layer by layer as an engine finishes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

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
    shape = (
        len(descriptor.chunk_keys),
        descriptor.num_layers,
        descriptor.per_layer_chunk_bytes,
    )
    parts = payload_parts(chunks, shape, "chunks")
    reply = core.channel.call(requests.put(bucket, descriptor, parts), timeout_s)
    return parse_reply(reply.body, PutResult, "a put")


def payload_parts(data: Any, shape: tuple[int, ...], name: str) -> list[memoryview]:
    """The bytes of an array of `shape`, of raw bytes as long, or of a list with one of those for
    each index of the first axis; without joining them.

    Raises `InvalidRequest` for another shape or length, and for items of more than one byte: bytes
    in another order would be stored without anybody noticing.
    """
    if not isinstance(data, list | tuple):
        return [_part(data, shape, name)]
    pieces: Sequence[Any] = data
    if len(pieces) != shape[0]:
        raise InvalidRequest(f"{name} is a list of {len(pieces)}, the layout needs {shape[0]}")
    return [_part(piece, shape[1:], f"{name}[{n}]") for n, piece in enumerate(pieces)]


def _part(piece: Any, shape: tuple[int, ...], name: str) -> memoryview:
    try:
        if isinstance(piece, memoryview) or not hasattr(piece, "shape"):
            piece = memoryview(piece)
            if (piece.format, piece.ndim) == ("B", 1):
                return _sized(piece.cast("B"), math.prod(shape), name)
        array = np.asarray(piece)
        _check_shape(array, shape, name)
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    except (TypeError, ValueError, BufferError) as error:
        raise InvalidRequest(f"{name}: {error}") from error


def _sized(view: memoryview, expected_bytes: int, name: str) -> memoryview:
    if len(view) != expected_bytes:
        raise InvalidRequest(f"{name} holds {len(view)} bytes, the layout needs {expected_bytes}")
    return view


def _check_shape(array: npt.NDArray[Any], shape: tuple[int, ...], name: str) -> None:
    if array.shape != shape or array.itemsize != 1:
        raise InvalidRequest(
            f"{name} is {array.dtype} of shape {array.shape}, the layout needs uint8 of shape "
            f"{shape}; use .view(numpy.uint8).reshape{shape} where the bytes are in that order"
        )


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
        """Send the next layer: uint8[N, per_layer_chunk_bytes], raw bytes of that length, or a list
        with one slice a chunk.

        The memory may be reused when the call returns. Raises `InvalidRequest` for another shape or
        size or one layer too many, and whatever the server has against the put, which has failed
        then.
        """
        num_layers = self._descriptor.num_layers
        if self._closed or self._written_layers == num_layers:
            state = "the put is closed" if self._closed else f"all {num_layers} layers are written"
            raise InvalidRequest(f"write_layer: {state}")
        shape = (len(self._descriptor.chunk_keys), self._descriptor.per_layer_chunk_bytes)
        parts = payload_parts(kv, shape, f"layer {self._written_layers}")
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
