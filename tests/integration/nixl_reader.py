"""A client process that takes one delivery over NIXL: `python -m tests.integration.nixl_reader`.

Its argument is JSON. It prints a line for each layer. Where the delivery fails it takes it once
more, without a bound on its rate.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

from objectcache import Client, DeliveryFailed, FabricSettings, KvLayout, ObjectCacheError

LAYOUT = KvLayout(
    num_layers=16,
    chunk_tokens=16,
    per_layer_chunk_bytes=64 << 10,
    dtype="float16",
    fingerprint="nixl",
)
CHUNKS = 8
BUCKET = "nixl-bucket"
TOKENS = np.arange(CHUNKS * LAYOUT.chunk_tokens)
CHUNKS_OF_ALL = np.random.default_rng(3).integers(
    0, 256, (CHUNKS, LAYOUT.num_layers, LAYOUT.per_layer_chunk_bytes), np.uint8
)


def main() -> None:
    """Read until all is there."""
    how: dict[str, Any] = json.loads(sys.argv[1])
    client = Client(
        how["endpoint"],
        access_key=how["access_key"],
        secret_key=how["secret_key"],
        transport="nixl",
        fabric=FabricSettings("lo", how["ucx"]),
    )
    keys = client.kv_bucket(BUCKET, LAYOUT).chunk_keys(TOKENS)
    rate_bytes_per_s = how["rate_bytes_per_s"]
    while not _read(client, keys, rate_bytes_per_s):
        rate_bytes_per_s = None
    client.close()


def _read(client: Client, keys: list[str], rate_bytes_per_s: float | None) -> bool:
    bucket = client.kv_bucket(BUCKET, LAYOUT)
    try:
        with bucket.fetch(
            keys, delivery="layerwise", rate_bytes_per_s=rate_bytes_per_s
        ) as delivery:
            for layer, payload in delivery:
                is_right = np.array_equal(payload, CHUNKS_OF_ALL[:, layer])
                print(f"layer {layer} {'right' if is_right else 'wrong'}", flush=True)
    except DeliveryFailed:
        print("failed", flush=True)
        return False
    except ObjectCacheError as error:  # the server is still letting the session go
        print(f"refused {error.code}", flush=True)
        return False
    print("complete", flush=True)
    return True


if __name__ == "__main__":
    main()
