"""How a gateway ends that did not run for a while: what its clients sent is served before."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

import pytest
import uvloop

from objectcache_gateway import server
from objectcache_gateway.health_check import HealthState
from objectcache_gateway.server import QUIET_S, TURNS, Gateway
from objectcache_gateway.signing.credentials import CredentialStore, RootCredentials
from objectcache_runtime.settings import ServerSettings, Settings

BOUND_S = 60.0
REQUEST = b"GET /healthz HTTP/1.1\r\nHost: gateway\r\n\r\n"
ROOT = RootCredentials("AKIAROOT", "root-secret", "a test")


class SlowHealth:
    """Takes longer than a request has that is under way when connections are closed."""

    def __init__(self, *_: object) -> None:
        pass

    async def state(self) -> HealthState:
        """After a while, as some requests are answered."""
        await asyncio.sleep(0.5)
        return HealthState(200, {"status": "ok"})


async def answer(client: socket.socket) -> bytes:
    """The head of an answer; empty where the connection is closed without one."""
    received = b""
    loop = asyncio.get_running_loop()
    while b"\r\n\r\n" not in received and (piece := await loop.sock_recv(client, 4096)):
        received += piece
    return received


@pytest.mark.parametrize(
    ("stands_still_s", "client_too"),
    [(1.5 * QUIET_S, False), (3 * QUIET_S, False), (3 * QUIET_S, True)],
)
def test_a_gateway_that_stood_still_while_it_drained_serves_who_was_about_to_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stands_still_s: float, client_too: bool
) -> None:
    monkeypatch.setattr(server, "HealthCheck", SlowHealth)
    settings = Settings(server=ServerSettings(data_dir=str(tmp_path)))

    async def run(listener: socket.socket, client: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        gateway = Gateway(settings, CredentialStore(ROOT))
        await gateway.start([listener])
        await loop.sock_connect(client, listener.getsockname())
        await loop.sock_sendall(client, REQUEST)
        assert (await answer(client)).startswith(b"HTTP/1.1 200 ")
        drain = asyncio.create_task(gateway.drain(BOUND_S))
        while gateway._request_begun.is_set():  # noqa: ASYNC110  (it is cleared, not set)
            await asyncio.sleep(0)
        # It waits for a quiet while. Nothing of this process runs until that is over.
        if not client_too:
            client.send(REQUEST)
        time.sleep(stands_still_s)  # noqa: ASYNC251
        if client_too:
            for _ in range(2 * TURNS):
                await asyncio.sleep(0)
            client.send(REQUEST)
        head = await answer(client)
        assert head.startswith(b"HTTP/1.1 200 ")
        assert b"\r\nConnection: close\r\n" in head
        await drain

    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        for each in (listener, client):
            each.setblocking(False)
        uvloop.run(asyncio.wait_for(run(listener, client), BOUND_S))
