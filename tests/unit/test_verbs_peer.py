"""A peer whose queue pair does not go as it should; the pair is played here."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from objectcache_fabrics.registered_memory import RemoteMemory
from objectcache_fabrics.staging_memory import StagingMemory
from objectcache_fabrics.verbs import peer as peer_module
from objectcache_fabrics.verbs.address import VerbsAddress
from objectcache_fabrics.verbs.completion_thread import CompletionThread
from objectcache_fabrics.verbs.peer import VerbsPeer
from objectcache_fabrics.verbs.queue_pair import Completion
from objectcache_schemas.errors import ObjectCacheError, Unavailable

DEADLINE_S = 20.0
BUFFER_BYTES, BUFFER_COUNT, DEPTH = 4096, 8, 4
CLIENT = VerbsAddress(qp_num=1, psn=0, gid=bytes(10) + b"\xff\xff" + bytes([10, 77, 0, 1]))
MEMORY = RemoteMemory(1 << 20, 1 << 20, 1)
DEVICE: Any = SimpleNamespace(
    work_max=DEPTH, segments_max=1, read_segments_max=1, message_bytes_max=BUFFER_BYTES
)


class PlayedPair:
    """Flushes or not, is destroyed or not, and closes or not, as the test says."""

    flushes, closes, is_destroyed_first = False, True, True

    def __init__(self, *_: object, **__: object) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK)
        self.address = CLIENT
        self.is_destroyed = False
        self.posted: list[int] = []
        self._flushed: list[Completion] = []
        self._lock = threading.Lock()

    def connect(self, peer: VerbsAddress) -> None: ...

    def arm(self) -> None: ...

    def take_events(self) -> None: ...

    def write(self, number: int, *_: object, **__: object) -> None:
        self.posted.append(number)

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
    monkeypatch.setattr(peer_module, "FLUSH_TIMEOUT_S", 0.05)
    monkeypatch.setattr(PlayedPair, "flushes", flushes)
    monkeypatch.setattr(PlayedPair, "closes", closes)
    monkeypatch.setattr(PlayedPair, "is_destroyed_first", destroyed)
    region: Any = SimpleNamespace(address=staging.address, local_key=1)
    peer = VerbsPeer(DEVICE, staging, region, thread, CLIENT, DEADLINE_S)
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
