"""Gets over a session, against a scripted gateway and target socket."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from objectcache import AccessDenied, Client, DeliveryFailed, NotFound, Unavailable
from objectcache.deliveries.delivery import Delivery
from objectcache.deliveries.fetch_into_target import SESSION_DESCRIPTOR_BYTES_MAX
from objectcache.kv_bucket import KvBucket
from objectcache_schemas.descriptor import Descriptor, MemoryTarget
from objectcache_schemas.limits import Limits
from objectcache_schemas.messages.sessions import GetBegun, GetEnded, GetPrefix, PassGiven
from tests.integration.served import wait_until
from tests.unit.client.client_fakes import DEADLINE_S, KEYS, LAYOUT, chunks_of, payload_of
from tests.unit.client.client_shared_server import SharedServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SharedServer]:
    server = SharedServer(tmp_path)
    yield server
    server.close()


@pytest.fixture
def client(server: SharedServer) -> Iterator[Client]:
    with server.client() as client:
        yield client


def bucket_of(client: Client) -> KvBucket:
    return KvBucket(client._core, "b", LAYOUT)


def fetched_over_http(server: SharedServer, client: Client) -> None:
    with bucket_of(client).fetch(KEYS) as delivery:
        server.next_get().finish(payload_of(5))
        assert np.array_equal(delivery.wait(), chunks_of(5).transpose(1, 0, 2))


@pytest.fixture
def passed(server: SharedServer, client: Client) -> KvBucket:
    """A bucket that the client's session was given a pass for."""
    with bucket_of(client).fetch(KEYS) as delivery:
        server.targets.send(PassGiven(bucket="b", lives_s=60.0))
        server.next_get().finish(payload_of(5))
        delivery.wait()
    session = client._core.shared.sessions.session()
    wait_until(lambda: session.may_get("b"), "the pass, which the outcome may overtake")
    return bucket_of(client)


class Fetching:
    """A fetch in another thread, which waits for its answer."""

    def __init__(self, bucket: KvBucket, transport: str = "auto", timeout_s: float = DEADLINE_S):
        self.delivery: Delivery | None = None
        self.error: BaseException | None = None

        def fetch() -> None:
            try:
                self.delivery = bucket.fetch(KEYS, transport=transport, timeout_s=timeout_s)
            except Exception as error:
                self.error = error

        self._thread = threading.Thread(target=fetch)
        self._thread.start()

    def begun(self) -> Delivery:
        self._thread.join(DEADLINE_S)
        delivery, self.delivery = self.delivery, None  # memory is used again where nobody holds it
        assert delivery is not None, self.error
        return delivery

    def refused(self) -> BaseException:
        self._thread.join(DEADLINE_S)
        assert self.error is not None
        return self.error


def target_of(get: GetPrefix) -> MemoryTarget:
    target = Descriptor.from_bytes(get.descriptor, Limits()).rdma_target
    assert target is not None
    assert target.tag == get.tag
    return target


def begin(server: SharedServer) -> GetPrefix:
    get = server.targets.gets.get(timeout=DEADLINE_S)
    begun = GetBegun(tag=get.tag, delivery="layerwise", chunk_count=5, path="agg")
    server.targets.send(begun)
    return get


def finish(server: SharedServer, get: GetPrefix) -> None:
    memory = server.targets.memory[target_of(get).target_id]
    memory[: len(payload_of(5))] = payload_of(5)
    server.targets.send(GetEnded(tag=get.tag, payload_bytes=len(payload_of(5))))


def test_a_get_goes_over_the_session_that_has_a_pass(
    server: SharedServer, passed: KvBucket
) -> None:
    for _ in range(2):
        fetching = Fetching(passed)
        get = begin(server)
        with closing(fetching.begun()) as delivery:
            assert (delivery.path, delivery.request_id) == ("agg", get.request_id)
            assert delivery.window_source is None
            finish(server, get)
            assert np.array_equal(delivery.wait(), chunks_of(5).transpose(1, 0, 2))
            del delivery
    assert server.targets.registered_count == 1  # its memory was used again
    assert server.gets.empty()


def test_a_get_that_the_session_may_not_ask_for_goes_over_http_and_so_does_the_next(
    server: SharedServer, passed: KvBucket, client: Client
) -> None:
    fetching = Fetching(passed)
    get = server.targets.gets.get(timeout=DEADLINE_S)
    server.targets.send(GetEnded(tag=get.tag, error=AccessDenied("no pass").to_wire()))
    playing = server.next_get()
    with fetching.begun() as delivery:
        playing.finish(payload_of(5))
        delivery.wait()
    fetched_over_http(server, client)
    assert server.targets.gets.empty()


def test_other_refusals_are_raised(server: SharedServer, passed: KvBucket) -> None:
    fetching = Fetching(passed)
    get = server.targets.gets.get(timeout=DEADLINE_S)
    missing = NotFound("not stored", missing_index=3)
    server.targets.send(GetEnded(tag=get.tag, error=missing.to_wire()))
    error = fetching.refused()
    assert isinstance(error, NotFound)
    assert error.details.missing_index == 3
    assert server.gets.empty()


def test_an_end_with_an_error_fails_the_delivery(server: SharedServer, passed: KvBucket) -> None:
    fetching = Fetching(passed)
    get = begin(server)
    with fetching.begun() as delivery:
        error = DeliveryFailed("rotten").to_wire()
        server.targets.send(GetEnded(tag=get.tag, error=error, failed_layer=0))
        with pytest.raises(DeliveryFailed, match="rotten"):
            delivery.wait()


def test_a_session_that_ends_before_its_answer_has_the_payload_come_by_body(
    server: SharedServer, passed: KvBucket
) -> None:
    fetching = Fetching(passed)
    server.targets.gets.get(timeout=DEADLINE_S)
    server.targets.hang_up()
    with fetching.begun() as delivery:
        assert delivery.transport == "body"
        assert np.array_equal(delivery.wait(), chunks_of(5).transpose(1, 0, 2))


def test_a_session_that_ends_fails_its_gets_and_their_memory_is_not_used_again(
    server: SharedServer, passed: KvBucket, client: Client
) -> None:
    fetching = Fetching(passed)
    begin(server)
    with fetching.begun() as delivery:
        server.targets.hang_up()
        with pytest.raises(DeliveryFailed):
            delivery.wait()
    del delivery, fetching
    fetched_over_http(server, client)
    assert server.targets.registered_count == 2


def test_a_server_that_says_nothing_is_given_up_and_told_to_let_the_memory_go(
    server: SharedServer, passed: KvBucket
) -> None:
    server.targets.hold_releases = True
    fetching = Fetching(passed, "shared_memory", timeout_s=0.05)
    get = server.targets.gets.get(timeout=DEADLINE_S)
    assert isinstance(fetching.refused(), Unavailable)
    assert server.targets.released.get(timeout=DEADLINE_S) == target_of(get).target_id


def test_a_descriptor_too_long_for_a_message_goes_over_http(
    server: SharedServer, passed: KvBucket
) -> None:
    keys = [f"{number:0>64}" for number in range(SESSION_DESCRIPTOR_BYTES_MAX // 64)]
    with passed.fetch(keys) as delivery:
        assert server.next_get().target.length_bytes == len(keys) * LAYOUT.chunk_bytes
        assert delivery.chunk_count == len(keys)
    assert server.targets.gets.empty()
