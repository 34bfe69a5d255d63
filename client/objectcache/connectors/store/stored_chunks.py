"""A connector's lookups and puts, as every engine needs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from objectcache.kv_bucket import KvBucket
from objectcache_schemas.errors import Conflict

# In one request. With keys as long as `KvNamespace` makes them, less than a third of
# `descriptor_bytes_max`, and a quarter of `chunks_per_descriptor_max`.
MATCH_KEYS_MAX = 16_384

# Stores the chunks [begin, end) behind a parent; tells how many of them are new.
PutRange = Callable[[int, int, str | None], int]


def match_prefix(bucket: KvBucket, keys: Sequence[str], timeout_s: float | None = None) -> int:
    """How many leading chunks are stored: one round trip, or as few as the server's limits allow.

    `timeout_s` bounds every silence of the server, in the client's place.
    """
    matched = 0
    for begin in range(0, len(keys), MATCH_KEYS_MAX):
        part = keys[begin : begin + MATCH_KEYS_MAX]
        matched += bucket.match(part, timeout_s=timeout_s)
        if matched < begin + len(part):
            break
    return matched


def put_chunks_absent(
    bucket: KvBucket, keys: Sequence[str], chunks: Any, parent_key: str | None = None
) -> int:
    """`put_absent` of chunks as `KvBucket.put` takes them."""

    def put(begin: int, end: int, parent: str | None) -> int:
        return bucket.put(keys[begin:end], chunks[begin:end], parent_key=parent).stored

    return put_absent(bucket, keys, put, parent_key)


def put_absent(
    bucket: KvBucket, keys: Sequence[str], put: PutRange, parent_key: str | None = None
) -> int:
    """Store those of a run of chunks that nobody has stored; how many are new.

    Computing KV again rarely gives the same bytes, so other bytes under a key are no error: they
    are the KV of the same tokens, and stay as they are. `put` raises `Conflict` (ContentConflict)
    where any chunk of its range is stored in other bytes, and stores none of them then. Raises
    what else `put` and the store raise; what was stored before that stays stored.
    """
    return _Absent(bucket, keys, put, parent_key).store(0, len(keys))


class _Absent:
    """One run of chunks. A put is all or none, so one chunk that stands in the way is searched for:
    a match finds where the stored ones at the beginning end, halving those behind a hole.
    """

    def __init__(
        self, bucket: KvBucket, keys: Sequence[str], put: PutRange, parent_key: str | None
    ) -> None:
        self._bucket = bucket
        self._keys = keys
        self._put = put
        self._parent_key = parent_key

    def store(self, begin: int, end: int) -> int:
        if begin >= end:
            return 0
        try:
            return self._put(begin, end, self._keys[begin - 1] if begin else self._parent_key)
        except Conflict as error:
            if error.code != "ContentConflict":
                raise
        if end - begin == 1:
            return 0
        if stored := self._stored(begin, end):
            return self.store(begin + stored, end)
        middle = (begin + end) // 2
        return self.store(begin, middle) + self._store_behind(middle, end)

    def _store_behind(self, begin: int, end: int) -> int:
        return self.store(begin + self._stored(begin, end), end)

    def _stored(self, begin: int, end: int) -> int:
        return match_prefix(self._bucket, self._keys[begin:end])
