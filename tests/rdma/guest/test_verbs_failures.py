"""What goes wrong on a verbs connection ends in an error, and never in a write after the end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import pytest

from objectcache_fabrics.registered_memory import RemoteMemory
from objectcache_fabrics.verbs import queue_pair as verbs_queue_pair
from objectcache_fabrics.verbs.address import Announcement, VerbsAddress
from objectcache_fabrics.verbs.peer import VerbsPeer
from objectcache_schemas.errors import ObjectCacheError
from tests.rdma.guest.conftest import Remote
from tests.rdma.guest.peers import (
    PIECE_BYTES,
    PIECE_COUNT,
    WAIT_S,
    Client,
    Server,
    run_client,
    run_server,
    with_fewer_receives,
)

PIECE = b"\x5a" * PIECE_BYTES
ANY_MEMORY = RemoteMemory(1 << 20, 1 << 20, 1)


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device tries for half a minute before it gives a client up."""
    monkeypatch.setattr(verbs_queue_pair, "ACK_TIMEOUT", 20)


def all_fail(server: Server, count: int) -> ObjectCacheError:
    """Every write ends in the same error, and its staging memory is back."""
    errors = [server.outcome() for _ in range(count)]
    first = errors[0]
    assert first is not None
    assert {id(error) for error in errors} == {id(first)}
    assert first.code == "DeliveryFailed"
    assert server.idle_pieces == PIECE_COUNT
    return first


def ends_with_failures(server: Server, count: int) -> ObjectCacheError:
    """Some writes were through, and all after the first failure failed."""
    outcomes = [server.outcome() for _ in range(count)]
    failed = [outcome is not None for outcome in outcomes]
    assert failed == sorted(failed)
    last = outcomes[-1]
    assert last is not None
    assert server.idle_pieces == PIECE_COUNT
    return last


def fails_from_now_on(server: Server, peer: VerbsPeer, memory: RemoteMemory) -> None:
    """The peer is of no use any more, and says so at once."""
    server.write(peer, memory, 0, PIECE)
    all_fail(server, 1)
    peer.announce(1, 1)
    peer.return_credits(1)


def test_a_wrong_key_is_refused_by_the_client_and_ends_the_connection(
    make_server: Callable[..., Server], make_client: Callable[..., Client]
) -> None:
    server, client = make_server(), make_client()
    peer = client.join(server)
    lost = threading.Event()
    peer.when_broken(lost.set)
    right = client.memory
    wrong = RemoteMemory(right.address, right.length_bytes, right.key ^ 0x5500)
    with peer._lock:  # all are queued before the first is refused
        for piece in range(3):
            threading.Thread(
                target=server.write, args=(peer, wrong, piece * PIECE_BYTES, PIECE)
            ).start()
    assert "refuses" in all_fail(server, 3).message
    client.wait_until_lost()
    fails_from_now_on(server, peer, right)
    assert lost.is_set()
    lost.clear()
    peer.when_broken(lost.set)  # at once
    assert lost.is_set()
    assert not client.array.any()


def test_a_write_past_the_end_of_registered_memory_is_refused(
    make_server: Callable[..., Server], make_client: Callable[..., Client]
) -> None:
    server, client = make_server(), make_client()
    peer = client.join(server)
    told = RemoteMemory(client.memory.address, 2 << 20, client.memory.key)
    server.write(peer, told, (1 << 20) - 100, PIECE)
    assert "refuses" in all_fail(server, 1).message


def test_staging_memory_that_is_not_registered_is_this_hosts_failure(
    make_server: Callable[..., Server], make_client: Callable[..., Client]
) -> None:
    server, client = make_server(), make_client()
    peer = client.join(server)
    server.fabric._sources._staged.local_key ^= 0x5500
    server.write(peer, client.memory, 0, PIECE)
    assert "this host" in all_fail(server, 1).message
    assert not client.is_lost


def test_a_client_that_was_killed_is_given_up(
    make_server: Callable[..., Server], make_remote: Callable[..., Remote]
) -> None:
    server = make_server()
    remote = make_remote(server, "rxe0")
    server.write(remote.peer, remote.memory, 0, PIECE)
    assert server.outcome() is None
    remote.process.kill()
    remote.process.join()
    for piece in range(4):
        server.write(remote.peer, remote.memory, piece * PIECE_BYTES, PIECE)
    assert "does not answer" in all_fail(server, 4).message
    fails_from_now_on(server, remote.peer, remote.memory)


def test_a_client_killed_among_writes_leaves_other_clients_alone(
    make_server: Callable[..., Server],
    make_remote: Callable[..., Remote],
    make_client: Callable[..., Client],
) -> None:
    server, other = make_server(), make_client()
    remote = make_remote(server, "rxe0")
    peer_of_other = other.join(server)
    for piece in range(16):
        server.write(remote.peer, remote.memory, piece * PIECE_BYTES, PIECE)
        if piece == 8:
            os.kill(remote.process.pid or 0, signal.SIGKILL)
    remote.process.join()
    server.write(remote.peer, remote.memory, 0, PIECE)
    # A device whose process is being taken down may still refuse, before it falls silent.
    told = ends_with_failures(server, 17).message
    assert "does not answer" in told or "the peer refuses" in told
    server.write(peer_of_other, other.memory, 0, PIECE)
    peer_of_other.announce(3, 1)
    assert server.outcome() is None
    assert other.next_heard() == Announcement(3, 1)


def test_a_stopped_client_is_written_to_by_its_device_and_hears_when_it_goes_on(
    make_server: Callable[..., Server], make_remote: Callable[..., Remote]
) -> None:
    """No write waits for its process, so no staging memory does; watermarks wait for credits."""
    server = make_server()
    remote = make_remote(server, "rxe0")
    os.kill(remote.process.pid or 0, signal.SIGSTOP)
    for piece in range(16):
        server.write(remote.peer, remote.memory, piece * PIECE_BYTES, PIECE)
    assert [server.outcome() for _ in range(16)] == [None] * 16
    for end_layer in range(1, 301):  # more than it has posted receives
        remote.peer.announce(9, end_layer)
    assert server.idle_pieces == PIECE_COUNT
    os.kill(remote.process.pid or 0, signal.SIGCONT)
    assert remote.asked("bytes") == PIECE * 16
    assert remote.asked("heard") == Announcement(9, 1)


def test_a_client_behind_a_dead_link_is_given_up(
    make_server: Callable[..., Server],
    make_remote: Callable[..., Remote],
    link: Callable[[str, str], None],
) -> None:
    server = make_server("rxe1")
    remote = make_remote(server, "rxe2")
    server.write(remote.peer, remote.memory, 0, PIECE)
    assert server.outcome() is None
    link("rx2", "down")
    for piece in range(4):
        server.write(remote.peer, remote.memory, piece * PIECE_BYTES, PIECE)
    error = all_fail(server, 4)
    assert "does not answer" in error.message or "this host" in error.message
    fails_from_now_on(server, remote.peer, remote.memory)


def test_this_hosts_dead_link_is_told_and_the_next_connection_works(
    make_server: Callable[..., Server],
    make_remote: Callable[..., Remote],
    link: Callable[[str, str], None],
) -> None:
    server = make_server("rxe1")
    remote = make_remote(server, "rxe2")
    link("rx1", "down")
    server.write(remote.peer, remote.memory, 0, PIECE)
    error = all_fail(server, 1)
    assert "this host" in error.message or "does not answer" in error.message


def test_a_write_that_takes_longer_than_its_deadline_is_given_up(
    make_server: Callable[..., Server], make_client: Callable[..., Client], patience: None
) -> None:
    server, client = make_server("rxe0", 1.0), make_client()
    peer, _ = server.open(client.endpoint.hello())
    server.write(peer, ANY_MEMORY, 0, PIECE)
    assert all_fail(server, 1).message.endswith("within 1 s")


def test_a_client_that_is_not_where_it_says_is_given_up(
    make_server: Callable[..., Server],
) -> None:
    server = make_server()
    nowhere = VerbsAddress(
        qp_num=17, psn=0, gid=bytes(10) + b"\xff\xff" + bytes([10, 77, 0, 200]), receives=1
    )
    peer, _ = server.open(nowhere.to_bytes())
    server.write(peer, ANY_MEMORY, 0, PIECE)
    error = all_fail(server, 1)
    assert "does not answer" in error.message or "this host" in error.message


def test_a_client_that_lies_about_its_receives_is_given_up(
    make_server: Callable[..., Server], make_client: Callable[..., Client]
) -> None:
    server, client = make_server(), make_client()
    peer, answer = server.open(with_fewer_receives(client.endpoint.hello(), 4096))
    client.endpoint._pair.post_receives = lambda count: None  # type: ignore[method-assign]
    client.connect(answer)
    for number in range(140):  # it has 128
        peer.announce(number, 1)
    server.write(peer, client.memory, 0, PIECE)
    assert "has posted no receives" in all_fail(server, 1).message
    for _ in range(128):
        client.next_heard()


def test_a_closed_session_fails_what_is_under_way_and_gives_staging_memory_back(
    make_server: Callable[..., Server], make_client: Callable[..., Client], patience: None
) -> None:
    server, client = make_server(), make_client()
    peer, _ = server.open(client.endpoint.hello())  # it never connects: nothing is taken
    for piece in range(16):
        server.write(peer, ANY_MEMORY, piece * PIECE_BYTES, PIECE)
    assert server.idle_pieces == PIECE_COUNT - 16
    lost = threading.Event()
    peer.when_broken(lost.set)
    peer.close()
    assert "session has ended" in all_fail(server, 16).message
    server.close()
    assert repr(peer).startswith("<VerbsPeer ended")
    assert not lost.is_set()  # nobody has to be told


def test_a_receiver_that_was_closed_is_written_to_no_more(
    make_server: Callable[..., Server], make_remote: Callable[..., Remote]
) -> None:
    """While the server goes on writing: what it sends after the close reaches nothing."""
    server, client = make_server(), Client()
    peer = client.join(server)
    memory = client.memory
    client_array = client.array
    stop = threading.Event()

    def write_on() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            server.write(peer, memory, 0, bytes([number % 255 + 1]) * PIECE_BYTES)
            if server.outcome() is not None:
                return

    writer = threading.Thread(target=write_on)
    writer.start()
    peer.announce(1, 1)
    client.next_heard()
    client.close()
    client_array[:] = 0
    writer.join(WAIT_S)
    stop.set()
    assert not writer.is_alive()  # it has met the error
    assert not client_array.any()
    assert server.idle_pieces == PIECE_COUNT


def test_a_client_of_a_server_that_was_killed_hears_nothing_and_can_close(
    processes: Callable[..., tuple[BaseProcess, Connection]],
) -> None:
    client = Client()
    process, pipe = processes(run_server, "rxe0")
    pipe.send(client.endpoint.hello())
    client.connect(pipe.recv())
    memory = client.memory
    pipe.send((memory.address, memory.length_bytes, memory.key))
    client.next_heard()
    process.kill()
    process.join()
    assert not client.is_lost
    client.close()
    content = client.array[:PIECE_BYTES]
    assert content.min() == content.max() > 0  # all of one pass


def test_clients_in_processes_of_their_own_get_their_own_bytes(
    make_server: Callable[..., Server],
    processes: Callable[..., tuple[BaseProcess, Connection]],
) -> None:
    server = make_server("rxe1")
    remotes: list[Remote] = []
    for _ in range(2):
        process, pipe = processes(run_client, "rxe2")
        peer, answer = server.open(pipe.recv())
        pipe.send(answer)
        remotes.append(Remote(process, pipe, peer, RemoteMemory(*pipe.recv())))
    for number, remote in enumerate(remotes):
        server.write(remote.peer, remote.memory, 0, bytes([number + 1]) * PIECE_BYTES)
    assert [server.outcome(), server.outcome()] == [None, None]
    for number, remote in enumerate(remotes):
        remote.peer.announce(4, 1)
        assert remote.asked("heard") == Announcement(4, 1)
        content = remote.asked("bytes")
        assert isinstance(content, bytes)
        assert content == bytes([number + 1]) * PIECE_BYTES + bytes((1 << 20) - PIECE_BYTES)
