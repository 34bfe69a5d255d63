"""One gateway connection as a request's handler sees it."""

from __future__ import annotations

from abc import ABC, abstractmethod

import msgspec

from objectcache_runtime.networking.stream_socket import StreamSocket
from objectcache_schemas.conversations import BodyChoice, PutEnd
from objectcache_schemas.messages.leases import EndLease

_BODY_CHOICE = msgspec.msgpack.Decoder(BodyChoice)
_PUT_END = msgspec.msgpack.Decoder(PutEnd)
_LEASE_END = msgspec.msgpack.Decoder(EndLease)


class Asker(ABC):
    """Who asked for a delivery into a target: a gateway for its client, or a client's session."""

    @abstractmethod
    async def send(self, message: msgspec.Struct) -> None:
        """Send a reply."""

    @abstractmethod
    async def gone(self) -> None:
        """Return when nobody waits for the delivery any more."""


class Conversation(Asker):
    """Messages of one request after its first. Raises `ConnectionEnded` and `FrameError`."""

    def __init__(self, stream: StreamSocket) -> None:
        self.stream = stream
        self.given_up = False

    async def send(self, message: msgspec.Struct) -> None:
        await self.stream.send_frame(message)

    async def gone(self) -> None:
        await self.stream.closed_by_peer()

    async def receive_body_choice(self) -> BodyChoice:
        """What the gateway wants of the body."""
        return await self.stream.receive_frame(_BODY_CHOICE)

    async def receive_put_end(self) -> PutEnd:
        """How the gateway ends the data of a put."""
        return await self.stream.receive_frame(_PUT_END)

    async def receive_lease_end(self) -> EndLease:
        """How the gateway ends its writing into a target."""
        return await self.stream.receive_frame(_LEASE_END)

    def take_descriptor(self) -> int | None:
        """The file descriptor that came with the last message."""
        return self.stream.take_descriptor()

    def give_up(self) -> None:
        """The connection cannot go on: a body was cut. It is closed when the handler returns."""
        self.given_up = True
