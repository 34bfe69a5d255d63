"""A stored prefix of Llama 3.1 8B's shape at a chunk granularity, and where its bytes lie."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.server import Server
from objectcache import KvBucket, KvLayout
from objectcache.replay.kv_bytes import KvBytes
from objectcache_schemas.layout import rolling_keys
from objectcache_schemas.limits import MIB

SLICE_BYTES_PER_TOKEN = 4096  # 2 (K, V) x 8 KV heads x 128 wide x 2 bytes
LAYERS = 32
PUT_BYTES_MAX = 128 * MIB


@dataclass(frozen=True, slots=True)
class Geometry:
    """A prefix of `payload_bytes` in chunks of `chunk_tokens`."""

    chunk_tokens: int
    payload_bytes: int

    @property
    def slice_bytes(self) -> int:
        """Bytes of one layer of one chunk."""
        return SLICE_BYTES_PER_TOKEN * self.chunk_tokens

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk."""
        return LAYERS * self.slice_bytes

    @property
    def chunk_count(self) -> int:
        """Chunks of the prefix."""
        return self.payload_bytes // self.chunk_bytes

    def layout(self) -> KvLayout:
        """The bucket's layout."""
        return KvLayout(
            num_layers=LAYERS,
            chunk_tokens=self.chunk_tokens,
            per_layer_chunk_bytes=self.slice_bytes,
            dtype="float16",
            fingerprint="benchmark",
        )

    def keys(self, count: int | None = None, series: int = 0) -> list[str]:
        """Chunk keys; another series shares none."""
        rows = [np.array([series, n], np.uint32) for n in range(count or self.chunk_count)]
        return list(rolling_keys(self.layout().key_seed(), rows))

    def __str__(self) -> str:
        return f"G={self.chunk_tokens}"


def put_prefix(bucket: KvBucket, geometry: Geometry, keys: list[str]) -> None:
    """Store the bytes that `check_layers` expects."""
    kv = KvBytes(geometry.layout())
    chunks_each = max(1, PUT_BYTES_MAX // geometry.chunk_bytes)
    for first in range(0, len(keys), chunks_each):
        some = keys[first : first + chunks_each]
        bucket.put(some, kv.chunks(some))


def check_delivery(bucket: KvBucket, geometry: Geometry, keys: list[str], transport: str) -> None:
    """Fetch once, untimed, and stop the benchmark if a byte is wrong."""
    kv = KvBytes(geometry.layout())
    for mode in ("layerwise", "chunkwise"):
        with bucket.fetch(keys, delivery=mode, transport=transport) as delivery:
            for layer, payload in delivery:
                if kv.wrong_bytes(keys, layer, payload):
                    raise SystemExit(f"{mode} over {transport}: layer {layer} holds wrong bytes")


def object_files(server: Server, geometry: Geometry) -> list[Path]:
    """The files that hold this geometry's chunks, by their size."""
    sizes = range(geometry.chunk_bytes, geometry.chunk_bytes + geometry.slice_bytes)
    found = [
        Path(folder) / name
        for folder, _, names in os.walk(server.data_dir)
        for name in names
        if (Path(folder) / name).stat().st_size in sizes
    ]
    return sorted(found)
