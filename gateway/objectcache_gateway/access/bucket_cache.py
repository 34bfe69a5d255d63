"""What this gateway knows of buckets: who owns them, and how often they may be asked."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from objectcache_gateway.access.directory import AccessDirectory
from objectcache_schemas.messages.buckets import Bucket, GetBucket
from objectcache_schemas.records import BucketInfo

BUCKETS_MAX = 4096
BYTES_MAX = 32 << 20  # as msgpack; what it takes as objects is a few times as much

_ENCODER = msgspec.msgpack.Encoder()


class BucketCache:
    """Buckets as the storage server knows them, kept until any of them changes."""

    def __init__(
        self, ask: Callable[[GetBucket], Awaitable[Bucket]], directory: AccessDirectory
    ) -> None:
        """`ask` asks the storage server."""
        self._ask = ask
        self._directory = directory
        self._known: dict[str, BucketInfo] = {}
        self._known_bytes = 0
        self._generation = 0
        directory.on_buckets_changed(self._forget)

    def _forget(self) -> None:
        self._known = {}
        self._known_bytes = 0
        self._generation += 1

    def known(self, name: str) -> BucketInfo | None:
        """The bucket, if it is known and a change would have been heard of."""
        return self._known.get(name) if self._directory.is_followed else None

    async def ask(self, name: str) -> BucketInfo:
        """The bucket as it is now. Raises `NotFound` (NoSuchBucket) and what a call raises."""
        generation = self._generation
        bucket = await self._ask(GetBucket(name=name))
        # What changed since the question was asked may have changed this one. Another server than
        # the one that is followed may have answered, before or after a change that is not heard of.
        versions = self._directory.versions
        is_own = versions is not None and versions[1] == bucket.buckets_version
        if generation == self._generation and is_own:
            self._keep(bucket.info)
        return bucket.info

    def _keep(self, info: BucketInfo) -> None:
        info_bytes = len(_ENCODER.encode(info))
        before = self._known.pop(info.name, None)
        if before is not None:
            self._known_bytes -= len(_ENCODER.encode(before))
        if len(self._known) >= BUCKETS_MAX or self._known_bytes + info_bytes > BYTES_MAX:
            self._known.clear()
            self._known_bytes = 0
        self._known[info.name] = info
        self._known_bytes += info_bytes

    def __repr__(self) -> str:
        return f"<BucketCache {len(self._known)}/{BUCKETS_MAX}, {self._known_bytes} bytes>"
