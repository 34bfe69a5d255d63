"""Rates that change while deliveries run, on real processes."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator

import pytest

from objectcache import Delivery
from objectcache_schemas.errors import Busy
from objectcache_schemas.operators.schedule import ScheduleChanges
from objectcache_schemas.policy_names import FOR_LIFE, PolicyName
from tests.integration.scheduling_load import (
    BYTES_PER_GBIT,
    EVERY_POLICY,
    LAYOUT,
    Load,
    Prefix,
    ScheduledServer,
    stored_prefix,
)
from tests.integration.served import wait_until

CHUNK_COUNT = 32  # 4 MiB
PAYLOAD_BYTES = CHUNK_COUNT * LAYOUT.chunk_bytes
SLOW_GBPS = 0.002  # 16 s for the payload; half of it is the least
SLOW = SLOW_GBPS * BYTES_PER_GBIT
SHORT_QUEUE_TIMEOUT_S = 2
WINDOW_S = 0.004
RATE_POLICIES = [policy for policy in EVERY_POLICY if policy != "stall_dynamic"]
THREADS, FETCHES = 4, 20


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScheduledServer]:
    data_dir = tmp_path_factory.mktemp("rates") / "data"
    with ScheduledServer(data_dir) as server:
        yield server


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScheduledServer]:
    """One that refuses soon."""
    data_dir = tmp_path_factory.mktemp("hasty") / "data"
    timeout = f"scheduler.queue_timeout_s={SHORT_QUEUE_TIMEOUT_S}"
    with ScheduledServer(data_dir, timeout) as server:
        yield server


@pytest.fixture(scope="module")
def hasty_prefix(hasty: ScheduledServer) -> Iterator[Prefix]:
    with hasty.client() as client:
        yield stored_prefix(client, "rates", CHUNK_COUNT)


@pytest.fixture(autouse=True)
def _no_changes(served: ScheduledServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OBJECTCACHE")]:
        monkeypatch.delenv(name)
    served.begin_anew()


@pytest.fixture(scope="module")
def prefix(served: ScheduledServer) -> Iterator[Prefix]:
    with served.client() as client:
        yield stored_prefix(client, "rates", CHUNK_COUNT)


def begin(prefix: Prefix, chunk_count: int = CHUNK_COUNT) -> Delivery:
    """A delivery that has its rate."""
    return prefix.fetch(
        chunk_count, transport="body", delivery="layerwise", compute_window_s=WINDOW_S
    )


def rates(served: ScheduledServer) -> list[float | None]:
    """Of all deliveries, bytes per second."""
    return [shown.rate_bytes_per_s for shown in served.state().deliveries]


def test_rates_follow_who_comes_and_goes_and_the_cap(
    served: ScheduledServer, prefix: Prefix
) -> None:
    served.change(ScheduleChanges(policy="equal", cap_gbps=SLOW_GBPS))
    with begin(prefix) as first:
        assert first.rate_bytes_per_s == SLOW
        assert rates(served) == [SLOW]
        with begin(prefix) as second:
            assert second.rate_bytes_per_s == SLOW / 2
            assert rates(served) == [SLOW / 2] * 2
            assert first.rate_bytes_per_s == SLOW  # as it was told
            served.change(ScheduleChanges(cap_gbps=SLOW_GBPS / 2))
            assert rates(served) == [SLOW / 4] * 2
            assert served.trace(first.request_id).rate_bytes_per_s == SLOW / 4
        wait_until(lambda: rates(served) == [SLOW / 2], "the one that is left to have all")
        served.change(ScheduleChanges(cap_gbps=0))
        prefix.check(first)
    trace = served.trace(first.request_id)
    assert trace.rate_bytes_per_s is not None  # the mean of those it had
    assert SLOW / 4 < trace.rate_bytes_per_s < SLOW


@pytest.mark.parametrize("policy", RATE_POLICIES)
def test_who_comes_while_a_long_delivery_runs_has_a_rate_at_once(
    served: ScheduledServer, prefix: Prefix, policy: PolicyName
) -> None:
    served.change(ScheduleChanges(policy=policy, cap_gbps=SLOW_GBPS))
    with begin(prefix), begin(prefix, 1) as small:
        assert small.rate_bytes_per_s is not None
        assert small.rate_bytes_per_s < SLOW
        served.change(ScheduleChanges(cap_gbps=0))
        prefix.check(small)


@pytest.mark.parametrize("policy", RATE_POLICIES)
def test_who_comes_while_a_long_delivery_runs_is_refused_where_rates_are_for_life(
    hasty: ScheduledServer, hasty_prefix: Prefix, policy: PolicyName
) -> None:
    """The long one would run for longer than anybody may wait for a rate."""
    hasty.begin_anew()
    hasty.change(ScheduleChanges(policy=policy, cap_gbps=SLOW_GBPS, rates=FOR_LIFE))
    with begin(hasty_prefix), pytest.raises(Busy, match="no rate was free for 2 s"):
        begin(hasty_prefix, 1)


@pytest.mark.parametrize("policy", RATE_POLICIES)
def test_below_seventy_percent_of_the_link_nobody_is_refused(
    served: ScheduledServer, prefix: Prefix, policy: PolicyName
) -> None:
    """Large and small ones, staggered: each thread waits between two of them."""
    served.change(ScheduleChanges(policy=policy, cap_gbps=0.4))

    def fetch(choices: random.Random) -> int:
        chunk_count = choices.choice([1, 4, CHUNK_COUNT])
        carrying_s = chunk_count * LAYOUT.chunk_bytes / (0.4 * BYTES_PER_GBIT)
        fetched_bytes = prefix.fetch_and_check(
            chunk_count, transport="body", delivery="layerwise", compute_window_s=WINDOW_S
        )
        threading.Event().wait(choices.uniform(1.0, 2.0) * THREADS * carrying_s / 0.7)
        return fetched_bytes

    with Load(fetch, THREADS, policy) as load:
        load.wait_done(FETCHES)
