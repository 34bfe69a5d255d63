"""A prefix of which some chunks are stored as frames, and what it looks like."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from objectcache import Client, KvLayout
from objectcache.kv_bucket import KvBucket
from objectcache_schemas.messages.buckets import SetPolicy
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.records import BucketPolicy, StoredEncoding
from tests.servers import RunningServer
from tests.storage_client import StorageClient

ZSTD, DEFLATE = "planes-zstd", "planes-deflate"
BUCKET = "encoded"
LAYOUT = KvLayout(
    num_layers=6,
    chunk_tokens=4,
    per_layer_chunk_bytes=16 << 10,
    dtype="bfloat16",
    fingerprint="normal",
)
# Chunks of one put each: an extent of several slots, of one, and as what they are stored.
PUTS = ((5, ZSTD), (1, ZSTD), (1, None), (3, None), (4, DEFLATE), (3, ZSTD))
CHUNKS = sum(count for count, _ in PUTS)
SLICE_BYTES, LAYERS = LAYOUT.per_layer_chunk_bytes, LAYOUT.num_layers
PAYLOAD_BYTES = CHUNKS * LAYOUT.chunk_bytes


def normal_numbers(chunk_count: int, seed: int = 1) -> npt.NDArray[np.uint8]:
    """bfloat16 of a normal distribution, as KV are alike: uint8[chunks, layers, slice_bytes]."""
    shape = (chunk_count, LAYERS, SLICE_BYTES // 2)
    numbers = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return (numbers.view(np.uint32) >> 16).astype("<u2").view(np.uint8)


DATA = normal_numbers(CHUNKS)
TOKENS = np.arange(CHUNKS * LAYOUT.chunk_tokens)
KEYS = LAYOUT.chunk_keys(TOKENS)


def client_of(server: RunningServer, **options: Any) -> Client:
    keys = server.credentials
    return Client(
        server.endpoint, access_key=keys.access_key, secret_key=keys.secret_key, **options
    )


def store_as(server: RunningServer, bucket: str, encoding: str | None) -> None:
    """What is put from now on is stored so."""
    policy = BucketPolicy(encoding=None if encoding is None else StoredEncoding(encoding))
    with StorageClient(server.run_dir / "storage.sock") as storage:
        storage.ask(SetPolicy(bucket=bucket, policy=policy), Done)


def fill(server: RunningServer, client: Client, name: str = BUCKET) -> KvBucket:
    """A bucket with the whole prefix."""
    bucket = client.kv_bucket(name, LAYOUT, create=True)
    first = 0
    for count, encoding in PUTS:
        store_as(server, name, encoding)
        bucket.put(KEYS[first : first + count], DATA[first : first + count])
        first += count
    return bucket
