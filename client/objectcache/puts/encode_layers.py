"""The layers of a put as frames: what is sent in the place of its slices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from objectcache.payload import Bytes
from objectcache.puts.put_request import PutRequest
from objectcache_encodings.decoder import SliceDecoder
from objectcache_encodings.element_sizes import smallest_element_bytes
from objectcache_encodings.encoder import SliceEncoder
from objectcache_encodings.frames import codec_of, pack_row
from objectcache_encodings.payload_directory import PayloadDirectory, PayloadRun
from objectcache_schemas.descriptor import (
    ENCODED_RATIO_MAX,
    ENCODED_SLICE_BYTES_MAX,
    DeliveryMode,
)


def may_be_encoded(put: PutRequest) -> bool:
    """Whether a server takes such slices as frames."""
    return put.descriptor.per_layer_chunk_bytes <= ENCODED_SLICE_BYTES_MAX


class EncodedLayers:
    """The layers of one put that were encoded so far. For one thread at a time."""

    def __init__(self, put: PutRequest, encoding: str) -> None:
        """`encoding` is a name among `ENCODINGS`."""
        self._put = put
        self._encoding = encoding
        self._encoder: SliceEncoder | None = None
        self._rows: list[Bytes] = []

    def add(self, slices: Sequence[Bytes]) -> None:
        """Encode the next layer: one slice a chunk, whose bytes lie together."""
        if self._encoder is None:
            self._encoder = SliceEncoder(self._encoding, self._element_bytes(slices[0]))
        self._rows.append(pack_row([self._encoder.encode_slice(one) for one in slices]))

    def _element_bytes(self, slice_: Bytes) -> int:
        element_bytes = self._put.element_bytes
        if element_bytes is None or slice_.size % element_bytes:
            return smallest_element_bytes(slice_)
        return element_bytes

    @property
    def saves(self) -> bool:
        """Whether the layers so far have fewer bytes than their slices."""
        chunk_count, _, slice_bytes = self._put.shape
        return sum(row.size for row in self._rows) < len(self._rows) * chunk_count * slice_bytes

    def payload(self) -> tuple[PutRequest, list[memoryview]] | None:
        """The put, and its payload's parts, once all layers were encoded; None where they have no
        fewer bytes than slices, or so few that a server takes them for an attack.
        """
        chunk_count, _, slice_bytes = self._put.shape
        pitches = tuple(row.shape[1] for row in self._rows)
        run = PayloadRun(chunk_count, codec_of(self._encoding), pitches)
        directory = PayloadDirectory((run,), slice_bytes)
        encoded_bytes, plain_bytes = directory.payload_bytes, directory.decoded_bytes
        if not plain_bytes <= ENCODED_RATIO_MAX * encoded_bytes < ENCODED_RATIO_MAX * plain_bytes:
            return None
        descriptor = replace(
            self._put.descriptor, delivery=DeliveryMode.LAYERWISE, encoded_bytes=encoded_bytes
        )
        parts = [memoryview(directory.to_bytes()), *(row.reshape(-1).data for row in self._rows)]
        return replace(self._put, descriptor=descriptor), parts

    def decoded(self) -> list[memoryview]:
        """The slices of the layers so far, for whoever has to send them plain after all."""
        chunk_count, _, slice_bytes = self._put.shape
        decoder = SliceDecoder()
        layers: list[memoryview] = []
        for row in self._rows:
            out = np.empty((chunk_count, slice_bytes), np.uint8)
            decoder.decode_row(row, out)
            layers.append(out.reshape(-1).data)
        return layers
