"""Redis: one MGET for all chunks, through redis-py, and received where it belongs."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.compare.clients.store_client import Bytes, Prefix, StoreClient, all_at_once
from benchmarks.compare.ways import REDIS_IN_PLACE, REDIS_LIBRARY, Way


class RedisClient(StoreClient):
    """Values are the chunks."""

    ways = (REDIS_LIBRARY, REDIS_IN_PLACE)

    def __init__(self, port: int) -> None:
        self._port = port

    def open(self) -> None:
        from redis import Redis

        self._redis: Any = Redis("127.0.0.1", self._port)
        self._socket = socket.create_connection(("127.0.0.1", self._port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def store(self, prefix: Prefix) -> None:
        for key, chunk in prefix.chunks():
            self._redis.set(key, chunk.tobytes())
        self._prefix = prefix
        self._memory = np.zeros(prefix.cell.payload_bytes, np.uint8)
        self._chunks = self._memory.reshape(len(prefix.keys), prefix.chunk_bytes)

    def fetch(self, way: Way) -> Sequence[float]:
        if way == REDIS_LIBRARY:
            self._fetch_by_library()
        else:
            self._fetch_in_place()
        return all_at_once(self._prefix)

    def layer(self, way: Way, layer: int) -> Bytes:
        return self._prefix.layer_of_chunks(self._memory, layer)

    def clear(self) -> None:
        self._memory[:] = 0

    def drop(self) -> None:
        self._redis.flushall()
        del self._memory, self._chunks

    def close(self) -> None:
        self._socket.close()
        self._redis.close()

    def _fetch_by_library(self) -> None:
        values = self._redis.mget(self._prefix.keys)
        for chunk, value in zip(self._chunks, values, strict=True):
            chunk[:] = np.frombuffer(value, np.uint8)

    def _fetch_in_place(self) -> None:
        """All values have one length, so the reply's framing is known beforehand."""
        keys = [key.encode() for key in self._prefix.keys]
        words = b"".join(b"$%d\r\n%s\r\n" % (len(key), key) for key in keys)
        self._socket.sendall(b"*%d\r\n$4\r\nMGET\r\n%s" % (len(keys) + 1, words))
        self._expect(b"*%d\r\n" % len(keys))
        head = b"$%d\r\n" % self._prefix.chunk_bytes
        for chunk in self._chunks:
            self._expect(head)
            self._receive(chunk.data)
            self._expect(b"\r\n")

    def _expect(self, framing: bytes) -> None:
        received = bytearray(len(framing))
        self._receive(memoryview(received))
        if received != framing:
            raise RuntimeError(f"Redis answered {bytes(received)!r}")

    def _receive(self, memory: memoryview) -> None:
        count = self._socket.recv_into(memory, len(memory), socket.MSG_WAITALL)
        if count < len(memory):
            raise RuntimeError("Redis closed the connection")
