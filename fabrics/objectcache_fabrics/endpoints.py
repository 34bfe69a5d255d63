"""The side of a fabric that registers memory, which others write to and read from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from objectcache_fabrics.registered_memory import DeviceMemory
from objectcache_schemas.messages.message import Message
from objectcache_schemas.messages.sessions import LayersReady, RegisterRemoteTarget


class FabricEndpoint(ABC):
    """This process' side of a fabric, for one session. Thread-safe.

    `on_end` is called on the endpoint's thread when that ends, for whatever reason.
    """

    name: str
    on_end: Callable[[], None] = staticmethod(lambda: None)

    @abstractmethod
    def hello(self) -> bytes:
        """The `endpoint` of `OpenFabric`."""

    @abstractmethod
    def connect(
        self,
        answer: bytes,
        heard: Callable[[LayersReady], None],
        tell: Callable[[Message], None],
    ) -> None:
        """Take the `endpoint` of `FabricOpened`. From now on `heard` is called, on a thread of the
        endpoint's own, for whatever the server announces; `tell` sends what is not answered.
        Raises `Unavailable`, and `Unsupported` where this process has no such fabric.
        """

    @abstractmethod
    def register(self, memory: DeviceMemory) -> tuple[RegisterRemoteTarget, Any]:
        """Have the memory reached; returns how the server is told, and what `unregister` takes.

        Raises `Unavailable`.
        """

    @abstractmethod
    def unregister(self, registered: Any) -> None:
        """Undo `register`, when the server does not touch the memory any more."""

    @abstractmethod
    def listen(self, deliveries: int) -> None:
        """So many deliveries are to be announced now; with none there is nothing to listen to."""

    @abstractmethod
    def close(self) -> None:
        """End it. Repeating has no effect."""
