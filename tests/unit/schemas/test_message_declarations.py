"""Every message is declared: what answers it, whether it is repeated, and who handles it."""

from __future__ import annotations

import importlib
import pkgutil
from typing import get_args

import msgspec

import objectcache_schemas
from objectcache_schemas.conversations import BodyChoice, GatewayRequest, PutEnd, StorageReply
from objectcache_schemas.errors import WireError
from objectcache_schemas.messages.handshake import Hello, Welcome
from objectcache_schemas.messages.leases import EndLease
from objectcache_schemas.messages.message import REQUESTS, Changes, Message, RequestRow
from objectcache_schemas.messages.sessions import NixlNames, TargetEvent, TargetRequest
from objectcache_schemas.operators.server_state import Health
from objectcache_storage_server.connections.handlers import HANDLERS

# What is said before, within or after a request, and in a session; each union is its own decoder's.
LATER = {Hello, EndLease, NixlNames, *get_args(BodyChoice), *get_args(PutEnd)}
OF_SESSIONS = {*get_args(TargetRequest), *get_args(TargetEvent)}
REPLIES = {reply for row in REQUESTS.values() for reply in row.replies} | {Welcome}


def every_message() -> set[type[Message]]:
    """All classes of messages there are, wherever in the package they stand."""
    prefix = objectcache_schemas.__name__ + "."
    for module in pkgutil.walk_packages(objectcache_schemas.__path__, prefix):
        importlib.import_module(module.name)
    found: set[type[Message]] = set()
    new = {Message}
    while new:
        new = {kind for parent in new for kind in parent.__subclasses__()} - found
        found |= new
    return {kind for kind in found if kind.__module__.startswith(prefix)}


def undeclared(messages: set[type[Message]], requests: dict[type[Message], RequestRow]) -> set[str]:
    """Names of messages that nobody would understand, answer or carry out."""
    known = {*requests, *REPLIES, *LATER, *OF_SESSIONS}
    missing = {kind.__name__ for kind in messages - known}
    missing |= {kind.__name__ for kind in requests if kind not in HANDLERS}
    return missing | {kind.__name__ for kind, row in requests.items() if not row.replies}


def test_every_message_has_its_declaration_its_reply_and_its_handler() -> None:
    assert undeclared(every_message(), REQUESTS) == set()


def test_a_message_that_nobody_declared_is_named() -> None:
    class Forgotten(Message, frozen=True):
        """No request, no reply."""

    assert undeclared({Forgotten}, {}) == {"Forgotten"}


def test_a_request_without_a_reply_or_a_handler_is_named() -> None:
    class Unheard(Message, frozen=True):
        """Nobody carries it out."""

    kind, row = next(iter(REQUESTS.items()))
    silent = RequestRow((), row.repeatable, row.changes)
    assert undeclared(set(), {Unheard: row}) == {"Unheard"}
    assert undeclared(set(), {kind: silent}) == {kind.__name__}


def test_no_handler_is_for_what_is_no_request() -> None:
    assert set(HANDLERS) <= set(REQUESTS)


def test_both_sides_decode_what_is_declared_and_no_more() -> None:
    assert set(get_args(GatewayRequest)) == set(REQUESTS)
    assert set(get_args(StorageReply)) == REPLIES | {WireError}


def test_of_what_changes_something_only_these_are_ever_sent_twice() -> None:
    twice = {
        kind.__name__
        for kind, row in REQUESTS.items()
        if row.repeatable is not False and row.changes is not Changes.NOTHING
    }
    # They store nothing before a CommitPut, or ask alone; deleting what is deleted is no error.
    assert twice == {"PutObject", "PutPart", "KvPut", "CheckPut", "DeleteObjects"}


def test_a_health_with_nothing_to_complain_of_is_read_by_whoever_knows_no_complaints() -> None:
    def sent(health: Health) -> set[str]:
        return set(msgspec.msgpack.decode(msgspec.msgpack.encode(health)))

    well = Health(
        engine="memory", deliveries_in_flight=0, in_flight_bytes=0, damaged_count=0, draining=False
    )
    always = {
        "op", "engine", "deliveries_in_flight", "in_flight_bytes", "damaged_count", "draining",
    }  # fmt: skip
    assert sent(well) == always
    assert sent(msgspec.structs.replace(well, degraded="it is full")) == {*always, "degraded"}
