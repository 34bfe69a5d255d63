"""The catalog contract: buckets, and what is stored under which key, changed by transactions.

A view sees one moment: all its look-ups see the same commits. A change is seen by nobody until its
block has ended, and by everybody after that; an error in the block undoes it. When a change has
ended, it outlives a crash.

Keys are in the order of their UTF-8 bytes. What a look-up meets that is not what was stored counts
as missing, and is dropped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from objectcache_schemas.records import BucketInfo, ObjectInfo
from objectcache_storage_server.engines.bucket_rules import no_such_bucket


@dataclass(frozen=True, slots=True)
class BucketRow:
    """A bucket and the number under which its objects are stored."""

    number: int
    info: BucketInfo


class StoredVersion(Protocol):
    """What every catalog says of an object's version, whatever else it stores of it."""

    @property
    def info(self) -> ObjectInfo:
        """What callers are told of it."""
        ...


V = TypeVar("V", bound=StoredVersion)
T = TypeVar("T")


class CatalogView(ABC, Generic[V]):
    """Look-ups of one transaction."""

    @abstractmethod
    def find_bucket(self, name: str) -> BucketRow | None:
        """The bucket of this name."""

    def bucket(self, name: str) -> BucketRow:
        """The bucket of this name; raises `NotFound` (NoSuchBucket)."""
        found = self.find_bucket(name)
        if found is None:
            raise no_such_bucket(name)
        return found

    @abstractmethod
    def buckets(self, after: str = "", limit: int | None = None) -> list[BucketInfo]:
        """Buckets after this name, by name, without those that begin with a dot."""

    @abstractmethod
    def versions(self, bucket_number: int, keys: Iterable[str]) -> dict[str, V]:
        """What is stored of `keys`."""

    @abstractmethod
    def match(self, bucket_number: int, keys: Sequence[str]) -> int:
        """How many leading keys are stored. Work is bounded by that number, not by `len(keys)`."""

    @abstractmethod
    def scan(
        self, bucket_number: int, prefix: str, start_after: str, limit: int
    ) -> list[ObjectInfo]:
        """Objects with the prefix and a key greater than `start_after`, at most `limit`."""

    @abstractmethod
    def is_empty(self, bucket_number: int) -> bool:
        """Whether the bucket holds no object."""

    @abstractmethod
    def key_of_other_size(self, bucket_number: int, size_bytes: int) -> str | None:
        """Any key whose object has another size. May read all where there is none."""


class CatalogChange(CatalogView[V]):
    """Look-ups and changes of one transaction."""

    @abstractmethod
    def add_bucket(self, info: BucketInfo) -> int:
        """Add a bucket, whose name must be free; returns its number, which no other ever has."""

    @abstractmethod
    def replace_bucket(self, number: int, info: BucketInfo) -> None:
        """Store a bucket's changed info."""

    @abstractmethod
    def remove_bucket(self, number: int) -> None:
        """Remove a bucket that holds no objects."""


class Catalog(ABC, Generic[V]):
    """Safe to use from any thread."""

    @abstractmethod
    def reading(self) -> AbstractContextManager[CatalogView[V]]:
        """One consistent view."""

    @abstractmethod
    def change(self, act: Callable[[CatalogChange[V]], T], deadline_s: float) -> T:
        """What `act` returns, once all that it changed is durable. What it raises undoes it. It may
        run more than once, so it has no effect but on what it is given. Raises `StorageFull` and
        `Unavailable`.
        """


class TransactionCatalog(Catalog[V]):
    """A catalog that nobody else changes meanwhile: a change is a block of code that runs once."""

    @abstractmethod
    def writing(self) -> AbstractContextManager[CatalogChange[V]]:
        """One transaction, durable when the block has ended. Raises `StorageFull` and
        `Unavailable`.
        """

    def change(self, act: Callable[[CatalogChange[V]], T], deadline_s: float) -> T:
        with self.writing() as change:
            return act(change)
