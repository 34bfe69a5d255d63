"""Catalogs on one store in memory, and versions to put into them."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from objectcache_schemas.errors import Unavailable
from objectcache_schemas.limits import MIB
from objectcache_schemas.records import BucketInfo, ObjectInfo
from objectcache_storage_server.engines.shared.index.replayed_change import ReplayedChange
from objectcache_storage_server.engines.shared.index.replayed_view import ReplayedView
from objectcache_storage_server.engines.shared.index.version_rows import new_rows
from objectcache_storage_server.engines.shared.log.keep_checkpoints import CheckpointRule
from objectcache_storage_server.engines.shared.log.log_catalog import CALL_S_MAX, LogCatalog
from objectcache_storage_server.engines.shared.versions import (
    ExtentName,
    ExtentShape,
    SharedVersion,
)
from objectcache_storage_server.engines.stores.memory_store import MemoryStore, MemoryStoreState
from objectcache_storage_server.testing.wrapped_shared_stores import FaultyStore

T = TypeVar("T")

BUCKET = BucketInfo(name="bucket", owner="owner", region="region", created_s=1.0)
NEVER = CheckpointRule(records=1 << 40, log_bytes=1 << 60)
SHAPE = ExtentShape(slots=4, num_layers=2, slice_bytes=8, object_bytes=64)


def soon() -> float:
    """A deadline that is not met on a slow machine only."""
    return time.monotonic() + 60


class Server:
    """A catalog of its own, over a store that fails on request."""

    def __init__(
        self,
        state: MemoryStoreState,
        folder: Path,
        *,
        heartbeat_s: float = 3600.0,
        checkpoint_rule: CheckpointRule = NEVER,
        index_bytes_max: int = 256 * MIB,
        call_s_max: float = CALL_S_MAX,
    ) -> None:
        self.state = state
        self.folder = folder
        self.heartbeat_s = heartbeat_s
        self.checkpoint_rule = checkpoint_rule
        self.index_bytes_max = index_bytes_max
        self.call_s_max = call_s_max
        self.extent_count = 0
        self.is_open = False
        self.open()

    def open(self) -> None:
        """Open it, again after `close`."""
        self.store = FaultyStore(MemoryStore(self.state))
        try:
            self.catalog = LogCatalog(
                self.store,
                self.folder,
                index_bytes_max=self.index_bytes_max,
                heartbeat_s=self.heartbeat_s,
                checkpoint_rule=self.checkpoint_rule,
                call_s_max=self.call_s_max,
            )
        except BaseException:
            self.store.close()
            raise
        self.is_open = True

    def close(self) -> None:
        """End it in an orderly manner; a second call has no effect."""
        if self.is_open:
            self.is_open = False
            self.catalog.close()
            self.store.close()

    def change(self, act: Callable[[ReplayedChange], T]) -> T:
        """A change with a long deadline."""
        return self.catalog.change(act, soon())

    def make_bucket(self, info: BucketInfo = BUCKET) -> int:
        """Its number."""
        return self.change(lambda change: change.add_bucket(info))

    def put(self, bucket_number: int, keys: Sequence[str], byte: int = 0) -> list[SharedVersion]:
        """Store chunks, a few to an extent, in one record; returns them as they were given."""
        versions, shapes = self.staged(bucket_number, keys, byte)
        self.change(lambda change: change.add(new_rows(versions), shapes))
        return versions

    def staged(
        self, bucket_number: int, keys: Sequence[str], byte: int = 0
    ) -> tuple[list[SharedVersion], dict[ExtentName, ExtentShape]]:
        """Versions of these keys in extents of this server."""
        versions: list[SharedVersion] = []
        for index, key in enumerate(keys):
            slot = index % SHAPE.slots
            if not slot:
                self.extent_count += 1
            name = ExtentName(self.catalog.writer, self.extent_count)
            versions.append(version_of(bucket_number, key, name, slot, byte))
        return versions, {version.extents[0]: SHAPE for version in versions}

    def contents(self) -> tuple[object, ...]:
        """All that its index says, once it has followed the log."""
        self.catalog.follow(soon())
        with self.catalog.reading() as view:
            buckets = [view.bucket(info.name) for info in view.buckets()]
            versions = view.every_version(None, 1 << 30)
            return (
                view.state,
                buckets,
                [view.totals(row.number) for row in buckets],
                versions,
                view.pinned(version.name for version in versions),
                view.extents(None, 1 << 30),
                view.graveyard(None, 1 << 30),
                view.writers(),
                {name: view.document(name) for name in document_names(view)},
            )

    @property
    def is_followed(self) -> bool:
        """Whether the last look at the log was answered, or none has failed yet."""
        return not self.catalog._follower.failure

    def keys(self, bucket_number: int) -> list[str]:
        """All keys that it knows of a bucket, once it has followed the log."""
        self.catalog.follow(soon())
        with self.catalog.reading() as view:
            return [info.key for info in view.scan(bucket_number, "", "", 1 << 30)]

    def new_writer(self) -> int:
        """Its writer, once one is entered in the log."""
        until(self._has_writer)
        return self.catalog.writer

    def _has_writer(self) -> bool:
        try:
            return self.catalog.writer > 0
        except Unavailable:
            return False


def document_names(view: ReplayedView) -> list[str]:
    """The names of all documents, in order."""
    cursor = view._txn.cursor(view._databases.documents)
    return [raw.decode() for raw in cursor.iternext(keys=True, values=False)]


def until(is_so: Callable[[], bool]) -> None:
    """Return when it is so, which other threads see to."""
    deadline_s = soon()
    while not is_so():
        assert time.monotonic() < deadline_s, "it did not come to be so"
        time.sleep(0.005)


def version_of(
    bucket_number: int, key: str, extent: ExtentName, slot: int, byte: int = 0
) -> SharedVersion:
    """A chunk in a slot."""
    info = ObjectInfo(key=key, size_bytes=16, etag=f"etag-{byte}", modified_s=2.5)
    return SharedVersion(bucket_number, info, 0, 8, array("Q", [byte, 1]), (extent,), slot, True, 7)
