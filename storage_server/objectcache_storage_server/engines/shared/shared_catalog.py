"""The catalog of the shared engine: what its index is asked, and what a record may change."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, TypeVar

from objectcache_schemas.records import ObjectAttributes
from objectcache_storage_server.engines.base import BucketTotals
from objectcache_storage_server.engines.blobs.blob_store import StoreTimeout
from objectcache_storage_server.engines.catalog import Catalog, CatalogChange, CatalogView
from objectcache_storage_server.engines.shared.versions import (
    ExtentName,
    ExtentShape,
    NewRow,
    SharedVersion,
    SharedVersionName,
)

T = TypeVar("T")


class UnknownOutcome(StoreTimeout):
    """A change may have been made, or may yet be: whatever it names must be left where it is."""


class Moment(NamedTuple):
    """Of an index: what is looked up at two equal ones without changes is the same. With changes it
    may not be: a record that failed is made again of others.
    """

    end: int  # number of the next record
    changes: int  # that the record with this number has so far, as it is made


class SharedView(CatalogView[SharedVersion]):
    """Look-ups of one moment of the replayed index."""

    @property
    @abstractmethod
    def moment(self) -> Moment:
        """Which moment it is."""

    @abstractmethod
    def totals(self, bucket_number: int) -> BucketTotals:
        """What the bucket holds, as it is counted with every change."""

    @abstractmethod
    def shapes(self, extents: Iterable[ExtentName]) -> dict[ExtentName, ExtentShape]:
        """The shapes of extents that some version names."""

    @abstractmethod
    def every_version(self, after: tuple[int, str] | None, limit: int) -> list[SharedVersion]:
        """Versions of all buckets behind a bucket number and key, in that order."""

    @abstractmethod
    def pinned(self, names: Iterable[SharedVersionName]) -> set[SharedVersionName]:
        """Those of these versions that an operator pinned."""

    @abstractmethod
    def document(self, name: str) -> bytes | None:
        """A document that all servers share, such as the accounts."""


class SharedChange(SharedView, CatalogChange[SharedVersion]):
    """Look-ups and changes that become part of one record."""

    @abstractmethod
    def add(self, rows: Sequence[NewRow], shapes: Mapping[ExtentName, ExtentShape]) -> None:
        """Add versions of one bucket, of distinct keys, in place of what is stored under them. They
        are not pinned. `shapes` of the extents that are new.

        Raises `Unavailable` where the writer of an extent that no version names was fenced: other
        servers took it for dead, and its objects for leftovers. The same for an extent whose last
        version was deleted meanwhile. Raises `InvalidRequest` for more versions than a record can
        hold.
        """

    @abstractmethod
    def delete(self, names: Iterable[SharedVersionName]) -> list[SharedVersion]:
        """Delete these very versions; returns those that were there. Extents that no version names
        any more go into the graveyard when the record ends.
        """

    @abstractmethod
    def replace_attributes(self, name: SharedVersionName, attributes: ObjectAttributes) -> None:
        """Give this very version, which is there, other attributes; all else stays, its pin too."""

    @abstractmethod
    def set_pinned(self, names: Iterable[SharedVersionName], pinned: bool) -> int:
        """Mark versions as pinned by an operator, or as not; counts those that are there."""

    @abstractmethod
    def put_document(self, name: str, document: bytes | None) -> None:
        """Store a document, or remove it."""


class SharedCatalog(Catalog[SharedVersion]):
    """Buckets, versions and extents of a store that other servers change, too."""

    @abstractmethod
    def reading(self) -> AbstractContextManager[SharedView]:
        """One moment of what has been replayed."""

    @abstractmethod
    def follow(self, deadline_s: float) -> None:
        """Replay whatever was acknowledged before this call, on whichever server. Callers that wait
        at once share the question. Raises `StoreTimeout`, `Unavailable`.
        """

    @abstractmethod
    def change(self, act: Callable[[SharedChange], T], deadline_s: float) -> T:
        """Make a change: `act` is run against the index at the log's end, and again where another
        server was first, so it has no effect but on what it is given. What it raises undoes it and
        is raised here. Others' changes may share the record.

        When it returns the change is durable and part of this server's index. Raises
        `UnknownOutcome`, `StorageFull`, `StoreTimeout`, `Unavailable`; but for the first nothing
        was or will be changed.
        """

    @abstractmethod
    def note_used(self, extents: Iterable[ExtentName]) -> None:
        """Have the log say some time that these were read. A hint: what is too much is dropped."""

    @property
    @abstractmethod
    def writer(self) -> int:
        """The number under which this server names its objects now."""

    @abstractmethod
    def close(self) -> None:
        """Let go of it, once every call has ended."""
