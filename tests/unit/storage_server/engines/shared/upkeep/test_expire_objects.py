"""ttl_s of a bucket, by clocks that nobody can set."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from objectcache_schemas.records import BucketPolicy
from tests.unit.storage_server.engines.shared.upkeep.upkept_servers import (
    KV,
    UpkeptServer,
    soon,
)

Start = Callable[..., UpkeptServer]
TTL_S = 500.0
YEAR_S = 365 * 86400.0


def put_with_ttl(server: UpkeptServer) -> None:
    server.engine.create_bucket(KV)
    server.engine.set_policy(KV.name, BucketPolicy(ttl_s=TTL_S))
    server.put(["old"])
    server.round(0.0)


def test_what_is_older_than_its_bucket_allows_goes(start: Start) -> None:
    server = start()
    put_with_ttl(server)
    server.put(["pinned"])
    server.engine.pin(KV.name, ["pinned"], True)
    server.round(100.0)
    server.put(["young"])
    server.round(200.0)
    server.round(TTL_S + 50.0)
    assert server.stored_keys() == ["pinned", "young"]
    assert server.engine.status().expired_objects == 1


@pytest.mark.parametrize("off_s", [-30 * YEAR_S, 30 * YEAR_S])
def test_a_wall_clock_that_jumps_by_years_expires_nothing_and_keeps_nothing(
    start: Start, off_s: float
) -> None:
    now_s = [1.7e9]
    server = start(wall_clock=lambda: now_s[0])
    put_with_ttl(server)
    now_s[0] += off_s
    server.put(["put by a clock that is off"])
    server.round(100.0)
    assert len(server.stored_keys()) == 2
    server.round(TTL_S + 50.0)
    assert server.stored_keys() == ["put by a clock that is off"]
    server.round(TTL_S + 150.0)
    assert server.stored_keys() == []


def test_after_a_start_the_objects_own_time_is_asked(start: Start) -> None:
    now_s = [1.7e9]
    first = start(wall_clock=lambda: now_s[0])
    put_with_ttl(first)
    first.close()
    now_s[0] += TTL_S - 50.0
    second = start(wall_clock=lambda: now_s[0])
    second.engine.catalog.change(
        lambda change: change.fence(change.state.upkeep_holder or 0), soon()
    )
    second.round(0.0)
    assert second.stored_keys() == ["old"]
    second.round(100.0)
    assert second.stored_keys() == []
