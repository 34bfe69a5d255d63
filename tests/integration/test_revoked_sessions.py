"""Sessions through the gateway end with the right to have opened them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import msgspec
import pytest
from websockets.exceptions import ConnectionClosed

from objectcache.channel.access_key import SigningKey
from objectcache.channel.endpoint import Endpoint
from objectcache.channel.signing import Signer
from objectcache.sessions.web_wire import WebWire
from objectcache_schemas.errors import AccessDenied, WireError
from objectcache_schemas.messages.sessions import ReleaseTarget, TargetEvent
from tests.integration.tenants import Tenant, new_tenant
from tests.servers import Credentials, RunningServer, start_server

TIMEOUT_S = 30.0
POLICY_VIOLATION = 1008
_EVENT: msgspec.msgpack.Decoder[TargetEvent] = msgspec.msgpack.Decoder(TargetEvent)


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("revoked")
    with start_server(folder, "gateway.session_heartbeat_s=8", "storage.nixl=off") as running:
        yield running


@pytest.fixture
def join(server: RunningServer) -> Iterator[Callable[[Credentials], WebWire]]:
    with ExitStack() as joined:

        def join_as(pair: Credentials) -> WebWire:
            key = SigningKey(pair.access_key, pair.secret_key, None)
            endpoint = Endpoint.parse(server.endpoint)
            signer = Signer(endpoint, "us-east-1", lambda: key)
            wire = WebWire.join(endpoint, signer.signed_headers, None, TIMEOUT_S)
            joined.callback(wire.close)
            return wire

        yield join_as


def goes_on(wire: WebWire) -> bool:
    """Whether the session answers."""
    wire.send(ReleaseTarget(target_id=bytes(16)))
    answer = _EVENT.decode(wire._connection.recv(TIMEOUT_S))
    return isinstance(answer, WireError) and "not registered" in answer.message


def why_it_ended(wire: WebWire) -> tuple[int, str]:
    """The code and the reason that the client was told."""
    with pytest.raises(ConnectionClosed) as caught:
        wire._connection.recv(TIMEOUT_S)
    assert caught.value.rcvd is not None
    return caught.value.rcvd.code, caught.value.rcvd.reason


def test_a_session_ends_when_its_key_or_its_user_loses_access_and_no_other_does(
    server: RunningServer, join: Callable[[Credentials], WebWire]
) -> None:
    alice, bob = new_tenant(server, "alice"), new_tenant(server, "bob")
    carol = new_tenant(server, "carol")
    deleted, disabled, expired = alice, alice.another_key(), alice.another_key()
    stay = [join(server.credentials), join(carol.credentials)]
    losing = [join(tenant.credentials) for tenant in (deleted, disabled, expired, bob)]
    assert all(goes_on(wire) for wire in (*stay, *losing))
    deleted.delete_key()
    disabled.change_key(enabled=False)
    expired.change_key(expires_s=time.time() - 1)
    bob.change_user(enabled=False)
    reasons = (
        "the access key does not exist",
        "the access key is disabled",
        "the access key has expired",
        "the access key's user is disabled",
    )
    for wire, why in zip(losing, reasons, strict=True):
        assert why_it_ended(wire) == (POLICY_VIOLATION, why)
    with pytest.raises(AccessDenied):
        join(bob.credentials)
    _wait_a_heartbeat(join, carol)
    assert all(goes_on(wire) for wire in stay)


def _wait_a_heartbeat(join: Callable[[Credentials], WebWire], tenant: Tenant) -> None:
    """A session that begins now and ends at its first check: all others were checked meanwhile."""
    key = tenant.another_key()
    wire = join(key.credentials)
    key.delete_key()
    why_it_ended(wire)
