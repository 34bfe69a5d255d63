"""Storing chunks: whole, or layer by layer as an engine finishes them."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from objectcache.channel.responses import PutResult
from objectcache.core import ClientCore, TransportChoice
from objectcache.landing.fabric_regions import device_memory_of
from objectcache.landing.refusals import may_fall_back
from objectcache.puts.encoded_puts import EncodingSink, encoding_of, put_encoded, tell_account
from objectcache.puts.put_request import PutRequest
from objectcache.puts.put_sinks import (
    KeptSink,
    PutSink,
    UploadSink,
    open_registered_sink,
    put_body,
    put_parts,
)
from objectcache.puts.registered_put import claim_held, held_payload, held_run, put_registered
from objectcache_schemas.errors import InvalidRequest, NotFound, Unavailable


def put_chunks(core: ClientCore, put: PutRequest, chunks: Any) -> PutResult:
    """Store a whole payload in the descriptor's order; all chunks become visible, or none.

    Raises the server's refusal, or `Unavailable` with the reason where registered memory was
    demanded and cannot be had.
    """
    if hasattr(chunks, "__cuda_array_interface__"):
        return _put_out_of_gpu(core, put, chunks)
    parts = payload_parts(chunks, put.shape, "chunks")
    begun_s = time.monotonic()
    encoding = encoding_of(core, put)
    result = put_encoded(core, put, encoding, parts) if encoding else None
    is_encoded = result is not None
    if result is None:
        result = _put_plain(core, put, parts)
    seconds = time.monotonic() - begun_s
    tell_account(core, put, seconds, was_tried=bool(encoding), is_encoded=is_encoded)
    return result


def _put_plain(core: ClientCore, put: PutRequest, parts: list[memoryview]) -> PutResult:
    if put.transport is TransportChoice.BODY:
        return put_body(core, put, parts)
    if (result := _put_out_of_target(core, put, parts)) is not None:
        return result
    return put_parts(core, put, parts)


def _put_out_of_target(
    core: ClientCore, put: PutRequest, parts: list[memoryview]
) -> PutResult | None:
    """Store where it lies; None where it is in no target, or has to take another way."""
    held = held_payload(core, put, parts)
    if held is None:
        return None
    try:
        payload = claim_held(held)
        return None if payload is None else put_registered(core, put, payload)
    except (Unavailable, NotFound) as error:
        if put.demands_registered_memory or not may_fall_back(error):
            raise
    return put_body(core, put, parts)


def _put_out_of_gpu(core: ClientCore, put: PutRequest, chunks: Any) -> PutResult:
    """Store what lies in a GPU, out of the fabric's target that holds it: there is no other way."""
    memory, _ = device_memory_of(chunks)
    if memory.length_bytes != put.payload_bytes:
        raise InvalidRequest(
            f"chunks holds {memory.length_bytes} bytes, the layout needs {put.payload_bytes}"
        )
    held = held_run(core, put, memory.address, memory.length_bytes)
    payload = None if held is None else claim_held(held)
    if payload is None:
        raise InvalidRequest(
            "chunks: memory of a GPU is put out of a target that holds it; register it with "
            "client.fabric_target(buffer=...), or copy it to the host"
        )
    return put_registered(core, put, payload)


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
        needed_bytes = math.prod(shape)
        remedy = f"use .view(numpy.uint8).reshape{shape} where the bytes are in that order"
        if array.nbytes != needed_bytes:
            remedy = f"it has {array.nbytes} bytes of {needed_bytes}"
        raise InvalidRequest(
            f"{name} is {array.dtype} of shape {array.shape}, the layout needs uint8 of shape "
            f"{shape}; {remedy}"
        )


class LayerPut:
    """A put that is written while the engine computes. Use it in a `with` block, from one thread.

    Leaving the block stores the chunks, all or none; leaving it by an exception, or before the last
    layer was written, stores nothing. `result` is set then.
    """

    def __init__(self, core: ClientCore, put: PutRequest) -> None:
        self._core = core
        self._put = put
        self._written_layers = 0
        self._sink: PutSink | None = None
        self._held_up_s = 0.0  # of the caller's time
        self._closed = False
        self.result: PutResult | None = None

    def write_layer(self, kv: Any) -> None:
        """Take the next layer: uint8[N, per_layer_chunk_bytes], raw bytes of that length, or a list
        with one slice a chunk.

        The memory may be reused when the call returns. Raises `InvalidRequest` for another shape or
        size or one layer too many, and whatever the server has against the put, which has failed
        then.
        """
        chunk_count, num_layers, slice_bytes = self._put.shape
        if self._closed or self._written_layers == num_layers:
            state = "the put is closed" if self._closed else f"all {num_layers} layers are written"
            raise InvalidRequest(f"write_layer: {state}")
        parts = payload_parts(kv, (chunk_count, slice_bytes), f"layer {self._written_layers}")
        begun_s = time.monotonic()
        try:
            if self._sink is None:
                self._sink = _open_sink(self._core, self._put)
            self._sink.write(parts)
        except BaseException:
            self.abandon()
            raise
        self._written_layers += 1
        self._held_up_s += time.monotonic() - begun_s

    def close(self) -> None:
        """Store what was written; raises `InvalidRequest` when layers are missing, or the server's
        error. Repeating has no effect.
        """
        if self._closed:
            return
        num_layers = self._put.descriptor.num_layers
        if self._written_layers < num_layers or self._sink is None:
            self.abandon()
            raise InvalidRequest(
                f"{self._written_layers} of {num_layers} layers were written; nothing is stored"
            )
        self._closed = True
        begun_s = time.monotonic()
        self.result = self._sink.finish()
        self._held_up_s += time.monotonic() - begun_s
        was_tried = isinstance(self._sink, EncodingSink)
        is_encoded = isinstance(self._sink, EncodingSink) and self._sink.is_encoded
        tell_account(
            self._core, self._put, self._held_up_s, was_tried=was_tried, is_encoded=is_encoded
        )

    def abandon(self) -> None:
        """Store nothing. No effect once closed."""
        if not self._closed and self._sink is not None:
            self._sink.abandon()
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        chunk_count, num_layers, _ = self._put.shape
        layers = f"{self._written_layers}/{num_layers} layers"
        return f"<LayerPut {chunk_count} chunks, {layers}, {state}>"


def _open_sink(core: ClientCore, put: PutRequest) -> PutSink:
    if encoding := encoding_of(core, put):
        return EncodingSink(core, put, encoding)
    sink = open_registered_sink(core, put)
    if sink is not None:
        return sink
    # Where the body's digest is part of the request's head it can only be sent whole.
    return UploadSink(core, put) if core.endpoint.protects_bodies else KeptSink(core, put)
