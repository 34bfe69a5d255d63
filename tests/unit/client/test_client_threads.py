"""The threads that receive deliveries: kept, but never in the way."""

from __future__ import annotations

import queue
import threading
import weakref

from objectcache.thread_reserve import IDLE_MAX, ThreadReserve

DEADLINE_S = 20.0


class Work:
    """Notes the thread that ran it, when it may."""

    def __init__(self, go_on: threading.Event) -> None:
        self.go_on = go_on
        self.threads: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()

    def __call__(self) -> None:
        assert self.go_on.wait(DEADLINE_S)
        self.threads.put(threading.current_thread())


def wait_idle(reserve: ThreadReserve, count: int) -> None:
    idle = threading.Condition(reserve._lock)
    with idle:
        while len(reserve._idle) < count:
            idle.wait(0.001)


def test_work_runs_at_once_however_much_there_is() -> None:
    reserve = ThreadReserve("test")
    together = threading.Barrier(IDLE_MAX + 3, timeout=DEADLINE_S)

    def meet() -> None:
        together.wait()

    for _ in range(IDLE_MAX + 2):
        reserve.start(meet)
    together.wait()
    wait_idle(reserve, IDLE_MAX)
    assert repr(reserve) == f"<ThreadReserve {IDLE_MAX} idle>"
    reserve.close()


def test_an_idle_thread_takes_the_next_work_and_forgets_the_last() -> None:
    reserve = ThreadReserve("test")
    go_on = threading.Event()
    go_on.set()
    first = Work(go_on)
    threads, forgotten = first.threads, weakref.ref(first)
    reserve.start(first)
    del first
    used = threads.get(timeout=DEADLINE_S)
    wait_idle(reserve, 1)
    assert forgotten() is None
    second = Work(go_on)
    reserve.start(second)
    assert second.threads.get(timeout=DEADLINE_S) is used
    reserve.close()
    used.join(DEADLINE_S)
    assert not used.is_alive()


def test_work_that_runs_while_the_reserve_closes_is_finished() -> None:
    reserve = ThreadReserve("test")
    work = Work(threading.Event())
    reserve.start(work)
    reserve.close()
    work.go_on.set()
    used = work.threads.get(timeout=DEADLINE_S)
    used.join(DEADLINE_S)
    assert not used.is_alive()
