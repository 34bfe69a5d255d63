"""Layers are announced after their writes, in order, and landing memory is let go once: whatever
comes in between.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objectcache_relay.forwarding import ForwardedPiece, Forwarding, ForwardingEnd, PeerTraffic
from objectcache_schemas.errors import DamagedData, DeliveryFailed, ObjectCacheError, Unavailable

LOST = Unavailable("the upstream is gone")
GONE = DeliveryFailed("the engine is gone")


def wrote_all(forwarding: Forwarding) -> list[ForwardedPiece]:
    pieces: list[ForwardedPiece] = []
    while forwarding.wants_to_write:
        pieces.append(forwarding.next_piece())
    for piece in pieces:
        forwarding.ended(piece, None)
    return pieces


def test_a_layer_is_announced_only_when_those_before_it_are_written() -> None:
    forwarding = Forwarding(4, 7, 10, piece_bytes_max=10)
    forwarding.arrived(6)
    first, second = forwarding.next_piece(), forwarding.next_piece()
    assert not forwarding.wants_to_write
    forwarding.ended(second, None)
    assert forwarding.announcement() is None
    forwarding.ended(first, None)
    assert forwarding.announcement() == 6
    assert forwarding.announcement() is None


def test_a_piece_never_crosses_a_layer_and_never_exceeds_its_bound() -> None:
    forwarding = Forwarding(0, 2, 10, piece_bytes_max=4)
    forwarding.arrived(2)
    assert wrote_all(forwarding) == [
        ForwardedPiece(0, 4),
        ForwardedPiece(4, 4),
        ForwardedPiece(8, 2),
        ForwardedPiece(10, 4),
        ForwardedPiece(14, 4),
        ForwardedPiece(18, 2),
    ]


def test_a_payload_without_layers_is_announced_at_its_end_alone() -> None:
    forwarding = Forwarding(0, 3, 10, is_whole=True, piece_bytes_max=16)
    forwarding.arrived(2)
    assert not forwarding.wants_to_write
    forwarding.arrived(3)
    first, second = forwarding.next_piece(), forwarding.next_piece()
    assert (first, second) == (ForwardedPiece(0, 16), ForwardedPiece(16, 14))
    forwarding.ended(first, None)
    assert forwarding.announcement() is None
    forwarding.ended(second, None)
    assert forwarding.announcement() == 3


def test_after_a_failure_upstream_what_has_arrived_is_still_sent_on() -> None:
    forwarding = Forwarding(0, 4, 10)
    forwarding.arrived(2)
    forwarding.upstream_ended(LOST)
    forwarding.arrived(4)
    assert forwarding.end() is None
    assert [piece.length_bytes for piece in wrote_all(forwarding)] == [10, 10]
    assert forwarding.announcement() == 2
    assert forwarding.end() == ForwardingEnd(2, LOST)


def test_layers_before_a_damaged_one_are_announced_when_they_are_written() -> None:
    forwarding = Forwarding(0, 4, 10)
    forwarding.arrived(4)
    pieces = [forwarding.next_piece() for _ in range(4)]
    forwarding.ended(pieces[3], DamagedData("a frame"))
    forwarding.ended(pieces[2], DamagedData("a frame before"))
    assert forwarding.announcement() is None
    forwarding.ended(pieces[1], None)
    forwarding.ended(pieces[0], None)
    assert forwarding.announcement() == 2
    forwarding.upstream_ended()
    end = forwarding.end()
    assert end is not None
    assert end.end_layer == 2


def test_a_write_that_fails_stops_the_rest_and_nothing_more_is_announced() -> None:
    forwarding = Forwarding(0, 4, 10)
    forwarding.arrived(3)
    first, second = forwarding.next_piece(), forwarding.next_piece()
    forwarding.ended(second, GONE)
    forwarding.ended(first, None)
    assert not forwarding.wants_to_write
    assert forwarding.announcement() is None
    assert not forwarding.let_go()  # the upstream still writes
    forwarding.upstream_ended()
    assert forwarding.end() == ForwardingEnd(0, GONE)
    assert forwarding.let_go()
    assert not forwarding.let_go()


def test_a_peer_has_no_more_in_flight_than_it_may_and_its_deliveries_take_turns() -> None:
    traffic = PeerTraffic(20)
    one, other = Forwarding(0, 4, 10), Forwarding(0, 4, 10)
    for forwarding in (one, other):
        forwarding.arrived(4)
        traffic.add(forwarding)
    first, second = traffic.next_write(), traffic.next_write()
    assert first is not None
    assert second is not None
    assert (first[0], second[0]) == (one, other)
    assert traffic.next_write() is None
    traffic.ended(*first, None)
    third = traffic.next_write()
    assert third == (one, ForwardedPiece(10, 10))


def test_a_piece_that_is_larger_than_the_bound_goes_alone() -> None:
    traffic = PeerTraffic(5)
    forwarding = Forwarding(0, 2, 10)
    forwarding.arrived(2)
    traffic.add(forwarding)
    first = traffic.next_write()
    assert first is not None
    assert traffic.next_write() is None
    traffic.ended(*first, None)
    assert traffic.next_write() is not None


class Landing:
    """What really is in landing memory and at the engine, beside what `Forwarding` says."""

    def __init__(self, shape: tuple[int, int, int], is_whole: bool) -> None:
        self.first_layer, self.layer_count, self.layer_bytes = shape
        self.end_layer = self.first_layer + self.layer_count
        self.arrived_end = self.first_layer
        self.upstream_over = False
        self.written = bytearray(self.layer_count * self.layer_bytes)
        self.under_way: list[ForwardedPiece] = []
        self.announced = [self.first_layer]
        self.let_go = 0
        self.has_failed = False
        self.forwarding = Forwarding(
            self.first_layer,
            self.end_layer,
            self.layer_bytes,
            is_whole=is_whole,
            piece_bytes_max=7,
        )

    def begin(self, piece: ForwardedPiece) -> None:
        end = piece.offset_bytes + piece.length_bytes
        assert end <= (self.arrived_end - self.first_layer) * self.layer_bytes
        assert not any(self.written[piece.offset_bytes : end])  # nothing is sent twice
        assert not self.let_go
        self.under_way.append(piece)

    def finish(self, number: int, error: ObjectCacheError | None) -> ForwardedPiece:
        piece = self.under_way.pop(number % len(self.under_way))
        if error is None:
            end = piece.offset_bytes + piece.length_bytes
            self.written[piece.offset_bytes : end] = b"\1" * piece.length_bytes
        else:
            self.has_failed = True
        return piece

    def look(self) -> None:
        """What must hold after every event."""
        end_layer = self.forwarding.announcement()
        if end_layer is not None:
            assert end_layer > self.announced[-1]
            assert all(self.written[: (end_layer - self.first_layer) * self.layer_bytes])
            assert not self.has_failed
            self.announced.append(end_layer)
        if self.forwarding.let_go():
            assert self.upstream_over
            assert not self.under_way
            self.let_go += 1
        assert self.let_go <= 1


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "write", "done", "fail", "stop", "end", "lose"]),
        st.integers(0, 40),
    ),
    max_size=80,
)


@settings(max_examples=400, deadline=None)
@given(
    shape=st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(1, 20)),
    is_whole=st.booleans(),
    in_flight_bytes_max=st.integers(1, 40),
    events=EVENTS,
    rest=st.integers(0, 40),
)
def test_whatever_happens_layers_come_in_order_and_memory_is_let_go_once(
    shape: tuple[int, int, int],
    is_whole: bool,
    in_flight_bytes_max: int,
    events: list[tuple[str, int]],
    rest: int,
) -> None:
    landing = Landing(shape, is_whole)
    forwarding = landing.forwarding
    traffic = PeerTraffic(in_flight_bytes_max)
    traffic.add(forwarding)

    def write() -> bool:
        found = traffic.next_write()
        if found is not None:
            landing.begin(found[1])
            lengths = [piece.length_bytes for piece in landing.under_way]
            assert sum(lengths) <= max(in_flight_bytes_max, max(lengths))
        return found is not None

    was_cut = False
    for event, number in events:
        match event:
            case "arrive" if not landing.upstream_over:
                landing.arrived_end = max(
                    landing.arrived_end, landing.first_layer + number % (shape[1] + 1)
                )
                forwarding.arrived(landing.arrived_end)
            case "write":
                write()
            case "done" | "fail" if landing.under_way:
                error = GONE if event == "fail" else None
                was_cut |= error is not None
                traffic.ended(forwarding, landing.finish(number, error), error)
            case "stop" if number < 4:
                was_cut = True
                forwarding.stop(GONE)
            case "end" | "lose" if number < 8 and not landing.upstream_over:
                is_complete = landing.arrived_end == landing.end_layer
                if event == "lose" or is_complete:
                    landing.upstream_over = True
                    forwarding.upstream_ended(None if event == "end" else LOST)
            case _:
                pass
        landing.look()

    # Whatever was left open ends: the upstream first, then every write.
    if not landing.upstream_over:
        landing.arrived_end = landing.end_layer
        forwarding.arrived(landing.end_layer)
        landing.upstream_over = True
        forwarding.upstream_ended()
    while write() or landing.under_way:
        if landing.under_way:
            traffic.ended(forwarding, landing.finish(rest, None), None)
        landing.look()
    landing.look()
    assert landing.let_go == 1
    assert traffic.in_flight_bytes == 0
    end = forwarding.end()
    assert end is not None
    assert end.end_layer == landing.announced[-1]
    if not was_cut:
        everything = landing.arrived_end
        if is_whole and everything < landing.end_layer:
            everything = landing.first_layer
        assert end.end_layer == everything


def test_a_piece_that_was_not_handed_out_cannot_end() -> None:
    forwarding = Forwarding(0, 1, 10)
    with pytest.raises(KeyError):
        forwarding.ended(ForwardedPiece(0, 10), None)
