"""The shared engine in the contract's tests: one server, and two servers of one store."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
import uuid
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from objectcache_schemas.limits import MIB
from objectcache_schemas.records import Condition, ObjectInfo
from objectcache_storage_server.engines.base import (
    ALWAYS,
    Committed,
    PrefixShape,
    Staged,
    StagedPrefix,
    StagedPut,
)
from objectcache_storage_server.engines.catalog_engine import CALL_S_MAX
from objectcache_storage_server.engines.disk.flush_latch import FlushLatch
from objectcache_storage_server.engines.passing_engine import PassingEngine
from objectcache_storage_server.engines.shared.cache.extent_cache import ExtentCache
from objectcache_storage_server.engines.shared.engine import SharedEngine
from objectcache_storage_server.engines.shared.log.keep_checkpoints import CheckpointRule
from objectcache_storage_server.engines.shared.log.log_catalog import HEARTBEAT_S, LogCatalog
from objectcache_storage_server.engines.shared.upkeep.upkeep_rules import UpkeepRules
from objectcache_storage_server.engines.shared.upkeep.upkeep_thread import ROUND_S, SharedUpkeep
from objectcache_storage_server.engines.stores.daos.daos_store import DaosStore
from objectcache_storage_server.engines.stores.folder.folder_store import FolderStore
from objectcache_storage_server.engines.stores.memory_store import MemoryStore, MemoryStoreState
from objectcache_storage_server.engines.stores.shared_store import SharedStore

T = TypeVar("T")

FOLLOW_S_MAX = 20.0
INDEX_BYTES_MAX = 64 * MIB
PUT_BUFFER_BYTES_MAX = 64 * MIB
RULES = UpkeepRules()
CHECKPOINT_RULE = CheckpointRule()
DAOS = os.environ.get("DAOS_POOL", ""), os.environ.get("DAOS_CONT", "")  # a container of no type
READS = frozenset(
    {
        "bucket",
        "fresh_bucket",
        "buckets",
        "usage",
        "stat",
        "stat_at_hand",
        "match",
        "open_many",
        "read_small",
        "scan",
        "copy",
    }
)
# Answered from what a server has replayed, for every bucket.
REPLAYED = frozenset({"bucket", "buckets", "usage", "stat_at_hand"})


class TwoServers(PassingEngine):
    """Engines of one store, one of which carries out each call.

    What answers from what was replayed follows the log first, as a client that waits a moment would
    see it: reads of ordinary buckets have to do that by themselves.
    """

    def __init__(self, first: SharedEngine, second: SharedEngine) -> None:
        self.servers = (first, second)
        self._chosen = threading.local()
        self.capabilities = first.capabilities
        self._staged_by = WeakKeyDictionary[Staged, SharedEngine]()
        self._has_layouts = False  # whose buckets are answered from what was replayed, too

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.servers!r}>"

    def choose(self, operation: str) -> SharedEngine:
        """Who carries out this operation."""
        raise NotImplementedError

    @property
    def inner(self) -> SharedEngine:  # type: ignore[override]
        """Who carries out the operation of this thread."""
        chosen: SharedEngine = self._chosen.engine
        return chosen

    def call(self, operation: str, size_bytes: int, action: Callable[[], T]) -> T:
        self._chosen.engine = engine = self.choose(operation)
        self._has_layouts = self._has_layouts or operation == "set_layout"
        if operation in REPLAYED or self._has_layouts:
            engine.catalog.follow(time.monotonic() + FOLLOW_S_MAX)
        return action()

    # What was staged by a server is committed by it.

    def stage(self, *args: Any, **kwargs: Any) -> Staged:
        staged = super().stage(*args, **kwargs)
        self._staged_by[staged] = self.inner
        return staged

    def stage_prefix(self, bucket: str, shape: PrefixShape) -> StagedPrefix:
        prefix = super().stage_prefix(bucket, shape)
        self._staged_by.update(dict.fromkeys(prefix.staged, self.inner))
        return prefix

    def stage_joined(self, *args: Any, **kwargs: Any) -> Staged | None:
        staged = super().stage_joined(*args, **kwargs)
        if staged is not None:
            self._staged_by[staged] = self.inner
        return staged

    def commit(self, puts: Sequence[StagedPut], condition: Condition = ALWAYS) -> list[Committed]:
        engine = self._staged_by[puts[0].staged] if puts else self.servers[0]
        committed = engine.commit(puts, condition)
        self.after_commit()
        return committed

    def after_commit(self) -> None:
        """This thread has committed."""

    @contextlib.contextmanager
    def scanning(
        self, bucket: str
    ) -> Generator[Callable[[str, str, int], list[ObjectInfo]], None, None]:
        with self.choose("scan").scanning(bucket) as scan:
            yield scan

    @property
    def damaged_count(self) -> int:
        return sum(engine.damaged_count for engine in self.servers)

    @property
    def flush_failure(self) -> str:
        return "".join(engine.flush_failure for engine in self.servers)

    def close(self) -> None:
        for engine in self.servers:
            engine.close()


class WriterAndReader(TwoServers):
    """The first server changes everything, the second one answers."""

    def choose(self, operation: str) -> SharedEngine:
        return self.servers[operation in READS]


class ByTurns(TwoServers):
    """Every call is the other server's, but that what is committed together is staged by one."""

    def __init__(self, first: SharedEngine, second: SharedEngine) -> None:
        super().__init__(first, second)
        self._turns = itertools.count()

    def choose(self, operation: str) -> SharedEngine:
        if operation.startswith("stage"):
            if not hasattr(self._chosen, "stager"):
                self.after_commit()
            stager: SharedEngine = self._chosen.stager
            return stager
        return self.servers[next(self._turns) % 2]

    def after_commit(self) -> None:
        self._chosen.stager = self.servers[next(self._turns) % 2]


def open_server(
    store: SharedStore,
    folder: Path,
    clock: Callable[[], float] = time.time,
    call_s_max: float = CALL_S_MAX,
    rules: UpkeepRules = RULES,
    round_s: float | None = ROUND_S,
    heartbeat_s: float = HEARTBEAT_S,
    checkpoint_rule: CheckpointRule = CHECKPOINT_RULE,
    cache_slots: int = 0,
) -> SharedEngine:
    """One server of a store, whose index is in `folder`, and its cache beside it, if it has one."""
    with contextlib.ExitStack() as opened:
        opened.callback(store.close)
        cache = opened_cache(store, folder, cache_slots) if cache_slots else None
        if cache is not None:
            opened.callback(cache.close)
        catalog = LogCatalog(
            store,
            folder,
            index_bytes_max=INDEX_BYTES_MAX,
            heartbeat_s=heartbeat_s,
            checkpoint_rule=checkpoint_rule,
        )
        opened.callback(catalog.close)
        upkeep = SharedUpkeep(catalog, store, rules, clock, round_s)
        opened.callback(upkeep.close)
        close = opened.pop_all().close
        return SharedEngine(
            catalog,
            store,
            upkeep,
            PUT_BUFFER_BYTES_MAX,
            FlushLatch(),
            close,
            clock,
            call_s_max,
            cache,
        )


def opened_cache(store: SharedStore, folder: Path, slot_count: int) -> ExtentCache:
    """The cache of the server whose index is in `folder`."""
    slot_bytes = store.capabilities.object_bytes_max
    cache_folder = folder.with_name(f"{folder.name}-cache")
    return ExtentCache(cache_folder, slot_count * slot_bytes, slot_bytes)


def in_memory(object_bytes_max: int = 4 * MIB) -> Callable[[], SharedStore]:
    """What opens handles of a store in memory."""
    state = MemoryStoreState()

    def open_handle() -> SharedStore:
        store = MemoryStore(state)
        store.capabilities = replace(store.capabilities, object_bytes_max=object_bytes_max)
        return store

    return open_handle


def one_server(folder: Path, object_bytes_max: int = 4 * MIB, cache_slots: int = 0) -> SharedEngine:
    """A new store in memory, and its only server."""
    return open_server(in_memory(object_bytes_max)(), folder, cache_slots=cache_slots)


def two_servers(
    kind: Callable[[SharedEngine, SharedEngine], TwoServers],
    open_handle: Callable[[], SharedStore],
    folder: Path,
    clock: Callable[[], float] = time.time,
    cache_slots: int = 0,
) -> TwoServers:
    """Two servers of a store."""
    first, second = (
        open_server(open_handle(), folder / name, clock, cache_slots=cache_slots)
        for name in ("a", "b")
    )
    return kind(first, second)


def in_folder(folder: Path) -> Callable[[], SharedStore]:
    """What opens handles of a store in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    return lambda: FolderStore(folder / "store", create=True)


def in_daos() -> Callable[[], SharedStore]:
    """What opens handles of a store in two DAOS objects of its own, in the container of `DAOS`."""
    pool, container = DAOS
    first = uuid.uuid4().int >> 66
    return lambda: DaosStore(pool, container, create=True, first_object=first)
