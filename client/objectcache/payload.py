"""Where each layer's bytes are in a payload: arithmetic alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from objectcache_schemas.descriptor import DeliveryMode

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class PayloadShape:
    """A payload of `chunk_count` chunks and the layers from `first_layer` to below `end_layer`.

    Layerwise it is uint8[layers, chunk_count, slice_bytes], chunkwise uint8[chunk_count, layers,
    slice_bytes].
    """

    first_layer: int
    end_layer: int
    chunk_count: int
    slice_bytes: int
    mode: DeliveryMode

    @property
    def layer_count(self) -> int:
        """Layers in the payload."""
        return self.end_layer - self.first_layer

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer payload."""
        return self.chunk_count * self.slice_bytes

    @property
    def payload_bytes(self) -> int:
        """Bytes of the whole payload."""
        return self.layer_count * self.layer_bytes

    def layers_within(self, received_bytes: int) -> int:
        """One past the last layer that is whole when the payload's first bytes have arrived.

        Chunkwise no layer is whole before the payload is.
        """
        if received_bytes == self.payload_bytes:
            return self.end_layer
        if self.mode is DeliveryMode.CHUNKWISE:
            return self.first_layer
        return self.first_layer + received_bytes // self.layer_bytes

    def payload(self, memory: Bytes) -> Bytes:
        """View of the payload at the start of `memory` as uint8[layers, chunk_count, slice_bytes].

        Strided when chunkwise.
        """
        flat = memory[: self.payload_bytes]
        if self.mode is DeliveryMode.CHUNKWISE:
            by_chunk = flat.reshape(self.chunk_count, self.layer_count, self.slice_bytes)
            return by_chunk.transpose(1, 0, 2)
        return flat.reshape(self.layer_count, self.chunk_count, self.slice_bytes)
