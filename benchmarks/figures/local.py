"""The local baselines of figure 13: the same KV cache in this process' memory."""

from __future__ import annotations

import time

import numpy as np

from benchmarks.figures.gpu import Bytes, EmulatedGpu, Prefill, copy_chunks
from benchmarks.figures.scaled import ScaledRequest


class LocalChunks:
    """Chunks as they are stored: uint8[chunk_count, num_layers, slice_bytes]."""

    def __init__(self, request: ScaledRequest) -> None:
        geometry = request.geometry
        shape = (geometry.chunk_count, geometry.num_layers, geometry.slice_bytes)
        self._request = request
        self._chunks = _filled(shape)

    def prefill(self, gpu: EmulatedGpu) -> Prefill:
        """Local-DRAM-LW: each layer is gathered from all chunks on its way into the GPU."""
        return gpu.prefill_layers(self, self._request.num_layers, time.monotonic())

    def prefill_whole(self, gpu: EmulatedGpu) -> Prefill:
        """Local-DRAM-CW: chunk after chunk, then all of the computing."""
        started_s = time.monotonic()
        return gpu.prefill_whole(
            lambda memory: copy_chunks(self._chunks, memory), self._request.num_layers, started_s
        )

    def wait_layer(self, layer: int) -> Bytes:
        """A strided view: the GPU's copy gathers it."""
        return self._chunks[:, layer]

    def consumed(self, layer: int) -> None:
        """Nobody is told."""


class LocalLayers:
    """Layers put together beforehand: uint8[num_layers, layer_bytes] (paper: opt-local-LW)."""

    def __init__(self, request: ScaledRequest) -> None:
        self._request = request
        self._layers = _filled((request.num_layers, request.layer_bytes))

    def prefill(self, gpu: EmulatedGpu) -> Prefill:
        """Only copies into the GPU's memory are left to do."""
        return gpu.prefill_layers(self, self._request.num_layers, time.monotonic())

    def wait_layer(self, layer: int) -> Bytes:
        """It is there."""
        kv: Bytes = self._layers[layer]
        return kv

    def consumed(self, layer: int) -> None:
        """Nobody is told."""


def _filled(shape: tuple[int, ...]) -> Bytes:
    """Memory that is really there: pages of zeroes would be one page."""
    memory: Bytes = np.full(shape, 7, np.uint8)
    return memory
