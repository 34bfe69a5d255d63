"""Waiting for a turn: nobody who is cancelled, refused or late takes a place with them."""

from __future__ import annotations

import asyncio
import threading

import pytest

from objectcache_runtime.networking.stream_socket import ConnectionEnded
from objectcache_runtime.settings import SchedulerSettings, Settings, StorageSettings
from objectcache_schemas.errors import Busy, Unavailable
from objectcache_schemas.operators.schedule import TenantShare
from objectcache_storage_server.admission.entrance import Entrance

LONG_S = 1000.0


def entrance(
    deliveries_max: int = 1,
    tenant_deliveries_max: int = 100,
    queue_max: int = 10,
    queue_timeout_s: float = LONG_S,
) -> Entrance:
    return Entrance(
        Settings(
            storage=StorageSettings(deliveries_max=deliveries_max),
            scheduler=SchedulerSettings(
                tenant_deliveries_max=tenant_deliveries_max,
                queue_max=queue_max,
                queue_timeout_s=queue_timeout_s,
            ),
        )
    )


async def turn() -> None:
    """Every task that can run has run."""
    for _ in range(5):
        await asyncio.sleep(0)


async def waiting_task(door: Entrance, tenant: str) -> asyncio.Task[float]:
    """A task that waits at the entrance."""
    before = door.waiting
    task = asyncio.create_task(door.enter(tenant))
    await turn()
    assert door.waiting == before + 1
    return task


@pytest.mark.asyncio
async def test_where_there_is_room_nobody_waits() -> None:
    door = entrance()
    async with door.admitted("a") as waited_s:
        assert waited_s == 0.0
        assert (door.running, door.waiting) == (1, 0)
    assert door.running == 0


@pytest.mark.asyncio
async def test_the_next_is_let_in_when_one_leaves_and_is_told_how_long_it_waited() -> None:
    door = entrance()
    waited: list[float] = []

    async def deliver() -> None:
        async with door.admitted("a") as waited_s:
            waited.append(waited_s)

    async with door.admitted("a"):
        task = asyncio.create_task(deliver())
        await turn()
        assert door.waiting == 1
    await task
    assert waited[0] > 0.0
    assert (door.running, door.waiting) == (0, 0)


@pytest.mark.asyncio
async def test_a_place_is_free_again_however_the_delivery_ends() -> None:
    door = entrance()
    with pytest.raises(ZeroDivisionError):
        async with door.admitted("a"):
            raise ZeroDivisionError
    async with door.admitted("a") as waited_s:
        assert waited_s == 0.0


@pytest.mark.asyncio
async def test_whoever_is_cancelled_while_waiting_leaves_the_queue_at_once() -> None:
    door = entrance()
    await door.enter("a")
    first, second = await waiting_task(door, "a"), await waiting_task(door, "a")
    first.cancel()
    await turn()
    assert door.waiting == 1
    door.leave("a", 1.0)
    await second
    assert first.cancelled()
    assert (door.running, door.waiting) == (1, 0)


@pytest.mark.asyncio
@pytest.mark.parametrize("turns", [0, 1, 2])
async def test_whoever_is_cancelled_once_it_was_let_in_gives_its_place_to_the_next(
    turns: int,
) -> None:
    door = entrance()
    await door.enter("a")
    first, second = await waiting_task(door, "a"), await waiting_task(door, "a")
    door.leave("a", 1.0)  # the first is in, and does not know it yet
    for _ in range(turns):
        await asyncio.sleep(0)
    first.cancel()
    await turn()
    if first.cancelled():
        await second
        assert (door.running, door.waiting) == (1, 0)
    else:  # the cancellation came after it was told: the place is its own
        assert first.result() > 0
        assert (door.running, door.waiting) == (1, 1)
        second.cancel()
        await asyncio.wait([second])


@pytest.mark.asyncio
async def test_whoever_is_let_in_when_it_was_cancelled_already_takes_no_place() -> None:
    door = entrance()
    await door.enter("a")
    first, second = await waiting_task(door, "a"), await waiting_task(door, "a")
    first.cancel()  # its task has not run yet
    door.leave("a", 1.0)
    await second
    assert first.cancelled()
    assert (door.running, door.waiting) == (1, 0)


@pytest.mark.asyncio
async def test_a_refusal_that_meets_a_cancellation_takes_no_place() -> None:
    door = entrance()
    await door.enter("a")
    task = await waiting_task(door, "a")
    door.close()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    door.leave("a", 1.0)
    assert (door.running, door.waiting) == (0, 0)


@pytest.mark.asyncio
async def test_whoever_asks_and_leaves_waits_no_longer() -> None:
    door, gone = entrance(), asyncio.Event()

    async def is_gone() -> None:
        await gone.wait()

    async def stays() -> None:
        await asyncio.Event().wait()

    await door.enter("a")
    leaving = asyncio.create_task(door.enter("a", is_gone))
    await turn()
    staying = asyncio.create_task(door.enter("a", stays))
    await turn()
    assert door.waiting == 2
    gone.set()
    with pytest.raises(ConnectionEnded):
        await leaving
    assert door.waiting == 1
    door.leave("a", 1.0)
    assert await staying > 0
    assert (door.running, door.waiting) == (1, 0)


@pytest.mark.asyncio
async def test_whoever_is_gone_in_the_moment_it_is_let_in_takes_no_place() -> None:
    door, gone = entrance(), asyncio.Event()

    async def is_gone() -> None:
        await gone.wait()

    await door.enter("a")
    task = asyncio.create_task(door.enter("a", is_gone))
    await turn()
    gone.set()
    await asyncio.sleep(0)
    door.leave("a", 1.0)
    result = (await asyncio.gather(task, return_exceptions=True))[0]
    assert isinstance(result, ConnectionEnded) == (door.running == 0)
    assert door.waiting == 0


@pytest.mark.asyncio
async def test_whoever_waits_for_scheduler_queue_timeout_s_is_told_to_slow_down() -> None:
    door = entrance(queue_timeout_s=0.01)
    await door.enter("a")
    late = await asyncio.gather(door.enter("a"), door.enter("b"), return_exceptions=True)
    for error in late:
        assert isinstance(error, Busy)
        assert "scheduler.queue_timeout_s" in error.message
        assert error.details.retry_after_s is not None
    assert (door.running, door.waiting) == (1, 0)
    with pytest.raises(Busy):  # the timer is set again
        await door.enter("a")


@pytest.mark.asyncio
async def test_a_wait_without_end_is_a_wait() -> None:
    door = entrance(queue_timeout_s=float("inf"))
    await door.enter("a")
    task = await waiting_task(door, "a")
    door.leave("a", 1.0)
    assert await task > 0
    door.close()


@pytest.mark.asyncio
async def test_a_full_queue_is_told_at_once_to_slow_down() -> None:
    door = entrance(queue_max=1)
    await door.enter("a")
    task = await waiting_task(door, "a")
    with pytest.raises(Busy, match=r"scheduler\.queue_max"):
        await door.enter("a")
    door.leave("a", 1.0)
    await task


@pytest.mark.asyncio
async def test_one_tenants_full_queue_is_not_anothers() -> None:
    door = entrance(deliveries_max=9, tenant_deliveries_max=1, queue_max=1)
    await door.enter("a")
    task = await waiting_task(door, "a")
    async with door.admitted("b") as waited_s:
        assert waited_s == 0.0
    door.leave("a", 1.0)
    await task


@pytest.mark.asyncio
async def test_a_closed_entrance_refuses_who_waits_and_who_comes() -> None:
    door = entrance()
    await door.enter("a")
    task = await waiting_task(door, "a")
    door.close()
    with pytest.raises(Unavailable, match="the storage server is stopping"):
        await task
    with pytest.raises(Unavailable, match="the storage server is stopping"):
        await door.enter("b")
    door.leave("a", 1.0)
    assert (door.running, door.waiting) == (0, 0)


@pytest.mark.asyncio
async def test_a_larger_share_lets_in_who_waits_from_any_thread() -> None:
    door = entrance(deliveries_max=9, tenant_deliveries_max=1)
    await door.enter("a")
    task = await waiting_task(door, "a")
    changing = threading.Thread(target=door.configure, args=({"a": TenantShare(deliveries_max=2)},))
    changing.start()
    assert await task > 0
    changing.join()
    assert door.running == 2


@pytest.mark.asyncio
async def test_no_place_is_lost_whoever_is_cancelled_when() -> None:
    door = entrance(deliveries_max=3, tenant_deliveries_max=2)
    inside = most = 0

    async def deliver(index: int) -> None:
        nonlocal inside, most
        async with door.admitted("abc"[index % 3]):
            inside += 1
            most = max(most, inside)
            try:
                for _ in range(index % 4):
                    await asyncio.sleep(0)
            finally:
                inside -= 1

    for round_index in range(50):
        tasks = [asyncio.create_task(deliver(index)) for index in range(20)]
        for index, task in enumerate(tasks):
            if (index + round_index) % 3 == 0:
                await asyncio.sleep(0)
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (inside, door.running, door.waiting) == (0, 0, 0)
    assert most == 3


@pytest.mark.asyncio
async def test_a_tenant_holds_others_up_while_one_that_has_no_more_waits_for_all_alone() -> None:
    door = entrance(deliveries_max=2)
    assert not door.is_held_from_others("a")
    await door.enter("a")
    await door.enter("b")
    assert not door.is_held_from_others("a")
    waiting = await waiting_task(door, "c")
    assert door.is_held_from_others("a")
    assert not door.is_held_from_others("nobody")
    door.leave("a", 1.0)
    await waiting
    own = await waiting_task(door, "c")
    assert door.is_held_from_others("c")  # its own request waits
    door.leave("b", 1.0)
    own.cancel()
    await asyncio.gather(own, return_exceptions=True)
