"""Which readers the dispatcher has look for work, with a schedule that is a queue."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, cast

import pytest

from objectcache_storage_server.deliver import Delivery
from objectcache_storage_server.dispatcher import Dispatcher
from objectcache_storage_server.plan import Fragment
from objectcache_storage_server.scheduling.scheduler import Grant, Scheduler, Wait

BOUND_S = 20.0
FRAGMENT = Fragment(0, 1, 0, 1, 0, 1)


class Queue:
    """A schedule: whoever was woken goes next, once."""

    def __init__(self) -> None:
        self._ready: deque[Held] = deque()

    def wake(self, job: Held, now_s: float) -> None:
        self._ready.append(job)

    def next(self, now_s: float) -> Grant[Any] | Wait:
        return Grant(self._ready.popleft(), FRAGMENT) if self._ready else Wait(math.inf)


class Held:
    """A delivery whose fragments end when the test says so."""

    def __init__(self) -> None:
        self.taken: Fragment | None = None
        self.begun = threading.Semaphore(0)
        self.ends = threading.Semaphore(0)

    def execute(self, fragment: Fragment) -> None:
        self.begun.release()
        assert self.ends.acquire(timeout=BOUND_S)


@pytest.fixture
def dispatcher() -> Iterator[Dispatcher]:
    dispatcher = Dispatcher(2, cast("Scheduler[Delivery]", Queue()))
    yield dispatcher
    dispatcher.close()


def wake(dispatcher: Dispatcher, job: Held, *, rouse: bool = True) -> None:
    dispatcher.wake(cast(Delivery, job), rouse=rouse)


def test_a_reader_goes_on_with_what_was_left_to_it(dispatcher: Dispatcher) -> None:
    job = Held()
    wake(dispatcher, job)
    assert job.begun.acquire(timeout=BOUND_S)
    wake(dispatcher, job, rouse=False)
    job.ends.release()
    assert job.begun.acquire(timeout=BOUND_S)
    job.ends.release()


def test_a_reader_that_is_given_another_delivery_rouses_one_for_what_was_left_to_it(
    dispatcher: Dispatcher,
) -> None:
    job, other = Held(), Held()
    wake(dispatcher, job)
    assert job.begun.acquire(timeout=BOUND_S)
    wake(dispatcher, other, rouse=False)
    wake(dispatcher, job, rouse=False)
    job.ends.release()
    for each in (other, job):  # at the same time: neither has ended
        assert each.begun.acquire(timeout=BOUND_S)
    for each in (other, job):
        each.ends.release()
