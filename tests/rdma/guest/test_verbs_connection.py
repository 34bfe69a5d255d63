"""A verbs connection that works: bytes, announcements, credits, reads."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable

import numpy as np
import pytest
from msgspec.structs import replace

from objectcache_fabrics.registered_memory import RemoteMemory
from objectcache_fabrics.verbs import peer as peer_module
from objectcache_fabrics.verbs import queue_pair as verbs_queue_pair
from objectcache_fabrics.verbs.address import Announcement, VerbsAddress
from objectcache_fabrics.verbs.device import VerbsDevice
from objectcache_fabrics.verbs.pyverbs_binding import load_pyverbs
from objectcache_schemas.errors import InvalidRequest, Unavailable
from tests.rdma.guest.peers import (
    PIECE_BYTES,
    PIECE_COUNT,
    Client,
    Server,
    with_fewer_receives,
)

CONTENT = np.random.default_rng(6).integers(0, 256, 1 << 20, np.uint8)


def test_what_is_written_is_in_place_before_it_is_announced(
    make_server: Callable[..., Server], make_client: Callable[..., Client]
) -> None:
    server, client = make_server(), make_client()
    peer = client.join(server)
    layer_bytes = 3 * PIECE_BYTES
    for layer in range(5):
        for piece in range(3):
            begin = layer * layer_bytes + piece * PIECE_BYTES
            server.write(peer, client.memory, begin, CONTENT[begin : begin + PIECE_BYTES].tobytes())
        assert [server.outcome() for _ in range(3)] == [None] * 3
        peer.announce(77, layer + 1)
        assert client.next_heard() == Announcement(77, layer + 1)
        end = (layer + 1) * layer_bytes
        assert np.array_equal(client.array[:end], CONTENT[:end])
        assert not client.array[end:].any()
    assert server.idle_pieces == PIECE_COUNT


def test_a_piece_goes_where_its_offset_says_and_nowhere_else(
    make_server: Callable[..., Server], make_client: Callable[..., Client]
) -> None:
    server, client = make_server(), make_client()
    peer = client.join(server)
    server.write(peer, client.memory, 4099, b"\x07" * 1001)
    assert server.outcome() is None
    assert client.array[4098:5101].tolist() == [0] + [7] * 1001 + [0]
    assert int(client.array.sum(dtype=np.int64)) == 7 * 1001


def test_writes_that_queue_up_behind_each_other_arrive_as_gathered_ones(
    make_server: Callable[..., Server],
    make_client: Callable[..., Client],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_module, "SEND_DEPTH", 2)
    server, client = make_server(), make_client()
    peer = client.join(server)
    count = 16
    with peer._lock:  # nothing is posted meanwhile
        queue, post = peer._queue, peer._post
        peer._post = lambda: None  # type: ignore[method-assign]
    for piece in range(count):
        begin = piece * PIECE_BYTES
        server.write(peer, client.memory, begin, CONTENT[begin : begin + PIECE_BYTES].tobytes())
    peer._post = post  # type: ignore[method-assign]
    peer.return_credits(0)
    assert [server.outcome() for _ in range(count)] == [None] * count
    assert np.array_equal(client.array, CONTENT)
    assert queue.last_number == 0  # one entry of the device's queue for all


def test_a_piece_longer_than_a_message_is_written_in_several(
    make_server: Callable[..., Server], make_client: Callable[..., Client]
) -> None:
    server, client = make_server(), make_client()
    server.fabric._device.message_bytes_max = 10_000
    peer = client.join(server)
    server.write(peer, client.memory, 5, CONTENT[:PIECE_BYTES].tobytes())
    assert server.outcome() is None
    assert np.array_equal(client.array[5 : PIECE_BYTES + 5], CONTENT[:PIECE_BYTES])
    assert peer._queue.last_number == 6
    assert server.outcomes.empty()  # it is one write to whoever asked for it


def test_the_memory_of_a_client_is_read(
    make_server: Callable[..., Server], make_client: Callable[..., Client]
) -> None:
    server, client = make_server(), make_client()
    peer = client.join(server)
    client.array[:] = CONTENT
    staged = server.staging.take(5000)
    content = bytearray()

    def done(error: object) -> None:
        content.extend(staged)
        server.returning(staged)(error)  # type: ignore[arg-type]

    peer.read(client.memory, 333, staged, done)
    assert server.outcome() is None
    assert bytes(content) == CONTENT[333:5333].tobytes()


def test_without_credits_watermarks_wait_and_the_last_one_counts(
    make_server: Callable[..., Server], make_client: Callable[..., Client]
) -> None:
    server, client = make_server(), make_client()
    peer, answer = server.open(with_fewer_receives(client.endpoint.hello(), 3))
    client.connect(answer)
    for end_layer in range(1, 11):
        peer.announce(5, end_layer)
        if end_layer <= 3:
            assert client.next_heard() == Announcement(5, end_layer)
    peer.announce(6, 1)
    assert client.heard.empty()
    peer.return_credits(1)
    assert client.next_heard() == Announcement(5, 10)
    peer.return_credits(1)  # the same one again
    assert client.heard.empty()
    peer.return_credits(1 << 40)  # no more than there were
    assert client.next_heard() == Announcement(6, 1)
    assert peer._queue.credits == 2


def test_a_client_returns_what_it_has_heard_so_that_announcing_never_ends(
    make_server: Callable[..., Server], make_client: Callable[..., Client]
) -> None:
    server, client = make_server(), make_client()
    peer = client.join(server)
    announced = 400  # three times what may be on its way
    returned = 0
    for number in range(announced):
        peer.announce(number, 1)
        assert client.next_heard() == Announcement(number, 1)
        while not client.credits.empty():
            returned = client.credits.get()
            peer.return_credits(returned)
    assert announced - 64 <= returned <= announced


def test_memory_of_one_session_cannot_be_named_in_another(
    make_server: Callable[..., Server], make_client: Callable[..., Client]
) -> None:
    server, alice, bob = make_server(), make_client(), make_client()
    alice.join(server)
    peer_of_bob = bob.join(server)
    server.write(peer_of_bob, alice.memory, 0, b"mine now")
    error = server.outcome()
    assert error is not None
    assert error.code == "DeliveryFailed"
    assert "refuses" in error.message
    assert not alice.array.any()


def test_sessions_leave_nothing_behind(
    make_server: Callable[..., Server], make_client: Callable[..., Client]
) -> None:
    server = make_server()

    def one_session() -> None:
        client = Client("rxe0")
        peer = client.join(server)
        server.write(peer, client.memory, 0, b"x")
        assert server.outcome() is None
        client.close()
        client.close()
        peer.close()
        peer.close()

    one_session()
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(5):
        one_session()
    server.close()  # waits until the peers have ended
    after = set(os.listdir("/proc/self/fd"))
    assert len(after) <= len(before)
    assert server.idle_pieces == PIECE_COUNT


def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(Unavailable, match="'mlx5_9'"):
        VerbsDevice("mlx5_9")
    with pytest.raises(Unavailable, match="port"):
        VerbsDevice("rxe0:9")
    with pytest.raises(Unavailable, match="1 to 255"):
        VerbsDevice("rxe0:port")


def test_the_first_active_device_is_taken_with_its_address_over_ipv4() -> None:
    device = VerbsDevice()
    assert device.name == "rxe0:1"
    assert device.gid == bytes(10) + b"\xff\xff" + bytes([10, 77, 0, 1])
    assert device.mtu_bytes == 4096
    device.close()
    device.close()


def test_a_port_that_is_down_is_not_taken(link: Callable[[str, str], None]) -> None:
    link("rx1", "down")
    with pytest.raises(Unavailable, match="rxe1 is not active"):
        VerbsDevice("rxe1")


def test_an_endpoint_that_makes_no_sense_is_refused(
    make_server: Callable[..., Server],
) -> None:
    server = make_server()
    nowhere = VerbsAddress(qp_num=17, psn=0, gid=bytes(10) + b"\xff\xff\x08\x08\x08\x08")
    with pytest.raises(InvalidRequest, match="receives"):
        server.open(nowhere.to_bytes())
    with pytest.raises(InvalidRequest, match="endpoint"):
        server.open(b"hello")


def test_a_client_where_no_route_of_the_device_leads_is_refused_before_the_network_is_asked(
    make_server: Callable[..., Server], make_client: Callable[..., Client]
) -> None:
    server, client = make_server(), make_client()
    own = VerbsAddress.from_bytes(client.endpoint.hello())
    elsewhere = replace(own, gid=bytes(10) + b"\xff\xff" + bytes([10, 78, 0, 2]))
    with pytest.raises(Unavailable, match="no route leads there"):
        server.open(elsewhere.to_bytes())
    client.join(server)


def test_a_client_whom_nobody_answers_for_is_refused_before_the_library_is_asked(
    make_server: Callable[..., Server],
    make_client: Callable[..., Client],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would hold Python's lock for a second: all threads would stand still."""
    routed = "10.78.0.99 dev rx1 src 10.78.0.1 table 77"
    subprocess.run(["ip", "route", "replace", *routed.split()], check=True, timeout=60)
    server, client = make_server("rxe1"), make_client("rxe2")
    own = VerbsAddress.from_bytes(client.endpoint.hello())
    nobody = replace(own, gid=bytes(10) + b"\xff\xff" + bytes([10, 78, 0, 99]))
    with monkeypatch.context() as patched:
        patched.setattr(
            verbs_queue_pair.QueuePair, "_path_to", lambda *_: pytest.fail("it is asked")
        )
        for _ in range(2):
            with pytest.raises(Unavailable, match="no host answers"):
                server.open(nobody.to_bytes())
    peer = client.join(server)
    server.write(peer, client.memory, 0, b"here")
    assert server.outcome() is None
    assert bytes(client.array[:4]) == b"here"


def test_a_queue_pair_that_did_not_close_is_closed_when_asked_again() -> None:
    device = VerbsDevice("rxe0")
    pair = verbs_queue_pair.QueuePair(device, send_depth=2, receive_depth=0, reads_answered=0)
    real = pair._pair

    class Refusing:
        def close(self) -> None:
            raise load_pyverbs().error("Failed to destroy QP")

    pair._pair = Refusing()
    for _ in range(2):
        with pytest.raises(Unavailable, match="does not close"):
            pair.close()
        assert not pair.is_destroyed
    pair._pair = real
    for _ in range(2):
        pair.close()
        assert pair.is_destroyed
    device.close()


def test_a_read_takes_no_more_segments_than_the_device_says() -> None:
    device = VerbsDevice("rxe0")
    about = device.context.query_device()
    assert 1 <= device.read_segments_max <= min(about.max_sge, about.max_sge_rd)
    device.close()


def test_only_memory_of_the_host_is_admitted(
    make_server: Callable[..., Server], make_client: Callable[..., Client]
) -> None:
    server, client = make_server(), make_client()
    peer = client.join(server)
    peer.admit(client.memory, b"")
    with pytest.raises(InvalidRequest, match="memory of the host"):
        peer.admit(RemoteMemory(4096, 4096, 1, memory="VRAM"), b"")
    peer.close()
    with pytest.raises(Unavailable, match="ended"):
        peer.admit(client.memory, b"")
