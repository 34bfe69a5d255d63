"""A whole server on an RDMA device, clients of it, and what they store."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from objectcache import Client, KvLayout
from objectcache.kv_bucket import KvBucket
from objectcache.sessions.fabric_joining import FabricSettings
from objectcache_schemas.operators.server_state import GetMetrics, Metrics
from tests import forked_servers, servers
from tests.servers import RunningServer, running_server
from tests.storage_client import StorageClient

SERVER_DEVICE, CLIENT_DEVICE = "rxe1", "rxe2"  # with a link between them
CHUNK_COUNT = 40


def layout_of(num_layers: int, slice_bytes: int) -> KvLayout:
    return KvLayout(
        num_layers=num_layers,
        chunk_tokens=16,
        per_layer_chunk_bytes=slice_bytes,
        dtype="float16",
        fingerprint="rdma",
    )


@contextmanager
def server_on_device(data_dir: Path, *settings: str) -> Iterator[RunningServer]:
    """Its first start reads all that it imports through an emulated disk, on an emulated processor
    that has half of a real one where other tests run beside it.
    """
    forked_servers.START_S = servers.READY_TIMEOUT_S = 600.0
    servers.STOP_TIMEOUT_S = 300.0
    device = f"storage.verbs_device={SERVER_DEVICE}"
    with running_server(
        data_dir, "storage.engine=memory", "storage.nixl=off", device, *settings
    ) as running:
        yield running


def client_of(server: RunningServer, device: str = CLIENT_DEVICE) -> Client:
    keys = server.credentials
    return client_at(server.endpoint, keys.access_key, keys.secret_key, device)


def client_at(endpoint: str, access_key: str, secret_key: str, device: str) -> Client:
    return Client(
        endpoint,
        access_key=access_key,
        secret_key=secret_key,
        transport="verbs",
        fabric=FabricSettings(verbs_device=device),
    )


def stored_prefix(client: Client, layout: KvLayout) -> tuple[KvBucket, list[str], Any]:
    """Chunks of random bytes, put over the client's transport."""
    bucket = client.kv_bucket(f"rdma-{secrets.token_hex(6)}", layout, create=True)
    keys = bucket.chunk_keys(np.arange(CHUNK_COUNT * layout.chunk_tokens))
    shape = (CHUNK_COUNT, layout.num_layers, layout.per_layer_chunk_bytes)
    chunks = np.random.default_rng(3).integers(0, 256, shape, dtype=np.uint8)
    assert bucket.put(keys, chunks).stored == CHUNK_COUNT
    return bucket, keys, chunks


def staged_bytes(server: RunningServer) -> int:
    """Staging memory that deliveries hold, as the storage server counts it."""
    with StorageClient(server.run_dir / "storage.sock") as storage:
        page = storage.ask(GetMetrics(), Metrics).text.decode()
    found = re.search(r"^objectcache_\w*fabric_staging_bytes (\S+)$", page, re.MULTILINE)
    assert found is not None, page
    return int(float(found.group(1)))


def run_fetcher(
    pipe: Any,
    endpoint: str,
    access_key: str,
    secret_key: str,
    bucket_name: str,
    layers: str,
    slice_bytes: str,
) -> None:
    """A client in a process of its own that fetches again and again; tells of every first layer."""
    layout = layout_of(int(layers), int(slice_bytes))
    client = client_at(endpoint, access_key, secret_key, CLIENT_DEVICE)
    bucket = client.kv_bucket(bucket_name, layout)
    keys = bucket.chunk_keys(np.arange(CHUNK_COUNT * layout.chunk_tokens))
    while True:
        with bucket.fetch(keys, delivery="layerwise") as delivery:
            delivery.wait_layer(0)
            pipe.send("begun")
            delivery.wait()
