"""Servers of one store whose rounds of upkeep a test asks for, at times that it chooses."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from objectcache_schemas.errors import Unavailable
from objectcache_schemas.limits import KIB
from objectcache_schemas.operators.engine_status import CheckReport
from objectcache_storage_server.engines.base import PrefixShape, StagedPrefix, StagedPut
from objectcache_storage_server.engines.shared.engine import SharedEngine
from objectcache_storage_server.engines.shared.index.index_state import IndexState
from objectcache_storage_server.engines.shared.upkeep.upkeep_rules import UpkeepRules
from objectcache_storage_server.engines.stores.memory_store import MemoryStore, MemoryStoreState
from objectcache_storage_server.testing import FaultyStore
from tests.contract.engine_suite import BUCKET, content
from tests.contract.opened_engines.shared_engines import open_server

KV = msgspec.structs.replace(BUCKET, name="kv")
GRACE_S = 1000.0
SLICE_BYTES = 1 * KIB
LAYERS = 4
CHUNK_BYTES = LAYERS * SLICE_BYTES
RULES = UpkeepRules(grace_s=GRACE_S, writer_lease_s=3600.0)


def soon() -> float:
    """A deadline that is not met on a slow machine only."""
    return time.monotonic() + 60


def until(is_so: Callable[[], bool]) -> None:
    """Return when it is so, which other threads see to."""
    deadline_s = soon()
    while not is_so():
        assert time.monotonic() < deadline_s, "it did not come to be so"
        time.sleep(0.005)


class UpkeptServer:
    """One server. Its upkeep's clock begins at 0 and is moved by `round`."""

    def __init__(
        self,
        state: MemoryStoreState,
        folder: Path,
        rules: UpkeepRules = RULES,
        wall_clock: Callable[[], float] = time.time,
        heartbeat_s: float = 3600.0,
    ) -> None:
        self.store = FaultyStore(MemoryStore(state))
        self.store.capabilities = replace(self.store.capabilities, object_bytes_max=64 * KIB)
        self.engine: SharedEngine = open_server(
            self.store,
            folder,
            wall_clock,
            rules=rules,
            round_s=None,
            heartbeat_s=heartbeat_s,
        )
        # A whole number, so that a grace after another time is a grace after it to the last bit.
        self.begun_s = float(int(time.monotonic()))
        self.is_open = True

    def close(self) -> None:
        """A second call has no effect."""
        if self.is_open:
            self.is_open = False
            self.store.release()
            self.engine.close()

    def round(self, now_s: float = 0.0) -> None:
        """One round, so long after the start."""
        self.engine.catalog.follow(soon())
        self.engine.upkeep.round(self.begun_s + now_s)

    def state(self) -> IndexState:
        """At the log's end."""
        self.engine.catalog.follow(soon())
        with self.engine.catalog.reading() as view:
            return view.state

    def writer(self) -> int:
        """The number under which it writes, once it is entered in the log."""
        until(self._is_registered)
        return self.engine.catalog.writer

    def _is_registered(self) -> bool:
        try:
            return self.engine.catalog.writer > 0
        except Unavailable:
            return False

    def fence(self, other: UpkeptServer) -> None:
        """Take another server for dead."""
        writer = other.writer()
        self.engine.catalog.change(lambda change: change.fence(writer), soon())

    def staged(self, keys: Sequence[str], parent_key: str | None = None) -> StagedPrefix:
        """Chunks of a prefix in the store, which no record names."""
        shape = PrefixShape(keys, LAYERS, SLICE_BYTES, True, parent_key)
        prefix = self.engine.stage_prefix(KV.name, shape)
        data = memoryview(
            b"".join(content((key, layer), SLICE_BYTES) for layer in range(LAYERS) for key in keys)
        )
        try:
            prefix.write(0, data)
        except BaseException:
            prefix.discard()
            raise
        return prefix

    def put(self, keys: Sequence[str], parent_key: str | None = None) -> None:
        """Store chunks of a prefix, in extents of their own."""
        self.commit(self.staged(keys, parent_key))

    def commit(self, prefix: StagedPrefix) -> None:
        """Have a record name them."""
        self.engine.commit([StagedPut(one, "etag") for one in prefix.staged])

    def stored_keys(self) -> list[str]:
        """All of the bucket, at the log's end."""
        self.engine.catalog.follow(soon())
        return [info.key for info in self.engine.scan(KV.name, "", "", 1 << 20)]

    def read(self, key: str) -> bytes:
        """An object's bytes."""
        with self.engine.open_many(KV.name, [key]) as opened:
            info = opened.infos[0]
            assert info is not None, key
            buffer = memoryview(bytearray(info.size_bytes))
            opened.read_into(0, 0, buffer)
            return bytes(buffer)

    def use(self, keys: Sequence[str]) -> None:
        """Read, and have the log say so."""
        for key in keys:
            assert self.read(key) == chunk(key)
        end = self.state().end
        self.engine.catalog.describe_server(b"%d" % end)
        until(lambda: self.state().end > end)

    def check(self, repair: bool = False) -> CheckReport:
        """A whole check."""
        return self.engine.check(repair, lambda report: True)


def chunk(key: str) -> bytes:
    """What `UpkeptServer.put` stores under a key."""
    return b"".join(content((key, layer), SLICE_BYTES) for layer in range(LAYERS))


def object_names(state: MemoryStoreState) -> set[str]:
    """Of all extents that are in the store."""
    with state.changed:
        return {name for name in state.objects if name.startswith("data/")}
