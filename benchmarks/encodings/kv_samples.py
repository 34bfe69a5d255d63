"""What is encoded: rows of slices of bf16, normal numbers or the KV cache of a real model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Slices = npt.NDArray[np.uint8]

LAYERS, TOKENS, HEADS, WIDTH = 30, 2048, 3, 64  # of SmolLM2-135M and a prefix
ROW_SLICES = 16
SEED = 1


@dataclass(frozen=True, slots=True)
class KvSample:
    """The KV of a prefix: uint16[layers, 2, tokens, heads, width], bf16."""

    name: str
    numbers: npt.NDArray[np.uint16]
    is_real: bool

    def rows(self, chunk_tokens: int) -> list[Slices]:
        """A row of at most `ROW_SLICES` chunks for each layer: uint8[n, slice_bytes]."""
        layers, parts, tokens, heads, width = self.numbers.shape
        chunks = self.numbers.reshape(layers, parts, -1, chunk_tokens, heads, width)
        together = np.ascontiguousarray(chunks[:, :, :ROW_SLICES].transpose(0, 2, 1, 3, 4, 5))
        return list(
            together.reshape(layers, min(ROW_SLICES, tokens // chunk_tokens), -1).view("u1")
        )


def gaussian() -> KvSample:
    """Normal numbers, as many as the real model's."""
    shape = LAYERS, 2, TOKENS, HEADS, WIDTH
    floats = np.random.default_rng(SEED).standard_normal(shape, np.float32)
    return KvSample("normal numbers", (floats.view("<u4") >> 16).astype("<u2"), is_real=False)
