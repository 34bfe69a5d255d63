"""A plain socket whose bytes travel over TLS, between two ends in one process."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path

from objectcache_runtime.networking import tls_tunnel
from tests.certificates import Authority

BOUND_S = 60.0


def test_bytes_pass_and_a_client_whose_host_is_gone_is_noticed_within_a_minute(
    tmp_path: Path,
) -> None:
    authority = Authority(tmp_path)
    pair = authority.pair("server")
    served = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    served.load_cert_chain(pair.certificate, pair.key)
    trusted = ssl.create_default_context(cafile=str(authority.file))

    async def run(listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        port = listener.getsockname()[1]
        dialing = asyncio.ensure_future(tls_tunnel.dial("localhost", port, trusted))
        connected, _ = await loop.sock_accept(listener)
        ours, ended = await tls_tunnel.accept(connected, served)
        with ours, await dialing as theirs:
            await loop.sock_sendall(theirs, b"hello")
            assert await loop.sock_recv(ours, 5) == b"hello"
            assert connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            silence_s, every_s, times = (
                connected.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            )
            assert silence_s + every_s * times <= 60
        await ended

    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        asyncio.run(asyncio.wait_for(run(listening), BOUND_S))
