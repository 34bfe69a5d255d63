"""A catalog in this process's memory: buckets by name and number, each a sorted dictionary."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sortedcontainers import SortedDict

from objectcache_schemas.records import BucketInfo, ObjectInfo
from objectcache_storage_server.engines.base import BucketTotals
from objectcache_storage_server.engines.blobs.blob_catalog import (
    BlobCatalog,
    BlobChange,
    BlobVersion,
    BlobVersionName,
)
from objectcache_storage_server.engines.catalog import BucketRow


@dataclass(slots=True)
class _Bucket:
    number: int
    info: BucketInfo
    versions: Any = field(default_factory=SortedDict)  # by key; code points sort as UTF-8
    stored_bytes: int = 0


_NO_VERSIONS: Any = SortedDict()  # of a bucket that was removed; never changed
_NOTHING = BucketTotals(0, 0)


class _Buckets:
    """Buckets, each found by its number and by its name."""

    def __init__(self) -> None:
        self.by_number: dict[int, _Bucket] = {}
        self.by_name: Any = SortedDict()
        self.numbers = itertools.count(1)

    def add(self, bucket: _Bucket) -> None:
        self.by_number[bucket.number] = self.by_name[bucket.info.name] = bucket

    def remove(self, bucket: _Bucket) -> None:
        del self.by_number[bucket.number], self.by_name[bucket.info.name]


class MemoryChange(BlobChange):
    """Look-ups and changes of one transaction, carried out at once and undone by an error.

    A bucket may have been removed since its number was looked up; it then holds no versions.
    """

    def __init__(self, buckets: _Buckets) -> None:
        self._buckets = buckets
        self._undo: list[Callable[[], None]] = []

    def undo(self) -> None:
        """Have everything as it was."""
        for step in reversed(self._undo):
            step()

    def find_bucket(self, name: str) -> BucketRow | None:
        bucket: _Bucket | None = self._buckets.by_name.get(name)
        return BucketRow(bucket.number, bucket.info) if bucket is not None else None

    def buckets(self, after: str = "", limit: int | None = None) -> list[BucketInfo]:
        by_name = self._buckets.by_name
        names = by_name.irange(after, inclusive=(False, True))
        listed = (name for name in names if not name.startswith("."))
        return [by_name[name].info for name in itertools.islice(listed, limit)]

    def _versions(self, bucket_number: int) -> Any:
        bucket = self._buckets.by_number.get(bucket_number)
        return bucket.versions if bucket is not None else _NO_VERSIONS

    def versions(self, bucket_number: int, keys: Iterable[str]) -> dict[str, BlobVersion]:
        stored = self._versions(bucket_number)
        return {key: stored[key] for key in keys if key in stored}

    def match(self, bucket_number: int, keys: Sequence[str]) -> int:
        stored = self._versions(bucket_number)
        return sum(1 for _ in itertools.takewhile(stored.__contains__, keys))

    def scan(
        self, bucket_number: int, prefix: str, start_after: str, limit: int
    ) -> list[ObjectInfo]:
        stored = self._versions(bucket_number)
        follows_prefix = start_after < prefix or not start_after
        keys = stored.irange(
            prefix if follows_prefix else start_after, inclusive=(follows_prefix, True)
        )
        found = itertools.takewhile(lambda key: key.startswith(prefix), keys)
        return [stored[key].info for key in itertools.islice(found, limit)]

    def is_empty(self, bucket_number: int) -> bool:
        return not self._versions(bucket_number)

    def key_of_other_size(self, bucket_number: int, size_bytes: int) -> str | None:
        stored = self._versions(bucket_number).items()
        return next((key for key, each in stored if each.info.size_bytes != size_bytes), None)

    def totals(self, bucket_number: int) -> BucketTotals:
        bucket = self._buckets.by_number.get(bucket_number)
        return BucketTotals(len(bucket.versions), bucket.stored_bytes) if bucket else _NOTHING

    def blob_sizes(self) -> Iterator[tuple[BlobVersionName, int]]:
        for bucket in self._buckets.by_number.values():
            for version in bucket.versions.values():
                yield version.name, version.info.size_bytes

    def add_bucket(self, info: BucketInfo) -> int:
        bucket = _Bucket(next(self._buckets.numbers), info)
        self._buckets.add(bucket)
        self._undo.append(lambda: self._buckets.remove(bucket))
        return bucket.number

    def replace_bucket(self, number: int, info: BucketInfo) -> None:
        bucket = self._buckets.by_number[number]
        before, bucket.info = bucket.info, info
        self._undo.append(lambda: setattr(bucket, "info", before))

    def remove_bucket(self, number: int) -> None:
        bucket = self._buckets.by_number[number]
        self._buckets.remove(bucket)
        self._undo.append(lambda: self._buckets.add(bucket))

    def add(self, versions: Iterable[BlobVersion]) -> None:
        for version in versions:
            bucket = self._buckets.by_number[version.bucket_number]
            before = bucket.versions.get(version.info.key)
            _set(bucket, version.info.key, version)
            self._undo.append(partial(_set, bucket, version.info.key, before))

    def delete(self, names: Iterable[BlobVersionName]) -> int:
        count = 0
        for name in names:
            version = self._versions(name.bucket_number).get(name.key)
            if version is not None and version.name == name:
                bucket = self._buckets.by_number[name.bucket_number]
                _set(bucket, name.key, None)
                self._undo.append(partial(_set, bucket, name.key, version))
                count += 1
        return count


def _set(bucket: _Bucket, key: str, version: BlobVersion | None) -> None:
    before: BlobVersion | None = bucket.versions.pop(key, None)
    bucket.stored_bytes -= before.info.size_bytes if before is not None else 0
    if version is not None:
        bucket.versions[key] = version
        bucket.stored_bytes += version.info.size_bytes


class MemoryCatalog(BlobCatalog):
    """Everything under one lock, which outlives nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buckets = _Buckets()

    def __repr__(self) -> str:
        return f"<MemoryCatalog {len(self._buckets.by_number)} buckets>"

    @contextlib.contextmanager
    def reading(self) -> Generator[MemoryChange, None, None]:
        with self._lock:
            yield MemoryChange(self._buckets)

    @contextlib.contextmanager
    def writing(self) -> Generator[MemoryChange, None, None]:
        change = MemoryChange(self._buckets)
        with self._lock:
            try:
                yield change
            except BaseException:
                change.undo()
                raise

    @property
    def object_count(self) -> int:
        """Of all buckets."""
        with self._lock:
            return sum(len(bucket.versions) for bucket in self._buckets.by_number.values())

    def close(self) -> None:
        self._buckets = _Buckets()
