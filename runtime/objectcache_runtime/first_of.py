"""Waiting for whatever comes first, and ending what goes on besides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import asynccontextmanager
from typing import Any


async def first_of(*waits: Awaitable[object], timeout_s: float | None = None) -> list[bool]:
    """Return when one of them has, or the time is over: which ones have. The others are cancelled,
    and have ended.
    """
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    async with ended_after(*tasks):
        await first_done(*tasks, timeout_s=timeout_s)
        return [task.done() for task in tasks]


async def first_done(*tasks: asyncio.Future[Any], timeout_s: float | None = None) -> None:
    """Return when one of the tasks is done, or the time is over."""
    await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


@asynccontextmanager
async def ended_after(*tasks: asyncio.Future[Any]) -> AsyncGenerator[None]:
    """Tasks that do not outlive the block."""
    try:
        yield
    finally:
        await end(*tasks)


async def end(*tasks: asyncio.Future[Any]) -> list[Any]:
    """Cancel those that go on, and return what all came to, errors among it."""
    for task in tasks:
        task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)
