"""The transport contract: memory to read into, then written, announced, failed or closed.

A transport belongs to one delivery. Reader threads call it, several at once; no method blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from objectcache_schemas.errors import ObjectCacheError


class Transport(ABC):
    """Carries one delivery's payload to its client."""

    name: str

    @abstractmethod
    def reserve(self, offset_bytes: int, length_bytes: int) -> bool:
        """Claim room for a piece of the payload; false if there is none now.

        Pieces are reserved in payload order. The delivery is woken when room comes back.
        """

    @abstractmethod
    def memory(self, offset_bytes: int, length_bytes: int) -> memoryview:
        """The writable memory of a reserved piece. The caller alone writes there, until `written`
        or `close`. Raises our errors where there is none any more.
        """

    @abstractmethod
    def written(self, offset_bytes: int, length_bytes: int) -> None:
        """The piece is complete. Pieces complete in any order."""

    @abstractmethod
    def announce(self, end_layer: int) -> None:
        """All delivered layers below `end_layer` are complete. The watermark only rises.

        By one thread at a time, which may not be the one that wrote them. What raises has announced
        nothing.
        """

    @abstractmethod
    def fail(self, failed_layer: int, error: ObjectCacheError) -> None:
        """The delivery has ended early; tell the client, as far as the transport can, when its
        memory is not written any more.

        No piece is handed over any more. Called at most once, before `close`, and never after the
        last layer was announced.
        """

    @abstractmethod
    def close(self) -> None:
        """Nothing will be handed over any more: let go of what only that needed. A second call has
        no effect.
        """

    def when_quiet(self, callback: Callable[[], None]) -> None:
        """Have `callback` called once, from any thread, when the client's memory is not written any
        more; after `close`. At once where pieces are in place as soon as they are written.
        """
        callback()

    @property
    def undelivered(self) -> tuple[int, ObjectCacheError] | None:
        """The first layer that is not in place and why, where pieces that were handed over have not
        arrived; known for good when the transport is quiet.
        """
        return None
