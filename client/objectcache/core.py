"""What a client, its buckets and its deliveries share."""

from __future__ import annotations

import enum
import ssl
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from objectcache.arguments import checked_count, checked_seconds, checked_switch
from objectcache.channel import requests
from objectcache.channel.access_key import AccessKey
from objectcache.channel.connections import ConnectionPool
from objectcache.channel.endpoint import Endpoint
from objectcache.channel.http_channel import HttpChannel
from objectcache.channel.responses import SessionReply, parse_reply
from objectcache.deliveries.learned_windows import LearnedWindows
from objectcache.memory.session_keeper import SessionKeeper
from objectcache.memory.shared_targets import SharedTargets
from objectcache.memory.target_pool import TargetPool
from objectcache.thread_reserve import ThreadReserve
from objectcache_schemas.errors import InvalidRequest


class TransportChoice(enum.Enum):
    """How the bytes of a delivery or a put may travel."""

    AUTO = "auto"  # shared memory where it can be had, else the body
    SHARED_MEMORY = "shared_memory"
    BODY = "body"

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

    def __post_init__(self) -> None:
        checked_seconds("timeout_s", self.timeout_s)
        checked_count("connections_max", self.connections_max)
        checked_count("target_bytes_max", self.target_bytes_max)
        checked_switch("learn_windows", self.learn_windows)


class ClientCore:
    """Connections, the session and the memory of one client. Thread-safe.

    `close` is a finalizer: it runs when it is called, or when nothing holds the core any more.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        access_key: Callable[[], AccessKey],
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
        self.sessions = SessionKeeper(lambda: _invite(channel), settings.timeout_s)
        self.pool = TargetPool(settings.target_bytes_max)
        self.targets = SharedTargets()
        self.windows = LearnedWindows()
        self.threads = ThreadReserve("objectcache-receiver")
        self.close = weakref.finalize(self, _close, connections, self.sessions, self.threads)

    def __repr__(self) -> str:
        return f"{self.endpoint.url}, {self.channel.pool!r}, {self.sessions!r}, {self.pool!r}"


def _invite(channel: HttpChannel) -> SessionReply:
    reply = channel.call(requests.open_session())
    return parse_reply(reply.body, SessionReply, "a session request")


def _close(connections: ConnectionPool, sessions: SessionKeeper, threads: ThreadReserve) -> None:
    sessions.close()
    connections.close()
    threads.close()
