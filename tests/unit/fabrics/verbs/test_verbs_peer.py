"""A peer whose queue pair does not go as it should; the pair is played here."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from objectcache_fabrics.peers import TrafficLane, WriteTimeout
from objectcache_fabrics.registered_memory import DeviceMemory, RemoteMemory
from objectcache_fabrics.staging_memory import StagingMemory
from objectcache_fabrics.verbs import peer as peer_module
from objectcache_fabrics.verbs.address import VerbsAddress
from objectcache_fabrics.verbs.completion_thread import CompletionThread
from objectcache_fabrics.verbs.peer import VerbsPeer
from objectcache_fabrics.verbs.queue_pair import Completion, Segment
from objectcache_fabrics.verbs.source_memory import SourceMemory
from objectcache_schemas.errors import ObjectCacheError, Unavailable

DEADLINE_S = 20.0
BUFFER_BYTES, BUFFER_COUNT, DEPTH = 4096, 8, 4
CLIENT = VerbsAddress(qp_num=1, psn=0, gid=bytes(10) + b"\xff\xff" + bytes([10, 77, 0, 1]))
MEMORY = RemoteMemory(1 << 20, 1 << 20, 1)


class PlayedRegion:
    def __init__(self, address: int, local_key: int) -> None:
        self.address, self.local_key = address, local_key
        self.is_open = True

    def close(self) -> None:
        self.is_open = False


class PlayedDevice:
    """Registers anything, under the next key."""

    work_max, segments_max, read_segments_max, message_bytes_max = DEPTH, 1, 1, BUFFER_BYTES

    def __init__(self) -> None:
        self.regions: list[PlayedRegion] = []

    def register(self, address: int, length_bytes: int, **remotely: bool) -> PlayedRegion:
        assert not any(remotely.values())
        self.regions.append(PlayedRegion(address, len(self.regions)))
        return self.regions[-1]


DEVICE: Any = PlayedDevice()


class PlayedPair:
    """Flushes or not, is destroyed or not, and closes or not, as the test says."""

    flushes, closes, is_destroyed_first = False, True, True

    def __init__(self, *_: object, **__: object) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK)
        self.address = CLIENT
        self.is_destroyed = False
        self.posted: list[int] = []
        self.segments: list[Segment] = []
        self._flushed: list[Completion] = []
        self._lock = threading.Lock()

    def connect(self, peer: VerbsAddress, lane: TrafficLane) -> None: ...

    def arm(self) -> None: ...

    def take_events(self) -> None: ...

    def write(self, number: int, segments: Sequence[Segment], *_: object, **__: object) -> None:
        self.posted.append(number)
        self.segments += segments

    def poll(self) -> list[Completion]:
        with self._lock:
            flushed, self._flushed = self._flushed, []
        return flushed

    def fail(self) -> None:
        if self.flushes:
            with self._lock:
                self._flushed = [Completion(number, "it has ended") for number in self.posted]
            os.eventfd_write(self.descriptor, 1)

    def close(self) -> None:
        os.close(self.descriptor)
        self.is_destroyed = self.closes or self.is_destroyed_first
        if not self.closes:
            raise Unavailable("verbs: a queue pair does not close: Device or resource busy")


@pytest.fixture
def staging() -> StagingMemory:
    return StagingMemory(BUFFER_BYTES, BUFFER_BYTES * BUFFER_COUNT)


@pytest.fixture
def thread() -> Iterator[CompletionThread]:
    thread = CompletionThread(0.02)
    yield thread
    thread.close()


@pytest.mark.parametrize(
    ("flushes", "closes", "destroyed", "lost"),
    [
        (True, True, True, 0),
        (False, True, True, 0),
        (True, False, False, 0),  # what was posted has ended
        (False, False, True, 0),  # only its completion queue is left
        (False, False, False, DEPTH),
    ],
)
def test_staging_memory_comes_back_unless_the_device_may_still_read_it(
    monkeypatch: pytest.MonkeyPatch,
    staging: StagingMemory,
    thread: CompletionThread,
    flushes: bool,
    closes: bool,
    destroyed: bool,
    lost: int,
) -> None:
    """Of six writes four were posted; the device cannot know of the others."""
    monkeypatch.setattr(peer_module, "QueuePair", PlayedPair)
    monkeypatch.setattr(peer_module, "FLUSH_TIMEOUT_S", DEADLINE_S if flushes else 0.05)
    monkeypatch.setattr(PlayedPair, "flushes", flushes)
    monkeypatch.setattr(PlayedPair, "closes", closes)
    monkeypatch.setattr(PlayedPair, "is_destroyed_first", destroyed)
    sources = SourceMemory(DEVICE, staging)
    peer = VerbsPeer(DEVICE, sources, thread, CLIENT, WriteTimeout(DEADLINE_S))
    outcomes: queue.Queue[ObjectCacheError | None] = queue.Queue()
    staging.reserve(6 * BUFFER_BYTES)
    views = [staging.take(BUFFER_BYTES) for _ in range(6)]
    posted = {staging.offset_of(view) for view in views[:DEPTH]}
    for view in views:

        def done(error: ObjectCacheError | None, view: memoryview = view) -> None:
            staging.put(view)
            outcomes.put(error)

        peer.write(MEMORY, 0, view, done)
    peer.close()
    assert all(outcomes.get(timeout=DEADLINE_S) for _ in views)
    staging.release(6 * BUFFER_BYTES)
    assert staging.capacity_bytes == (BUFFER_COUNT - lost) * BUFFER_BYTES
    free = {
        staging.offset_of(staging.take(BUFFER_BYTES))
        for _ in range(staging.reserve(BUFFER_COUNT * BUFFER_BYTES, BUFFER_BYTES) // BUFFER_BYTES)
    }
    assert len(free) == BUFFER_COUNT - lost
    assert free.isdisjoint(posted) == bool(lost)


@pytest.fixture
def make_peer(
    monkeypatch: pytest.MonkeyPatch, staging: StagingMemory, thread: CompletionThread
) -> Iterator[Callable[[SourceMemory], VerbsPeer]]:
    monkeypatch.setattr(peer_module, "QueuePair", PlayedPair)
    made: list[VerbsPeer] = []

    def make(sources: SourceMemory) -> VerbsPeer:
        device: Any = sources._device
        made.append(VerbsPeer(device, sources, thread, CLIENT, WriteTimeout(DEADLINE_S)))
        return made[-1]

    yield make
    for peer in made:
        peer.close()


def lent_memory() -> tuple[DeviceMemory, memoryview]:
    array = np.zeros(4 * BUFFER_BYTES, np.uint8)
    return DeviceMemory(array.ctypes.data, array.nbytes, array), array.data


def test_pieces_leave_from_where_they_lie_under_the_key_of_that_memory(
    staging: StagingMemory, make_peer: Callable[[SourceMemory], VerbsPeer]
) -> None:
    device: Any = PlayedDevice()
    sources = SourceMemory(device, staging)
    peers = [make_peer(sources) for _ in range(2)]
    (first, first_view), (other, other_view) = lent_memory(), lent_memory()
    for memory in (first, other, first):
        for peer in peers:
            peer.lend(memory, lambda: pytest.fail("nothing is lost"))
    assert len(device.regions) == 3  # with the staging memory: each once, whoever writes from it
    pieces = [first_view[BUFFER_BYTES:], other_view[-7:], staging.take(9)]
    for piece in pieces:
        peers[0].write(MEMORY, 0, piece[:BUFFER_BYTES], lambda _: None)
    pair: Any = peers[0]._pair
    assert pair.segments == [
        (first.address + BUFFER_BYTES, BUFFER_BYTES, 1),
        (other.address + other.length_bytes - 7, 7, 2),
        (staging.address + staging.offset_of(pieces[2]), 9, 0),
    ]
    peers[1].take_back(first)
    assert device.regions[1].is_open  # the first peer has it
    ended = threading.Event()
    peers[0].write(MEMORY, 0, pieces[1], lambda _: ended.set())
    peers[0].close()
    assert ended.wait(DEADLINE_S)
    assert [region.is_open for region in device.regions] == [True, False, True]
    peers[1].take_back(other)
    peers[1].take_back(other)
    assert [region.is_open for region in device.regions] == [True, False, False]


@pytest.mark.parametrize("destroyed", [True, False])
def test_lent_memory_is_lost_where_the_device_may_still_read_it(
    monkeypatch: pytest.MonkeyPatch,
    staging: StagingMemory,
    make_peer: Callable[[SourceMemory], VerbsPeer],
    destroyed: bool,
) -> None:
    """Only what a posted write lies in, which whoever lent it hears before the write has ended."""
    monkeypatch.setattr(peer_module, "FLUSH_TIMEOUT_S", 0.05)
    monkeypatch.setattr(PlayedPair, "closes", False)
    monkeypatch.setattr(PlayedPair, "is_destroyed_first", destroyed)
    device: Any = PlayedDevice()
    peer = make_peer(SourceMemory(device, staging))
    (posted, posted_view), (idle, _) = lent_memory(), lent_memory()
    told: queue.Queue[str] = queue.Queue()
    peer.lend(posted, lambda: told.put("posted is lost"))
    peer.lend(idle, lambda: told.put("idle is lost"))
    peer.write(MEMORY, 0, posted_view[:BUFFER_BYTES], lambda _: told.put("ended"))
    peer.close()
    expected = [*([] if destroyed else ["posted is lost"]), "ended"]
    assert [told.get(timeout=DEADLINE_S) for _ in expected] == expected
    assert [region.is_open for region in device.regions] == [True, not destroyed, False]
    peer.lend(idle, lambda: told.put("idle is lost"))  # nobody writes from it any more
    assert len(device.regions) == 3
    assert staging.capacity_bytes == BUFFER_COUNT * BUFFER_BYTES


def test_memory_that_cannot_be_registered_is_not_lent(
    monkeypatch: pytest.MonkeyPatch,
    staging: StagingMemory,
    make_peer: Callable[[SourceMemory], VerbsPeer],
) -> None:
    device: Any = PlayedDevice()
    peer = make_peer(SourceMemory(device, staging))
    memory, view = lent_memory()

    def refused(*_: int, **__: bool) -> PlayedRegion:
        raise Unavailable("is `ulimit -l` too low?")

    with monkeypatch.context() as refusing:
        refusing.setattr(device, "register", refused)
        with pytest.raises(Unavailable, match="ulimit"):
            peer.lend(memory, lambda: None)
    peer.lend(memory, lambda: None)
    peer.write(MEMORY, 0, view[:BUFFER_BYTES], lambda _: None)
    assert device.regions[1].is_open
