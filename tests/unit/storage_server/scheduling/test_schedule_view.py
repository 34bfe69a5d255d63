"""What an operator sees of the schedule, and that looking holds nobody up."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from objectcache_runtime.settings import ServerSettings, Settings
from objectcache_schemas.operators.schedule import ScheduledDelivery
from objectcache_storage_server.engines.memory.engine import MemoryEngine
from objectcache_storage_server.scheduling import view_schedule
from objectcache_storage_server.scheduling.demand import Demand
from objectcache_storage_server.service import Service
from tests.schedules import demand_of
from tests.unit.storage_server.deliveries.test_deliver import LAYERS, Client, a_delivery

BOUND_S = 20.0


def test_the_dispatcher_goes_on_while_the_view_is_put_together(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    service = Service(Settings(server=ServerSettings(data_dir=str(tmp_path))), MemoryEngine())
    dispatcher = service.schedule.dispatcher
    dispatcher.close()  # nothing is read: both stay
    deliveries = [a_delivery(Client(), dispatcher.remove) for _ in range(2)]
    for delivery in deliveries:
        dispatcher.add(delivery, demand_of(delivery.plan))
    seen: list[int] = []

    def built_while_others_dispatch(**fields: object) -> ScheduledDelivery:
        other = threading.Thread(target=dispatcher.wake, args=(deliveries[0],))
        other.start()
        other.join(BOUND_S)
        assert not other.is_alive(), "the lock is held"
        seen.append(1)
        return ScheduledDelivery(**fields)  # type: ignore[arg-type]

    monkeypatch.setattr(view_schedule, "ScheduledDelivery", built_while_others_dispatch)
    state = service.schedule.state()
    assert (state.delivery_count, len(state.deliveries), len(seen)) == (2, 2, 2)
    shown = state.deliveries[0]
    expected = Demand(64, None, LAYERS)
    assert (shown.payload_bytes, shown.next_layer) == (expected.payload_bytes, 0)
    assert shown.age_s >= 0
    service.close()
