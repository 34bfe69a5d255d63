"""What is posted to a queue pair and when, against a device that is played here."""

from __future__ import annotations

import random

import pytest

from objectcache_fabrics.verbs.address import Announcement
from objectcache_fabrics.verbs.queue_pair import Segment
from objectcache_fabrics.verbs.send_queue import (
    WAITING_MAX,
    SendQueue,
    TransferKind,
    VerbsTransfer,
    Work,
)
from objectcache_schemas.errors import ObjectCacheError


def a_queue(
    depth: int = 8,
    segments: int = 4,
    read_segments: int = 4,
    message_bytes: int = 1000,
    credits: int = 4,
) -> SendQueue:
    return SendQueue(
        depth=depth,
        segments_max=segments,
        read_segments_max=read_segments,
        message_bytes_max=message_bytes,
        credits_max=credits,
    )


class Told(list[object]):
    """Notes which transfer was told of."""

    def done(self, name: object) -> object:
        def tell(error: ObjectCacheError | None) -> None:
            self.append(name)

        return tell


def transfer(
    address: int,
    length_bytes: int = 100,
    *,
    key: int = 1,
    operation: TransferKind = TransferKind.WRITE,
    done: object = None,
    source: int = 0,
) -> VerbsTransfer:
    segment = Segment(source or 10_000 + address * 7, length_bytes, 9)
    return VerbsTransfer(operation, segment, address, key, done)  # type: ignore[arg-type]


def addresses(works: list[Work]) -> list[list[int]]:
    return [[each.address for each in work.transfers] for work in works]


def test_neighbours_that_wait_go_into_one_entry() -> None:
    queue = a_queue()
    for address in (0, 100, 200, 400, 500):
        queue.add(transfer(address))
    assert addresses(queue.take(0.0)) == [[0, 100, 200], [400, 500]]


def test_neighbours_of_another_key_or_kind_do_not() -> None:
    queue = a_queue()
    queue.add(transfer(0))
    queue.add(transfer(100, key=2))
    queue.add(transfer(200, key=2, operation=TransferKind.READ))
    queue.add(transfer(300, key=2, operation=TransferKind.READ))
    assert addresses(queue.take(0.0)) == [[0], [100], [200, 300]]


def test_an_entry_has_no_more_segments_and_bytes_than_the_device_takes() -> None:
    queue = a_queue(segments=3, message_bytes=250)
    for index in range(4):
        queue.add(transfer(100 * index))
    for index in range(4):
        queue.add(transfer(1000 + 10 * index, 10))
    taken = addresses(queue.take(0.0))
    assert taken == [[0, 100], [200, 300], [1000, 1010, 1020], [1030]]


def test_a_read_has_no_more_segments_than_the_device_takes_in_a_read() -> None:
    queue = a_queue(segments=3, read_segments=2)
    for operation in (TransferKind.WRITE, TransferKind.READ):
        for index in range(4):
            queue.add(transfer(100 * index, operation=operation))
    assert addresses(queue.take(0.0)) == [[0, 100, 200], [300], [0, 100], [200, 300]]


def test_the_device_may_be_at_what_was_posted_and_has_not_ended() -> None:
    queue = a_queue(depth=3)
    for index in range(4):
        queue.add(transfer(1000 * index, source=10 * index + 1))
    first = queue.take(0.0)[0]
    assert [segment.address for segment in queue.posted_segments] == [1, 11, 21]
    queue.completed(first.number, 0.0)
    assert [segment.address for segment in queue.posted_segments] == [11, 21]


def test_what_is_longer_than_a_message_is_split_and_told_of_once() -> None:
    told, queue = Told(), a_queue(message_bytes=1000)
    queue.add(transfer(5, 2500, done=told.done("long"), source=50_000))
    works = queue.take(0.0)
    pieces = [work.transfers[0] for work in works]
    assert [(p.segment.address, p.segment.length_bytes, p.address) for p in pieces] == [
        (50_000, 1000, 5),
        (51_000, 1000, 1005),
        (52_000, 500, 2005),
    ]
    assert queue.completed(works[1].number, 1.0) == []
    for tell in queue.completed(works[2].number, 1.0):
        tell(None)
    assert told == ["long"]


def test_the_queue_never_holds_more_than_its_depth() -> None:
    queue = a_queue(depth=4)
    for index in range(10):
        queue.add(transfer(1000 * index))
    first = queue.take(0.0)
    assert len(first) == 4
    assert queue.take(0.0) == []
    queue.completed(first[1].number, 0.0)
    assert len(queue.take(0.0)) == 2
    assert queue.posted_count == 4


def test_half_a_queue_goes_unsignalled_at_most_and_the_last_never() -> None:
    queue = a_queue(depth=8)
    for index in range(7):
        queue.add(transfer(1000 * index))
    signalled = [work.signalled for work in queue.take(0.0)]
    assert signalled == [False, False, False, True, False, False, True]


def test_one_entry_alone_is_signalled() -> None:
    queue = a_queue()
    for index in range(3):
        queue.add(transfer(1000 * index))
        (work,) = queue.take(0.0)
        assert work.signalled


def test_the_end_of_an_entry_ends_all_before_it() -> None:
    told, queue = Told(), a_queue()
    for index in range(4):
        queue.add(transfer(1000 * index, done=told.done(index)))
    works = queue.take(0.0)
    for tell in queue.completed(works[2].number, 0.0):
        tell(None)
    assert told == [0, 1, 2]
    for tell in queue.abandon():
        tell(None)
    assert told == [0, 1, 2, 3]


def test_what_is_abandoned_is_told_of_once_posted_or_not() -> None:
    told, queue = Told(), a_queue(depth=2)
    for index in range(5):
        queue.add(transfer(1000 * index, done=told.done(index)))
    queue.announce(Announcement(1, 1))
    queue.take(0.0)
    for tell in queue.abandon():
        tell(None)
    assert told == [0, 1, 2, 3, 4]
    assert queue.abandon() == []
    assert queue.take(0.0) == []


def test_announcements_go_before_what_waits_and_take_credits() -> None:
    queue = a_queue(credits=2)
    queue.add(transfer(0))
    for tag in (1, 2, 3):
        queue.announce(Announcement(tag, 7))
    works = queue.take(0.0)
    assert [work.announcement for work in works] == [(1, 7), (2, 7), None]
    assert queue.credits == 0
    queue.return_credits(1)
    assert [work.announcement for work in queue.take(0.0)] == [(3, 7)]


def test_without_credits_a_later_watermark_takes_the_earlier_ones_place() -> None:
    queue = a_queue(credits=1)
    for tag, end_layer in ((1, 1), (1, 2), (2, 5), (1, 9), (2, 6)):
        queue.announce(Announcement(tag, end_layer))
        queue.take(0.0)
    for taken, expected in ((1, (1, 9)), (2, (2, 6))):
        queue.return_credits(taken)
        (work,) = queue.take(0.0)
        assert work.announcement == expected
    queue.return_credits(3)
    assert queue.take(0.0) == []


def test_what_waits_for_a_delivery_that_has_ended_takes_no_credit_from_others() -> None:
    queue = a_queue(credits=0)
    for tag in (1, 2, 3):
        queue.announce(Announcement(tag, 4))
    for tag in (1, 3, 9):
        queue.forget(tag)
    queue._credits_max = 3
    assert [work.announcement for work in queue.take(0.0)] == [(2, 4)]
    assert queue.credits == 2


def test_a_client_that_returns_no_credits_keeps_a_bounded_number_of_watermarks() -> None:
    queue = a_queue(credits=0)
    for tag in range(WAITING_MAX + 2):
        queue.announce(Announcement(tag, 1))
    assert len(queue._end_layers) == WAITING_MAX
    queue._credits_max = 1
    assert [work.announcement for work in queue.take(0.0)] == [(2, 1)]


def test_an_announcement_that_waits_for_credits_leaves_no_write_unsignalled() -> None:
    queue = a_queue(credits=0)
    queue.announce(Announcement(1, 1))
    queue.add(transfer(0))
    (work,) = queue.take(0.0)
    assert work.signalled


@pytest.mark.parametrize("taken", [-1, 0, 1 << 40])
def test_credits_are_never_more_than_the_client_began_with(taken: int) -> None:
    queue = a_queue(credits=4)
    for tag in range(3):
        queue.announce(Announcement(tag, 1))
    queue.take(0.0)
    queue.return_credits(taken)
    assert queue.credits == (4 if taken > 0 else 1)
    queue.return_credits(0)
    assert queue.credits == (4 if taken > 0 else 1)


def test_the_device_is_at_the_oldest_entry_since_it_was_posted_or_the_one_before_ended() -> None:
    queue = a_queue()
    assert queue.waits_since_s is None
    queue.add(transfer(0))
    (first,) = queue.take(10.0)
    queue.add(transfer(1000))
    queue.take(11.0)
    assert queue.waits_since_s == 10.0
    queue.completed(first.number, 15.0)
    assert queue.waits_since_s == 15.0
    queue.completed(queue.last_number, 16.0)
    assert queue.waits_since_s is None


@pytest.mark.parametrize("seed", range(20))
def test_everything_is_told_of_once_and_in_order_whatever_the_device_does(seed: int) -> None:
    """A device that tells of signalled entries alone, a client that returns credits at leisure."""
    rng = random.Random(seed)
    told, queue = Told(), a_queue(depth=rng.choice([2, 3, 8]), credits=rng.choice([1, 3]))
    device: list[Work] = []
    added, announced, address = 0, 0, 0
    heard: dict[int, Announcement | None] = {}
    while added < 200 or queue.posted_count or announced < 50:
        match rng.randrange(4):
            case 0 if added < 200:
                address += rng.choice([100, 100, 5000])
                queue.add(transfer(address, done=told.done(added)))
                added += 1
            case 1 if announced < 50:
                announced += 1
                queue.announce(Announcement(announced % 3, announced))
            case 2:
                queue.return_credits(len(heard))
            case _:
                signalled = [work for work in device if work.signalled]
                if signalled:
                    ended = rng.choice(signalled)
                    device = device[device.index(ended) + 1 :]
                    for tell in queue.completed(ended.number, 0.0):
                        tell(None)
        for work in queue.take(0.0):
            device.append(work)
            if work.announcement is not None:
                heard[work.number] = work.announcement
        assert queue.posted_count == len(device)
        assert not device or any(work.signalled for work in device)
    assert told == list(range(200))
    queue.return_credits(1 << 20)
    for work in queue.take(0.0):
        heard[work.number] = work.announcement
    last = {each.tag: each.end_layer for each in heard.values() if each is not None}
    assert last == {50 % 3: 50, 49 % 3: 49, 48 % 3: 48}
