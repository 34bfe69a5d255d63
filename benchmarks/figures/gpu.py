"""A GPU that is emulated by its measured compute windows, with real copies and real waiting.

It loads one layer ahead, as a prefill engine does (paper, section 3.5): while layer l is computed
it waits for layer l + 1 and copies it into its own memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
PIECE_BYTES = 1 << 24


class LayerSource(Protocol):
    """Where the KV cache comes from."""

    def wait_layer(self, layer: int) -> Bytes:
        """The layer's bytes, once they are there; any shape, not necessarily contiguous."""
        ...

    def consumed(self, layer: int) -> None:
        """The GPU has computed the layer."""
        ...


@dataclass(frozen=True, slots=True)
class Prefill:
    """One request's times, in seconds from its beginning."""

    ttft_s: float
    stall_s: float  # for which the GPU waited
    loaded_s: tuple[float, ...]  # when each layer was in the GPU's memory


class EmulatedGpu:
    """Computes every layer for `window_s`. Its memory holds `memory_bytes`, which is touched now so
    that no measurement pays for it.
    """

    def __init__(self, window_s: float, memory_bytes: int) -> None:
        self.window_s = window_s
        self._memory = np.ones(memory_bytes, np.uint8)

    def prefill_layers(
        self, source: LayerSource, num_layers: int, started_s: float, first_layer: int = 0
    ) -> Prefill:
        """Load and compute layer by layer; memory of two layers is enough. `started_s` is a
        `time.monotonic` before anything was asked for.
        """
        loaded: list[float] = []
        computed_s = started_s
        for layer in range(first_layer, first_layer + num_layers):
            self._load_layer(layer, source.wait_layer(layer))
            loaded.append(time.monotonic())
            if len(loaded) > 1:
                sleep_until(computed_s)
                source.consumed(layer - 1)
            computed_s = max(loaded[-1], computed_s) + self.window_s
        sleep_until(computed_s)
        source.consumed(first_layer + num_layers - 1)
        ttft_s = computed_s - started_s
        arrivals_s = tuple(at_s - started_s for at_s in loaded)
        return Prefill(ttft_s, ttft_s - num_layers * self.window_s, arrivals_s)

    def prefill_whole(
        self, load: Callable[[Bytes], None], num_layers: int, started_s: float
    ) -> Prefill:
        """Load everything, then compute (paper: chunkwise). `load` fills the GPU's memory."""
        load(self._memory)
        loaded_s = time.monotonic()
        computed_s = loaded_s + num_layers * self.window_s
        sleep_until(computed_s)
        arrivals_s = (loaded_s - started_s,) * num_layers
        return Prefill(computed_s - started_s, loaded_s - started_s, arrivals_s)

    def _load_layer(self, layer: int, kv: Bytes) -> None:
        half = len(self._memory) // 2 * (layer % 2)
        np.copyto(self._memory[half : half + kv.size].reshape(kv.shape), kv)


def copy_chunks(chunks: Bytes, memory: Bytes) -> None:
    """Copy chunk after chunk to the front of `memory`."""
    flat = chunks.reshape(len(chunks), -1)
    for chunk, place in zip(flat, memory[: flat.size].reshape(flat.shape), strict=True):
        np.copyto(place, chunk)


def sleep_until(at_s: float) -> None:
    """Sleep until a `time.monotonic`; no time if it has passed. It never spins: others need the
    processor, and what computes is counted by its due time, not by when a thread woke.
    """
    left_s = at_s - time.monotonic()
    if left_s > 0:
        time.sleep(left_s)
