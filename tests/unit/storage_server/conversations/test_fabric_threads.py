"""Threads for what waits for clients: an identity has a share, and others are not held up."""

from __future__ import annotations

import asyncio
import threading

import pytest

from objectcache_storage_server.conversations.fabric_threads import FabricThreads

DEADLINE_S = 20.0


@pytest.mark.asyncio
async def test_an_identity_that_stands_still_keeps_neither_others_nor_other_threads_waiting() -> (
    None
):
    threads, go_on = FabricThreads(9, threads=4), threading.Event()
    begun = threading.Semaphore(0)

    def stand_still() -> None:
        begun.release()
        assert go_on.wait(DEADLINE_S)

    stopped = [asyncio.create_task(threads.start("alice", stand_still)) for _ in range(5)]
    try:
        async with asyncio.timeout(DEADLINE_S):
            for _ in range(3):
                assert await asyncio.to_thread(begun.acquire, True, DEADLINE_S)
            assert await (await threads.start("bob", threading.get_ident))
            assert await asyncio.to_thread(threading.get_ident)  # the loop's own are free
        assert [task.done() for task in stopped] == [True, True, True, False, False]
        assert not begun.acquire(blocking=False)
        stopped[4].cancel()  # whoever waits for its turn may leave
    finally:
        go_on.set()
    async with asyncio.timeout(DEADLINE_S):
        for task in stopped[:4]:
            await (await task)
    await asyncio.gather(stopped[4], return_exceptions=True)


@pytest.mark.asyncio
async def test_a_call_that_nobody_waits_for_any_more_keeps_its_thread_until_it_ends() -> None:
    threads, go_on = FabricThreads(9, threads=1), threading.Event()
    first = await threads.start("alice", go_on.wait, DEADLINE_S)
    waiting = asyncio.ensure_future(asyncio.shield(first))
    await asyncio.sleep(0)
    waiting.cancel()
    second = asyncio.create_task(threads.start("alice", int, "7"))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not second.done()
    go_on.set()
    async with asyncio.timeout(DEADLINE_S):
        assert await first
        assert await (await second) == 7


@pytest.mark.asyncio
async def test_a_call_that_fails_gives_its_thread_back() -> None:
    threads = FabricThreads(9, threads=1)
    for _ in range(3):
        with pytest.raises(ValueError, match="invalid literal"):
            await (await threads.start("alice", int, "no number"))
    assert repr(threads).startswith("<FabricThreads <LineWaits 0 wait")
