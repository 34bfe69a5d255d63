"""Which storage server may be drained without a word that it is the last."""

from __future__ import annotations

import pytest

from objectcache_gateway.admin.processes.processes import check_not_last
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.operators.server_state import Health
from tests.unit.gateway.storage.test_storage_fleet import FakeServer, fleet_of, known

HEALTH = Health(
    engine="fake", deliveries_in_flight=0, in_flight_bytes=0, damaged_count=0, draining=False
)


@pytest.mark.asyncio
async def test_a_server_that_is_cut_off_from_its_store_is_not_another_that_takes_work() -> None:
    working, other = FakeServer("working"), FakeServer("other")
    working.reply = other.reply = HEALTH
    async with fleet_of(working, other) as fleet:
        known(fleet, working, other)
        await check_not_last(fleet, fleet.servers[0])
        other.store_failure = "it cannot follow the log"
        known(fleet, working, other)
        with pytest.raises(InvalidRequest, match="last storage server"):
            await check_not_last(fleet, fleet.servers[0])
        await check_not_last(fleet, fleet.servers[1])
