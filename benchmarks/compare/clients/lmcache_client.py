"""LMCache's S3 connector, unmodified: one object a chunk, through the AWS runtime."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from typing import Any

import numpy as np

from benchmarks.compare.cells import MLA, Cell
from benchmarks.compare.clients.s3_bucket import REGION, S3Bucket, S3Server
from benchmarks.compare.clients.store_client import Bytes, Prefix, StoreClient, all_at_once
from benchmarks.compare.ways import Way, lmcache_way
from objectcache_schemas.limits import GIB

HEAD_WIDTH = 128  # of Llama; the number of heads follows
TIMEOUT_S = 60.0
PUT_AT_ONCE = 4


class LmcacheClient(StoreClient):
    """Chunks land in memory objects of LMCache's CPU backend, which is this path's target.

    The connector knows virtual hosts alone. The bytes of a chunk are ours, in our order; the
    connector does not look at them.
    """

    def __init__(self, server: S3Server) -> None:
        self.ways = (lmcache_way(server.name),)
        self._server = server

    def open(self) -> None:
        S3Bucket(self._server, self._server.bucket).create()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._fetched: list[Any] = []

    def store(self, prefix: Prefix) -> None:
        import torch
        from lmcache.utils import CacheEngineKey

        self._prefix = prefix
        self._connector, self._backend = self._connected(prefix.cell)
        self._keys = [
            CacheEngineKey(prefix.cell.model.name, 1, 0, int(key[:16], 16), torch.bfloat16)
            for key in prefix.keys
        ]
        self._run(self._put_all(prefix))

    def fetch(self, way: Way) -> Sequence[float]:
        self._fetched = self._run(self._connector.batched_get(self._keys))
        if any(memory is None for memory in self._fetched):
            raise RuntimeError("the connector did not find a chunk, see its log")
        return all_at_once(self._prefix)

    def layer(self, way: Way, layer: int) -> Bytes:
        slice_bytes = self._prefix.slice_bytes
        part = slice(layer * slice_bytes, (layer + 1) * slice_bytes)
        return np.stack([_bytes_of(memory)[part] for memory in self._fetched])

    def clear(self) -> None:
        for memory in self._fetched:
            _bytes_of(memory)[:] = 0
            memory.ref_count_down()
        self._fetched = []

    def drop(self) -> None:
        # The connector has a close, which waits without end for workers that it cancelled (0.5.6);
        # what it would end is idle.
        self._backend.memory_allocator.close()
        S3Bucket(self._server, self._server.bucket).empty()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _put_all(self, prefix: Prefix) -> None:
        """One after the other but for a few: the target's memory is all there is."""
        under_way = asyncio.Semaphore(PUT_AT_ONCE)

        async def put(key: Any, memory: Any) -> None:
            await self._connector.put(key, memory)
            memory.ref_count_down()
            under_way.release()

        tasks: list[asyncio.Task[None]] = []
        for key, (_, chunk) in zip(self._keys, prefix.chunks(), strict=True):
            await under_way.acquire()
            memory = self._allocated()
            _bytes_of(memory)[:] = chunk.reshape(-1)
            tasks.append(asyncio.create_task(put(key, memory)))
        await asyncio.gather(*tasks)
        if len(self._connector.object_size_cache) < len(tasks):
            raise RuntimeError(
                f"it refuses to store chunks of {prefix.chunk_bytes:,} bytes, which its own "
                "allocator pads"
            )

    def _connected(self, cell: Cell) -> tuple[Any, Any]:
        import torch
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.connector import CreateConnector
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

        url = f"s3://{self._server.bucket_host}:{self._server.port}"
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=cell.chunk_tokens,
            local_cpu=False,
            max_local_cpu_size=(cell.payload_bytes + cell.geometry.chunk_bytes) / GIB + 0.1,
            remote_url=url,
            extra_config={
                "save_chunk_meta": False,
                "s3_region": REGION,
                "disable_tls": True,
                "aws_access_key_id": self._server.access_key,
                "aws_secret_access_key": self._server.secret_key,
            },
        )
        metadata = LMCacheMetadata(
            model_name=cell.model.name,
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.bfloat16,
            kv_shape=_kv_shape(cell),
            use_mla=cell.model == MLA,
            chunk_size=cell.chunk_tokens,
        )
        backend = LocalCPUBackend(config, metadata, dst_device="cpu")
        metered = CreateConnector(url, self._loop, backend, config, metadata)
        return metered.getWrappedConnector(), backend

    def _allocated(self) -> Any:
        connector = self._connector
        memory = self._backend.allocate(
            connector.meta_shapes, connector.meta_dtypes, connector.meta_fmt
        )
        if memory is None:
            raise RuntimeError("LMCache's CPU backend has no memory left")
        return memory

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(TIMEOUT_S)


def _kv_shape(cell: Cell) -> tuple[int, int, int, int, int]:
    """Layers, K and V, tokens, heads, width; two bytes an element."""
    elements = cell.model.token_bytes // 2
    if cell.model == MLA:
        return (cell.model.num_layers, 1, cell.chunk_tokens, 1, elements)
    heads = elements // 2 // HEAD_WIDTH
    return (cell.model.num_layers, 2, cell.chunk_tokens, heads, HEAD_WIDTH)


def _bytes_of(memory: Any) -> Bytes:
    return np.frombuffer(memory.byte_array, np.uint8)
