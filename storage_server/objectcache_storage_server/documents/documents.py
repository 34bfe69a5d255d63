"""The contract of small documents that are replaced whole: files of one server, or kept in the
store that several servers share.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

from objectcache_schemas.errors import ObjectCacheError


class DocumentKind(NamedTuple):
    """Which document. `words` name it for people, as in "reading the accounts"."""

    name: str
    words: str


ACCOUNTS = DocumentKind("accounts", "the accounts")
SCHEDULE = DocumentKind("schedule", "the changed schedule")


class KeptDocument(NamedTuple):
    """What is kept. `version` is another number after every change."""

    version: int
    data: bytes


class Kept(NamedTuple):
    """A document was replaced. `fault` is what to tell where a power loss may undo that."""

    version: int
    fault: ObjectCacheError | None = None


class DocumentChanged(Exception):
    """Another server was first: read it again, and judge again."""


class Documents(ABC):
    """Methods block, and may be called from any thread."""

    @abstractmethod
    def place(self, kind: DocumentKind) -> str:
        """Where it lies, for people."""

    @abstractmethod
    def get(self, kind: DocumentKind) -> KeptDocument | None:
        """What is kept; None where there is none. Raises `Unavailable`, and `InvalidRequest` where
        something stands in its place.
        """

    def follow(self) -> bool:
        """Hear of every change that was acknowledged before, on whichever server; false where
        nobody else makes any. Raises `Unavailable`.
        """
        return False

    @abstractmethod
    def put(self, kind: DocumentKind, data: bytes, expected: int | None) -> Kept:
        """Replace the document of version `expected`; None is that there is none. Durable when it
        returns. Raises `DocumentChanged`, `Conflict` where it is too large, `StorageFull` and
        `Unavailable`.
        """

    def on_change(  # noqa: B027 - where nobody else changes any there is nothing to tell
        self, kind: DocumentKind, listener: Callable[[], None]
    ) -> None:
        """Have `listener` called, in a thread of its own, when another server has changed it, and
        again after a pause where it fails. Register before the document is read first.
        """


class MemoryDocuments(Documents):
    """They end with the process."""

    def __init__(self) -> None:
        self._documents: dict[DocumentKind, KeptDocument] = {}
        self._version = first_version()

    def place(self, kind: DocumentKind) -> str:
        return f"{kind.words} in memory"

    def get(self, kind: DocumentKind) -> KeptDocument | None:
        return self._documents.get(kind)

    def put(self, kind: DocumentKind, data: bytes, expected: int | None) -> Kept:
        found = self._documents.get(kind)
        if (found.version if found else None) != expected:
            raise DocumentChanged
        self._version += 1
        self._documents[kind] = KeptDocument(self._version, data)
        return Kept(self._version)


def first_version() -> int:
    """A number above all that a process before this one has given out."""
    return time.time_ns() // 1000
