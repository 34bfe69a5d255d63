"""LMCache's own S3 connectors, unmodified, in a process where the bucket's host name resolves."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.s3_l2_adapter import S3L2AdapterConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.storage_backend.connector import CreateConnector

from tests.clients.driver import Endpoint
from tests.engines.lmcache_parts import (
    MODEL,
    EngineSide,
    contents,
    engine_keys,
    engine_side,
    release,
)

BUCKET = "lmcache-s3"
SHAPES = {
    "small": (4, 2, 16, 2, 8),
    "medium": (4, 2, 64, 4, 64),  # its layers are whole pages of LMCache's memory
    "large": (64, 2, 80, 8, 64),  # 10 MiB, more than LMCache's client sends or asks for at once
}
TASK_TIMEOUT_S = 60.0


class S3ConnectorDriver:
    """The `S3Connector` that LMCache makes of `remote_url: s3://...`.

    Connectors live as long as the process: closing one stops the event loop that it waits for.
    """

    cannot_name: ClassVar[Mapping[str, str]] = {}

    def __init__(self, endpoint: Endpoint, workspace: Path) -> None:
        self._endpoint = endpoint
        self._open = ExitStack()

    def put(self, size: str, first: int, count: int) -> list[bytes]:
        """Store chunks of noise, one by one as LMCache does; returns them."""
        engine, connector = self._parts(size)
        memory_objs = engine.chunks(count)
        stored = contents(memory_objs)
        for key, memory_obj in zip(engine_keys(count, first), memory_objs, strict=True):
            engine.call(connector.put(key, memory_obj))
        return stored

    def get(self, size: str, first: int, count: int) -> list[bytes | None]:
        """What a batched get brings for each key."""
        engine, connector = self._parts(size)
        found = engine.call(connector.batched_get(engine_keys(count, first)))
        brought = [None if one is None else contents([one])[0] for one in found]
        release(found)
        return brought

    def get_one(self, size: str, first: int) -> bytes | None:
        """What a get of one key brings."""
        engine, connector = self._parts(size)
        found = engine.call(connector.get(engine_keys(1, first)[0]))
        brought = None if found is None else contents([found])[0]
        release([found])
        return brought

    def lookup(self, first: int, count: int) -> tuple[list[bool], int]:
        """What `exists` says for each key, and `batched_async_contains` for all."""
        engine, connector = self._parts("small")
        keys = engine_keys(count, first)
        each = [engine.call(connector.exists(key)) for key in keys]
        return each, engine.call(connector.batched_async_contains("lookup", keys))

    def put_layers(self, first: int) -> None:
        """Store a chunk in LMCache's layerwise mode: an object a layer."""
        engine, connector = self._parts("medium", use_layerwise=True)
        layers, parts, tokens, heads, head_size = SHAPES["medium"]
        shape = torch.Size([tokens, parts, heads * head_size])
        for key in engine_keys(1, first)[0].split_layers(layers):
            memory_obj = engine.backend.allocate(
                shape, engine.metadata.kv_dtype, MemoryFormat.KV_T2D
            )
            engine.call(connector.put(key, memory_obj))

    def _parts(self, size: str, **settings: Any) -> tuple[EngineSide, Any]:
        """An engine's side and a connector that remembers nothing of earlier calls."""
        url = urlsplit(self._endpoint.url)
        remote_url = f"s3://{BUCKET}.{url.hostname}:{url.port}"
        extra = {
            "s3_region": "us-east-1",
            "s3_num_io_threads": 2,
            "save_chunk_meta": False,
            "disable_tls": True,
            "aws_access_key_id": self._endpoint.access_key,
            "aws_secret_access_key": self._endpoint.secret_key,
        }
        side = engine_side(
            extra, shape=SHAPES[size], memory_gib=0.05, remote_url=remote_url, **settings
        )
        engine = self._open.enter_context(side)
        connector = CreateConnector(
            remote_url, engine.loop, engine.backend, engine.config, engine.metadata
        )
        return engine, connector


class S3L2Driver:
    """The `S3L2Adapter` of the multiprocess mode."""

    cannot_name: ClassVar[Mapping[str, str]] = {}

    def __init__(self, endpoint: Endpoint, workspace: Path) -> None:
        url = urlsplit(endpoint.url)
        config = S3L2AdapterConfig.from_dict(
            {
                "s3_endpoint": f"s3://{BUCKET}.{url.hostname}:{url.port}",
                "s3_region": "us-east-1",
                "s3_num_io_threads": 2,
                "disable_tls": True,
                "aws_access_key_id": endpoint.access_key,
                "aws_secret_access_key": endpoint.secret_key,
            }
        )
        self._adapter = create_l2_adapter(config)

    def store(self, size: str, first: int, count: int) -> list[bytes]:
        """Store chunks of noise; returns them."""
        with engine_side({}, shape=SHAPES[size], memory_gib=0.05) as engine:
            memory_objs = engine.chunks(count)
            self._adapter.submit_store_task(_object_keys(first, count), memory_objs)
            done = _awaited(
                self._adapter.get_store_event_fd(),
                lambda: self._adapter.pop_completed_store_tasks() or None,
            )
            assert all(result.is_successful() for result in done.values())
            stored = contents(memory_objs)
            release(memory_objs)
            return stored

    def lookup(self, first: int, count: int) -> list[int]:
        """The chunks that are found."""
        with engine_side({}, shape=SHAPES["small"]) as engine:
            shapes, dtypes = engine.metadata.get_shapes(), engine.metadata.get_dtypes()
            task = self._adapter.submit_lookup_and_lock_task(
                _object_keys(first, count), {0: MemoryLayoutDesc(shapes, dtypes)}
            )
            bitmap = _awaited(
                self._adapter.get_lookup_and_lock_event_fd(),
                lambda: self._adapter.query_lookup_and_lock_result(task),
            )
            self._adapter.submit_unlock(_object_keys(first, count))
            return sorted(bitmap.get_indices_list())

    def load(self, size: str, first: int, count: int) -> list[bytes | None]:
        """What is loaded for each key."""
        with engine_side({}, shape=SHAPES[size], memory_gib=0.05) as engine:
            memory_objs = engine.chunks(count)
            task = self._adapter.submit_load_task(_object_keys(first, count), memory_objs)
            bitmap = _awaited(
                self._adapter.get_load_event_fd(), lambda: self._adapter.query_load_result(task)
            )
            loaded = contents(memory_objs)
            release(memory_objs)
            return [chunk if bitmap.test(n) else None for n, chunk in enumerate(loaded)]

    def delete(self, first: int, count: int) -> None:
        """Delete chunks."""
        self._adapter.delete(_object_keys(first, count))

    def listed(self, page_size: int) -> list[tuple[str, int]]:
        """Hash and size of every chunk of the model, page after page."""
        chunks: list[tuple[str, int]] = []
        cursor: str | None = None
        while True:
            page = self._adapter.list_l2_keys(MODEL, page_size, cursor)
            chunks += [(entry.key.chunk_hash_hex, entry.size_bytes) for entry in page.entries]
            cursor = page.next_page_token
            if cursor is None:
                return chunks


def _object_keys(first: int, count: int) -> list[ObjectKey]:
    kv_rank = ObjectKey.ComputeKVRank(1, 0, 1, 0)
    return [ObjectKey((first * 1000 + n).to_bytes(32, "big"), MODEL, kv_rank) for n in range(count)]


def _awaited(event_fd: int, query: Callable[[], Any]) -> Any:
    deadline_s = time.monotonic() + TASK_TIMEOUT_S
    poller = select.poll()
    poller.register(event_fd, select.POLLIN)
    while (result := query()) is None:
        assert time.monotonic() < deadline_s
        if poller.poll(1000):
            os.read(event_fd, 8)
    return result
