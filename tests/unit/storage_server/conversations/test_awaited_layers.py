"""Announcements that a client is spared while it waits for a later layer."""

from __future__ import annotations

import msgspec

from objectcache_schemas.errors import Unavailable
from objectcache_schemas.messages.sessions import (
    DeliveryFailure,
    GetEnded,
    LayersAwaited,
    LayersReady,
)
from objectcache_storage_server.conversations.awaited_layers import (
    AWAITED_MAX,
    INTERVAL_S_MAX,
    AwaitedLayers,
)


def ready(end_layer: int, tag: int = 7) -> LayersReady:
    return LayersReady(tag=tag, end_layer=end_layer)


def awaiting(end_layer: int, interval_s: float = 5.0, tag: int = 7) -> AwaitedLayers:
    awaited = AwaitedLayers()
    assert (
        list(
            awaited.awaits(LayersAwaited(tag=tag, end_layer=end_layer, interval_s=interval_s), 0.0)
        )
        == []
    )
    return awaited


def told(
    awaited: AwaitedLayers, *events: msgspec.Struct, now_s: float = 1.0
) -> list[msgspec.Struct]:
    return [sent for event in events for sent in awaited.passed(event, now_s)]


def test_what_nobody_waits_for_is_left_out_until_what_is_awaited_is_there() -> None:
    awaited = awaiting(4)
    assert told(awaited, *map(ready, range(1, 7))) == [ready(4), ready(5), ready(6)]
    assert told(AwaitedLayers(), *map(ready, (1, 2))) == [ready(1), ready(2)]
    assert told(awaiting(4), ready(1, tag=8), ready(9)) == [ready(1, tag=8), ready(9)]


def test_a_layer_is_told_of_in_each_interval_that_one_comes_in() -> None:
    awaited = awaiting(9, interval_s=2.0)
    sent = [told(awaited, ready(layer), now_s=float(layer)) for layer in range(1, 6)]
    assert sent == [[], [ready(2)], [], [ready(4)], []]
    endless = awaiting(9, interval_s=1e9)
    assert told(endless, ready(1), now_s=INTERVAL_S_MAX - 1) == []
    assert told(endless, ready(2), now_s=INTERVAL_S_MAX) == [ready(2)]


def test_an_end_comes_behind_what_was_left_out() -> None:
    for end in (
        GetEnded(tag=7, payload_bytes=5),
        DeliveryFailure(tag=7, failed_layer=3, error=Unavailable("gone").to_wire()),
    ):
        awaited = awaiting(9)
        assert told(awaited, ready(2), ready(3), end) == [ready(3), end]
        assert told(awaited, ready(1)) == [ready(1)], "another delivery has the tag"
        assert told(awaiting(9), end) == [end]


def test_who_waits_for_less_is_told_at_once_what_is_there_of_it() -> None:
    awaited = awaiting(9)
    assert told(awaited, ready(3)) == []
    less = LayersAwaited(tag=7, end_layer=3, interval_s=5.0)
    assert list(awaited.awaits(less, 1.0)) == [ready(3)]
    assert told(awaited, ready(4)) == [ready(4)]
    awaited = awaiting(9)
    assert told(awaited, ready(3)) == []
    assert list(awaited.awaits(LayersAwaited(tag=7, end_layer=5, interval_s=5.0), 1.0)) == []
    assert told(awaited, ready(4), ready(5), ready(6)) == [ready(5), ready(6)]


def test_asking_again_and_again_makes_no_silence() -> None:
    awaited = awaiting(9, interval_s=2.0)
    for now_s in (1.0, 1.5, 1.9):
        list(awaited.awaits(LayersAwaited(tag=7, end_layer=9, interval_s=2.0), now_s))
    assert told(awaited, ready(1), now_s=2.0) == [ready(1)]


def test_what_was_kept_is_due_by_the_interval_though_nothing_more_comes() -> None:
    awaited = awaiting(9, interval_s=2.0)
    assert awaited.next_due_s is None
    assert told(awaited, ready(1), ready(2)) == []
    assert awaited.next_due_s == 2.0
    assert list(awaited.due(1.9)) == []
    assert list(awaited.due(2.5)) == [ready(2)]
    assert awaited.next_due_s is None
    assert told(awaited, ready(3), now_s=4.0) == []
    assert awaited.next_due_s == 4.5


def test_of_more_deliveries_than_are_remembered_the_oldest_are_told_everything() -> None:
    awaited = awaiting(9, tag=0)
    assert told(awaited, ready(1, tag=0)) == []
    sent = [
        event
        for tag in range(1, AWAITED_MAX + 1)
        for event in awaited.awaits(LayersAwaited(tag=tag, end_layer=9, interval_s=5.0), 0.0)
    ]
    assert sent == [ready(1, tag=0)]
    assert told(awaited, ready(2, tag=0), ready(1, tag=1)) == [ready(2, tag=0)]
