"""A storage server writes to a ring of a client's memory, and believes what it is told within
bounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from objectcache.channel.access_key import SigningKey
from objectcache.core import ClientCore
from objectcache.deliveries.delivery import Delivery
from objectcache.deliveries.fetch_request import FetchRequest
from objectcache.sessions.fabric_joining import FabricSettings
from objectcache_relay.landing import upstream as upstream_module
from objectcache_relay.landing.landing_regions import LandingRegion
from objectcache_relay.landing.landing_ring import WrittenRing
from objectcache_relay.landing.upstream import AskedForward, Upstream
from objectcache_schemas.descriptor import DeliveryMode, Descriptor, MemoryTarget
from objectcache_schemas.errors import InvalidRequest, ObjectCacheError
from objectcache_schemas.layout import TargetRing
from objectcache_schemas.limits import Limits
from objectcache_schemas.messages.kv import DeliveryAccepted, DeliveryEnded, KvGet
from objectcache_schemas.messages.sessions import (
    DeliveryFailure,
    LayersAwaited,
    LayersConsumed,
    LayersFreed,
    LayersReady,
    ReleaseTarget,
    SessionPing,
    SessionPong,
    TargetReleased,
)
from tests.relay.relays import RunningRelay
from tests.servers import RunningServer, standing_still, start_server
from tests.storage_client import StorageClient, TargetClient

CHUNKS, LAYERS, SLICE = 8, 12, 4096
LAYER_BYTES = CHUNKS * SLICE
PLACES = 3
MEMORY_BYTES = PLACES * LAYER_BYTES
BUCKET = "ring"
STALL_S = 0.5
BOUND_S = 60.0
DATA = np.random.default_rng(7).integers(0, 256, (CHUNKS, LAYERS, SLICE), np.uint8)
WHOLE = Descriptor(
    tuple(f"{number:064x}" for number in range(CHUNKS)), LAYERS, 16, SLICE, DeliveryMode.LAYERWISE
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with (
        start_server(tmp_path_factory.mktemp("ring"), "storage.nixl=off") as running,
        closing(StorageClient(running.run_dir / "storage.sock")) as storage,
    ):
        storage.create_bucket(BUCKET)
        put = replace(WHOLE, delivery=DeliveryMode.CHUNKWISE)
        storage.kv_put(BUCKET, put.to_bytes(), DATA.tobytes())
        yield running


class Ring:
    """A session with a ring, and a connection on which it gets."""

    def __init__(self, server: RunningServer, length_bytes: int = MEMORY_BYTES) -> None:
        self._path = server.run_dir / "storage.sock"
        self.storage = StorageClient(self._path)
        self.session = TargetClient(self.storage)
        self.target_id, self.memory = self.session.register(length_bytes)

    def descriptor(self, tag: int, ring_layers: int | None = PLACES) -> Descriptor:
        target = MemoryTarget(
            transport="shared_memory",
            target_id=self.target_id,
            offset_bytes=0,
            length_bytes=len(self.memory),
            tag=tag,
        )
        return replace(WHOLE, rdma_target=target, ring_layers=ring_layers)

    def ask(self, descriptor: Descriptor, path: str = "") -> None:
        """Begin a get. Raises the refusal."""
        data = descriptor.to_bytes()
        get = KvGet(bucket=BUCKET, identity="root", request_id="r", descriptor=data, path=path)
        self.storage.ask(get, DeliveryAccepted)

    def begin(self, tag: int) -> None:
        """Begin a get, and wait until the ring is full."""
        self.ask(self.descriptor(tag))
        self.ready(tag, PLACES)

    def ready(self, tag: int, end_layer: int) -> None:
        """Until so many layers are there, and none that there is no room for."""
        heard = 0
        while heard < end_layer:
            event = self.session.event()
            assert isinstance(event, LayersReady), event
            assert event.tag == tag
            heard = event.end_layer
        assert heard == end_layer

    def place(self, layer: int) -> bytes:
        begin = layer % PLACES * LAYER_BYTES
        return self.memory[begin : begin + LAYER_BYTES]

    def free(self, tag: int, end_layer: int) -> None:
        self.session.send(LayersFreed(tag=tag, end_layer=end_layer))

    def failure(self, tag: int) -> tuple[int, ObjectCacheError]:
        """The first layer that is not there, and why; the connection is told the same."""
        event = self.session.event()
        assert isinstance(event, DeliveryFailure), event
        assert event.tag == tag
        ended = self.storage.reply(DeliveryEnded)
        assert ended.failed_layer == event.failed_layer
        assert ended.error == event.error
        return event.failed_layer, ObjectCacheError.from_wire(event.error)

    def close(self) -> None:
        self.session.close()
        self.storage.close()


def layer_of(layer: int) -> bytes:
    return DATA[:, layer].tobytes()


@pytest.fixture
def ring(server: RunningServer) -> Iterator[Ring]:
    with closing(Ring(server)) as one:
        yield one


def get_elsewhere(server: RunningServer) -> None:
    """A get into memory of its size, which is served while a ring waits."""
    with closing(Ring(server, LAYERS * LAYER_BYTES)) as other:
        other.ask(other.descriptor(1, ring_layers=None))
        assert other.storage.reply(DeliveryEnded).error is None
        assert other.memory[:] == DATA.transpose(1, 0, 2).tobytes()


def test_layers_take_places_that_are_freed_and_no_other(server: RunningServer, ring: Ring) -> None:
    ring.begin(tag=4)
    get_elsewhere(server)
    freed = 0
    for end in (1, 3, 4, 7, 9):  # one by one, several, and all of them
        for layer in range(freed, freed + PLACES):
            assert ring.place(layer) == layer_of(layer)
        ring.free(4, end)
        freed = end
        ring.ready(4, min(end + PLACES, LAYERS))
    for layer in range(LAYERS - PLACES, LAYERS):
        assert ring.place(layer) == layer_of(layer)
    ended = ring.storage.reply(DeliveryEnded)
    assert ended.error is None
    assert ended.payload_bytes == LAYERS * LAYER_BYTES
    ring.free(4, LAYERS)  # of a get that has ended: nobody hears it
    ring.begin(tag=5)


def test_a_get_that_frees_what_was_not_announced_fails_and_nothing_is_written_over(
    ring: Ring,
) -> None:
    ring.begin(tag=1)
    ring.free(1, -5)  # says nothing
    ring.free(2, LAYERS)  # of no get
    ring.free(1, PLACES + 1)
    failed_layer, error = ring.failure(1)
    assert failed_layer == PLACES
    assert isinstance(error, InvalidRequest)
    assert "LayersFreed.end_layer is 4, but only the layers below 3 were announced" in str(error)
    for layer in range(PLACES):
        assert ring.place(layer) == layer_of(layer)
    ring.begin(tag=2)  # the session lives


def test_a_client_that_frees_nothing_is_given_up(tmp_path: Path) -> None:
    """storage.send_stall_timeout_s"""
    stall = f"storage.send_stall_timeout_s={STALL_S}"
    with (
        start_server(tmp_path, stall, "storage.nixl=off") as server,
        closing(Ring(server)) as ring,
    ):
        ring.storage.create_bucket(BUCKET)
        put = replace(WHOLE, delivery=DeliveryMode.CHUNKWISE)
        ring.storage.kv_put(BUCKET, put.to_bytes(), DATA.tobytes())
        ring.begin(tag=1)
        failed_layer, error = ring.failure(1)
        assert failed_layer == PLACES
        assert "freed no layer of its ring for 0.5 s (storage.send_stall_timeout_s)" in str(error)
        get_elsewhere(server)


def test_memory_that_is_released_while_a_ring_waits_is_let_go(ring: Ring) -> None:
    ring.begin(tag=1)
    ring.session.send(ReleaseTarget(target_id=ring.target_id))
    heard = [ring.session.event() for _ in range(2)]
    assert {type(one) for one in heard} == {DeliveryFailure, TargetReleased}


def test_a_session_that_ends_while_a_ring_waits_ends_the_get(ring: Ring) -> None:
    ring.begin(tag=1)
    ring.session.close()
    assert ring.storage.reply(DeliveryEnded).error is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ring_layers": 0}, "ring_layers must be from 1 to 4096, got 0"),
        ({"ring_layers": 4097}, "ring_layers must be from 1 to 4096, got 4097"),
        ({"delivery": DeliveryMode.AUTO}, "delivery must be layerwise and part nil where ring_l"),
        ({"part": (0, CHUNKS)}, "delivery must be layerwise and part nil where ring_layers"),
    ],
)
def test_a_ring_out_of_bounds_is_refused_by_its_name(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        replace(WHOLE, **({"ring_layers": 2} | change))  # type: ignore[arg-type]
    assert caught.value.code == "InvalidDescriptor"


@pytest.mark.parametrize("of_put", [False, True])
def test_a_ring_is_for_a_get_into_a_target(of_put: bool) -> None:
    data = replace(WHOLE, ring_layers=2).to_bytes()
    with pytest.raises(InvalidRequest, match="ring_layers must be nil in a put, and where there"):
        Descriptor.from_bytes(data, Limits(), of_put=of_put)


def test_a_ring_whose_places_are_too_small_or_that_the_gateway_is_to_fill_is_refused(
    ring: Ring,
) -> None:
    with pytest.raises(InvalidRequest, match="divided by ring_layers is 24576, the longest lay"):
        ring.ask(ring.descriptor(1, ring_layers=PLACES + 1))
    with pytest.raises(InvalidRequest, match="goes round in no ring; use agg"):
        ring.ask(ring.descriptor(1), path="buffer")


def test_layers_of_a_ring_lie_where_they_began_plus_what_was_before() -> None:
    """Layers of an encoded payload, the first of which has the directory before it."""
    ring = TargetRing(2, 64, [40, 10, 64, 1])
    offsets = [0, 39, 40, 49, 50, 113, 114]
    assert [ring.number(offset) for offset in offsets] == [0, 0, 1, 1, 2, 2, 3]
    assert [ring.place_bytes(offset) for offset in offsets] == [0, 39, 64, 73, 0, 63, 64]
    assert ring.end_bytes(115) == 128


def test_word_of_freed_layers_that_found_no_room_arrives_all_the_same(
    server: RunningServer,
) -> None:
    """While the storage server stands still a session takes a few hundred small messages."""
    upstream = upstream_of(server, server.endpoint)
    with closing(upstream), closing(LandingRegion(upstream.memory(MEMORY_BYTES))) as region:
        asked = AskedForward(BUCKET, WHOLE, None, "r", ring_layers=PLACES)
        delivery, ring = upstream.fetch_into_ring(asked, region)
        with delivery:
            delivery.progress.wait(PLACES - 1, BOUND_S)
            wire = upstream._core.shared.sessions.session()._wire
            with standing_still(server.storage_pid):
                with suppress(BlockingIOError):
                    while True:
                        wire.send_now(LayersConsumed(tag=99, end_layer=1, compute_s=0.0))
                for layer in range(PLACES):
                    ring.written(layer + 1)
            delivery.progress.wait(2 * PLACES - 1, BOUND_S)


def test_what_a_client_awaited_of_a_get_that_ended_concerns_no_later_one(
    server: RunningServer,
) -> None:
    with closing(Ring(server, LAYERS * LAYER_BYTES)) as one:
        one.session.send(LayersAwaited(tag=6, end_layer=LAYERS + 1, interval_s=10.0))
        one.session.send(SessionPing())
        assert isinstance(one.session.event(), SessionPong)
        one.ask(one.descriptor(6, ring_layers=None))
        assert one.storage.reply(DeliveryEnded).error is None
        one.session.send(SessionPing())
        heard: list[object] = []
        while SessionPong() not in heard:
            heard.append(one.session.event())
        assert LayersReady(tag=6, end_layer=LAYERS) in heard


def test_a_relay_is_asked_for_a_body(server: RunningServer, relay: RunningRelay) -> None:
    upstream = upstream_of(server, relay.endpoint)
    with closing(upstream), closing(LandingRegion(upstream.memory(MEMORY_BYTES))) as region:
        assert taken(upstream, region) == "body"


def upstream_of(server: RunningServer, endpoint: str) -> Upstream:
    pair = server.credentials
    key = SigningKey(pair.access_key, pair.secret_key, None)
    return Upstream(endpoint, key, FabricSettings())


def test_a_server_that_knows_no_ring_is_asked_for_a_body_from_then_on(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream = upstream_of(server, server.endpoint)
    with closing(upstream), closing(LandingRegion(upstream.memory(MEMORY_BYTES))) as region:
        assert taken(upstream, region) == "shared_memory"
        asked = []

        def refuse(core: ClientCore, request: FetchRequest, ring: WrittenRing) -> Delivery:
            """As a release from before it does."""
            asked.append(request)
            data = request.descriptor.to_bytes().replace(b"ring_layers", b"ring_places")
            Descriptor.from_bytes(data, Limits())
            raise AssertionError("it refuses what it does not know")

        monkeypatch.setattr(upstream_module, "fetch_into_written_ring", refuse)
        monkeypatch.setattr(upstream_module, "UNKNOWN_RING", "unknown field `ring_places`")
        assert [taken(upstream, region) for _ in range(2)] == ["body", "body"]
        assert len(asked) == 1


def taken(upstream: Upstream, region: LandingRegion) -> str:
    """Have the prefix go round, every byte of it compared; how it came."""
    asked = AskedForward(BUCKET, WHOLE, None, "r", ring_layers=PLACES)
    delivery, ring = upstream.fetch_into_ring(asked, region)
    with delivery:
        for layer in range(LAYERS):
            delivery.progress.wait(layer, BOUND_S)
            begin = ring.layer_bytes(layer, None)
            assert bytes(region.view[begin : begin + LAYER_BYTES]) == layer_of(layer)
            ring.written(layer + 1)
    return delivery.transport
