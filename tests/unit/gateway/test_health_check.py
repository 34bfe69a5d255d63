"""The health that gateways answer with: asked for rarely, and never stale for long."""

from __future__ import annotations

import asyncio

import pytest

from objectcache_gateway.health_check import KEPT_S, HealthCheck
from objectcache_schemas.errors import Busy, Unavailable
from objectcache_schemas.operators.server_state import GetHealth, Health


class Storage:
    """A storage server that is well until it is told otherwise."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.asked = 0
        self.error: Exception | None = None
        self.draining = False
        self.flush_failure = ""
        self.degraded = ""

    async def ask(self, _: GetHealth) -> Health:
        self.asked += 1
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return Health(
            engine="memory",
            deliveries_in_flight=0,
            in_flight_bytes=0,
            damaged_count=0,
            draining=self.draining,
            flush_failure=self.flush_failure,
            degraded=self.degraded,
        )

    def check(self) -> HealthCheck:
        return HealthCheck(self.ask, lambda: self.now_s)


@pytest.mark.asyncio
async def test_many_checks_at_once_ask_the_storage_server_once() -> None:
    storage = Storage()
    check = storage.check()
    states = await asyncio.gather(*(check.state() for _ in range(50)))
    assert storage.asked == 1
    assert {state.status for state in states} == {200}
    assert states[0].body == {"status": "ok", "engine": "memory"}


@pytest.mark.asyncio
async def test_an_answer_is_kept_for_its_time_and_no_longer() -> None:
    storage = Storage()
    check = storage.check()
    assert (await check.state()).status == 200
    storage.error = Unavailable("gone")
    storage.now_s += KEPT_S - 0.01
    assert (await check.state()).status == 200
    storage.now_s += 0.01
    assert await check.state() == (503, {"status": "unavailable", "message": "gone"})
    storage.error = None
    assert (await check.state()).status == 503
    storage.now_s += KEPT_S
    assert (await check.state()).status == 200
    assert storage.asked == 3


@pytest.mark.asyncio
async def test_a_server_that_drains_is_not_healthy_and_a_busy_one_is() -> None:
    storage = Storage()
    storage.draining = True
    assert await storage.check().state() == (503, {"status": "draining", "engine": "memory"})
    storage.error = Busy("all connections are in use")
    assert await storage.check().state() == (200, {"status": "busy"})


@pytest.mark.asyncio
async def test_a_server_that_takes_no_changes_still_serves_and_says_so() -> None:
    storage = Storage()
    storage.flush_failure = "the index could not be flushed"
    status, body = await storage.check().state()
    assert (status, body["status"]) == (200, "read_only")
    assert body["message"] == storage.flush_failure


@pytest.mark.asyncio
async def test_a_server_that_refuses_some_still_serves_and_says_so() -> None:
    storage = Storage()
    storage.degraded = "lately: 3 requests refused"
    status, body = await storage.check().state()
    assert (status, body["status"], body["message"]) == (200, "degraded", storage.degraded)
