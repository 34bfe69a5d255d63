"""Mooncake Store over TCP: whole objects, and ranges of a layer within a session."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.compare.clients.store_client import Bytes, Prefix, StoreClient, all_at_once
from benchmarks.compare.ways import MOONCAKE_LAYERS, MOONCAKE_WHOLE, Way

LOCAL_BUFFER_BYTES = 64 << 20


class MooncakeClient(StoreClient):
    """Objects are the chunks; the target is registered, so that the library fills it itself."""

    ways = (MOONCAKE_WHOLE, MOONCAKE_LAYERS)

    def __init__(self, own_port: int, master_port: int) -> None:
        self._own_port = own_port
        self._master_port = master_port

    def open(self) -> None:
        self._store: Any = connected_store(
            self._own_port, self._master_port, segment_bytes=0, buffer_bytes=LOCAL_BUFFER_BYTES
        )

    def store(self, prefix: Prefix) -> None:
        for key, chunk in prefix.chunks():
            _succeed("put", [self._store.put(key, chunk.tobytes())], 0)
        self._prefix = prefix
        self._keys = list(prefix.keys)
        self._memory = np.zeros(prefix.cell.payload_bytes, np.uint8)
        self._address = self._memory.ctypes.data
        _succeed("register", [self._store.register_buffer(self._address, len(self._memory))], 0)

    def fetch(self, way: Way) -> Sequence[float]:
        return self._fetch_whole() if way == MOONCAKE_WHOLE else self._fetch_layers()

    def layer(self, way: Way, layer: int) -> Bytes:
        if way == MOONCAKE_WHOLE:
            return self._prefix.layer_of_chunks(self._memory, layer)
        return self._prefix.layer_of_layers(self._memory, layer)

    def clear(self) -> None:
        self._memory[:] = 0

    def drop(self) -> None:
        self._store.unregister_buffer(self._address)
        self._store.remove_all(True)
        del self._memory

    def close(self) -> None:
        self._store.close()

    def _fetch_whole(self) -> Sequence[float]:
        length_bytes = self._prefix.chunk_bytes
        count = len(self._keys)
        addresses = [self._address + number * length_bytes for number in range(count)]
        results = self._store.batch_get_into(self._keys, addresses, [length_bytes] * count)
        _succeed("get", results, length_bytes)
        return all_at_once(self._prefix)

    def _fetch_layers(self) -> Sequence[float]:
        slice_bytes, count = self._prefix.slice_bytes, len(self._keys)
        lengths = [[slice_bytes]] * count
        arrivals: list[float] = []
        _succeed("session", self._store.batch_get_session_start(self._keys), 0)
        for layer in range(self._prefix.num_layers):
            first = self._address + layer * count * slice_bytes
            addresses = [[first + number * slice_bytes] for number in range(count)]
            offsets = [[layer * slice_bytes]] * count
            results = self._store.batch_get_into_multi_buffer_ranges(
                self._keys, addresses, lengths, offsets
            )
            _succeed("ranged get", results, slice_bytes)
            arrivals.append(time.perf_counter())
        self._store.batch_get_session_end(self._keys)
        return arrivals


def connected_store(own_port: int, master_port: int, segment_bytes: int, buffer_bytes: int) -> Any:
    """A store client; it serves a segment of memory to others unless `segment_bytes` is 0."""
    os.environ.setdefault("MC_TCP_BIND_ADDRESS", "127.0.0.1")  # else it listens on every address
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    result = store.setup(
        f"127.0.0.1:{own_port}",
        "P2PHANDSHAKE",
        segment_bytes,
        buffer_bytes,
        "tcp",
        "",
        f"127.0.0.1:{master_port}",
    )
    _succeed("setup", [result], 0)
    return store


def _succeed(what: str, results: Sequence[int], expected: int) -> None:
    wrong = [result for result in results if result != expected]
    if wrong:
        raise RuntimeError(f"Mooncake's {what} gave {wrong[0]} for {len(wrong)} of {len(results)}")
