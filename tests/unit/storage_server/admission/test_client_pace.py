"""Who counts as stalled: a client that was waited for and moved little, while others waited."""

from __future__ import annotations

import asyncio
import time
from functools import partial

import pytest

from objectcache_runtime.metrics.recent_count import RECENT_S
from objectcache_schemas.errors import Busy
from objectcache_storage_server.admission.client_pace import (
    TICK_S,
    ClientPace,
    SlowClients,
    watch,
)
from objectcache_storage_server.admission.judge_clients import WINDOW_S

RATE = 1000


class Clock:
    """Paces whose clients are waited for all the time, or not at all."""

    def __init__(self) -> None:
        self.holding_up: set[str] = set()
        self.clients = SlowClients("took a body", RATE, self.holding_up.__contains__)
        self.now_s = 100.0

    def waited_for(self, tenant: str) -> ClientPace:
        pace = self.clients.add(tenant)
        pace._waits_since_s = self.now_s
        return pace

    def passes(self, seconds: float, moved: dict[ClientPace, float] | None = None) -> list[str]:
        """So much time; `moved` are rates. Returns whose clients were cut."""
        cut: list[str] = []
        for _ in range(round(seconds / TICK_S)):
            self.now_s += TICK_S
            for pace, rate in (moved or {}).items():
                pace.moved(int(rate * TICK_S))
            for pace in self.clients.slowest(self.now_s, 1):
                pace.is_cut = True
                self.clients.remove(pace)
                cut.append(pace.tenant)
        return cut


def test_a_slow_client_goes_on_until_it_holds_somebody_up() -> None:
    clock = Clock()
    clock.waited_for("slow")
    assert clock.passes(60) == []
    clock.holding_up.add("slow")
    assert clock.passes(WINDOW_S) == []
    assert clock.passes(2 * TICK_S) == ["slow"]
    assert clock.clients.cut_count == 1
    assert clock.clients.cut_lately.at(clock.now_s) == 1
    assert clock.clients.cut_lately.at(clock.now_s + RECENT_S) == 0


def test_a_client_at_the_least_rate_is_never_cut_and_one_below_is() -> None:
    clock = Clock()
    clock.holding_up.update(("at", "below"))
    moved = {clock.waited_for("at"): 1.0 * RATE, clock.waited_for("below"): 0.9 * RATE}
    assert clock.passes(10 * WINDOW_S, moved) == ["below"]


def test_a_client_that_was_not_waited_for_is_not_to_blame() -> None:
    clock = Clock()
    clock.holding_up.add("paced")
    clock.clients.add("paced")
    assert clock.passes(10 * WINDOW_S) == []


def test_the_slowest_goes_first_and_one_for_each_that_waits() -> None:
    clock = Clock()
    clock.holding_up.update("abc")
    moved = {
        clock.waited_for(name): RATE * part
        for name, part in zip("abc", (0.5, 0.1, 0.9), strict=True)
    }
    assert clock.passes(WINDOW_S + 4 * TICK_S, moved) == ["b", "a", "c"]


def test_who_has_waited_in_vain_before_is_judged_anew() -> None:
    clock = Clock()
    clock.waited_for("slow")
    clock.holding_up.add("slow")
    assert clock.passes(WINDOW_S) == []
    clock.holding_up.clear()
    assert clock.passes(TICK_S) == []
    clock.holding_up.add("slow")
    assert clock.passes(WINDOW_S) == []


def test_what_waits_in_the_kernel_was_not_taken() -> None:
    """A socket takes four windows' worth at once; the client takes it twice as fast as the rate."""
    clock = Clock()
    clock.holding_up.update(("steady", "slow"))
    unsent = {clock.waited_for("steady"): 0.0, clock.waited_for("slow"): 0.0}
    rates = dict(zip(unsent, (2.0 * RATE, 0.5 * RATE), strict=True))

    def left_bytes(pace: ClientPace) -> int:
        return int(unsent[pace])

    for pace in unsent:
        pace.unsent_bytes = partial(left_bytes, pace)
    cut: list[str] = []
    for _ in range(round(8 * WINDOW_S / TICK_S)):
        for pace in unsent:
            if unsent[pace] < RATE:
                unsent[pace] += 8 * WINDOW_S * RATE
                pace.moved(int(8 * WINDOW_S * RATE))
            unsent[pace] -= rates[pace] * TICK_S
        cut += clock.passes(TICK_S)
    assert cut == ["slow"]


@pytest.mark.asyncio
async def test_a_cut_while_the_wait_ends_by_itself_has_no_effect_on_whoever_cuts() -> None:
    pace = ClientPace("slow", RATE, "sent a put")
    waiting = asyncio.ensure_future(pace.wait_for(asyncio.Event().wait(), 0))
    while (timeout := pace._timeout) is None or not timeout.expired():  # noqa: ASYNC110
        await asyncio.sleep(0)
    pace.cut()
    pace.cut()
    with pytest.raises(Busy):
        await waiting


@pytest.mark.asyncio
async def test_the_watch_goes_on_after_a_look_that_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("objectcache_storage_server.admission.client_pace.TICK_S", 0)
    looked = asyncio.Event()
    looks = 0

    def waiting() -> int:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise RuntimeError("a fault")
        looked.set()
        return 0

    watching = asyncio.ensure_future(watch({Clock().clients: waiting}))
    await asyncio.wait_for(looked.wait(), 10)
    watching.cancel()
    assert "slow clients could not be looked at" in caplog.text


@pytest.mark.asyncio
async def test_a_cut_ends_the_wait_and_says_what_to_do() -> None:
    pace = ClientPace("slow", RATE, "sent a put")
    waiting = asyncio.ensure_future(pace.wait_for(asyncio.Event().wait()))
    await asyncio.sleep(0)
    assert pace.waited_s(time.monotonic() + 5) > 4
    pace.cut()
    said = r"the client sent a put at less than 1000 bytes/s .*storage\.client_rate_bytes_per_s_min"
    with pytest.raises(Busy, match=said):
        await waiting
    with pytest.raises(Busy):
        await pace.wait_for(asyncio.Event().wait())
    assert repr(pace) == "<ClientPace slow: 0 bytes>"


@pytest.mark.asyncio
async def test_a_wait_that_is_not_cut_returns_or_ends_in_time() -> None:
    pace = ClientPace("fast", RATE, "took a body")
    assert await pace.wait_for(asyncio.sleep(0, "taken"), 10.0) == "taken"
    with pytest.raises(TimeoutError):
        await pace.wait_for(asyncio.Event().wait(), 0.01)
    assert pace.waited_s(time.monotonic()) > 0.005
