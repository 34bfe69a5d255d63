"""Objects in this process's memory: the oracle of the contract, and the quick start's engine."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from sortedcontainers import SortedDict

from objectcache_schemas.layout import KvLayout
from objectcache_schemas.operators.engine_status import EngineStatus
from objectcache_schemas.records import (
    BucketConfiguration,
    BucketInfo,
    Condition,
    ObjectAttributes,
    ObjectInfo,
)
from objectcache_storage_server.engines.base import (
    ALWAYS,
    CHECKSUM_BLOCK_BYTES,
    BucketTotals,
    Committed,
    Engine,
    EngineCapabilities,
    OpenObjects,
    Placement,
    Read,
    Staged,
    StagedPut,
    check_unchanged,
)
from objectcache_storage_server.engines.block_checksums import (
    block_checksums,
    stored_block_bytes,
)
from objectcache_storage_server.engines.bucket_rules import (
    bucket_exists,
    bucket_not_empty,
    check_layout_change,
    no_such_bucket,
    no_such_key,
)
from objectcache_storage_server.engines.commit_rules import (
    Verdict,
    check_batch,
    check_fits_layout,
    judge,
)
from objectcache_storage_server.engines.content_etags import content_etag
from objectcache_storage_server.engines.key_order import key_bytes


@dataclass(frozen=True, slots=True)
class _Object:
    info: ObjectInfo
    data: bytes


@dataclass(slots=True)
class _Bucket:
    info: BucketInfo
    objects: Any = field(default_factory=SortedDict)  # str to _Object; code points sort as UTF-8
    stored_bytes: int = 0

    def store(self, new: _Object) -> None:
        """Put an object in place of what is stored under its key."""
        self.remove(new.info.key)
        self.objects[new.info.key] = new
        self.stored_bytes += new.info.size_bytes

    def remove(self, key: str) -> bool:
        """Let go of what is stored under a key; whether there was anything."""
        stored: _Object | None = self.objects.pop(key, None)
        if stored is not None:
            self.stored_bytes -= stored.info.size_bytes
        return stored is not None


class MemoryStaged(Staged):
    """Pieces by offset, joined when committed."""

    def __init__(self, bucket: str, key: str, checksum_block_bytes: int) -> None:
        self.bucket = bucket
        self.key = key
        self.checksum_block_bytes = checksum_block_bytes
        self._pieces: dict[int, bytes] = {}

    def write_at(self, offset_bytes: int, data: memoryview) -> None:
        assert offset_bytes % self.checksum_block_bytes == 0, offset_bytes
        if data:
            assert offset_bytes not in self._pieces, f"written twice at {offset_bytes}"
            self._pieces[offset_bytes] = bytes(data)

    def discard(self) -> None:
        self._pieces = {}

    def take(self) -> bytes:
        """The whole object; asserts that every byte was written, once. The pieces are let go."""
        pieces, self._pieces = self._pieces, {}
        end_bytes = 0
        for offset_bytes in sorted(pieces):
            assert offset_bytes == end_bytes, f"{self.key!r}: torn at {end_bytes}"
            end_bytes += len(pieces[offset_bytes])
        return b"".join(pieces[offset_bytes] for offset_bytes in sorted(pieces))


class MemoryOpenObjects(OpenObjects):
    """References to immutable bytes."""

    def __init__(self, objects: Sequence[_Object | None]) -> None:
        self._objects = list(objects)
        self.infos = [stored.info if stored else None for stored in objects]

    def placements(self) -> Sequence[Placement]:
        assert None not in self._objects, "an object is not stored"
        return [Placement(source, 0) for source in range(len(self._objects))]

    def read_many(self, reads: Sequence[Read], buffer: memoryview) -> None:
        for source, offset_bytes, length_bytes, landing in reads:
            stored = self._objects[source]
            assert stored is not None
            assert 0 <= offset_bytes <= offset_bytes + length_bytes <= len(stored.data)
            data = memoryview(stored.data)[offset_bytes : offset_bytes + length_bytes]
            buffer[landing : landing + length_bytes] = data

    def close(self) -> None:
        self._objects = []


class MemoryEngine(Engine):
    """Buckets in a dictionary, each a sorted dictionary of immutable objects, under one lock."""

    capabilities = EngineCapabilities(name="memory", persistent=False)

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: dict[str, _Bucket] = {}

    def __repr__(self) -> str:
        return f"<MemoryEngine {len(self._buckets)} buckets>"

    def create_bucket(self, bucket: BucketInfo) -> None:
        with self._lock:
            existing = self._buckets.get(bucket.name)
            if existing is not None:
                raise bucket_exists(existing.info, bucket)
            self._buckets[bucket.name] = _Bucket(bucket)

    def bucket(self, name: str) -> BucketInfo:
        with self._lock:
            return self._find(name).info

    def buckets(self, after: str = "", limit: int | None = None) -> list[BucketInfo]:
        with self._lock:
            found = [
                self._buckets[name].info
                for name in sorted(self._buckets)
                if name > after and not name.startswith(".")
            ]
            return found[:limit]

    def delete_bucket(self, name: str) -> None:
        with self._lock:
            if self._find(name).objects:
                raise bucket_not_empty(name)
            del self._buckets[name]

    def set_layout(self, name: str, layout: KvLayout) -> None:
        with self._lock:
            bucket = self._find(name)
            misfit = next(
                (
                    o.info
                    for o in bucket.objects.values()
                    if o.info.size_bytes != layout.chunk_bytes
                ),
                None,
            )
            check_layout_change(bucket.info, layout, misfit.key if misfit else None)
            bucket.info = msgspec.structs.replace(bucket.info, layout=layout)

    def configure_bucket(self, name: str, configuration: BucketConfiguration) -> None:
        with self._lock:
            bucket = self._find(name)
            bucket.info = msgspec.structs.replace(bucket.info, configuration=configuration)

    def usage(self, name: str) -> BucketTotals:
        with self._lock:
            bucket = self._find(name)
            return BucketTotals(len(bucket.objects), bucket.stored_bytes)

    def stage(
        self, bucket: str, key: str, checksum_block_bytes: int = CHECKSUM_BLOCK_BYTES
    ) -> Staged:
        key_bytes(key)
        self.bucket(bucket)
        return MemoryStaged(bucket, key, checksum_block_bytes)

    def commit(self, puts: Sequence[StagedPut], condition: Condition = ALWAYS) -> list[Committed]:
        check_batch(puts)
        objects = [self._object(put) for put in puts]
        if not objects:
            return []
        with self._lock:
            bucket = self._find(puts[0].staged.bucket)
            committed = [self._judge(bucket, new, condition) for new in objects]
            for new, (_, existed) in zip(objects, committed, strict=True):
                if not existed:
                    bucket.store(new)
            return committed

    def _object(self, put: StagedPut) -> _Object:
        assert isinstance(put.staged, MemoryStaged)
        data = put.staged.take()
        info = ObjectInfo(
            key=put.staged.key,
            size_bytes=len(data),
            etag=put.etag or _etag_of(data, put.staged.checksum_block_bytes),
            modified_s=self._clock(),
            attributes=put.attributes,
        )
        return _Object(info, data)

    def _judge(self, bucket: _Bucket, new: _Object, condition: Condition) -> Committed:
        check_fits_layout(new.info.key, len(new.data), bucket.info.layout)
        stored: _Object | None = bucket.objects.get(new.info.key)
        verdict = judge(
            new.info.key,
            condition,
            condition.immutable or bucket.info.layout is not None,
            stored.info if stored else None,
            lambda: stored is not None and stored.data == new.data,
        )
        if verdict is Verdict.KEEP:
            assert stored is not None
            return Committed(stored.info, existed=True)
        return Committed(new.info, existed=False)

    def replace_attributes(
        self, bucket: str, seen: ObjectInfo, attributes: ObjectAttributes
    ) -> ObjectInfo:
        with self._lock:
            found = self._find(bucket)
            stored: _Object | None = found.objects.get(seen.key)
            if stored is None:
                raise no_such_key(seen.key)
            check_unchanged(stored.info, seen)
            info = msgspec.structs.replace(stored.info, attributes=attributes)
            found.objects[seen.key] = _Object(info, stored.data)
            return info

    def delete(self, bucket: str, keys: Sequence[str]) -> int:
        with self._lock:
            found = self._find(bucket)
            return sum(found.remove(key) for key in keys)

    def expire(self, bucket: str, infos: Sequence[ObjectInfo]) -> BucketTotals:
        with self._lock:
            found = self._find(bucket)
            before_bytes, count = found.stored_bytes, len(found.objects)
            for info in infos:
                stored: _Object | None = found.objects.get(info.key)
                if stored is not None and stored.info == info:
                    found.remove(info.key)
            return BucketTotals(count - len(found.objects), before_bytes - found.stored_bytes)

    def stat(self, bucket: str, key: str) -> ObjectInfo:
        with self._lock:
            stored: _Object | None = self._find(bucket).objects.get(key)
        if stored is None:
            raise no_such_key(key)
        return stored.info

    def match(self, bucket: str, keys: Sequence[str]) -> int:
        with self._lock:
            objects = self._find(bucket).objects
            return sum(1 for _ in itertools.takewhile(objects.__contains__, keys))

    def open_many(
        self, bucket: str, keys: Sequence[str], *, are_prefix: bool = False
    ) -> OpenObjects:
        with self._lock:
            objects = self._find(bucket).objects
            return MemoryOpenObjects([objects.get(key) for key in keys])

    def scan(self, bucket: str, prefix: str, start_after: str, limit: int) -> list[ObjectInfo]:
        with self._lock:
            objects = self._find(bucket).objects
            follows_prefix = start_after < prefix or not start_after
            keys = objects.irange(
                prefix if follows_prefix else start_after, inclusive=(follows_prefix, True)
            )
            found = itertools.takewhile(lambda key: key.startswith(prefix), keys)
            return [objects[key].info for key in itertools.islice(found, limit)]

    @property
    def damaged_count(self) -> int:
        return 0

    def status(self) -> EngineStatus:
        with self._lock:
            objects = sum(len(bucket.objects) for bucket in self._buckets.values())
        return EngineStatus(engine=self.capabilities.name, objects=objects)

    def close(self) -> None:
        self._buckets = {}

    def _find(self, name: str) -> _Bucket:
        bucket = self._buckets.get(name)
        if bucket is None:
            raise no_such_bucket(name)
        return bucket


def _etag_of(data: bytes, checksum_block_bytes: int) -> str:
    block_bytes = stored_block_bytes(checksum_block_bytes)
    return content_etag(len(data), block_checksums(memoryview(data), block_bytes))
