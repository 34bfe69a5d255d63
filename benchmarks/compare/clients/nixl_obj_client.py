"""NIXL's OBJ plugin, unmodified: one request a descriptor, whole objects or ranges of a layer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.compare.clients.s3_bucket import REGION, S3Bucket, S3Server
from benchmarks.compare.clients.store_client import Bytes, Prefix, StoreClient, all_at_once
from benchmarks.compare.ways import Way, nixl_obj_way
from objectcache_fabrics.nixl.agent import library

BUCKET = "compare-nixl"
AGENT = "compare"
THREADS = 4  # more requests at once gain nothing on two cores; the plugin's default here is one
POLL_INTERVAL_S = 0.0002  # a spinning client would take a core from the server


class NixlObjClient(StoreClient):
    """Objects are the chunks, put by boto3; the target is registered DRAM."""

    def __init__(self, server: S3Server) -> None:
        self._whole, self._layers = (nixl_obj_way(server.name, by) for by in (False, True))
        self.ways = (self._whole, self._layers)
        self._server = server

    def open(self) -> None:
        nixl = library()
        S3Bucket(self._server, BUCKET).create()
        self._agent: Any = nixl.nixl_agent(AGENT, nixl.nixl_agent_config(backends=[]))
        self._agent.create_backend(
            "OBJ",
            {
                "endpoint_override": f"{self._server.path_host}:{self._server.port}",
                "scheme": "http",
                "bucket": BUCKET,
                "region": REGION,
                "access_key": self._server.access_key,
                "secret_key": self._server.secret_key,
                "req_checksum": "required",
                "resp_checksum": "required",
                "num_threads": str(THREADS),
            },
        )

    def store(self, prefix: Prefix) -> None:
        S3Bucket(self._server, BUCKET).put(prefix)
        self._prefix = prefix
        self._memory = np.zeros(prefix.cell.payload_bytes, np.uint8)
        self._address = self._memory.ctypes.data
        where = [(self._address, len(self._memory), 0, "")]
        what = [(0, prefix.chunk_bytes, number, key) for number, key in enumerate(prefix.keys)]
        self._registered = [
            self._agent.register_memory(where, "DRAM", backends=["OBJ"]),
            self._agent.register_memory(what, "OBJ", backends=["OBJ"]),
        ]

    def fetch(self, way: Way) -> Sequence[float]:
        if way == self._whole:
            handle = self._begin(0, self._prefix.chunk_bytes, 0)
            self._finish(handle)
            return all_at_once(self._prefix)
        slice_bytes, layer_bytes = self._prefix.slice_bytes, self._layer_bytes
        handles = [
            self._begin(layer * layer_bytes, slice_bytes, layer * slice_bytes)
            for layer in range(self._prefix.num_layers)
        ]
        arrivals: list[float] = []
        for handle in handles:
            self._finish(handle)
            arrivals.append(time.perf_counter())
        return arrivals

    def layer(self, way: Way, layer: int) -> Bytes:
        if way == self._whole:
            return self._prefix.layer_of_chunks(self._memory, layer)
        return self._prefix.layer_of_layers(self._memory, layer)

    def clear(self) -> None:
        self._memory[:] = 0

    def drop(self) -> None:
        for descriptors in self._registered:
            self._agent.deregister_memory(descriptors, backends=["OBJ"])
        del self._memory
        S3Bucket(self._server, BUCKET).empty()

    def close(self) -> None:
        del self._agent

    @property
    def _layer_bytes(self) -> int:
        return self._prefix.slice_bytes * len(self._prefix.keys)

    def _begin(self, target_offset_bytes: int, length_bytes: int, object_offset_bytes: int) -> Any:
        """Ask for as many bytes of each object, to lie one after the other in the target."""
        count = len(self._prefix.keys)
        numbers = np.arange(count, dtype=np.uint64)
        target = np.empty((count, 3), np.uint64)
        target[:, 0] = self._address + target_offset_bytes + numbers * np.uint64(length_bytes)
        target[:, 1], target[:, 2] = length_bytes, 0
        source = np.empty((count, 3), np.uint64)
        source[:, 0], source[:, 1], source[:, 2] = object_offset_bytes, length_bytes, numbers
        handle = self._agent.initialize_xfer(
            "READ",
            self._agent.get_xfer_descs(target, "DRAM"),
            self._agent.get_xfer_descs(source, "OBJ"),
            AGENT,
            backends=["OBJ"],
        )
        self._agent.transfer(handle)
        return handle

    def _finish(self, handle: Any) -> None:
        while (state := self._agent.check_xfer_state(handle)) == "PROC":
            time.sleep(POLL_INTERVAL_S)
        self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError(f"a transfer ended as {state}")
