"""One commit of the files engine: judge, flush, and change the index in one transaction."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from objectcache_schemas.records import Condition, ObjectInfo
from objectcache_storage_server.engines.base import Committed, StagedPut
from objectcache_storage_server.engines.commit_rules import Verdict, check_fits_layout, judge
from objectcache_storage_server.engines.content_etags import content_etag
from objectcache_storage_server.engines.files.index_records import BucketRow, Version
from objectcache_storage_server.engines.files.object_files import ObjectFiles
from objectcache_storage_server.engines.files.open_files import FileDamage, OpenFile, OpenFileCache
from objectcache_storage_server.engines.files.sqlite_index import FilesIndex
from objectcache_storage_server.engines.files.staged_files import FilesStaged
from objectcache_storage_server.engines.system_errors import translated


@dataclass(frozen=True, slots=True)
class NewVersion:
    """A staged file and what the index will say of it."""

    staged: FilesStaged
    info: ObjectInfo

    @staticmethod
    def of(put: StagedPut, modified_s: float) -> NewVersion:
        """The version that a put would store; asserts that it was written whole."""
        staged = put.staged
        assert isinstance(staged, FilesStaged)
        info = ObjectInfo(
            key=staged.key,
            size_bytes=staged.size_bytes,
            etag=put.etag or content_etag(staged.size_bytes, staged.checksums),
            modified_s=modified_s,
            attributes=put.attributes,
        )
        return NewVersion(staged, info)

    @property
    def key(self) -> str:
        """The object's key."""
        return self.info.key

    def in_bucket(self, bucket_number: int) -> Version:
        """The version as the index stores it."""
        staged = self.staged
        return Version(
            bucket_number, staged.object_id, self.info, staged.block_bytes, staged.checksums
        )


class FilesCommit:
    """The steps of a commit, and what it found on the way.

    It is judged twice. The first time without a lock, so that what is refused or stored already
    costs no flush; the second time inside the transaction, whose verdict counts.
    """

    def __init__(
        self,
        index: FilesIndex,
        files: ObjectFiles,
        cache: OpenFileCache,
        new: Sequence[NewVersion],
        condition: Condition,
    ) -> None:
        self.replaced_ids: list[int] = []  # versions that no row names any more
        self.damaged: dict[str, str] = {}  # key to reason, of stored versions that were replaced
        self._index = index
        self._files = files
        self._cache = cache
        self._new = new
        self._condition = condition
        self._keys = [each.key for each in new]
        self._flushed: set[int] = set()
        self._same_bytes: dict[int, bool] = {}  # by the stored version's id, where it was read

    def carry_out(self) -> list[Committed]:
        """Store durably what is not stored yet; raises as `Engine.commit` says."""
        bucket_name = self._new[0].staged.bucket
        with self._index.reading() as view:
            bucket = view.bucket(bucket_name)
            stored = view.versions(bucket.number, self._keys)
        self._flush(self._judge(bucket, stored))
        with contextlib.ExitStack() as replacing, self._index.writing() as change:
            bucket = change.bucket(bucket_name)
            stored = change.versions(bucket.number, self._keys)
            to_store = self._judge(bucket, stored)
            self._flush(to_store)
            replaced = [stored[each.key] for each in to_store if each.key in stored]
            if replaced:
                replaced_keys = [version.info.key for version in replaced]
                replacing.enter_context(self._cache.changing(bucket.number, replaced_keys))
            self.replaced_ids = [version.object_id for version in replaced]
            change.add(each.in_bucket(bucket.number) for each in to_store)
        for each in to_store:
            each.staged.release()
        is_new = {each.key for each in to_store}
        return [
            Committed(each.info, existed=False)
            if each.key in is_new
            else Committed(stored[each.key].info, existed=True)
            for each in self._new
        ]

    def _judge(self, bucket: BucketRow, stored: Mapping[str, Version]) -> list[NewVersion]:
        """Those that are to be stored."""
        self.damaged = {}
        return [each for each in self._new if self._is_to_store(bucket, each, stored.get(each.key))]

    def _is_to_store(self, bucket: BucketRow, new: NewVersion, stored: Version | None) -> bool:
        check_fits_layout(new.key, new.info.size_bytes, bucket.info.layout)
        try:
            verdict = judge(
                new.key,
                self._condition,
                self._condition.immutable or bucket.info.layout is not None,
                stored.info if stored else None,
                lambda: stored is not None and self._holds_same_bytes(stored, new),
            )
        except FileDamage as damage:  # what is stored is no bytes of anybody's: put it right
            self.damaged[new.key] = str(damage)
            return True
        return verdict is Verdict.STORE

    def _holds_same_bytes(self, stored: Version, new: NewVersion) -> bool:
        if stored.info.size_bytes != new.info.size_bytes:
            return False
        if stored.block_bytes == new.staged.block_bytes:
            return stored.checksums == new.staged.checksums
        known = self._same_bytes.get(stored.object_id)
        if known is None:
            known = self._same_bytes[stored.object_id] = self._compare(stored, new.staged)
        return known

    def _compare(self, stored: Version, new: FilesStaged) -> bool:
        """Read the stored bytes and hash them in the new blocks; raises `FileDamage`."""
        path = self._files.path(stored.object_id)
        with translated("read an object", path):
            try:
                file = OpenFile(path, stored)
            except FileNotFoundError as error:
                raise FileDamage("its file is missing") from error
            try:
                return file.verify_and_hash(new.block_bytes) == new.checksums
            finally:
                file.close()

    def _flush(self, versions: Sequence[NewVersion]) -> None:
        unflushed = [
            (each.staged.object_id, each.staged.file_descriptor)
            for each in versions
            if each.staged.object_id not in self._flushed
        ]
        if unflushed:
            self._files.sync(unflushed)
            self._flushed.update(object_id for object_id, _ in unflushed)
