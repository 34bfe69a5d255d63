"""The blob store contract: where bytes lie, with no idea what they mean.

A blob has a number, which its store gives out once and never again. It is written, flushed, and
from then on never changed: what is replaced is another blob. Which blobs there are to anybody, and
under which key, is in the catalog alone; a blob that no catalog names is a leftover of a crash.

Threads. Every method may be called from any thread. All but `begin_reads` block.

Reads are begun and end later. `begin_reads` takes all reads of a batch and returns a future of the
standard library at once; what a store can do only by waiting, it does before it returns, and says
so with a `queue_depth` of 0. The landing memory is the caller's: the store writes it from the call
until the future has ended, and never afterwards, whichever way it ended. Callbacks of the future
run in a thread of the store, which they must not hold up.

Deadlines. `deadline_s` is on the clock of `time.monotonic`. What has not ended by then ends with
`StoreTimeout`, within about a second. A write, a flush or a delete that timed out may be carried
out all the same, also later: its caller must not conclude that it was not.

Cancelling the future of a read asks the store to forget it. A store has marked the future as
running (`set_running_or_notify_cancel`) before it may write to a landing, so a `cancel` that
succeeds says that no landing was or will be written; after one that does not, the future ends in
its time.

Errors. `LostBlob`: the store answered, and does not have the bytes: no such blob, or it ends early,
or the device cannot read it. Only this and a checksum that fails are damage. `StoreTimeout` and
other `Unavailable`: the store could not be asked; the same call may succeed later, and nothing is
said about the bytes. `StorageFull`: what is asked for needs space that there is not. `Busy`: a
limit of this process. Errors of systems and libraries are translated here and nowhere above.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

from objectcache_schemas.errors import Unavailable


@dataclass(frozen=True, slots=True)
class BlobCapabilities:
    """What a store is good at; asked where it matters, never found out by trying."""

    queue_depth: int = 0  # calls of `begin_reads`, each a batch, to have under way; 0: see above
    is_shared: bool = False  # other servers store blobs in it, so what is unknown may be theirs
    is_verified: bool = False  # it vouches for its bytes itself: no checksum finds more


class StoreTimeout(Unavailable):
    """The store did not answer in time. A change may have been carried out, or may be later."""


class LostBlob(Exception):
    """The store answered that it does not have these bytes. `blob` is whose."""

    def __init__(self, blob: OpenBlob, reason: str) -> None:
        super().__init__(reason)
        self.blob = blob


class OpenBlob:
    """A blob that is open for reading. A store with something to keep for it makes its own kind."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class BlobRead(NamedTuple):
    """A range of a blob, and the memory of bytes that it is to fill."""

    blob: OpenBlob
    offset_bytes: int
    landing: memoryview


class BlobStore(ABC):
    """See the module's docstring, which is the contract."""

    capabilities: BlobCapabilities = BlobCapabilities()

    # --- writing ---

    @abstractmethod
    def create(self, deadline_s: float) -> int:
        """The number of a new, empty blob. Raises `StorageFull`, `Busy`, `Unavailable`."""

    @abstractmethod
    def write(self, number: int, offset_bytes: int, data: memoryview, deadline_s: float) -> None:
        """Store bytes of a blob that was not flushed yet: anywhere in it, each byte once, by one
        thread at a time. The data may be reused when the call returns. Raises `StorageFull`,
        `Unavailable`.

        A store that takes a blob only as a whole gathers it here, and stores it in `flush`.
        """

    @abstractmethod
    def flush(self, numbers: Sequence[int], deadline_s: float) -> None:
        """The blobs are complete: return when they outlive a crash. Raises `Unavailable` where that
        is not known for all of them, `StorageFull`.
        """

    @abstractmethod
    def delete(self, numbers: Iterable[int], deadline_s: float) -> None:
        """Remove blobs, complete or not, that may be gone already. Works where there is no space.

        Who has one open reads on, from here or for as long as the store keeps what is deleted.
        Raises `Unavailable`; what was not removed is swept when an engine opens.
        """

    # --- reading ---

    @abstractmethod
    def open(self, number: int) -> OpenBlob:
        """Open a blob for reading; no round trip where one would be needed to look whether it is
        there. Raises `LostBlob`, `Busy`, `Unavailable`.
        """

    @abstractmethod
    def release(self, blobs: Iterable[OpenBlob]) -> None:
        """Nobody reads them any more."""

    @abstractmethod
    def begin_reads(self, reads: Sequence[BlobRead], deadline_s: float) -> Future[None]:
        """Begin a batch of reads. The future ends with `LostBlob`, `StoreTimeout`, `Unavailable`,
        or well, when every landing is filled.
        """

    # --- the store itself ---

    @abstractmethod
    def sizes(self) -> dict[int, int]:
        """Bytes of every blob by number, those that were never flushed too. For an engine that
        opens; raises `Unavailable`.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of everything. Blobs that were not flushed may be lost."""


DONE: Future[None] = Future()  # of reads that ended well before they were begun
DONE.set_result(None)


def failed(error: BaseException) -> Future[None]:
    """The future of reads that ended with an error before they were begun."""
    future: Future[None] = Future()
    future.set_exception(error)
    return future
