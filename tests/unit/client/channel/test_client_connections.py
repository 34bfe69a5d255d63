"""Connections: bounded, reused, replaced when stale; what the system says becomes our errors."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from objectcache import Client, Delivery
from objectcache.channel.connections import ConnectionPool
from objectcache.channel.endpoint import Endpoint
from objectcache.errors import Busy, Conflict, DeliveryFailed, NotFound, Unavailable
from objectcache.kv_bucket import KvBucket
from tests.integration.served import begun_in_time
from tests.unit.client.client_fakes import (
    DEADLINE_S,
    KEYS,
    LAYOUT,
    FakeGateway,
    Listener,
    Peer,
    Received,
    chunks_of,
    payload_of,
)

ERROR_XML = b"<Error><Code>%s</Code><Message>no</Message></Error>"


def matched(peer: Peer, count: int = 1) -> None:
    peer.answer(body=msgspec.msgpack.encode({"v": 1, "matched": count}))


def test_connections_are_reused_last_in_first_out() -> None:
    with FakeGateway(lambda request, peer: matched(peer)) as gateway, gateway.client() as client:
        bucket = KvBucket(client._core, "b", LAYOUT)
        for _ in range(5):
            assert bucket.match(KEYS) == 1
        assert gateway.listener.connection_count == 1


def test_a_pool_holds_no_more_connections_than_its_bound() -> None:
    pool = ConnectionPool(Endpoint("http", "127.0.0.1", 1), 2)
    first, second = pool.take(1), pool.take(1)
    assert first is not second
    with pytest.raises(Busy, match="connections_max is 2"):
        pool.take(0.01)
    taken: list[object] = []
    waiter = threading.Thread(target=lambda: taken.append(pool.take(DEADLINE_S)))
    waiter.start()
    pool.discard(first)
    waiter.join(DEADLINE_S)
    assert len(taken) == 1
    assert repr(pool) == "<ConnectionPool 2/2 open, 0 idle>"
    pool.close()
    with pytest.raises(Unavailable, match="closed"):
        pool.take(1)


def test_a_refused_connection_is_unavailable_and_names_the_address() -> None:
    gateway = FakeGateway(lambda request, peer: None)
    gateway.listener.close()
    with socket.socket() as bound:  # so that nobody else listens at its port meanwhile
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        gateway.url = f"http://127.0.0.1:{port}"
        with gateway.client() as client, pytest.raises(Unavailable, match=f"{port}.*refused"):
            client.get_layout("b")


def test_a_gateway_that_says_nothing_is_unavailable_after_the_timeout() -> None:
    with (
        FakeGateway(lambda request, peer: None) as gateway,
        gateway.client(timeout_s=0.1) as client,
        pytest.raises(Unavailable, match=r"^http://127\.0\.0\.1:\d+: no answer: timed out$"),
    ):
        client.get_layout("b")


def close_instead_of_second(peer: Peer, served: list[int]) -> None:
    served.append(1)
    if len(served) == 2:
        peer.close()  # after the request was sent, as when an idle timeout meets a new request
    else:
        matched(peer)


def test_a_connection_that_goes_stale_under_a_request_is_replaced_once() -> None:
    served: list[int] = []
    with (
        FakeGateway(lambda request, peer: close_instead_of_second(peer, served)) as gateway,
        gateway.client() as client,
    ):
        bucket = KvBucket(client._core, "b", LAYOUT)
        assert bucket.match(KEYS) == 1
        assert bucket.match(KEYS) == 1
        assert gateway.listener.connection_count == 2


def test_a_request_that_must_not_be_repeated_is_not() -> None:
    served: list[int] = []
    with (
        FakeGateway(lambda request, peer: close_instead_of_second(peer, served)) as gateway,
        gateway.client() as client,
    ):
        bucket = KvBucket(client._core, "b", LAYOUT)
        assert bucket.match(KEYS) == 1
        with pytest.raises(Unavailable) as caught:
            client.create_bucket("other")
        assert "TLS" not in caught.value.message  # it has answered in plain HTTP
        assert len(served) == 2


def test_a_fresh_connection_that_breaks_is_not_tried_again() -> None:
    with (
        FakeGateway(lambda request, peer: peer.close()) as gateway,
        gateway.client() as client,
        pytest.raises(Unavailable),
    ):
        client.get_layout("b")
    assert len(gateway.requests) == 1


def test_an_idle_connection_that_was_closed_is_not_used() -> None:
    def serve(request: Received, peer: Peer) -> None:
        peer.answer()
        peer.close()

    with FakeGateway(serve) as gateway, gateway.client() as client:
        client.create_bucket("one")
        (idle,) = client._core.channel.pool._idle
        idle.http.sock.settimeout(DEADLINE_S)
        assert idle.http.sock.recv(1, socket.MSG_PEEK) == b""  # the close has arrived
        client.create_bucket("two")


def test_an_error_keeps_the_connection() -> None:
    with (
        (
            FakeGateway(lambda request, peer: peer.answer(404, body=ERROR_XML % b"NoSuchBucket"))
        ) as gateway,
        gateway.client() as client,
    ):
        for _ in range(3):
            with pytest.raises(NotFound) as caught:
                client.get_layout("b")
            assert caught.value.code == "NoSuchBucket"
        assert gateway.listener.connection_count == 1


def test_an_answer_that_is_cut_is_unavailable() -> None:
    def serve(request: Received, peer: Peer) -> None:
        peer.answer(body=b"half", length_bytes=8)
        peer.close()

    with (
        FakeGateway(serve) as gateway,
        gateway.client() as client,
        pytest.raises(Unavailable, match=r"^http://127.*4 bytes are missing"),
    ):
        client.get_layout("b")


class RefusingPeer:
    """Answers as soon as the head of a put has arrived, and takes nothing of the body."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.client_done = threading.Event()
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def serve(self) -> None:
        sock, _ = self.listener.accept()
        with self.listener, sock:
            while b"\r\n\r\n" not in sock.recv(1 << 16, socket.MSG_PEEK):
                pass
            Peer(sock).answer(409, body=ERROR_XML % b"ContentConflict")
            sock.shutdown(socket.SHUT_WR)
            self.client_done.wait(DEADLINE_S)


def test_a_put_that_is_refused_early_raises_the_servers_error() -> None:
    peer = RefusingPeer()
    gateway = FakeGateway(lambda request, peer: None)
    gateway.listener.close()
    gateway.url = peer.url
    layout = type(LAYOUT)(
        num_layers=1, chunk_tokens=1, per_layer_chunk_bytes=64 << 20, dtype="x", fingerprint="x"
    )
    with gateway.client(timeout_s=2.0) as client:  # which the put waits for before it looks
        bucket = KvBucket(client._core, "b", layout)
        with pytest.raises(Conflict):
            bucket.put(["k"], np.zeros((1, 1, 64 << 20), np.uint8))
    peer.client_done.set()
    peer.thread.join(DEADLINE_S)


def cut_after(count: int) -> Callable[[Received, Peer], None]:
    def serve(request: Received, peer: Peer) -> None:
        payload = payload_of(5)
        peer.answer_delivery("layerwise", 5, payload[:count], len(payload))
        peer.close()

    return serve


@pytest.mark.parametrize(("count", "layer"), [(0, 0), (199, 0), (200, 1), (401, 2), (599, 2)])
def test_a_cut_body_fails_at_the_first_layer_that_is_not_whole(count: int, layer: int) -> None:
    with FakeGateway(cut_after(count)) as gateway, gateway.client() as client:
        bucket = KvBucket(client._core, "b", LAYOUT)
        with bucket.fetch(KEYS) as delivery:
            for whole in range(layer):
                expected = chunks_of(5)[:, whole]
                assert np.array_equal(delivery.wait_layer(whole), expected)
            with pytest.raises(DeliveryFailed, match="bytes are missing") as caught:
                delivery.wait()
            assert caught.value.details.layer == layer


def test_a_body_that_stops_arriving_fails_after_the_timeout() -> None:
    def serve(request: Received, peer: Peer) -> None:
        peer.answer_delivery("layerwise", 5, payload_of(5)[:250], 600)
        peer.wait_closed()

    with FakeGateway(serve) as gateway, gateway.client() as client:
        bucket = KvBucket(client._core, "b", LAYOUT)

        def begin(timeout_s: float) -> Delivery:
            delivery = bucket.fetch(KEYS, timeout_s=timeout_s)
            delivery.wait_layer(0)
            return delivery

        with begun_in_time(begin) as delivery:
            with pytest.raises(DeliveryFailed, match="timed out") as caught:
                delivery.wait_layer(2)
            assert caught.value.details.layer == 1


def test_closing_early_closes_the_connection_and_does_not_hang() -> None:
    closed = threading.Event()

    def serve(request: Received, peer: Peer) -> None:
        peer.answer_delivery("layerwise", 5, payload_of(5)[:250], 600)
        peer.wait_closed()
        closed.set()

    with FakeGateway(serve) as gateway, gateway.client() as client:
        delivery = KvBucket(client._core, "b", LAYOUT).fetch(KEYS)
        first = delivery.wait_layer(0)
        delivery.close()
        assert closed.wait(DEADLINE_S)
        assert np.array_equal(first, chunks_of(5)[:, 0])
        assert np.array_equal(delivery.wait_layer(0), first)
        with pytest.raises(DeliveryFailed, match="closed"):
            delivery.wait_layer(2)
        delivery.close()
        assert repr(client._core.channel.pool) == "<ConnectionPool 0/32 open, 0 idle>"


def test_a_body_of_another_length_than_the_headers_say_is_an_error() -> None:
    def serve(request: Received, peer: Peer) -> None:
        peer.answer_delivery("layerwise", 5, b"", 601)

    with FakeGateway(serve) as gateway, gateway.client() as client:
        with pytest.raises(Exception, match="601 bytes for a payload of 600"):
            KvBucket(client._core, "b", LAYOUT).fetch(KEYS)
        assert "0/32 open" in repr(client._core.channel.pool)


def test_tls_to_a_plain_port_is_unavailable_and_says_so() -> None:
    def answer_in_plain_text(sock: socket.socket) -> None:
        sock.recv(4096)
        sock.sendall(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")

    sock = socket.create_server(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    listener = Listener(sock, answer_in_plain_text)
    url = f"https://127.0.0.1:{port}"
    try:
        with (
            Client(url, access_key="key", secret_key="secret", timeout_s=DEADLINE_S) as client,
            pytest.raises(Unavailable, match=f"127.0.0.1:{port}: TLS failed.*write http://$"),
        ):
            client.create_bucket("b")
    finally:
        listener.close()
