"""The storage servers of one store, as any of them knows them."""

from __future__ import annotations

import msgspec

from objectcache_schemas.messages.message import Changes, Message, request


class ServerState(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One storage server, as it last said of itself.

    Fields that a later version adds are passed over, so that servers of two versions can serve one
    store while they are replaced one after the other.
    """

    server_id: bytes  # drawn at each start; every target of the server begins with it
    host_id: str  # boot id of its host
    socket_path: str = ""  # where gateways of its host reach it
    address: str = ""  # host:port where others do, over mutual TLS; empty where none may
    load: int = 0  # deliveries and puts that run or wait
    in_flight_bytes: int = 0
    recent_bytes: int = 0  # of gets and puts that began lately, fading
    recent_requests: float = 0.0  # how many these are
    sessions: int = 0  # of clients, that are open
    draining: bool = False
    writer: int = 0  # under which it writes to a shared store; 0 where the store is its own
    lag_records: int = 0  # of the store's log, that it has not replayed
    lag_is_known: bool = True  # false where it cannot tell what the log ends with
    store_failure: str = ""  # why it cannot serve from the store now; empty while it can
    heard_s: float = 0.0  # ago, that it said so; 0 of whoever answers

    @property
    def name(self) -> str:
        """For people: its address, or its socket."""
        return self.address or self.socket_path or self.server_id.hex()


class Servers(Message, frozen=True, omit_defaults=True):
    """Reply to `GetServers`: who answers, and the others that are alive."""

    answering: ServerState
    others: tuple[ServerState, ...] = ()


@request(Servers, repeatable=True, changes=Changes.NOTHING)
class GetServers(Message, frozen=True):
    """Ask for the servers of the store; also how a gateway finds out that one stands still."""

    knows_others: bool = False  # whether the gateway could ask another server
