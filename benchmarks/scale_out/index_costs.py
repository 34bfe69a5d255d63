"""What a record costs the servers, measured once with the index's own code.

A catalog makes records of few chunks and of many in a log in memory, and a replay beside it follows
after each: a line through both gives the seconds for each record, and for each chunk.
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from objectcache_schemas.limits import GIB, KIB
from objectcache_schemas.records import BucketInfo, ObjectInfo
from objectcache_storage_server.engines.shared.index.index_folders import IndexFolders
from objectcache_storage_server.engines.shared.index.replayed_change import ReplayedChange
from objectcache_storage_server.engines.shared.index.version_rows import new_rows
from objectcache_storage_server.engines.shared.log.log_catalog import LogCatalog
from objectcache_storage_server.engines.shared.log.open_index import IndexOpener, store_identity
from objectcache_storage_server.engines.shared.log.replay import LogReplay
from objectcache_storage_server.engines.shared.log.writers.own_writer import OwnWriter
from objectcache_storage_server.engines.shared.versions import (
    ExtentName,
    ExtentShape,
    SharedVersion,
)
from objectcache_storage_server.engines.stores.memory_store import MemoryStore, MemoryStoreState

LAYERS = 32
FEW, MANY = 8, 448  # chunks of a record
USED_EXTENTS = 1000  # of the heartbeat that is measured
SLOTS = 64  # of an extent, with 16 tokens a chunk
CALL_S = 60.0
NEVER_S = 3600.0
INDEX_BYTES_MAX = 4 * GIB
_BUCKET = BucketInfo(name="scale", owner="owner", region="region", created_s=1.0)
_SHAPE = ExtentShape(
    slots=SLOTS, num_layers=LAYERS, slice_bytes=64 * KIB, object_bytes=SLOTS * 64 * KIB
)


@dataclass(frozen=True, slots=True)
class IndexCosts:
    """Seconds of one processor, and bytes of the log."""

    apply_record_s: float
    apply_chunk_s: float
    judge_record_s: float  # to make one, the store's append left out
    judge_chunk_s: float
    used_extent_s: float  # of a heartbeat, for each extent that it names
    record_bytes: float
    chunk_bytes: float

    def apply_s(self, chunks: int, used: int = 0) -> float:
        """To replay a record."""
        return self.apply_record_s + chunks * self.apply_chunk_s + used * self.used_extent_s

    def judge_s(self, chunks: int, used: int = 0) -> float:
        """To make a record, once."""
        return self.judge_record_s + chunks * self.judge_chunk_s + used * self.used_extent_s

    def size_bytes(self, chunks: int, used: int = 0) -> float:
        """Of a record."""
        return self.record_bytes + chunks * self.chunk_bytes + used * 16


# Measured by `--measure` on two cores (AMD EPYC) that others kept busy, in an index that grew from
# 180,000 chunks to 360,000.
GIVEN = IndexCosts(
    apply_record_s=89e-6,
    apply_chunk_s=3.53e-6,
    judge_record_s=126e-6,
    judge_chunk_s=4.73e-6,
    used_extent_s=4.57e-6,
    record_bytes=97.0,
    chunk_bytes=428.0,
)


def measured_costs(folder: Path, records: int) -> IndexCosts:
    """Medians of so many records of either size, in an index that holds as many large ones."""
    state = MemoryStoreState()
    store, other = MemoryStore(state), MemoryStore(state)
    catalog = LogCatalog(
        store, folder / "maker", index_bytes_max=INDEX_BYTES_MAX, heartbeat_s=NEVER_S
    )
    store_id = store_identity(other, OwnWriter(), _soon_s())
    folders = IndexFolders(folder / "follower")
    opener = IndexOpener(other, store_id, folders, INDEX_BYTES_MAX)
    replay = LogReplay(other, opener, opener.made(_soon_s()), lambda touched: None)
    try:
        return _Pair(catalog, replay, state).costs(records)
    finally:
        replay.close()
        catalog.close()
        other.close()
        store.close()


def _soon_s() -> float:
    return time.monotonic() + CALL_S


def _spent_s(call: Callable[[], object]) -> float:
    """Processor time of this thread, which others on the machine do not lengthen."""
    begun_s = time.thread_time()
    call()
    return time.thread_time() - begun_s


class _Pair:
    """Who makes records, and who follows."""

    def __init__(self, maker: LogCatalog, follower: LogReplay, state: MemoryStoreState) -> None:
        self._maker = maker
        self._follower = follower
        self._state = state
        self._bucket = maker.change(lambda change: change.add_bucket(_BUCKET), _soon_s())
        self._put = 0
        self._extents = 0

    def costs(self, records: int) -> IndexCosts:
        """Of records in an index that is not small."""
        for _ in range(records):
            self._add(MANY)
        few = [self._add(FEW) for _ in range(records)]
        many = [self._add(MANY) for _ in range(records)]
        judge_record_s, judge_chunk_s = _line(few, many, 0)
        apply_record_s, apply_chunk_s = _line(few, many, 1)
        record_bytes, chunk_bytes = _line(few, many, 2)
        used_s = median(self._use(USED_EXTENTS) for _ in range(records)) - apply_record_s
        return IndexCosts(
            apply_record_s=apply_record_s,
            apply_chunk_s=apply_chunk_s,
            judge_record_s=judge_record_s,
            judge_chunk_s=judge_chunk_s,
            used_extent_s=max(0.0, used_s) / USED_EXTENTS,
            record_bytes=record_bytes,
            chunk_bytes=chunk_bytes,
        )

    def _add(self, chunks: int) -> tuple[float, float, float]:
        """Seconds to make and to replay a record of so many chunks, and its bytes."""
        self._put += 1
        versions = [self._version(place) for place in range(chunks)]
        shapes = {one.extents[0]: _SHAPE for one in versions}
        made_s = self._make(lambda change: change.add(new_rows(versions), shapes))
        return made_s, self._followed_s(), float(len(self._state.records[-1]))

    def _use(self, count: int) -> float:
        """Seconds to replay a heartbeat that names so many extents."""
        used = [ExtentName(self._maker.writer, number + 1) for number in range(count)]
        self._make(lambda change: change.heartbeat(None, used))
        return self._followed_s()

    def _make(self, act: Callable[[ReplayedChange], None]) -> float:
        return _spent_s(lambda: self._maker.change(act, _soon_s()))

    def _followed_s(self) -> float:
        spent_s = _spent_s(lambda: self._follower.follow_some(_soon_s()))
        assert self._follower.end == self._state.end, "a record was not followed"
        return spent_s

    def _version(self, place: int) -> SharedVersion:
        if not place % SLOTS:
            self._extents += 1
        key = hashlib.sha256(f"{self._put}/{place}".encode()).hexdigest()
        size_bytes = _SHAPE.slice_bytes * LAYERS
        info = ObjectInfo(key=key, size_bytes=size_bytes, etag=key[:32], modified_s=2.5)
        extents = (ExtentName(self._maker.writer, self._extents),)
        return SharedVersion(
            bucket_number=self._bucket,
            info=info,
            serial=0,
            block_bytes=_SHAPE.slice_bytes,
            checksums=array("Q", range(LAYERS)),
            extents=extents,
            slot=place % SLOTS,
            is_evictable=True,
            parent_hash=7,
        )


def _line(
    few: Sequence[tuple[float, ...]], many: Sequence[tuple[float, ...]], column: int
) -> tuple[float, float]:
    """What a record costs, and what a chunk of it does, by the medians of a column."""
    at_few, at_many = (median(row[column] for row in rows) for rows in (few, many))
    each = max(0.0, at_many - at_few) / (MANY - FEW)
    return max(0.0, at_few - FEW * each), each
