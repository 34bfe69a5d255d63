"""The contract of a store that several storage servers share: objects by name, and one log.

Objects are written once, whole, under a name that nobody used before, and never changed. The log is
a sequence of records, numbered from 0 without a gap; whoever is first to append a number has it.
What objects and records mean is the shared engine's matter (docs/shared_engine.md).

Threads. Every method may be called from any thread. All but `begin_reads` block. A process that
opened a store must not fork.

Deadlines. `deadline_s` is on the clock of `time.monotonic`. What has not ended by then raises
`StoreTimeout`, within about a second. A put, an append or a delete that timed out may be carried
out all the same, also later: its caller must not conclude that it was not.

Errors. `LostObject`: the store answered that there is no such object, or that it is shorter; never
raised where the store could not be asked, or where the pool, bucket, container or folder itself is
not there: that is `Unavailable`, as is whatever else may go well later. `StorageFull`: what is
asked for needs space or a quota that there is not; reads and deletes work on. Errors of systems and
libraries are translated in the store's own modules and nowhere above.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

from objectcache_schemas.limits import MIB
from objectcache_storage_server.engines.blobs.blob_store import StoreTimeout

__all__ = [
    "LostObject",
    "ObjectRead",
    "SharedStore",
    "StoreCapabilities",
    "StoreTimeout",
    "StoredObject",
    "TrimmedLog",
]

NAME_BYTES_MAX = 200  # of ASCII letters, digits, and . - _ /; no part is empty, "." or ".."


@dataclass(frozen=True, slots=True)
class StoreCapabilities:
    """What a store is good at; asked where it matters, never found out by trying."""

    name: str
    queue_depth: int  # calls of `begin_reads`, each a batch, to have under way at a time
    put_depth: int  # calls of `put` to have under way at a time
    object_bytes_max: int = 4 * MIB  # that one `put` may store, and at which reads are quickest
    record_bytes_max: int = 4 * MIB
    has_bell: bool = False  # `wait_for_record` is woken by an append, wherever that was made


class LostObject(Exception):
    """The store answered that it does not have these bytes."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name


class TrimmedLog(Exception):
    """Records that were asked for have been trimmed; `first` is the first that is kept."""

    def __init__(self, first: int) -> None:
        super().__init__(f"the log begins at record {first}")
        self.first = first


class StoredObject(NamedTuple):
    """An object of a listing."""

    name: str
    size_bytes: int


class ObjectRead(NamedTuple):
    """A range of an object, and the memory of bytes that it is to fill."""

    name: str
    offset_bytes: int
    landing: memoryview


class SharedStore(ABC):
    """See the module's docstring, which is the contract."""

    capabilities: StoreCapabilities
    was_made = False  # by the opening of this handle, and of no other

    # --- objects ---

    @abstractmethod
    def put(self, name: str, parts: Sequence[memoryview], deadline_s: float) -> None:
        """Store an object of these parts, one after the other, durably: it outlives a crash of
        whatever holds it. The parts may be reused when the call returns. At most
        `object_bytes_max` in all, not empty.

        Raises `StorageFull`, `StoreTimeout`, `Unavailable`; nothing or the whole object is there.
        """

    @abstractmethod
    def begin_reads(self, reads: Sequence[ObjectRead], deadline_s: float) -> Future[None]:
        """Begin a batch of reads, straight into their landings where the store can.

        The future ends when every landing is filled, or with `LostObject`, `StoreTimeout`,
        `Unavailable`. The landings are written from the call until it has ended and never after
        that, whichever way it ended. Its callbacks run in a thread of the store, which they must
        not hold up. A `cancel` that succeeds says that no landing was or will be written.
        """

    @abstractmethod
    def get(self, name: str, deadline_s: float) -> bytes:
        """A whole object. Raises `LostObject`, `StoreTimeout`, `Unavailable`."""

    @abstractmethod
    def list_objects(self, prefix: str, deadline_s: float) -> Iterator[StoredObject]:
        """Objects whose name begins so, in no order; one that is put or deleted meanwhile may be
        among them or not. Never the log's. Raises `StoreTimeout`, `Unavailable`.
        """

    @abstractmethod
    def delete(self, names: Iterable[str], deadline_s: float) -> None:
        """Remove objects, which may be gone already. Works where there is no space. Raises
        `StoreTimeout`, `Unavailable`; some may be gone then.
        """

    # --- space that is held back for records, where a store does so ---

    def put_from_reserve(self, name: str, parts: Sequence[memoryview], deadline_s: float) -> None:
        """`put`, for what will free more of the log than it takes: where there is no space
        otherwise, it may take of what is held back for records.
        """
        self.put(name, parts, deadline_s)

    def is_short(self, deadline_s: float) -> bool:
        """Whether records take of what is held back for them, because there is no space otherwise.
        Raises `StoreTimeout`, `Unavailable`.
        """
        return False

    # --- the log ---

    @abstractmethod
    def append(self, number: int, record: bytes, deadline_s: float) -> bool:
        """Make `record` the log's record `number`, durably; false where that number has been
        another's, also if it has been trimmed since.

        The caller knows record `number - 1`. Where that is lost nothing is appended, since the log
        has no hole: the answer is false, or `Unavailable`. Raises `StoreTimeout` where it may have
        been, or may yet be, carried out: `read_log` tells, once another record has that number or a
        later one. Raises `StorageFull` and other `Unavailable` where it was not.
        """

    @abstractmethod
    def read_log(self, first: int, size_bytes_max: int, deadline_s: float) -> list[bytes]:
        """Records `first`, `first + 1` and so on, up to the newest or `size_bytes_max`, but at
        least one if there is one; whatever was acknowledged before the call is among them.

        Raises `TrimmedLog`, `StoreTimeout`, `Unavailable`.
        """

    @abstractmethod
    def log_end(self, known: int, deadline_s: float) -> int:
        """The number of the next record. `known` is one that it is not below. Counts whatever was
        acknowledged before the call. Raises `StoreTimeout`, `Unavailable`.
        """

    @abstractmethod
    def trim_log(self, first: int, deadline_s: float) -> None:
        """Records below `first` may be removed, all or some. Works where there is no space."""

    @abstractmethod
    def wait_for_record(self, number: int, timeout_s: float) -> None:
        """Return when there may be a record of this number, at the latest after `timeout_s`: a
        bell, whose silence means nothing. Returns at once when the store is closed.
        """

    @abstractmethod
    def end_waits(self) -> None:
        """Have those return who are in `wait_for_record` of this handle now."""

    # --- the store itself ---

    @abstractmethod
    def close(self) -> None:
        """Let go of everything, once no call is under way. A second call has no effect."""
