"""Puts whose slices are sent as frames: what the caller asked for, or what the client chose.

A server that does not know the field refuses the put before it stores anything, and is sent the
same chunks plain.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from objectcache.arguments import AUTO_ENCODING
from objectcache.channel.responses import PutResult
from objectcache.core import ClientCore
from objectcache.payload import Bytes
from objectcache.puts.encode_layers import EncodedLayers, may_be_encoded
from objectcache.puts.put_request import PutRequest
from objectcache.puts.put_sinks import PutSink, put_parts
from objectcache_schemas.errors import InvalidRequest

UNKNOWN_FIELD = "unknown field `encoded_bytes`"  # in the refusal of a server from before it
UNKNOWN_S = 600.0  # for which it is sent none: it may be replaced by a later one
CHOSEN_ENCODING = "planes-zstd"  # where the client chooses


def encoding_of(core: ClientCore, put: PutRequest) -> str:
    """The encoding in which a put is to be sent; empty where it is sent plain."""
    if not put.encoding or not may_be_encoded(put):
        return ""
    if time.monotonic() < core.encoded_puts_unknown_until_s:
        return ""
    if put.encoding != AUTO_ENCODING:
        return put.encoding
    return CHOSEN_ENCODING if core.put_accounts.encodes(put.bucket, put.chunks_bytes) else ""


def tell_account(
    core: ClientCore, put: PutRequest, seconds: float, *, was_tried: bool, is_encoded: bool
) -> None:
    """A put has ended well, which held its caller up for so long. `was_tried`: it was encoded, and
    went plain all the same where not `is_encoded`.
    """
    if put.encoding != AUTO_ENCODING:
        return
    if is_encoded or not was_tried:
        core.put_accounts.ended(put.bucket, put.chunks_bytes, seconds, is_encoded=is_encoded)
    elif time.monotonic() >= core.encoded_puts_unknown_until_s:  # else it was the server's fault
        core.put_accounts.not_shorter(put.bucket, put.chunks_bytes)


def put_encoded(
    core: ClientCore, put: PutRequest, encoding: str, parts: Sequence[memoryview]
) -> PutResult | None:
    """Store the whole chunks of a payload, encoded; None where that has to be done plain.

    `parts` are whole chunks, one after another. Raises the server's refusal.
    """
    _, num_layers, slice_bytes = put.shape
    chunks = [
        chunk
        for part in parts
        for chunk in np.frombuffer(part, np.uint8).reshape(-1, num_layers, slice_bytes)
    ]
    layers = EncodedLayers(put, encoding)
    for layer in range(num_layers):
        layers.add([chunk[layer] for chunk in chunks])
        if not layers.saves:
            return None
    return _send(core, layers)


def _send(core: ClientCore, layers: EncodedLayers) -> PutResult | None:
    """None where a server has to be sent them plain."""
    encoded = layers.payload()
    if encoded is None:
        return None
    put, parts = encoded
    try:
        return put_parts(core, put, parts)
    except InvalidRequest as error:
        if UNKNOWN_FIELD not in error.message:
            raise
    core.encoded_puts_unknown_until_s = time.monotonic() + UNKNOWN_S
    return None


class EncodingSink(PutSink):
    """Encodes layers as they come, and sends all at the end."""

    def __init__(self, core: ClientCore, put: PutRequest, encoding: str) -> None:
        self._core = core
        self._put = put
        self._layers = EncodedLayers(put, encoding)
        self.is_encoded = True  # so far; false once it was sent plain

    def write(self, parts: Sequence[memoryview]) -> None:
        _, _, slice_bytes = self._put.shape
        slices: list[Bytes] = []
        for part in parts:
            slices.extend(np.frombuffer(part, np.uint8).reshape(-1, slice_bytes))
        self._layers.add(slices)

    def finish(self) -> PutResult:
        result = _send(self._core, self._layers)
        if result is not None:
            return result
        self.is_encoded = False
        return put_parts(self._core, replace(self._put, encoding=""), self._layers.decoded())

    def abandon(self) -> None:
        self._layers = EncodedLayers(self._put, CHOSEN_ENCODING)
