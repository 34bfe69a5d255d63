"""Waiting for whatever comes first leaves nothing behind."""

from __future__ import annotations

import asyncio

import pytest

from objectcache_runtime.first_of import end, ended_after, first_done, first_of


@pytest.mark.asyncio
async def test_which_came_first_is_told_and_the_others_have_ended() -> None:
    cancelled: list[str] = []

    async def never() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append("never")

    assert await first_of(never(), asyncio.sleep(0)) == [False, True]
    assert cancelled == ["never"]


@pytest.mark.asyncio
async def test_none_has_come_when_the_time_is_over() -> None:
    assert await first_of(asyncio.Event().wait(), timeout_s=0.0) == [False]


@pytest.mark.asyncio
async def test_tasks_end_with_the_block_that_failed_and_its_error_is_the_one_that_is_seen() -> None:
    async def failing() -> None:
        raise ValueError("of the task")

    task = asyncio.ensure_future(failing())
    forever = asyncio.ensure_future(asyncio.Event().wait())

    async def block() -> None:
        async with ended_after(task, forever):
            await first_done(task, forever)
            raise KeyError("of the block")

    with pytest.raises(KeyError):
        await block()
    assert forever.cancelled()
    assert isinstance(task.exception(), ValueError)


@pytest.mark.asyncio
async def test_what_tasks_came_to_is_told_when_they_are_ended() -> None:
    async def five() -> int:
        return 5

    done = asyncio.ensure_future(five())
    await first_done(done)
    results = await end(done, asyncio.ensure_future(asyncio.Event().wait()))
    assert results[0] == 5
    assert isinstance(results[1], asyncio.CancelledError)
