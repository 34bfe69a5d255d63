"""Addresses, listening sockets that were passed on, and the gateway's accepting from them."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from objectcache_gateway.listening import Acceptor, find_listeners
from objectcache_schemas.errors import InvalidRequest, Unavailable
from objectcache_schemas.listening import (
    HostPort,
    adopt_listeners,
    open_listeners,
    passed_descriptors,
    port_of,
)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9000", HostPort("127.0.0.1", 9000)),
        ("[::1]:0", HostPort("::1", 0)),
        (":80", HostPort("", 80)),
        ("store-1:65535", HostPort("store-1", 65535)),
    ],
)
def test_an_address_is_read_and_shown_as_it_was_given(text: str, address: HostPort) -> None:
    assert HostPort.parse("storage.listen", text) == address
    assert str(address) == text


@pytest.mark.parametrize("text", ["", "9000", "host:", "host:65536", "host:-1", "host:٣", "h:9 "])
def test_what_is_no_address_is_refused_with_the_settings_name(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"storage.listen must be host:port"):
        HostPort.parse("storage.listen", text)


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = HostPort("127.0.0.1", port_of(taken))
        with pytest.raises(Unavailable, match=f"cannot listen on {address}: Address already in"):
            open_listeners(address)


def test_a_host_with_several_addresses_has_one_port() -> None:
    listeners = open_listeners(HostPort("localhost", 0))
    assert len({port_of(listener) for listener in listeners}) == 1
    for listener in listeners:
        listener.close()


def test_systemds_descriptors_are_taken_once_and_only_by_the_process_they_are_for() -> None:
    environment = {"LISTEN_FDS": "2", "LISTEN_PID": "77", "LISTEN_FDNAMES": "a:b", "HOME": "/"}
    assert passed_descriptors(dict(environment), 78) == []
    assert passed_descriptors(environment, 77) == [3, 4]
    assert environment == {"HOME": "/"}
    assert passed_descriptors(environment, 77) == []
    with pytest.raises(InvalidRequest, match="LISTEN_FDS must be a number"):
        passed_descriptors({"LISTEN_FDS": "-1", "LISTEN_PID": "77"}, 77)


def test_a_passed_descriptor_must_be_a_listening_tcp_socket() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as of_unix, socket.socket() as silent:
        for descriptor in (of_unix.fileno(), silent.fileno()):
            with pytest.raises(InvalidRequest, match=r"is no listening TCP socket"):
                adopt_listeners([descriptor])
    read_end, write_end = os.pipe()
    with pytest.raises(InvalidRequest, match=r"is no socket"):
        adopt_listeners([read_end])
    os.close(read_end)
    os.close(write_end)


def test_a_gateway_alone_takes_systemds_socket_in_place_of_its_setting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as passed:
        port = port_of(passed)
        listeners, shown = find_listeners("127.0.0.1:1", [os.dup(passed.fileno())], {})
        assert shown == f"127.0.0.1:{port}"
        assert [port_of(listener) for listener in listeners] == [port]
        listeners[0].close()


class Named(asyncio.Protocol):
    """Answers every byte with its process' name."""

    def __init__(self, name: bytes) -> None:
        self._name = name

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(self._name)
        self._transport.close()


@pytest.mark.asyncio
async def test_what_waits_in_the_backlog_is_accepted_before_the_listener_closes() -> None:
    (listener,) = open_listeners(HostPort("127.0.0.1", 0))
    address = listener.getsockname()
    acceptor = Acceptor([listener], lambda: Named(b"served"), None, 16)
    waiting = [socket.create_connection(address) for _ in range(5)]
    acceptor.close()  # the loop has not run since: nothing was accepted before
    assert acceptor.connecting_count == 5
    await acceptor.connected()
    for connected in waiting:
        reader, writer = await asyncio.open_connection(sock=connected)
        writer.write(b"?")
        assert await reader.read() == b"served"
        writer.close()
        await writer.wait_closed()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)


@pytest.mark.asyncio
async def test_a_listener_that_is_shared_stays_open_for_the_others() -> None:
    (shared,) = open_listeners(HostPort("127.0.0.1", 0))
    address = shared.getsockname()
    first = Acceptor([shared.dup()], lambda: Named(b"first"), None, 16)
    second = Acceptor([shared.dup()], lambda: Named(b"second"), None, 16)
    first.start()
    first.close()
    connected = socket.create_connection(address)  # waits: nobody accepts
    second.start()
    reader, writer = await asyncio.open_connection(sock=connected)
    writer.write(b"?")
    assert await reader.read() == b"second"
    writer.close()
    await writer.wait_closed()
    second.close()
    shared.close()


@pytest.mark.asyncio
async def test_connections_within_their_handshake_are_bounded() -> None:
    (listener,) = open_listeners(HostPort("127.0.0.1", 0))
    acceptor = Acceptor([listener], lambda: Named(b"x"), None, 2)
    waiting = [socket.create_connection(listener.getsockname()) for _ in range(3)]
    acceptor.close()
    assert acceptor.connecting_count == 2
    await acceptor.connected()
    refused = await asyncio.get_running_loop().run_in_executor(None, waiting[2].recv, 1)
    assert refused == b""
    for connected in waiting:
        connected.close()
