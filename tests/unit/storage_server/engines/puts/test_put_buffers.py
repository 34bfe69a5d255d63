"""The memory of puts: bounded, and waited for by few."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from objectcache_storage_server.engines.puts.put_buffers import WAITING_MAX, PutBuffers

LONG_S = 60.0  # nobody here waits for so long, unless a machine stands still


def test_memory_is_had_up_to_the_bound_and_again_when_it_came_back() -> None:
    buffers = PutBuffers(10_000)
    first = buffers.take(6000)
    assert first is not None
    assert buffers.take(6000) is None
    assert not buffers.reserve(4001)
    assert buffers.reserve(4000)
    buffers.put(first)
    buffers.release(4000)
    assert buffers.take(6000) is first
    assert repr(buffers) == "<PutBuffers 6000/10000 bytes in use>"


def test_several_are_had_together_or_not_at_all() -> None:
    buffers = PutBuffers(10_000)
    assert buffers.take_several(3, 4000) == []
    assert [len(each) for each in buffers.take_several(2, 5000)] == [5000, 5000]
    assert buffers.take(1) is None


def test_what_never_fits_is_not_waited_for() -> None:
    assert not PutBuffers(1000).reserve(1001, LONG_S)


def test_who_waits_gets_what_comes_back_and_beyond_a_few_nobody_waits() -> None:
    buffers = PutBuffers(WAITING_MAX)
    assert buffers.reserve(WAITING_MAX)
    started = threading.Semaphore(0)

    def wait() -> bool:
        started.release()
        return buffers.reserve(1, LONG_S)

    with ThreadPoolExecutor(WAITING_MAX) as threads:
        waiting = [threads.submit(wait) for _ in range(WAITING_MAX)]
        for _ in waiting:
            started.acquire()
        while buffers.waiting_count < WAITING_MAX:
            time.sleep(0.001)
        assert not buffers.reserve(1, LONG_S)
        buffers.release(WAITING_MAX)
        assert all(each.result() for each in waiting)
    assert not buffers.reserve(1)
