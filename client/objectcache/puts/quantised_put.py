"""Puts of a model's own slices into chunks of a lossy dtype, quantised in the calling thread."""

from __future__ import annotations

from typing import Any

import numpy as np

from objectcache.core import ClientCore
from objectcache.payload import Bytes
from objectcache.puts.put_request import PutRequest
from objectcache.puts.putting import LayerPut, payload_parts
from objectcache_encodings.lossy.lossy_dtype import LossyDtype
from objectcache_schemas.errors import InvalidRequest


def quantised_chunks(chunks: Any, stored: tuple[int, int, int], lossy: LossyDtype) -> Bytes:
    """Chunks of the model's slices, as `KvBucket.put` takes them, quantised: uint8 of the shape
    `stored`, which is chunks, layers, bytes of a slice.

    Raises `InvalidRequest` for another shape, for numbers that are not finite, and for memory of a
    GPU, which is not read here.
    """
    if hasattr(chunks, "__cuda_array_interface__"):
        raise InvalidRequest("chunks: memory of a GPU is not quantised; copy it to the host")
    count, layers, _ = stored
    model = (count, layers, lossy.shape.slice_bytes)
    quantised, begin = np.empty(stored, np.uint8), 0
    for part in payload_parts(chunks, model, "chunks"):
        slices = np.frombuffer(part, np.uint8).reshape(-1, *model[1:])
        end = begin + len(slices)
        for layer in range(layers):
            quantised[begin:end, layer] = lossy.quantise(slices[:, layer], layer, begin)
        begin = end
    return quantised


class QuantisedLayerPut(LayerPut):
    """A `LayerPut` that takes layers of the model's slices: uint8[N, slice_bytes]."""

    def __init__(self, core: ClientCore, put: PutRequest, lossy: LossyDtype) -> None:
        super().__init__(core, put)
        self._lossy = lossy

    def write_layer(self, kv: Any) -> None:
        chunk_count, num_layers, _ = self._put.shape
        layer = min(self._written_layers, num_layers - 1)  # one too many is refused behind this
        shape = (chunk_count, self._lossy.shape.slice_bytes)
        parts = payload_parts(kv, shape, f"layer {layer}")
        slices = [np.frombuffer(part, np.uint8).reshape(-1, shape[1]) for part in parts]
        super().write_layer(self._lossy.quantise(np.concatenate(slices), layer))
