"""Addresses, listening sockets that were passed on, and the gateway's accepting from them."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest

from objectcache_gateway.connections.accept_connections import Acceptor, find_listeners
from objectcache_runtime.networking.listening import (
    HostPort,
    adopt_listeners,
    open_listeners,
    passed_descriptors,
    port_of,
)
from objectcache_schemas.errors import InvalidRequest, Unavailable
from tests.certificates import Authority


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9000", HostPort("127.0.0.1", 9000)),
        ("[::1]:0", HostPort("::1", 0)),
        ("[fe80::1%eth0]:1", HostPort("fe80::1%eth0", 1)),
        (":80", HostPort("", 80)),
        ("store-1:65535", HostPort("store-1", 65535)),
    ],
)
def test_an_address_is_read_and_shown_as_it_was_given(text: str, address: HostPort) -> None:
    assert HostPort.parse("storage.listen", text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "there is no port"),
        ("9000", "there is no port; write it as in 127.0.0.1:9000"),
        ("host:", "'' is no port"),
        ("host:65536", "'65536' is no port, a number from 0 to 65535"),
        ("127.0.0.1:99999", "'99999' is no port, a number from 0 to 65535"),
        ("host:-1", "'-1' is no port"),
        ("host:٣", "'٣' is no port"),
        ("h:9 ", "'9 ' is no port"),
        ("::1:9000", "an IPv6 address stands in brackets, as in [::1]:9000"),
        ("::", "an IPv6 address stands in brackets"),
        ("[::1:9000", "[::1 is no IPv6 address in brackets"),
        ("[host]:9000", "[host] is no IPv6 address in brackets"),
        ("[::1]", "there is no port; write it as in [::1]:9000"),
        ("a host:9000", "'a host' is no name or address of a host"),
        ("http://127.0.0.1:9000", "this is a URL, give its host and port alone"),
        ("http://127.0.0.1:9000/", "this is a URL"),
    ],
)
def test_what_is_no_address_is_refused_with_the_settings_name_and_the_part_that_is_wrong(
    text: str, fault: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        HostPort.parse("storage.listen", text)
    start = f"storage.listen must be host:port, got {text!r}: "
    assert caught.value.message.startswith(start + fault)


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = HostPort("127.0.0.1", port_of(taken))
        with pytest.raises(Unavailable, match=f"cannot listen on {address}: Address already in"):
            open_listeners(address)
        with pytest.raises(Unavailable, match=r"already in use; gateway\.listen says where else$"):
            open_listeners(address, "gateway.listen")


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
        self.ends = 0

    def never_made(self) -> None:
        self.ends += 1

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
    acceptor = Acceptor([listener], lambda _: Named(b"served"), None)
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
    first = Acceptor([shared.dup()], lambda _: Named(b"first"), None)
    second = Acceptor([shared.dup()], lambda _: Named(b"second"), None)
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
async def test_what_was_accepted_can_be_ended_before_it_is_a_connection(tmp_path: Path) -> None:
    (listener,) = open_listeners(HostPort("127.0.0.1", 0))
    pair = Authority(tmp_path).pair("gateway")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    accepted: list[Callable[[], None]] = []
    named = Named(b"x")

    def make(give_up: Callable[[], None]) -> Named:
        accepted.append(give_up)
        return named

    acceptor = Acceptor([listener], make, context)
    silent = socket.create_connection(listener.getsockname(), 10.0)
    acceptor.close()
    await asyncio.sleep(0)
    accepted[0]()
    await acceptor.connected()
    assert named.ends == 1
    assert silent.recv(1) == b""
    silent.close()


@pytest.mark.asyncio
async def test_an_acceptor_without_descriptors_has_another_connection_ended_and_goes_on() -> None:
    (listener,) = open_listeners(HostPort("127.0.0.1", 0))
    address = listener.getsockname()
    held = [os.dup(listener.fileno())]
    room_asked = asyncio.Event()

    def make_room() -> bool:
        room_asked.set()
        while held:
            os.close(held.pop())
        return True

    acceptor = Acceptor([listener], lambda _: Named(b"served"), None, make_room)
    waiting = socket.create_connection(address, 10.0)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (held[0] + 1, before[1]))
        while (descriptor := _one_more()) is not None:
            held.append(descriptor)
        acceptor.start()
        await asyncio.wait_for(room_asked.wait(), 10.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    reader, writer = await asyncio.open_connection(sock=waiting)
    writer.write(b"?")
    assert await reader.read() == b"served"
    writer.close()
    await writer.wait_closed()
    acceptor.close()


def _one_more() -> int | None:
    try:
        return os.open(os.devnull, os.O_RDONLY)
    except OSError:
        return None


@pytest.mark.parametrize(
    ("text", "is_loopback"),
    [("127.0.0.1:1", True), ("[::1]:1", True), ("localhost:1", True), ("10.0.0.1:1", False)],
)
def test_an_address_knows_whether_other_hosts_reach_it(text: str, is_loopback: bool) -> None:
    assert HostPort.parse("s", text).is_loopback is is_loopback
    assert not HostPort.parse("s", ":1").is_loopback
