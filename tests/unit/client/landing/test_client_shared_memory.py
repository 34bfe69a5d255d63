"""Deliveries into shared memory, against a scripted gateway and target socket."""

from __future__ import annotations

import gc
import queue
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from objectcache import (
    Client,
    Delivery,
    DeliveryFailed,
    InvalidRequest,
    NotFound,
    ObjectCacheError,
    PlainTarget,
    Unavailable,
)
from objectcache.kv_bucket import KvBucket
from objectcache.landing.memory_file import FILE_BYTES_MIN, MemoryFile, file_bytes_for
from objectcache.landing.regions import Landing
from objectcache.landing.target_pool import REGIONS_MAX, TargetPool
from objectcache.sessions.session_wire import FrameParser
from objectcache_schemas.errors import Busy, WireError
from objectcache_schemas.limits import MIB
from objectcache_schemas.messages.frames import FrameError
from objectcache_schemas.messages.sessions import DeliveryFailure
from tests.integration.served import begun_in_time
from tests.unit.client.client_fakes import (
    DEADLINE_S,
    KEYS,
    LAYOUT,
    chunks_of,
    payload_of,
)
from tests.unit.client.client_shared_server import SharedServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SharedServer]:
    server = SharedServer(tmp_path)
    yield server
    server.close()


def bucket_of(client: Client) -> KvBucket:
    return KvBucket(client._core, "b", LAYOUT)


def test_layers_are_usable_as_they_are_announced(server: SharedServer) -> None:
    with server.client() as client, bucket_of(client).fetch(KEYS) as delivery:
        assert (delivery.transport, delivery.chunk_count) == ("shared_memory", 5)
        playing = server.next_get()
        assert playing.target.length_bytes == 600
        assert playing.server.targets.registered_count == 1
        playing.write(payload_of(5)[:200])
        playing.announce(1)
        first = delivery.wait_layer(0)
        assert np.array_equal(first, chunks_of(5)[:, 0])
        with pytest.raises(DeliveryFailed, match="within"):
            delivery.wait_layer(1, timeout_s=0.01)
        playing.finish(payload_of(5))
        assert np.array_equal(delivery.wait(), chunks_of(5).transpose(1, 0, 2))
        assert np.shares_memory(first, delivery.wait())


def test_a_successful_outcome_alone_makes_all_layers_usable(server: SharedServer) -> None:
    server.mode = "chunkwise"
    with server.client() as client, bucket_of(client).fetch(KEYS) as delivery:
        playing = server.next_get()
        playing.write(payload_of(5, "chunkwise"))
        playing.peer.send_outcome()
        assert delivery.mode == "chunkwise"
        assert np.array_equal(delivery.wait_layer(2), chunks_of(5)[:, 2])


def test_memory_and_registration_are_reused_when_the_arrays_are_gone(
    server: SharedServer,
) -> None:
    with server.client() as client:
        for _ in range(3):
            with bucket_of(client).fetch(KEYS) as delivery:
                server.next_get().finish(payload_of(5))
                delivery.wait()
            del delivery
        assert server.targets.registered_count == 1
        assert server.session_requests == 1


def test_memory_is_not_reused_while_a_view_of_it_lives(server: SharedServer) -> None:
    with server.client() as client:
        with bucket_of(client).fetch(KEYS) as delivery:
            server.next_get().finish(payload_of(5))
            kept = delivery.wait_layer(1)[2:4].reshape(-1)[::3]
        del delivery
        expected = kept.copy()
        with bucket_of(client).fetch(KEYS) as delivery:
            server.next_get().finish(bytes(600))
            delivery.wait()
        assert server.targets.registered_count == 2
        assert np.array_equal(kept, expected)


def test_memory_of_a_delivery_closed_early_waits_for_the_server(server: SharedServer) -> None:
    server.targets.hold_releases = True
    with server.client() as client:
        delivery = bucket_of(client).fetch(KEYS)
        server.next_get()
        delivery.close()
        with pytest.raises(DeliveryFailed, match="closed"):
            delivery.wait_layer(0)
        del delivery
        assert "0/1 free" in repr(client)
        server.targets.answer_release()
        with bucket_of(client).fetch(KEYS) as delivery:
            server.next_get().finish(payload_of(5))
            delivery.wait()
        assert server.targets.registered_count == 2  # released, so registered again


@pytest.mark.parametrize("way", ["outcome", "event", "http", "session"])
def test_whatever_ends_first_fails_the_delivery(server: SharedServer, way: str) -> None:
    with server.client() as client, bucket_of(client).fetch(KEYS) as delivery:
        playing = server.next_get()
        playing.write(payload_of(5)[:200])
        playing.announce(1)
        delivery.wait_layer(0)
        if way == "outcome":
            playing.peer.send_outcome(
                error_code="DamagedData", error_message="rotten", failed_layer=1
            )
        elif way == "event":
            error = WireError("DamagedData", "rotten")
            tag = playing.target.tag
            server.targets.send(DeliveryFailure(tag=tag, failed_layer=1, error=error))
        elif way == "http":
            playing.peer.close()
        else:
            server.targets.listener.break_connections()
        with pytest.raises(DeliveryFailed) as caught:
            delivery.wait_layer(2)
        assert caught.value.details.layer == 1
        assert ("rotten" in caught.value.message) is (way in ("outcome", "event"))
        assert np.array_equal(delivery.wait_layer(0), chunks_of(5)[:, 0])


def test_a_server_that_goes_silent_fails_the_delivery(server: SharedServer) -> None:
    def begin(timeout_s: float) -> Delivery:
        # Nothing falls back to the body, which comes whole, where its answer takes too long.
        return bucket_of(client).fetch(KEYS, transport="shared_memory", timeout_s=timeout_s)

    with server.client() as client, begun_in_time(begin) as delivery:
        server.next_get()
        with pytest.raises(DeliveryFailed, match="nothing arrived"):
            delivery.wait()


def test_memory_that_a_dead_session_wrote_to_is_never_used_again(server: SharedServer) -> None:
    with server.client() as client:
        with bucket_of(client).fetch(KEYS) as delivery:
            server.next_get()
            server.targets.listener.break_connections()
            with pytest.raises(DeliveryFailed):
                delivery.wait()
        del delivery
        gc.collect()  # the exception's traceback holds the delivery
        with bucket_of(client).fetch(KEYS) as delivery:  # joins a new session
            server.next_get().finish(payload_of(5))
            assert delivery.transport == "shared_memory"
            delivery.wait()
        assert server.session_requests == 2
        assert "<TargetPool 0/1 free" in repr(client)


def test_another_host_is_served_by_body_and_the_decision_is_kept(server: SharedServer) -> None:
    server.host_id = "another boot id"
    with server.client() as client:
        for _ in range(3):
            with bucket_of(client).fetch(KEYS) as delivery:
                assert delivery.transport == "body"
                assert delivery.wait().tobytes() == payload_of(5)
        assert server.session_requests == 1
        with pytest.raises(Unavailable, match="another host"):
            bucket_of(client).fetch(KEYS, transport="shared_memory")
        with pytest.raises(Unavailable, match="another host"):
            client.shared_memory_target(100)


def test_a_refused_ticket_is_told_when_shared_memory_is_demanded(server: SharedServer) -> None:
    server.targets.refuse = WireError("InvalidRequest", "storage.sessions_max is 0")
    with (
        server.client(transport="shared_memory") as client,
        pytest.raises(Unavailable, match="sessions_max is 0"),
    ):
        bucket_of(client).fetch(KEYS)


def test_a_refused_registration_is_not_taken_for_the_answer_to_a_release(
    server: SharedServer,
) -> None:
    server.targets.hold_releases = True
    with server.client() as client:
        client.shared_memory_target(1000).close()  # its release stays unanswered
        server.targets.refuse_register = WireError("InvalidArgument", "storage.targets_max is 1")
        with pytest.raises(Unavailable, match="targets_max is 1"):
            client.shared_memory_target(1000)
        server.targets.refuse_register = None
        server.targets.answer_release()
        client.shared_memory_target(1000)
        assert server.session_requests == 1


def test_an_error_answers_a_release_when_nothing_else_waits(server: SharedServer) -> None:
    server.targets.hold_releases = True
    ends: queue.SimpleQueue[bool] = queue.SimpleQueue()
    with server.client() as client:
        client.shared_memory_target(1000)
        client._core.shared.sessions.session().release(bytes(16), ends.put)
        server.targets.send(WireError("NoSuchTarget", "not registered"))
        assert ends.get(timeout=DEADLINE_S) is False


def test_memory_is_withdrawn_when_the_answer_to_a_get_makes_no_sense(server: SharedServer) -> None:
    server.mode = "sideways"
    server.targets.hold_releases = True
    with server.client() as client:
        with pytest.raises(ObjectCacheError, match="sideways"):
            bucket_of(client).fetch(KEYS)
        target = server.next_get().target  # accepted: the server may be writing
        assert server.targets.released.get(timeout=DEADLINE_S) == target.target_id
        assert "TargetPool 0/1 free" in repr(client)


def test_a_target_that_the_server_lost_falls_back_to_the_body(server: SharedServer) -> None:
    server.refuse_gets_into_targets = (
        b"<Error><Code>NoSuchTarget</Code><Message>not registered</Message></Error>"
    )
    with server.client() as client:
        with bucket_of(client).fetch(KEYS) as delivery:
            assert delivery.transport == "body"
            delivery.wait()
        with pytest.raises(NotFound, match="not registered"):
            bucket_of(client).fetch(KEYS, transport="shared_memory")


def test_a_missing_chunk_is_no_reason_to_fall_back(server: SharedServer) -> None:
    server.refuse_gets_into_targets = b"<Error><Code>NoSuchKey</Code><Message>m</Message></Error>"
    with server.client() as client:
        with pytest.raises(NotFound):
            bucket_of(client).fetch(KEYS)
        gets = [r for r in server.gateway.requests if "kv-session" not in r.target]
        assert len(gets) == 1
        assert "<TargetPool 1/1 free" in repr(client)  # nothing was written to it


def test_an_explicit_shared_target_is_registered_once_and_reused(server: SharedServer) -> None:
    with server.client() as client:
        target = client.shared_memory_target(1000)
        for _ in range(2):
            with bucket_of(client).fetch(KEYS, target=target) as delivery:
                server.next_get().finish(payload_of(5))
                delivery.wait()
            assert target.array[:600].tobytes() == payload_of(5)
        assert server.targets.registered_count == 1
        with bucket_of(client).fetch(KEYS, target=target, transport="body") as delivery:
            assert delivery.transport == "body"
            delivery.wait()
        with pytest.raises(InvalidRequest, match=r"1000 bytes.*needs 1080"):
            bucket_of(client).fetch([*KEYS, "f", "g", "h", "i"], target=target)
        target.close()
        with pytest.raises(InvalidRequest, match="closed"):
            bucket_of(client).fetch(KEYS, target=target)


def test_an_explicit_target_is_free_again_once_the_server_let_go(server: SharedServer) -> None:
    with server.client() as client:
        target = client.shared_memory_target(1000)
        with bucket_of(client).fetch(KEYS, target=target):
            server.next_get()
            with pytest.raises(InvalidRequest, match="in use"):
                bucket_of(client).fetch(KEYS, target=target)
        with bucket_of(client).fetch(KEYS, target=target) as delivery:
            server.next_get().finish(payload_of(5))
            delivery.wait()


def test_plain_memory_is_no_shared_target(server: SharedServer) -> None:
    target = PlainTarget(bytearray(600))
    with server.client() as client:
        with bucket_of(client).fetch(KEYS, target=target) as delivery:
            assert delivery.transport == "body"
        with pytest.raises(InvalidRequest, match="shared_memory_target"):
            bucket_of(client).fetch(KEYS, target=target, transport="shared_memory")


def test_two_deliveries_hear_of_their_own_layers_only(server: SharedServer) -> None:
    with server.client() as client:
        first, second = bucket_of(client).fetch(KEYS), bucket_of(client).fetch(KEYS)
        with first, second:
            playing_first, playing_second = server.next_get(), server.next_get()
            playing_second.finish(payload_of(5))
            second.wait()
            assert first.arrivals_s == (None, None, None)
            playing_first.finish(payload_of(5))
            first.wait()


def quiet_lease(pool: TargetPool, length_bytes: int) -> Landing:
    landing = pool.lease(length_bytes, 0)
    landing.settle()
    return landing


def test_a_pool_over_its_bound_lets_free_regions_go_and_then_is_busy() -> None:
    pool = TargetPool(4 * MIB)
    del quiet_lease(pool, MIB).array
    second = quiet_lease(pool, 2 * MIB)
    assert repr(pool) == "<TargetPool 1/2 free, 3/4 MiB>"
    third = quiet_lease(pool, 2 * MIB)  # takes the free one's room
    assert repr(pool) == "<TargetPool 0/2 free, 4/4 MiB>"
    with pytest.raises(Busy, match="target_bytes_max"):
        pool.lease(1, 0)
    with pytest.raises(InvalidRequest, match="target_bytes_max"):
        pool.lease(4 * MIB + 1, 0)
    del second.array
    assert len(pool.lease(2 * MIB - 1, 0).array) == 2 * MIB
    assert len(third.array) == 2 * MIB


def test_a_pool_with_as_many_regions_as_it_may_have_names_their_number_not_their_bytes() -> None:
    pool = TargetPool(1 << 40)
    held = [quiet_lease(pool, 1) for _ in range(REGIONS_MAX)]
    said = f"memory for {REGIONS_MAX} deliveries at once.*transport='body'"
    with pytest.raises(Busy, match=said) as caught:
        pool.lease(1, 0)
    assert "target_bytes_max" not in caught.value.message
    del held[0].array
    assert pool.lease(1, 0).array is not None


def test_a_small_delivery_does_not_take_a_large_region() -> None:
    pool = TargetPool(64 * MIB)
    del quiet_lease(pool, 32 * MIB).array
    del quiet_lease(pool, 4 * MIB).array
    assert len(quiet_lease(pool, 3 * MIB).array) == 4 * MIB
    assert len(quiet_lease(pool, 100).array) == FILE_BYTES_MIN


def test_file_sizes_are_few_and_waste_little() -> None:
    sizes = [file_bytes_for(length) for length in (1, 65_537, 2 * MIB, 2 * MIB + 1, 100 * MIB)]
    assert sizes == [FILE_BYTES_MIN, 131_072, 2 * MIB, 4 * MIB, 104 * MIB]
    for length in range(2 * MIB, 900 * MIB, 7_654_321):
        size = file_bytes_for(length)
        assert length <= size <= max(length * 9 / 8, length + 2 * MIB)


def test_a_memory_file_cannot_change_its_size() -> None:
    import os

    file = MemoryFile(FILE_BYTES_MIN)
    for length_bytes in (0, 2 * FILE_BYTES_MIN):
        with pytest.raises(PermissionError):
            os.ftruncate(file.fd, length_bytes)
    with pytest.raises(Unavailable, match="shared memory"):
        MemoryFile(1 << 60)


def test_frames_come_out_whole_however_they_arrive() -> None:
    parser = FrameParser(100)
    stream = b"\0\0\0\3abc\0\0\0\0\0\0\0\1z"
    frames = [frame for index in range(len(stream)) for frame in parser.feed(stream[index:][:1])]
    assert frames == [b"abc", b"", b"z"]
    with pytest.raises(FrameError, match="101"):
        list(parser.feed(b"\0\0\0\x65"))
