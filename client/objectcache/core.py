"""What a client, its buckets and its deliveries share."""

from __future__ import annotations

import enum
import ssl
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from objectcache.arguments import (
    check_credential,
    check_tls,
    checked_choice,
    checked_count,
    checked_encoding,
    checked_name,
    checked_rate,
    checked_seconds,
    checked_switch,
    checked_zero_or_more,
)
from objectcache.channel import requests
from objectcache.channel.access_key import SigningKey
from objectcache.channel.connections import ConnectionPool
from objectcache.channel.endpoint import Endpoint
from objectcache.channel.http_channel import HttpChannel
from objectcache.channel.responses import KvServersReply, SessionReply, parse_reply
from objectcache.encoding_choice.encoding_account import EncodingAccounts
from objectcache.encoding_choice.put_account import PutAccounts
from objectcache.landing.fabric_regions import FabricRegion
from objectcache.landing.held_targets import HeldTargets
from objectcache.landing.regions import Region
from objectcache.landing.registered_memory import RegisteredMemory
from objectcache.landing.target_pool import TargetPool, memory_file_region
from objectcache.learned_windows import RememberedWindows
from objectcache.sessions.fabric_joining import FabricSettings, join_fabric
from objectcache.sessions.server_sessions import ServerSessions
from objectcache.sessions.session_keeper import SessionKeeper
from objectcache.sessions.target_session import TargetSession, own_host_id
from objectcache.thread_reserve import ThreadReserve
from objectcache_schemas import headers
from objectcache_schemas.descriptor import check_nic
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
        return checked_choice("transport", cls, text)


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
    split_from_bytes: int = 0
    nic: str | None = None
    nic_bytes_per_s: float | None = None
    encodings: tuple[str, ...] = ()
    put_encoding: str = ""
    relayed_by: str = ""  # the relay whose upstream this client is, in every request

    def __post_init__(self) -> None:
        checked_name("nic", self.nic)
        checked_rate("nic_bytes_per_s", self.nic_bytes_per_s)
        check_nic(self.nic, self.nic_bytes_per_s)
        check_credential("region", self.region)  # of the signature's scope, which is a header
        checked_seconds("timeout_s", self.timeout_s)
        checked_encoding("put_encoding", self.put_encoding)
        checked_count("connections_max", self.connections_max)
        checked_count("target_bytes_max", self.target_bytes_max)
        checked_switch("learn_windows", self.learn_windows)
        checked_zero_or_more("split_from_bytes", self.split_from_bytes)
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
        make_region: Callable[[int], Region] = memory_file_region,
    ) -> None:
        """`make_region` makes the shared memory for deliveries, of so many bytes or more."""
        from objectcache.channel.signing import Signer  # botocore takes long to import

        check_tls(tls)
        self.endpoint = endpoint
        self.settings = settings
        connections = ConnectionPool(endpoint, settings.connections_max, tls)
        relayed = {headers.RELAYED_BY: settings.relayed_by} if settings.relayed_by else {}
        signer = Signer(endpoint, settings.region, access_key, always=relayed)
        channel = HttpChannel(connections, signer, settings.timeout_s)
        self.channel = channel
        self.threads = ThreadReserve("objectcache-receiver")
        self.shared = RegisteredMemory(
            TransportChoice.SHARED_MEMORY.value,
            SessionKeeper(
                lambda: TargetSession.join(_invite(channel), settings.timeout_s),
                "no shared memory",
                self.threads,
            ),
            TargetPool(settings.target_bytes_max, make_region),
            HeldTargets(),
            ServerSessions(
                lambda: _listed(channel, own_host_id()),
                lambda one: TargetSession.join(_invite(channel, one), settings.timeout_s),
                self.threads,
            ),
        )
        self._fabrics = {
            choice: self._fabric_memory(choice, signer, connections.tls)
            for choice in (TransportChoice.NIXL, TransportChoice.VERBS)
        }
        self.windows = RememberedWindows()
        self.encoding_accounts = EncodingAccounts()
        self.encodings_unknown_until_s = 0.0  # by time.monotonic; set where the server refused them
        self.put_accounts = PutAccounts()
        self.encoded_puts_unknown_until_s = 0.0  # so of puts
        memories = (self.shared, *self._fabrics.values())
        keepers: list[SessionKeeper | ServerSessions] = [
            *(one.sessions for one in memories),
            *(one.servers for one in memories),
        ]
        self.close = weakref.finalize(self, _close, connections, keepers, self.threads)

    def server_knows_encodings(self, now_s: float) -> bool:
        """Whether a descriptor may name them, as far as is known; `now_s` by time.monotonic."""
        return now_s >= self.encodings_unknown_until_s

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

        sign, channel = signer.signed_headers, self.channel

        def join(server_id: bytes | None = None) -> TargetSession:
            return join_fabric(choice.value, endpoint, sign, tls, timeout_s, fabric, server_id)

        return RegisteredMemory(
            choice.value,
            SessionKeeper(join, "no session", self.threads),
            TargetPool(self.settings.target_bytes_max, FabricRegion),
            HeldTargets(),
            ServerSessions(lambda: _listed(channel), join, self.threads),
        )

    def __repr__(self) -> str:
        shared = self.shared
        return f"{self.endpoint.url}, {self.channel.pool!r}, {shared.sessions!r}, {shared.pool!r}"


def _invite(channel: HttpChannel, server_id: bytes | None = None) -> SessionReply:
    reply = channel.call(requests.open_session(own_host_id(), server_id))
    return parse_reply(reply.body, SessionReply, "a session request")


def _listed(channel: HttpChannel, host_id: str | None = None) -> list[bytes]:
    """The ids of the storage servers, of those on one host or of all."""
    reply = parse_reply(channel.call(requests.list_servers()).body, KvServersReply, "kv-servers")
    return [one.server_id for one in reply.servers if host_id in (None, one.host_id)]


def _close(
    connections: ConnectionPool,
    keepers: Sequence[SessionKeeper | ServerSessions],
    threads: ThreadReserve,
) -> None:
    for keeper in keepers:
        keeper.close()
    connections.close()
    threads.close()
