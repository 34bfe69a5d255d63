"""LMCache's multiprocess mode: an L2 adapter over a bucket of ObjectCache.

--l2-adapter '{"type": "plugin", "module_path": "objectcache.connectors.lmcache_l2",
               "class_name": "ObjectCacheL2Adapter",
               "adapter_params": {"endpoint": "...", "bucket": "..."}}'
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from objectcache.connectors.lmcache.chunk_store import ChunkStore
from objectcache.connectors.lmcache.geometry import ChunkGeometry
from objectcache.connectors.lmcache.identities import Identities
from objectcache.connectors.lmcache.memory import (
    bytes_of,
    dtypes_name,
    dtypes_name_of_object,
    geometry_of,
    geometry_of_object,
)
from objectcache.connectors.lmcache.names import interleaved, key_of_object_key
from objectcache.connectors.lmcache.task_queue import TaskQueue
from objectcache.connectors.missing_engine import missing_engine
from objectcache.connectors.store.configuration import StoreConfiguration
from objectcache.payload import Bytes
from objectcache_schemas.errors import ObjectCacheError

try:
    from lmcache.lmcache_native import Bitmap  # pyright: ignore[reportMissingImports]
    from lmcache.v1.distributed.internal_api import L2StoreResult  # pyright: ignore[reportMissingImports]
    from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface  # pyright: ignore[reportMissingImports]
    from lmcache.v1.platform import create_event_notifier  # pyright: ignore[reportMissingImports]
except ImportError as error:
    Bitmap = L2StoreResult = create_event_notifier = L2AdapterInterface = missing_engine(
        "LMCache 0.5.6", error
    )

TASKS_MAX = 1024  # waiting or running, of each kind
STORE_THREADS_MAX = 2  # a put holds its payload a second time until it is stored
LOOKUP_THREADS_MAX = 4
LOAD_THREADS_MAX = 4
SHAPES_MAX = 1024  # remembered, one a model and group of layers

_LOG = logging.getLogger("objectcache.connectors.lmcache")


@dataclass(frozen=True, slots=True)
class GroupShape:
    """How the chunks of one group of layers are shaped, and how keys name that."""

    geometry: ChunkGeometry
    dtypes: str


class ObjectCacheL2Adapter(L2AdapterInterface):
    """An `L2AdapterInterface`: a lookup is one match, a load one get, a store one put, for each
    group of layers.

    A lookup finds the leading run of the chunks of a group, as a prefix cache needs it; of several
    ranks, the run that all have. Nothing is locked: a chunk that is evicted between lookup and load
    is not loaded. Over a limit, after an error and when the server is gone, a task fails; it never
    waits longer than `lookup_timeout_s` (of a lookup) or `timeout_s` of the server's silence, and
    while the store is left alone after that, not at all. Raises `InvalidRequest` for wrong
    parameters.
    """

    def __init__(self, adapter_params: Mapping[str, Any], l1_memory_desc: object = None) -> None:
        super().__init__()
        configuration = StoreConfiguration.from_mapping(adapter_params, os.environ)
        self._store = ChunkStore(configuration)
        self._identities = Identities(configuration.weights_revision, os.environ)
        self._shapes: dict[tuple[str, int], GroupShape] = {}
        self._events = [create_event_notifier() for _ in range(3)]
        stored, looked_up, loaded = self._events
        self._stores: TaskQueue[Any] = TaskQueue(
            "store", STORE_THREADS_MAX, TASKS_MAX, stored.notify
        )
        self._lookups: TaskQueue[Any] = TaskQueue(
            "lookup", LOOKUP_THREADS_MAX, TASKS_MAX, looked_up.notify
        )
        self._loads: TaskQueue[Any] = TaskQueue("load", LOAD_THREADS_MAX, TASKS_MAX, loaded.notify)
        self._closed = False

    def get_store_event_fd(self) -> int:
        return int(self._events[0].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._events[1].fileno())

    def get_load_event_fd(self) -> int:
        return int(self._events[2].fileno())

    # --- tasks ---

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        return self._stores.submit(partial(self._store_all, keys, objects), L2StoreResult(False, 0))

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        return self._stores.pop_all()

    def submit_lookup_and_lock_task(
        self, keys: list[Any], group_layout_descs: Mapping[int, Any]
    ) -> int:
        work = partial(self._look_up, keys, dict(group_layout_descs))
        return self._lookups.submit(work, Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        return self._lookups.pop(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Nothing is locked."""

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        found = Bitmap(len(keys))  # what was loaded before an error stays loaded
        return self._loads.submit(partial(self._load, keys, objects, found), found)

    def query_load_result(self, task_id: int) -> Any:
        return self._loads.pop(task_id)

    # --- the rest of the interface ---

    def delete(self, keys: list[Any]) -> None:
        """Delete chunks, until one cannot be; those of a model that was not seen yet are left."""
        deleted: list[Any] = []
        sizes: list[int] = []
        try:
            for key in keys:
                shape = self._shapes.get((key.model_name, key.object_group_id))
                if shape is not None:
                    self._store.delete(self._name(key, shape))
                    deleted.append(key)
                    sizes.append(shape.geometry.chunk_bytes)
        except ObjectCacheError as error:
            _LOG.warning("%d of %d chunks are deleted: %s", len(deleted), len(keys), error)
        if deleted:
            self._notify_keys_deleted(deleted, sizes)

    def report_status(self) -> dict[str, Any]:
        queues = (self._stores, self._lookups, self._loads)
        return {
            "is_healthy": not self._closed,
            "type": "ObjectCacheL2Adapter",
            "failed_tasks": sum(queue.failure_count for queue in queues),
        }

    def close(self) -> None:
        """End the client, so that tasks that run fail, and wait for them: they use L1's memory."""
        if self._closed:
            return
        self._closed = True
        self._store.close()
        for queue in (self._stores, self._lookups, self._loads):
            queue.close()
        for event in self._events:
            event.close()

    # --- in threads ---

    def _store_all(self, keys: Sequence[Any], objects: Sequence[Any]) -> Any:
        shapes = [_shape_of_object(memory_obj) for memory_obj in objects]
        stored = 0
        for shape, indexes in _by_value([shape.geometry for shape in shapes]).items():
            names = [self._remembered(keys[index], shapes[index]) for index in indexes]
            stored += self._store.store(names, [bytes_of(objects[i]) for i in indexes], shape)
        sizes = [shape.geometry.chunk_bytes for shape in shapes]
        if stored:
            self._notify_keys_stored(list(keys), sizes)
        return L2StoreResult(True, sum(sizes))

    def _look_up(self, keys: Sequence[Any], descriptions: Mapping[int, Any]) -> Any:
        found = Bitmap(len(keys))
        for group, indexes in _by_value([key.object_group_id for key in keys]).items():
            description = descriptions.get(group)
            if description is None:
                continue  # without its shape a chunk has no name
            shape = GroupShape(
                geometry_of(description.shapes, description.dtypes),
                dtypes_name(description.dtypes),
            )
            indexes = _in_prefix_order(keys, indexes)
            matched = self._store.match([self._remembered(keys[i], shape) for i in indexes])
            for index in indexes[:matched]:
                found.set(index)
        hits = [key for index, key in enumerate(keys) if found.test(index)]
        if hits:
            self._notify_keys_accessed(hits)
        return found

    def _load(self, keys: Sequence[Any], objects: Sequence[Any], found: Any) -> Any:
        shapes = [_shape_of_object(memory_obj) for memory_obj in objects]
        for geometry, indexes in _by_value([shape.geometry for shape in shapes]).items():
            indexes = _in_prefix_order(keys, indexes)
            names = [self._name(keys[index], shapes[index]) for index in indexes]
            landing = partial(_landing, [bytes_of(objects[index]) for index in indexes])
            for index in indexes[: self._store.load(names, geometry, landing)]:
                found.set(index)
        return found

    def _remembered(self, key: Any, shape: GroupShape) -> str:
        if len(self._shapes) < SHAPES_MAX:
            self._shapes[key.model_name, key.object_group_id] = shape
        return self._name(key, shape)

    def _name(self, key: Any, shape: GroupShape) -> str:
        return key_of_object_key(key, shape.geometry, self._identities.of, shape.dtypes)


def _shape_of_object(memory_obj: Any) -> GroupShape:
    return GroupShape(geometry_of_object(memory_obj), dtypes_name_of_object(memory_obj))


def _landing(chunks: Sequence[Bytes], begin: int, count: int) -> Sequence[Bytes]:
    return chunks[begin : begin + count]


def _by_value(values: Sequence[Any]) -> dict[Any, list[int]]:
    """Indexes by the value that stands there, in order."""
    indexes: dict[Any, list[int]] = {}
    for index, value in enumerate(values):
        indexes.setdefault(value, []).append(index)
    return indexes


def _in_prefix_order(keys: Sequence[Any], indexes: Sequence[int]) -> list[int]:
    ranks = [(keys[i].model_name, keys[i].kv_rank, keys[i].cache_salt) for i in indexes]
    return [indexes[place] for place in interleaved(ranks)]
