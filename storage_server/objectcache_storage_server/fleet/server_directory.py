"""Which storage servers serve the store beside this one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from objectcache_schemas.operators.server_list import ServerState


class ServerDirectory(ABC):
    """The servers of the store, as they tell each other of themselves. From any thread."""

    @abstractmethod
    def others(self) -> Sequence[ServerState]:
        """Those that are alive, as far as has been heard; never blocks."""

    @abstractmethod
    def tell(self, state: ServerState) -> None:
        """What the others are to know of this server from now on; never blocks. It may reach them
        with the next heartbeat.
        """

    @property
    def serving(self) -> int:
        """Servers that take work, this one among them: 1 or more."""
        return 1 + sum(not other.draining for other in self.others())


class AloneDirectory(ServerDirectory):
    """Of a store that is this server's own."""

    def others(self) -> Sequence[ServerState]:
        return ()

    def tell(self, state: ServerState) -> None:
        """There is nobody to be told."""
