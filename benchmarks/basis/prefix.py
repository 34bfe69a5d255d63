"""A prefix of a model's shape at a chunk granularity, its keys, and its bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from objectcache import KvBucket, KvLayout
from objectcache_laboratory.replay.kv_bytes import KvBytes
from objectcache_schemas.chunk_keys import rolling_keys
from objectcache_schemas.limits import KIB

LLAMA_TOKEN_BYTES = 4096  # of a layer, Llama 3.1 8B: 2 (K, V) x 8 KV heads x 128 wide x 2 bytes
MLA_TOKEN_BYTES = 1152  # of a layer, DeepSeek-V3: (512 latent + 64 rotary) x 2 bytes
LAYERS = 32


@dataclass(frozen=True, slots=True)
class Geometry:
    """A prefix of `chunk_count` chunks of `chunk_tokens`, `token_bytes` a token and layer."""

    chunk_tokens: int
    chunk_count: int
    token_bytes: int = LLAMA_TOKEN_BYTES
    num_layers: int = LAYERS

    @property
    def slice_bytes(self) -> int:
        """Bytes of one layer of one chunk."""
        return self.token_bytes * self.chunk_tokens

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk."""
        return self.num_layers * self.slice_bytes

    @property
    def payload_bytes(self) -> int:
        """Bytes of the prefix."""
        return self.chunk_count * self.chunk_bytes

    def in_chunks_of(self, chunk_tokens: int) -> Geometry:
        """As many bytes in other chunks."""
        chunk_count = self.chunk_count * self.chunk_tokens // chunk_tokens
        return replace(self, chunk_tokens=chunk_tokens, chunk_count=chunk_count)

    def layout(self) -> KvLayout:
        """The bucket's layout."""
        return KvLayout(
            num_layers=self.num_layers,
            chunk_tokens=self.chunk_tokens,
            per_layer_chunk_bytes=self.slice_bytes,
            dtype="float16",
            fingerprint="benchmark",
        )

    def keys(self, series: int = 0) -> list[str]:
        """Chunk keys; another series shares none."""
        rows = [np.array([series, n], np.uint32) for n in range(self.chunk_count)]
        return list(rolling_keys(self.layout().key_seed(), rows))

    def __str__(self) -> str:
        return f"G={self.chunk_tokens}, S={self.slice_bytes / KIB:g} KiB"


def fill_chunks(memory: npt.NDArray[np.uint8], geometry: Geometry, keys: list[str]) -> None:
    """Lay the bytes that belong to `keys` in memory: uint8[chunk_count, num_layers, slice_bytes].

    A few chunks at a time, so that no second prefix is in memory.
    """
    kv = KvBytes(geometry.layout())
    for first in range(0, len(keys), 16):
        memory[first : first + 16] = kv.chunks(keys[first : first + 16])


def check_delivery(bucket: KvBucket, geometry: Geometry, keys: list[str], transport: str) -> None:
    """Fetch once, untimed, and stop the benchmark if a byte is wrong."""
    for mode in ("layerwise", "chunkwise"):
        with bucket.fetch(keys, delivery=mode, transport=transport) as delivery:
            for layer, payload in delivery:
                check_layer(geometry, keys, layer, payload)


def check_layer(
    geometry: Geometry, keys: list[str], layer: int, payload: npt.NDArray[np.uint8]
) -> None:
    """Stop the benchmark if a byte of uint8[chunk_count, slice_bytes] is wrong."""
    if KvBytes(geometry.layout()).wrong_bytes(keys, layer, payload):
        raise SystemExit(f"layer {layer} of {geometry} was delivered with wrong bytes")
