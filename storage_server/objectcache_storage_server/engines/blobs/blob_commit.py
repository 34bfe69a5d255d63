"""One commit of blobs: judged, flushed, and named in the catalog by one transaction."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Sequence

from objectcache_schemas.records import Condition
from objectcache_storage_server.engines.base import Committed
from objectcache_storage_server.engines.blobs.blob_catalog import BlobCatalog, BlobVersion
from objectcache_storage_server.engines.blobs.open_versions import OpenVersionCache
from objectcache_storage_server.engines.blobs.staged_blobs import StagedBlob
from objectcache_storage_server.engines.judge_commit import CommitJudge, NewObject

NewBlob = NewObject[StagedBlob]


class BlobCommit:
    """The steps of a commit, and what it found on the way."""

    def __init__(
        self,
        catalog: BlobCatalog,
        cache: OpenVersionCache,
        flush: Callable[[Sequence[int]], None],
        hash_stored: Callable[[BlobVersion, int], array[int]],
        new: Sequence[NewBlob],
        condition: Condition,
    ) -> None:
        """`flush` makes blobs durable; for `hash_stored` see `CommitJudge`."""
        self.judge = CommitJudge[StagedBlob, BlobVersion](new, condition, hash_stored)
        self.replaced_blobs: list[int] = []  # which no version names any more
        self._catalog = catalog
        self._cache = cache
        self._flush_blobs = flush
        self._bucket_name = new[0].staged.bucket
        self._keys = [each.key for each in new]
        self._flushed: set[int] = set()

    def carry_out(self) -> list[Committed]:
        """Store durably what is not stored yet; raises as `Engine.commit` says."""
        with self._catalog.reading() as view:
            bucket = view.bucket(self._bucket_name)
            stored = view.versions(bucket.number, self._keys)
        self._flush(self.judge.to_store(bucket.info, stored))
        with contextlib.ExitStack() as replacing, self._catalog.writing() as change:
            bucket = change.bucket(self._bucket_name)
            stored = change.versions(bucket.number, self._keys)
            to_store = self.judge.to_store(bucket.info, stored)
            self._flush(to_store)
            replaced = [stored[each.key] for each in to_store if each.key in stored]
            if replaced:
                replaced_keys = [version.info.key for version in replaced]
                replacing.enter_context(self._cache.changing(bucket.number, replaced_keys))
            self.replaced_blobs = [version.blob_number for version in replaced]
            change.add(_version(each, bucket.number) for each in to_store)
        for each in to_store:
            each.staged.keep()
        return self.judge.outcome(to_store, stored)

    def _flush(self, objects: Sequence[NewBlob]) -> None:
        written = [each.staged.blob_number for each in objects]
        unflushed = [number for number in written if number not in self._flushed]
        if unflushed:
            self._flush_blobs(unflushed)
            self._flushed.update(unflushed)


def _version(new: NewBlob, bucket_number: int) -> BlobVersion:
    staged = new.staged
    return BlobVersion(
        bucket_number, staged.blob_number, new.info, staged.block_bytes, staged.checksums()
    )
