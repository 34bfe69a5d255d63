"""Real parts of LMCache for tests: its memory pool, its loop, its keys, chunks full of noise."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

MODEL = "meta-llama/Llama-3.1-8B"
CALL_TIMEOUT_S = 60.0
SEEDS = itertools.count(7)  # other noise in every engine
T = TypeVar("T")


@dataclass
class EngineSide:
    """What LMCache's engine gives a connector: configuration, metadata, memory and a loop."""

    config: Any
    metadata: Any
    loop: asyncio.AbstractEventLoop
    backend: Any
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(next(SEEDS)))

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run on the loop, as LMCache's threads do."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(CALL_TIMEOUT_S)

    def chunk(self, token_count: int | None = None) -> Any:
        """A memory object with noise, of a whole chunk or of so many tokens."""
        memory_obj = self.backend.allocate(
            self.metadata.get_shapes(token_count),
            self.metadata.get_dtypes(),
            MemoryFormat.KV_2LTD,
            busy_loop=False,
        )
        assert memory_obj is not None
        view = np.frombuffer(memory_obj.byte_array, np.uint8)
        view[:] = self.random.integers(0, 256, len(view), np.uint8)
        return memory_obj

    def chunks(self, count: int) -> list[Any]:
        """So many whole chunks."""
        return [self.chunk() for _ in range(count)]

    @property
    def used_bytes(self) -> int:
        """What of LMCache's memory is not free."""
        allocator = self.backend.memory_allocator.pin_allocator
        return int(allocator.total_allocated_size)


@contextmanager
def engine_side(
    extra_config: dict[str, Any],
    *,
    shape: tuple[int, int, int, int, int] = (4, 2, 16, 2, 8),
    use_mla: bool = False,
    memory_gib: float = 0.25,
    **settings: Any,
) -> Iterator[EngineSide]:
    """`shape` is layers, keys and values, tokens, heads, head size."""
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=shape[2],
        local_cpu=False,
        max_local_cpu_size=memory_gib,
        extra_config=extra_config,
        **settings,
    )
    metadata = LMCacheMetadata(
        model_name=MODEL,
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.bfloat16,
        kv_shape=shape,
        use_mla=use_mla,
        chunk_size=shape[2],
    )
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="lmcache-loop")
    thread.start()
    backend = LocalCPUBackend(config, metadata, dst_device="cpu")
    try:
        yield EngineSide(config, metadata, loop, backend)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        backend.memory_allocator.close()


def engine_keys(count: int, first: int = 1, worker_id: int = 0, world_size: int = 1) -> list[Any]:
    """Keys of a prefix of so many chunks."""
    return [
        CacheEngineKey(MODEL, world_size, worker_id, first * 1000 + n, torch.bfloat16)
        for n in range(count)
    ]


def contents(memory_objs: Sequence[Any]) -> list[bytes]:
    """The bytes of each."""
    return [bytes(memory_obj.byte_array) for memory_obj in memory_objs]


def release(memory_objs: Sequence[Any]) -> None:
    """Give the memory back."""
    for memory_obj in memory_objs:
        if memory_obj is not None:
            memory_obj.ref_count_down()
