"""Judging a commit: which of its objects are to be stored, given what is stored now.

A commit is judged twice, by the same judge. The first time without a lock, so that what is refused
or stored already costs no flush; the second time inside the transaction, whose verdict counts.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

from objectcache_schemas.errors import DamagedData
from objectcache_schemas.records import BucketInfo, Condition, ObjectInfo
from objectcache_storage_server.engines.base import Committed, Staged, StagedPut
from objectcache_storage_server.engines.commit_rules import Verdict, check_fits_layout, judge
from objectcache_storage_server.engines.content_etags import content_etag


class FinishedStaged(Staged):
    """What a commit asks of a staged object, in every engine."""

    block_bytes: int  # of a checksum

    @abstractmethod
    def size_bytes(self) -> int:
        """Bytes of the whole object; asserts that each was written, once."""

    @abstractmethod
    def checksums(self) -> array[int]:
        """xxh3_64 of each block."""


class JudgedVersion(Protocol):
    """What a judge asks of a stored version."""

    @property
    def info(self) -> ObjectInfo:
        """What callers are told of it."""
        ...

    @property
    def name(self) -> tuple[int, str, int]:
        """What no other version has."""
        ...

    @property
    def block_bytes(self) -> int:
        """Of a checksum."""
        ...

    @property
    def checksums(self) -> array[int]:
        """xxh3_64 of each block."""
        ...


G = TypeVar("G", bound=FinishedStaged)
S = TypeVar("S", bound=JudgedVersion)


class NewObject(msgspec.Struct, Generic[G], frozen=True, gc=False):
    """A staged object and what will be said of it."""

    staged: G
    info: ObjectInfo

    @staticmethod
    def of(put: StagedPut, staged: G, modified_s: float) -> NewObject[G]:
        """The object that a put would store; asserts that it was written whole."""
        assert put.staged is staged
        size_bytes = staged.size_bytes()
        info = ObjectInfo(
            key=staged.key,
            size_bytes=size_bytes,
            etag=put.etag or content_etag(size_bytes, staged.checksums()),
            modified_s=modified_s,
            attributes=put.attributes,
        )
        return NewObject(staged, info)

    @property
    def key(self) -> str:
        """The object's key."""
        return self.info.key


class CommitJudge(Generic[G, S]):
    """The judge of one commit."""

    def __init__(
        self,
        new: Sequence[NewObject[G]],
        condition: Condition,
        hash_stored: Callable[[S, int], array[int]],
    ) -> None:
        """`hash_stored` reads a stored version for its checksums of blocks of another size; it
        raises `DamagedData`.
        """
        self.damaged: dict[str, str] = {}  # key to reason, of stored versions to be replaced
        self._new = new
        self._condition = condition
        self._hash_stored = hash_stored
        self._same_bytes: dict[tuple[int, str, int], bool] = {}  # where it was read

    def to_store(self, bucket: BucketInfo, stored: Mapping[str, S]) -> list[NewObject[G]]:
        """Those that are to be stored, by keys' `stored` versions. Raises as `Engine.commit`."""
        self.damaged = {}
        if bucket.layout is not None:
            for each in self._new:
                check_fits_layout(each.info.key, each.info.size_bytes, bucket.layout)
        if not stored and self._condition.etag is None:  # nothing that a condition could be of
            return list(self._new)
        return [each for each in self._new if self._is_to_store(bucket, each, stored.get(each.key))]

    def outcome(self, to_store: Sequence[NewObject[G]], stored: Mapping[str, S]) -> list[Committed]:
        """What became of each object when those of the last verdict were stored."""
        is_new = {each.info.key for each in to_store}
        return [
            Committed(each.info, False)
            if each.info.key in is_new
            else Committed(stored[each.info.key].info, True)
            for each in self._new
        ]

    @staticmethod
    def growth_bytes(to_store: Sequence[NewObject[G]], stored: Mapping[str, S]) -> int:
        """By how much a bucket's stored bytes grow with these, in place of what is stored."""
        new_bytes = sum([each.info.size_bytes for each in to_store])
        if not stored:
            return new_bytes
        replaced = [stored[each.key] for each in to_store if each.key in stored]
        return new_bytes - sum([version.info.size_bytes for version in replaced])

    def _is_to_store(self, bucket: BucketInfo, new: NewObject[G], stored: S | None) -> bool:
        try:
            verdict = judge(
                new.key,
                self._condition,
                self._condition.immutable or bucket.layout is not None,
                stored.info if stored else None,
                lambda: stored is not None and self._holds_same_bytes(stored, new),
            )
        except DamagedData as damage:  # what is stored is no bytes of anybody's: put it right
            self.damaged[new.key] = str(damage)
            return True
        return verdict is Verdict.STORE

    def _holds_same_bytes(self, stored: S, new: NewObject[G]) -> bool:
        if stored.info.size_bytes != new.info.size_bytes:
            return False
        staged = new.staged
        if stored.block_bytes == staged.block_bytes:
            return stored.checksums == staged.checksums()
        name = stored.name
        if name not in self._same_bytes:
            hashed = self._hash_stored(stored, staged.block_bytes)
            self._same_bytes[name] = hashed == staged.checksums()
        return self._same_bytes[name]
