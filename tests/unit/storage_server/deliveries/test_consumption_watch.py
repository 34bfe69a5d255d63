"""What is kept of a delivery that is whole while its client's GPU goes on: a few numbers."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from objectcache_schemas.messages.sessions import LayersConsumed
from objectcache_storage_server.deliveries import target_gets
from objectcache_storage_server.deliveries.running_delivery import RunningDelivery
from objectcache_storage_server.deliveries.watch_consumption import ConsumptionWatch
from tests.integration.served import wait_until
from tests.unit.storage_server.deliveries.test_get_cleanup import CHUNK, Gets, getting


class Kept:
    """The watches and deliveries that live."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.watches: list[weakref.ref[ConsumptionWatch]] = []
        self.deliveries: list[weakref.ref[object]] = []
        kept = self

        class Watch(ConsumptionWatch):
            def __init__(self, service: object, running: RunningDelivery, *rest: object) -> None:
                super().__init__(service, running, *rest)  # type: ignore[arg-type]
                kept.watches.append(weakref.ref(self))
                kept.deliveries.append(weakref.ref(running))
                kept.deliveries.append(weakref.ref(running.delivery))

        monkeypatch.setattr(target_gets, "ConsumptionWatch", Watch)

    def counts(self) -> tuple[int, int]:
        gc.collect()
        return (
            sum(one() is not None for one in self.watches),
            sum(one() is not None for one in self.deliveries),
        )

    async def come_to(self, watches: int, deliveries: int) -> None:
        """So many live, at once or when the thread that read the last bytes has let go of them."""
        await asyncio.to_thread(
            wait_until,
            lambda: self.counts() == (watches, deliveries),
            f"{watches} watches and {deliveries} deliveries to be left",
        )


async def delivered(one: Gets) -> None:
    """One whole delivery, always with the tag 1; its turn of the loop after the end included."""
    await one.serve(one.request(into_target=True))
    for _ in range(2):
        await one.host.reply(one.host.gateway)
    await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_a_whole_delivery_is_let_go_while_its_consumption_is_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = Kept(monkeypatch)
    async with getting() as one:
        await delivered(one)
        await kept.come_to(watches=1, deliveries=0)
        one.session.consumed(LayersConsumed(tag=1, end_layer=1, compute_s=0.001))
        assert kept.counts() == (1, 0)
        recorder = one.service.traces.latest(1)[0]
        assert recorder.trace().layers[0].consumed_s is not None
        one.session.consumed(LayersConsumed(tag=1, end_layer=CHUNK.num_layers, compute_s=0.001))
        assert kept.counts() == (0, 0)


@pytest.mark.asyncio
async def test_a_tag_is_watched_for_its_latest_delivery_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = Kept(monkeypatch)
    async with getting() as one:
        for _ in range(5):
            await delivered(one)
            await kept.come_to(watches=1, deliveries=0)


@pytest.mark.asyncio
async def test_with_its_session_nothing_is_awaited_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = Kept(monkeypatch)
    async with getting() as one:
        await delivered(one)
        await one.session.stop()
        await kept.come_to(watches=0, deliveries=0)
        await delivered(one)  # of a session that has ended nothing is heard
        await kept.come_to(watches=0, deliveries=0)
