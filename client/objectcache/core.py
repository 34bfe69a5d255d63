"""What a client, its buckets and its deliveries share."""

from __future__ import annotations

import enum
import ssl
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from objectcache.arguments import checked_count, checked_seconds, checked_switch
from objectcache.channel import requests
from objectcache.channel.access_key import SigningKey
from objectcache.channel.connections import ConnectionPool
from objectcache.channel.endpoint import Endpoint
from objectcache.channel.http_channel import HttpChannel
from objectcache.channel.responses import SessionReply, parse_reply
from objectcache.landing.fabric_regions import FabricRegion
from objectcache.landing.held_targets import HeldTargets
from objectcache.landing.registered_memory import RegisteredMemory
from objectcache.landing.target_pool import TargetPool
from objectcache.learned_windows import RememberedWindows
from objectcache.sessions.fabric_joining import FabricSettings, join_fabric
from objectcache.sessions.session_keeper import SessionKeeper
from objectcache.sessions.target_session import TargetSession
from objectcache.thread_reserve import ThreadReserve
from objectcache_schemas.errors import InvalidRequest

if TYPE_CHECKING:  # botocore takes long to import
    from objectcache.channel.signing import Signer


class TransportChoice(enum.Enum):
    """How the bytes of a delivery or a put may travel."""

    AUTO = "auto"  # shared memory where it can be had, else the body
    SHARED_MEMORY = "shared_memory"
    BODY = "body"
    NIXL = "nixl"
    VERBS = "verbs"

    @property
    def is_fabric(self) -> bool:
        """Whether the server writes into registered memory over a fabric."""
        return self in (TransportChoice.NIXL, TransportChoice.VERBS)

    @classmethod
    def parse(cls, text: str) -> TransportChoice:
        """Raises `InvalidRequest` for another word."""
        try:
            return cls(text)
        except ValueError:
            allowed = ", ".join(choice.value for choice in cls)
            raise InvalidRequest(f"transport must be one of {allowed}, got {text!r}") from None


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """How a client behaves; the arguments of `Client`."""

    region: str
    transport: TransportChoice
    timeout_s: float
    connections_max: int
    target_bytes_max: int
    learn_windows: bool = True
    fabric: FabricSettings = field(default_factory=FabricSettings)

    def __post_init__(self) -> None:
        checked_seconds("timeout_s", self.timeout_s)
        checked_count("connections_max", self.connections_max)
        checked_count("target_bytes_max", self.target_bytes_max)
        checked_switch("learn_windows", self.learn_windows)
        if not isinstance(self.fabric, FabricSettings):  # pyright: ignore[reportUnnecessaryIsInstance]
            kind = type(self.fabric).__name__
            raise InvalidRequest(f"fabric must be a FabricSettings, got {kind}")


class ClientCore:
    """Connections, the session and the memory of one client. Thread-safe.

    `close` is a finalizer: it runs when it is called, or when nothing holds the core any more.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        access_key: Callable[[], SigningKey],
        settings: CoreSettings,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        from objectcache.channel.signing import Signer  # botocore takes long to import

        self.endpoint = endpoint
        self.settings = settings
        connections = ConnectionPool(endpoint, settings.connections_max, tls)
        signer = Signer(endpoint, settings.region, access_key)
        channel = HttpChannel(connections, signer, settings.timeout_s)
        self.channel = channel
        self.shared = RegisteredMemory(
            TransportChoice.SHARED_MEMORY.value,
            SessionKeeper(
                lambda: TargetSession.join(_invite(channel), settings.timeout_s),
                "no shared memory",
            ),
            TargetPool(settings.target_bytes_max),
            HeldTargets(),
        )
        self._fabrics = {
            choice: self._fabric_memory(choice, signer, connections.tls)
            for choice in (TransportChoice.NIXL, TransportChoice.VERBS)
        }
        self.windows = RememberedWindows()
        self.threads = ThreadReserve("objectcache-receiver")
        keepers = [self.shared.sessions, *(one.sessions for one in self._fabrics.values())]
        self.close = weakref.finalize(self, _close, connections, keepers, self.threads)

    def memory(self, choice: TransportChoice) -> RegisteredMemory:
        """The memory of a transport: a fabric's, or shared memory."""
        return self._fabrics[choice] if choice.is_fabric else self.shared

    def fabric_memory(self, transport: str | None) -> RegisteredMemory:
        """The memory of a fabric: the named one, else the client's own, else NIXL. Raises
        `InvalidRequest` for a transport that is none.
        """
        own = self.settings.transport
        choice = own if own.is_fabric else TransportChoice.NIXL
        if transport is not None:
            choice = TransportChoice.parse(transport)
        if not choice.is_fabric:
            raise InvalidRequest(f"transport must be nixl or verbs, got {transport!r}")
        return self.memory(choice)

    def memories(self, choice: TransportChoice) -> Sequence[RegisteredMemory]:
        """Those that a put of this choice may come out of."""
        if choice is TransportChoice.AUTO:
            return (self.shared, *self._fabrics.values())
        return (self.memory(choice),)

    def _fabric_memory(
        self, choice: TransportChoice, signer: Signer, tls: ssl.SSLContext | None
    ) -> RegisteredMemory:
        endpoint, timeout_s, fabric = self.endpoint, self.settings.timeout_s, self.settings.fabric

        sign = signer.signed_headers

        def join() -> TargetSession:
            return join_fabric(choice.value, endpoint, sign, tls, timeout_s, fabric)

        return RegisteredMemory(
            choice.value,
            SessionKeeper(join, "no session"),
            TargetPool(self.settings.target_bytes_max, FabricRegion),
            HeldTargets(),
        )

    def __repr__(self) -> str:
        shared = self.shared
        return f"{self.endpoint.url}, {self.channel.pool!r}, {shared.sessions!r}, {shared.pool!r}"


def _invite(channel: HttpChannel) -> SessionReply:
    reply = channel.call(requests.open_session())
    return parse_reply(reply.body, SessionReply, "a session request")


def _close(
    connections: ConnectionPool, keepers: Sequence[SessionKeeper], threads: ThreadReserve
) -> None:
    for keeper in keepers:
        keeper.close()
    connections.close()
    threads.close()
