"""When a client that takes no byte is cut."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest

from objectcache_gateway.connections.client_socket import CHECKS_PER_TIMEOUT, SendWatch


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return socket.create_connection(listener.getsockname()), listener.accept()[0]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("pair", "is_cut"),
    [
        pytest.param(tcp_pair, True, id="the system tells of no progress"),
        pytest.param(socket.socketpair, False, id="the system does not tell"),
    ],
)
async def test_only_a_client_that_is_known_to_make_no_progress_is_cut(
    pair: Callable[[], tuple[socket.socket, socket.socket]], is_cut: bool
) -> None:
    ours, theirs = pair()
    transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=ours)
    with theirs, SendWatch(transport, timeout_s=0.0) as watch:
        for _ in range(CHECKS_PER_TIMEOUT * 10):
            await asyncio.sleep(0)  # a turn of the loop, in which one check is made
        assert watch.stalled == is_cut
        transport.abort()
        await asyncio.sleep(0)
