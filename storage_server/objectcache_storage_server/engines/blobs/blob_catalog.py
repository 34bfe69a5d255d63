"""What a catalog of blobs keeps beside buckets: versions, each the blob that holds its bytes."""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from objectcache_schemas.records import ObjectInfo
from objectcache_storage_server.engines.base import BucketTotals
from objectcache_storage_server.engines.catalog import (
    CatalogChange,
    CatalogView,
    TransactionCatalog,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BlobVersion:
    """One stored version of an object."""

    bucket_number: int
    blob_number: int
    info: ObjectInfo
    block_bytes: int
    checksums: array[int]  # xxh3_64 of each block

    @property
    def name(self) -> BlobVersionName:
        """Which version this is."""
        return BlobVersionName(self.bucket_number, self.info.key, self.blob_number)


class BlobVersionName(NamedTuple):
    """Which version of which object."""

    bucket_number: int
    key: str
    blob_number: int


class BlobView(CatalogView[BlobVersion]):
    """Look-ups of one transaction."""

    @abstractmethod
    def totals(self, bucket_number: int) -> BucketTotals:
        """What the bucket holds, as it is counted with every change."""

    @abstractmethod
    def blob_sizes(self) -> Iterator[tuple[BlobVersionName, int]]:
        """Every version, and the size in bytes of its blob."""


class BlobChange(BlobView, CatalogChange[BlobVersion]):
    """Look-ups and changes of one transaction."""

    @abstractmethod
    def add(self, versions: Iterable[BlobVersion]) -> None:
        """Add versions, in place of what is stored under their keys."""

    @abstractmethod
    def delete(self, names: Iterable[BlobVersionName]) -> int:
        """Delete these very versions, and count those that were there."""


class BlobCatalog(TransactionCatalog[BlobVersion]):
    """Buckets and object versions."""

    @abstractmethod
    def reading(self) -> AbstractContextManager[BlobView]: ...

    @abstractmethod
    def writing(self) -> AbstractContextManager[BlobChange]: ...

    def change_with_reserve(self, act: Callable[[BlobChange], T]) -> T:
        """A transaction that works on a full device: for deletes. `act` runs again, in another
        transaction, where the first did not fit. Raises `StorageFull` only when there is no
        reserve, or it is used up.
        """
        with self.writing() as change:
            return act(change)

    def refill_reserve(self) -> None:
        """Take the reserve again after a delete used it; stays without where there is no room."""

    @abstractmethod
    def close(self) -> None:
        """Let go of it, once every transaction has ended."""
