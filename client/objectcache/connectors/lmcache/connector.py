"""LMCache's remote connector: the chunks of a batch in one request, LMCache's event loop free.

Blocking calls run in threads of the connector's own. Storing has its own, so that no lookup waits
behind a put. What waits for a thread is bounded by LMCache: a put holds memory of its pool, and a
lookup or a get has a caller that waits.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

from objectcache.async_client import BlockingCalls
from objectcache.connectors.lmcache.chunk_store import ChunkStore
from objectcache.connectors.lmcache.identities import Identities
from objectcache.connectors.lmcache.memory import bytes_of, geometry_of
from objectcache.connectors.lmcache.names import hinted_relay, keys_of_engine_keys
from objectcache.connectors.lmcache.settings import store_configuration
from objectcache.connectors.missing_engine import missing_engine
from objectcache.payload import Bytes
from objectcache_schemas.errors import ObjectCacheError

try:
    from lmcache.v1.exceptions import IrrecoverableException  # pyright: ignore[reportMissingImports]
    from lmcache.v1.storage_backend.connector import ConnectorAdapter  # pyright: ignore[reportMissingImports]
    from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector  # pyright: ignore[reportMissingImports]
except ImportError as error:
    ConnectorAdapter = RemoteConnector = missing_engine("LMCache 0.5.6", error)
    IrrecoverableException = Exception

URL = "plugin://objectcache"
READ_THREADS_MAX = 8
PUT_THREADS_MAX = 2  # a put holds its payload a second time until it is stored
PING_FAILED = 1

# A connector has a method `list`, so its class cannot name the type.
Objects = list[Any]
Chunks = list[Bytes]
Names = list[str]

_LOG = logging.getLogger("objectcache.connectors.lmcache")


class ObjectCacheConnectorAdapter(ConnectorAdapter):
    """What LMCache loads: `remote_storage_plugins: ["objectcache"]`, or "objectcache.NAME"."""

    def __init__(self) -> None:
        super().__init__(URL)

    def can_parse(self, url: str) -> bool:
        return url == URL or url.startswith(URL + ".")

    def create_connector(self, context: Any) -> ObjectCacheConnector:
        return ObjectCacheConnector(context)


class ObjectCacheConnector(RemoteConnector):
    """A `RemoteConnector` over a bucket of ObjectCache.

    A wrong configuration raises LMCache's `IrrecoverableException` with what to change; nothing is
    sent before the first call, so a server that is away is found by `ping`. Failures raise
    `objectcache.errors`, which LMCache takes for misses.
    """

    def __init__(self, context: Any) -> None:
        super().__init__(context.config, context.metadata)
        name = context.plugin_name or "objectcache"
        try:
            configuration = store_configuration(context.config, name, os.environ)
            self._geometry = geometry_of(self.meta_shapes, self.meta_dtypes)
            self._store = ChunkStore(configuration)
        except ObjectCacheError as error:
            raise IrrecoverableException(f"ObjectCache: {error}") from error
        self._backend = context.local_cpu_backend
        self._identities = Identities(configuration.weights_revision, os.environ)
        self._identities.of(context.metadata.model_name)  # as it is now, when the engine loads it
        self._hashing = context.config.pre_caching_hash_algorithm
        self._reads = BlockingCalls(READ_THREADS_MAX)
        self._puts = BlockingCalls(PUT_THREADS_MAX)
        self._told_of_partial_chunks = False

    # --- lookups ---

    async def exists(self, key: Any) -> bool:
        return await self.batched_async_contains("", [key]) == 1

    def exists_sync(self, key: Any) -> bool:
        return self.batched_contains([key]) == 1

    def support_batched_contains(self) -> bool:
        return True

    def batched_contains(self, keys: Sequence[Any]) -> int:
        return self._store.match_or_none(self._names(keys))

    def support_batched_async_contains(self) -> bool:
        return True

    async def batched_async_contains(
        self, lookup_id: str, keys: Sequence[Any], pin: bool = False
    ) -> int:
        return await self._reads.run(partial(self.batched_contains, keys))

    # --- gets ---

    async def get(self, key: Any) -> Any:
        found = await self.batched_get_non_blocking("", [key])
        return found[0] if found else None

    def support_batched_get(self) -> bool:
        return True

    async def batched_get(self, keys: Sequence[Any]) -> Objects:
        found = await self.batched_get_non_blocking("", keys)
        return [*found, *[None] * (len(keys) - len(found))]

    def support_batched_get_non_blocking(self) -> bool:
        return True

    async def batched_get_non_blocking(self, lookup_id: str, keys: Sequence[Any]) -> Objects:
        return await self._reads.run(partial(self._load, keys), _release)

    # --- puts ---

    async def put(self, key: Any, memory_obj: Any) -> None:
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        return True

    async def batched_put(self, keys: Sequence[Any], memory_objs: Sequence[Any]) -> None:
        # LMCache lets its objects go when this is left, which a cancelled task does at once.
        for memory_obj in memory_objs:
            memory_obj.ref_count_up()
        await self._puts.finish(partial(self._store_whole, [*keys], [*memory_objs]))

    def remove_sync(self, key: Any) -> bool:
        self._store.delete(self._names([key])[0])
        return True

    async def list(self) -> Sequence[str]:
        raise NotImplementedError("stored keys hold a digest of what LMCache's keys leave out")

    # --- health ---

    def support_ping(self) -> bool:
        return True

    async def ping(self) -> int:
        try:
            await self._reads.run(self._store.probe)
        except ObjectCacheError as error:
            _LOG.warning("the store does not answer as it should: %s", error)
            return PING_FAILED
        return 0

    async def close(self) -> None:
        self._store.close()
        # Threads that still run write to LMCache's memory, which it may free after this.
        for calls in (self._reads, self._puts):
            await asyncio.to_thread(calls.close, wait=True)

    # --- in threads ---

    def _load(self, keys: Sequence[Any]) -> Objects:
        memory_objs: Objects = []
        loaded = 0
        try:
            landing = partial(self._allocate, memory_objs)
            relay = hinted_relay(keys)
            loaded = self._store.load(self._names(keys), self._geometry, landing, relay)
        finally:
            _release(memory_objs[loaded:])
        return memory_objs[:loaded]

    def _allocate(self, memory_objs: Objects, begin: int, count: int) -> Chunks:
        chunks: Chunks = []
        while len(chunks) < count:
            # Not its busy loop: that would hold the delivery until another request ends.
            memory_obj = self._backend.allocate(
                self.meta_shapes, self.meta_dtypes, self.meta_fmt, busy_loop=False
            )
            if memory_obj is None:
                _LOG.warning("LMCache has room for %d of %d chunks", len(chunks), count)
                break
            memory_objs.append(memory_obj)
            chunks.append(bytes_of(memory_obj))
        return chunks

    def _store_whole(self, keys: Sequence[Any], memory_objs: Objects) -> None:
        try:
            whole = [
                (key, bytes_of(memory_obj))
                for key, memory_obj in zip(keys, memory_objs, strict=True)
                if memory_obj.get_size() == self._geometry.chunk_bytes
            ]
            if len(whole) < len(keys):
                self._tell_of_partial_chunks()
            names = self._names([key for key, _ in whole])
            self._store.store(names, [chunk for _, chunk in whole], self._geometry)
        finally:
            _release(memory_objs)

    def _tell_of_partial_chunks(self) -> None:
        if not self._told_of_partial_chunks:
            self._told_of_partial_chunks = True
            _LOG.warning(
                "chunks of fewer than chunk_size tokens are not stored: a key does not say how "
                "many it has; set save_unfull_chunk to false"
            )

    def _names(self, keys: Sequence[Any]) -> Names:
        return keys_of_engine_keys(keys, self._geometry, self._identities.of, self._hashing)

    def __repr__(self) -> str:
        return f"<ObjectCacheConnector {self._store!r}>"


def _release(memory_objs: Sequence[Any]) -> None:
    for memory_obj in memory_objs:
        memory_obj.ref_count_down()
