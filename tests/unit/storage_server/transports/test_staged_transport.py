"""Deliveries over a fabric whose writes end late, out of order, or in errors."""

from __future__ import annotations

import msgspec
import pytest

from objectcache_fabrics.leased_memory import RemoteTargetMemory
from objectcache_fabrics.registered_memory import RemoteMemory
from objectcache_fabrics.ring_room import RingRoom
from objectcache_fabrics.staging_memory import StagingMemory
from objectcache_runtime.buffers import ReservedMemory
from objectcache_schemas.descriptor import MemoryTarget
from objectcache_schemas.errors import DamagedData, DeliveryFailed, InvalidRequest, ObjectCacheError
from objectcache_schemas.layout import TargetRing
from objectcache_schemas.messages.sessions import DeliveryFailure
from objectcache_storage_server.transports.staged import StagedTransport
from objectcache_storage_server.transports.targets import TargetOwner, TargetRegistry
from tests.unit.fabrics.held_peer import HeldPeer

BUFFER = 4096
TAG = 7
OFFSET = 50
FIRST_LAYER = 3
LAYERS = 4


class Delivery:
    """A transport of four layers of one buffer each under a grant of two, and who is told what."""

    def __init__(self, places: int = 0) -> None:
        """With `places` layers go round in as many."""
        ring = TargetRing(places, BUFFER, [BUFFER] * LAYERS) if places else None
        self.room = None if ring is None else RingRoom(ring, FIRST_LAYER)
        self.peer = HeldPeer(OFFSET + LAYERS * BUFFER)
        self.pool = StagingMemory(BUFFER, 3 * BUFFER)
        self.registry = TargetRegistry(1 << 30)
        self.posted: list[msgspec.Struct] = []
        self.woken = 0
        self.errors: list[ObjectCacheError] = []
        self.quiet = 0
        memory = RemoteTargetMemory("nixl", self.peer.remote, self.peer, self.posted.append)
        self.target = self.registry.register_remote(TargetOwner("alice"), memory)
        asked = MemoryTarget(
            transport="nixl",
            target_id=self.target.target_id,
            offset_bytes=OFFSET,
            length_bytes=LAYERS * BUFFER,
            tag=TAG,
        )
        self.transport = StagedTransport(
            self.registry.lease("alice", asked, LAYERS * BUFFER, ring),
            TAG,
            self.pool,
            ReservedMemory(self.pool, self.pool.reserve(2 * BUFFER, BUFFER)),
            self._wake,
            self.errors.append,
            FIRST_LAYER,
            self.room,
        )
        self.transport.when_quiet(self._quiet)

    def _wake(self) -> None:
        self.woken += 1

    def _quiet(self) -> None:
        self.quiet += 1

    def read(self, index: int) -> None:
        """As a reader does: claim room, fill it, hand it over, and announce the layer."""
        assert self.transport.reserve(index * BUFFER, BUFFER)
        self.transport.memory(index * BUFFER, BUFFER)[:] = bytes([index + 1]) * BUFFER
        self.transport.written(index * BUFFER, BUFFER)
        self.transport.announce(FIRST_LAYER + index + 1)

    @property
    def announced(self) -> list[int]:
        assert all(tag == TAG for tag, _ in self.peer.announced)
        return [end_layer for _, end_layer in self.peer.announced]

    @property
    def is_let_go(self) -> bool:
        return not self.target.leases and self.pool.promised_bytes == 0 and self.quiet == 1


@pytest.fixture
def delivery() -> Delivery:
    return Delivery()


def test_a_layer_is_announced_when_its_write_is_done_and_not_when_it_was_read(
    delivery: Delivery,
) -> None:
    delivery.read(0)
    assert delivery.announced == []
    delivery.peer.finish()
    assert delivery.announced == [FIRST_LAYER + 1]
    assert delivery.peer.memory[OFFSET : OFFSET + BUFFER] == b"\1" * BUFFER
    assert delivery.peer.memory[:OFFSET] == bytes(OFFSET)


def test_writes_that_end_out_of_order_are_announced_in_order(delivery: Delivery) -> None:
    delivery.read(0)
    delivery.read(1)
    delivery.peer.finish(1)
    assert delivery.announced == []
    delivery.peer.finish(0)
    assert delivery.announced == [FIRST_LAYER + 2]  # both at once


def test_room_comes_back_with_each_write_and_the_delivery_is_woken(delivery: Delivery) -> None:
    delivery.read(0)
    delivery.read(1)
    assert not delivery.transport.reserve(2 * BUFFER, BUFFER)
    woken = delivery.woken
    delivery.peer.finish()
    assert delivery.woken > woken
    delivery.read(2)
    assert not delivery.transport.reserve(3 * BUFFER, BUFFER)


def test_in_a_ring_a_layer_waits_for_its_place_and_not_for_a_buffer_alone() -> None:
    delivery = Delivery(places=2)
    assert delivery.room is not None
    delivery.read(0)
    delivery.read(1)
    with pytest.raises(InvalidRequest, match="below 3 were announced"):
        delivery.room.freed(FIRST_LAYER + 1)  # it is on its way still
    assert not delivery.transport.reserve(2 * BUFFER, BUFFER)
    assert delivery.room.lacking_since_s is None, "the client cannot free it yet"
    delivery.peer.finish()
    since_s = delivery.room.lacking_since_s
    assert since_s is not None
    delivery.peer.finish()
    assert delivery.room.lacking_since_s == since_s
    assert delivery.announced == [FIRST_LAYER + 1, FIRST_LAYER + 2]
    assert not delivery.transport.reserve(2 * BUFFER, BUFFER)
    delivery.room.freed(FIRST_LAYER + 1)
    assert delivery.room.lacking_since_s is None
    delivery.read(2)
    delivery.peer.finish()
    assert not delivery.transport.reserve(3 * BUFFER, BUFFER)
    places = delivery.peer.memory[OFFSET : OFFSET + 2 * BUFFER]
    assert places == b"\3" * BUFFER + b"\2" * BUFFER
    delivery.transport.close()
    assert delivery.is_let_go


def test_it_is_quiet_only_when_reading_has_ended_and_every_write_too(delivery: Delivery) -> None:
    delivery.read(0)
    delivery.read(1)
    delivery.peer.finish()
    delivery.transport.close()
    delivery.transport.close()
    assert delivery.quiet == 0
    assert delivery.target.leases
    assert delivery.pool.promised_bytes == 2 * BUFFER
    delivery.peer.finish()
    assert delivery.is_let_go


def test_who_asks_when_it_is_quiet_already_is_told_at_once(delivery: Delivery) -> None:
    delivery.transport.close()
    assert delivery.is_let_go
    told: list[str] = []
    delivery.transport.when_quiet(lambda: told.append("quiet"))
    assert told == ["quiet"]


def test_a_write_that_fails_stops_the_delivery_once_and_names_the_first_layer_not_in_place(
    delivery: Delivery,
) -> None:
    delivery.read(0)
    delivery.peer.finish()
    delivery.read(1)
    delivery.read(2)
    delivery.peer.fail(DeliveryFailed("gone"))
    delivery.peer.fail(DeliveryFailed("gone too"))
    assert [error.message for error in delivery.errors] == ["gone"]
    delivery.transport.close()
    layer, error = delivery.transport.undelivered or (None, None)
    assert (layer, str(error)) == (FIRST_LAYER + 1, "gone")
    assert delivery.announced == [FIRST_LAYER + 1]
    assert delivery.is_let_go


def test_a_write_that_fails_after_the_last_layer_was_read_leaves_it_unannounced(
    delivery: Delivery,
) -> None:
    for index in range(LAYERS):
        delivery.read(index)
        if index < LAYERS - 1:
            delivery.peer.finish()
    delivery.transport.close()  # all was read: the delivery is complete for its readers
    assert delivery.quiet == 0
    delivery.peer.fail(DeliveryFailed("gone"))
    assert delivery.announced[-1] == FIRST_LAYER + LAYERS - 1
    assert delivery.transport.undelivered is not None
    assert delivery.transport.undelivered[0] == FIRST_LAYER + LAYERS - 1
    assert delivery.is_let_go


def test_nothing_is_handed_to_the_fabric_after_a_failure(delivery: Delivery) -> None:
    delivery.read(0)
    assert delivery.transport.reserve(BUFFER, BUFFER)
    delivery.peer.fail(DeliveryFailed("gone"))
    assert not delivery.transport.reserve(2 * BUFFER, BUFFER)
    delivery.transport.written(BUFFER, BUFFER)  # was being read when the write failed
    assert delivery.peer.moves == []
    delivery.transport.close()
    assert delivery.is_let_go


def test_a_failed_read_is_told_when_nothing_is_written_with_the_layers_that_are_in_place(
    delivery: Delivery,
) -> None:
    delivery.read(0)
    delivery.peer.finish()
    delivery.read(1)
    delivery.transport.fail(FIRST_LAYER + 2, DamagedData("rotten", key="k0"))
    delivery.transport.close()
    assert delivery.posted == []  # the client may use its memory once it hears of it
    delivery.peer.finish()
    (event,) = delivery.posted
    assert isinstance(event, DeliveryFailure)
    assert (event.tag, event.failed_layer) == (TAG, FIRST_LAYER + 2)  # as the outcome says
    assert delivery.announced == [FIRST_LAYER + 1, FIRST_LAYER + 2]
    assert delivery.is_let_go


def test_a_failed_read_whose_last_write_fails_too_is_told_as_the_outcome_is(
    delivery: Delivery,
) -> None:
    delivery.read(0)
    delivery.transport.fail(FIRST_LAYER + 1, DamagedData("rotten", key="k0"))
    delivery.transport.close()
    delivery.peer.fail(DeliveryFailed("gone"))
    (event,) = delivery.posted
    assert isinstance(event, DeliveryFailure)
    assert delivery.transport.undelivered is not None
    assert event.failed_layer == delivery.transport.undelivered[0] == FIRST_LAYER
    assert delivery.is_let_go


def test_a_released_target_waits_for_what_is_being_written(delivery: Delivery) -> None:
    delivery.read(0)
    released: list[str] = []
    delivery.registry.release(delivery.target, lambda: released.append("yes"))
    delivery.transport.close()
    assert released == []
    delivery.peer.finish()
    assert released == ["yes"]


def test_staging_memory_gives_out_the_buffer_that_came_back_last_and_counts_whole_ones() -> None:
    pool = StagingMemory(BUFFER, 4 * BUFFER + 100, "the staging")
    assert (pool.length_bytes, pool.charged_bytes(1)) == (4 * BUFFER, BUFFER)
    first, second = pool.take(BUFFER), pool.take(10)
    assert abs(pool.offset_of(first) - pool.offset_of(second)) >= BUFFER
    place = pool.offset_of(second)
    pool.put(second)
    assert pool.offset_of(pool.take(BUFFER)) == place
    assert pool.reserve(9 * BUFFER, 2 * BUFFER) == 4 * BUFFER
    assert pool.reserve(BUFFER, BUFFER) == 0
    assert pool.shortage == f"{4 * BUFFER} bytes are being staged, the staging is {4 * BUFFER}"


@pytest.mark.parametrize(
    ("numbers", "named"),
    [
        ({"address": 0}, "address .* 1 or more"),
        ({"address": -5}, "address .* 1 or more"),
        ({"length_bytes": 0}, "length_bytes must be 1 or more"),
        ({"address": 2**64 - 10, "length_bytes": 11}, "64 bits"),
        ({"key": 2**32}, "key"),
        ({"key": -1}, "key"),
        ({"device_id": 2**16}, "device_id"),
        ({"memory": "BLOCK"}, "memory"),
    ],
)
def test_numbers_that_no_memory_has_are_refused(numbers: dict[str, object], named: str) -> None:
    given = {"address": 4096, "length_bytes": 100, **numbers}
    with pytest.raises(InvalidRequest, match=named):
        RemoteMemory(**given)  # type: ignore[arg-type]


def test_memory_at_the_end_of_the_address_space_is_memory_and_its_numbers_are_not_shown() -> None:
    memory = RemoteMemory(2**64 - 10, 10, key=0xDEADBEEF)
    assert repr(memory) == "<RemoteMemory 10 bytes of DRAM>"
