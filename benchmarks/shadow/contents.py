"""What is fetched: KV of normal numbers in bfloat16, as it is and through lossy dtypes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from objectcache import KvLayout
from objectcache_encodings.lossy import LOSSY_DTYPES, KvShape, LossyDtype, lossy_layout

Bytes = npt.NDArray[np.uint8]

HEADS, WIDTH, CHUNK_TOKENS = 4, 128, 64
SHAPE = KvShape(CHUNK_TOKENS, HEADS, WIDTH)
SEED = 3


@dataclass(frozen=True, slots=True)
class Volume:
    """How much is fetched at once."""

    layers: int
    chunk_count: int

    @property
    def delivered_bytes(self) -> int:
        """Of bfloat16, whatever comes over the link."""
        return self.layers * self.chunk_count * SHAPE.slice_bytes


@dataclass(frozen=True, slots=True)
class Content:
    """A bucket's kind of chunks: `dtype` is empty where they are as the model has them."""

    name: str
    dtype: str = ""
    is_encoded: bool = True

    @property
    def bucket(self) -> str:
        """Its name."""
        return f"shadow-{self.name}"

    def layout(self, volume: Volume) -> KvLayout:
        """Of its chunks."""
        plain = plain_layout(volume)
        return lossy_layout(plain, self.dtype, SHAPE) if self.dtype else plain

    @property
    def lossy(self) -> LossyDtype | None:
        """What takes symbols to numbers; None where there is nothing to take."""
        return LOSSY_DTYPES[self.dtype](SHAPE) if self.dtype else None

    def keys(self, volume: Volume) -> list[str]:
        """Of the one prefix."""
        return self.layout(volume).chunk_keys(np.arange(volume.chunk_count * CHUNK_TOKENS))


PLAIN = Content("plain", is_encoded=False)
LOSSLESS = Content("lossless")
CONTENTS = (
    PLAIN,
    LOSSLESS,
    Content("q8", "lossy-q8"),
    Content("q6", "lossy-q6"),
    Content("bins", "lossy-bins"),
)


def plain_layout(volume: Volume) -> KvLayout:
    """Of the model's own slices."""
    return KvLayout(
        num_layers=volume.layers,
        chunk_tokens=CHUNK_TOKENS,
        per_layer_chunk_bytes=SHAPE.slice_bytes,
        dtype="bfloat16",
        fingerprint="normal-numbers",
    )


@lru_cache(1)
def numbers(volume: Volume) -> Bytes:
    """uint8[layers, chunks, slice_bytes], the model's KV."""
    rng = np.random.default_rng(SEED)
    count = SHAPE.slice_bytes // 2
    out = np.empty((volume.layers, volume.chunk_count, SHAPE.slice_bytes), np.uint8)
    for layer in out:
        floats = rng.standard_normal((volume.chunk_count, count), np.float32)
        layer.view("<u2")[...] = floats.view("<u4") >> 16
    return out


def stored(content: Content, volume: Volume) -> Bytes:
    """What is put: uint8[layers, chunks, slice_bytes of its layout]."""
    lossy = content.lossy
    if lossy is None:
        return numbers(volume)
    quantised = [lossy.quantise(row, layer) for layer, row in enumerate(numbers(volume))]
    return np.stack(quantised)


@lru_cache(len(CONTENTS))
def expected(content: Content, volume: Volume) -> Bytes:
    """What the engine must have at the end: uint8[layers, chunks, SHAPE.slice_bytes]."""
    lossy = content.lossy
    if lossy is None:
        return numbers(volume)
    out = np.empty_like(numbers(volume))
    for layer, row in enumerate(stored(content, volume)):
        lossy.dequantise(row, layer, out[layer])
    return out
