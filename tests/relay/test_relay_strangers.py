"""Strangers at a relay's port, and certificates."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from objectcache import Client
from objectcache.channel import requests
from objectcache.channel.access_key import SigningKey
from objectcache.channel.authorities import client_context
from objectcache.channel.endpoint import Endpoint
from objectcache.channel.requests import GatewayRequest
from objectcache.channel.signing import Signer
from objectcache_schemas import headers
from tests.certificates import Authority
from tests.fetcher.fetchers import RunningFetcher
from tests.integration.served import wait_until
from tests.relay.relays import BOUND_S, BUCKET, RunningRelay, check_get
from tests.servers import Credentials, RunningServer

CONNECTIONS_MAX = 8


def connected(endpoint: str) -> socket.socket:
    address = urlsplit(endpoint)
    return socket.create_connection((address.hostname, address.port), BOUND_S)


def is_ended(stranger: socket.socket) -> bool:
    stranger.settimeout(0.01)
    try:
        return stranger.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def test_strangers_hold_no_place_that_an_engine_needs(
    server: RunningServer, tmp_path: Path
) -> None:
    bound = f"relay.connections_max={CONNECTIONS_MAX}"
    with (
        RunningRelay(server, tmp_path / "relay.log", bound) as relay,
        contextlib.ExitStack() as closing,
        relay.client() as engine,
    ):
        check_get(engine)  # its connections stay known
        strangers = [
            closing.enter_context(connected(relay.endpoint)) for _ in range(4 * CONNECTIONS_MAX)
        ]
        wait_until(
            lambda: sum(map(is_ended, strangers)) >= len(strangers) - CONNECTIONS_MAX,
            "the oldest of them are ended",
        )
        check_get(engine)
        with relay.client() as newcomer:
            check_get(newcomer)


def test_a_head_without_end_is_refused(relay: RunningRelay) -> None:
    with connected(relay.endpoint) as stranger:
        with contextlib.suppress(OSError):  # it is closed meanwhile
            stranger.sendall(b"GET / HTTP/1.1\r\n")
            for _ in range(1000):
                stranger.sendall(b"x-long: " + b"x" * 1000 + b"\r\n")
        assert stranger.recv(16).startswith((b"HTTP/1.0 4", b"HTTP/1.1 4"))


def test_a_body_that_stops_arriving_is_waited_for_no_longer_than_the_setting(
    server: RunningServer, tmp_path: Path
) -> None:
    stall = "gateway.body_stall_timeout_s=0.2"
    with (
        RunningRelay(server, tmp_path / "relay.log", stall) as relay,
        connected(relay.endpoint) as engine,
    ):
        credentials = server.credentials
        key = SigningKey(credentials.access_key, credentials.secret_key, None)
        match = requests.match("relayed", ("a" * 64,))
        signed = Signer(Endpoint.parse(relay.endpoint), "us-east-1", lambda: key).signed_headers(
            match
        )
        lines = [f"{name}: {value}" for name, value in signed.items()]
        head = "\r\n".join(
            [f"{match.method} {match.target} HTTP/1.1", *lines, "content-length: 100", "", ""]
        )
        engine.sendall(head.encode() + b"x")
        assert engine.recv(1 << 16).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("kind", [RunningRelay, RunningFetcher])
def test_a_body_over_the_limit_is_answered_and_not_reset(
    server: RunningServer, tmp_path: Path, kind: type[RunningRelay]
) -> None:
    with kind(server, tmp_path / "log") as relay:
        for endpoint in (server.endpoint, relay.endpoint):
            head, body = over_the_limit(endpoint, server.credentials)
            with connected(endpoint) as engine:
                engine.sendall(head + body)
                answer = engine.makefile("rb").read()
            assert answer.startswith(b"HTTP/1.1 413"), endpoint
            assert b"limits.descriptor_bytes_max" in answer


def over_the_limit(endpoint: str, credentials: Credentials) -> tuple[bytes, bytes]:
    """A get's head, and its body."""
    key = SigningKey(credentials.access_key, credentials.secret_key, None)
    body = bytes(9_000_000)
    get = GatewayRequest("POST", f"/{BUCKET}", headers.KV_GET, body=(body,))
    signed = Signer(Endpoint.parse(endpoint), "us-east-1", lambda: key).signed_headers(get)
    lines = [f"{name}: {value}" for name, value in signed.items()]
    length = f"content-length: {len(body)}"
    return "\r\n".join([f"POST {get.target} HTTP/1.1", *lines, length, "", ""]).encode(), body


def test_a_relay_with_a_certificate_serves_https_alone(
    server: RunningServer, tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "authority")
    pair = authority.pair("relay")
    files = (f"relay.tls_certificate={pair.certificate}", f"relay.tls_key={pair.key}")
    with RunningRelay(server, tmp_path / "relay.log", *files) as relay:
        assert relay.endpoint.startswith("https://127.0.0.1:")
        credentials = server.credentials
        for transport in ("body", "shared_memory"):
            with Client(
                relay.endpoint,
                access_key=credentials.access_key,
                secret_key=credentials.secret_key,
                transport=transport,
                tls=client_context(authority.file),
            ) as client:
                check_get(client)
        with connected(relay.endpoint) as plain:
            plain.sendall(b"GET /healthz HTTP/1.1\r\nHost: relay\r\n\r\n")
            assert b"200" not in plain.recv(1 << 16)
