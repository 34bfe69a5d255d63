"""ObjectCache's own request: layer by layer into this process, by each transport there is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from benchmarks.compare.clients.s3_bucket import S3Bucket, S3Server
from benchmarks.compare.clients.store_client import Bytes, Prefix, StoreClient
from benchmarks.compare.ways import BODY, NIXL, SHARED_MEMORY, Way
from objectcache import Client

TRANSPORTS = {SHARED_MEMORY: "shared_memory", BODY: "body", NIXL: "nixl"}
BUCKET = "compare-kv-{layers}-{slice_bytes}"


class ObjectCacheClient(StoreClient):
    """`KvBucket.fetch` into a target of the caller's own."""

    def __init__(self, server: S3Server, way: Way) -> None:
        self.ways = (way,)
        self._server = server
        self._transport = TRANSPORTS[way]

    def open(self) -> None:
        self._client = Client(
            self._server.url,
            access_key=self._server.access_key,
            secret_key=self._server.secret_key,
            transport=self._transport,
        )

    def store(self, prefix: Prefix) -> None:
        self._prefix = prefix
        self._name = BUCKET.format(layers=prefix.num_layers, slice_bytes=prefix.slice_bytes)
        layout = prefix.cell.geometry.layout()
        self._bucket = self._client.kv_bucket(self._name, layout, create=True)
        self._bucket.put(prefix.keys, [chunk for _, chunk in prefix.chunks()], transport="body")
        self._target: Any = self._new_target(prefix.cell.payload_bytes)

    def fetch(self, way: Way) -> Sequence[float]:
        arrivals: list[float] = []
        with self._bucket.fetch(
            self._prefix.keys,
            delivery="layerwise",
            transport=self._transport,
            target=self._target,
        ) as delivery:
            for layer in delivery.layers:
                delivery.wait_layer(layer)
                arrivals.append(time.perf_counter())
        return arrivals

    def layer(self, way: Way, layer: int) -> Bytes:
        payload = self._target.array[: self._prefix.cell.payload_bytes]
        return self._prefix.layer_of_layers(payload, layer)

    def clear(self) -> None:
        self._target.array[:] = 0

    def drop(self) -> None:
        self._target.close()
        S3Bucket(self._server, self._name).empty()

    def close(self) -> None:
        self._client.close()

    def _new_target(self, length_bytes: int) -> Any:
        if self._transport == TRANSPORTS[NIXL]:
            return self._client.fabric_target(length_bytes, transport="nixl")
        return self._client.shared_memory_target(length_bytes)
