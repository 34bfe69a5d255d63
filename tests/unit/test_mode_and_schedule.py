"""The threshold rule and the round of deliveries."""

from __future__ import annotations

import pytest

from objectcache_schemas.descriptor import DeliveryMode
from objectcache_storage_server.mode import choose_mode
from objectcache_storage_server.plan import Fragment
from objectcache_storage_server.schedule import RoundRobin

AUTO, LAYERWISE, CHUNKWISE = DeliveryMode.AUTO, DeliveryMode.LAYERWISE, DeliveryMode.CHUNKWISE


@pytest.mark.parametrize(
    ("asked", "payload_bytes", "chosen"),
    [
        (AUTO, 99, CHUNKWISE),
        (AUTO, 100, LAYERWISE),
        (LAYERWISE, 1, LAYERWISE),
        (CHUNKWISE, 1000, CHUNKWISE),
    ],
)
def test_auto_is_layerwise_from_the_threshold_up(
    asked: DeliveryMode, payload_bytes: int, chosen: DeliveryMode
) -> None:
    assert choose_mode(asked, payload_bytes, 100) is chosen


class FakeJob:
    def __init__(self, name: str, room: int) -> None:
        self.name = name
        self.room = room

    def take(self) -> Fragment | None:
        if self.room == 0:
            return None
        self.room -= 1
        return Fragment(0, 1, 0, 1, 0, 1)


def names(schedule: RoundRobin[FakeJob], count: int) -> list[str]:
    taken = []
    for _ in range(count):
        work = schedule.next()
        assert work is not None
        taken.append(work[0].name)
    return taken


def test_ready_jobs_take_turns() -> None:
    schedule: RoundRobin[FakeJob] = RoundRobin()
    for name in "abc":
        schedule.wake(FakeJob(name, 2))
    assert names(schedule, 6) == ["a", "b", "c", "a", "b", "c"]
    assert schedule.next() is None


def test_a_job_without_room_sleeps_until_it_is_woken_and_others_go_on() -> None:
    schedule: RoundRobin[FakeJob] = RoundRobin()
    slow, quick = FakeJob("slow", 1), FakeJob("quick", 5)
    schedule.wake(slow)
    schedule.wake(quick)
    assert names(schedule, 4) == ["slow", "quick", "quick", "quick"]
    slow.room = 1
    schedule.wake(slow)
    assert names(schedule, 3) == ["quick", "slow", "quick"]


def test_waking_a_ready_job_gives_it_no_second_turn() -> None:
    schedule: RoundRobin[FakeJob] = RoundRobin()
    one, other = FakeJob("one", 4), FakeJob("other", 4)
    for job in (one, one, other, one):
        schedule.wake(job)
    assert names(schedule, 4) == ["one", "other", "one", "other"]
