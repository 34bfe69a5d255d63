"""Deliveries of every kind under load while an operator changes everything, on real processes."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from objectcache import Client, KvLayout
from objectcache_schemas.limits import KIB
from objectcache_schemas.operators.schedule import ScheduleChanges, TenantShare
from objectcache_schemas.policy_names import PolicyName
from tests.integration.scheduling_load import (
    BYTES_PER_GBIT,
    EVERY_POLICY,
    LAYOUT,
    Fetching,
    Load,
    Prefix,
    ScheduledServer,
    stored_prefix,
)
from tests.integration.served import BOUND_S, wait_until

CHUNK_COUNT = 32
CHANGE_COUNT = 77
DELIVERIES_PER_CHANGE = 3
RATE_POLICIES = [policy for policy in EVERY_POLICY if policy != "stall_dynamic"]
WINDOW_S = 0.004
CATCH_UP_S = 0.002  # of the link
CROWD = 300
VERY_LOW_GBPS = 0.001
STANDSTILL_GBPS = 0.001  # the least; seconds for a fragment


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScheduledServer]:
    data_dir = tmp_path_factory.mktemp("load") / "data"
    with ScheduledServer(data_dir, "scheduler.queue_timeout_s=60") as server:
        yield server


@pytest.fixture(autouse=True)
def _no_changes(served: ScheduledServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OBJECTCACHE")]:
        monkeypatch.delenv(name)
    served.begin_anew()


@pytest.fixture(scope="module")
def client(served: ScheduledServer) -> Iterator[Client]:
    with served.client(connections_max=CROWD) as client:
        yield client


@pytest.fixture(scope="module")
def prefix(client: Client) -> Prefix:
    return stored_prefix(client, "load", CHUNK_COUNT)


@pytest.fixture(scope="module")
def s3(served: ScheduledServer) -> Iterator[Any]:
    s3 = served.s3()
    yield s3
    s3.close()


def fetch_anything(prefix: Prefix, s3: Any, choices: random.Random) -> int:
    """A delivery of some kind, compared; returns its bytes."""
    if choices.random() < 0.2:
        return get_object(prefix, s3, choices)
    options: dict[str, Any] = {
        "transport": choices.choice(["shared_memory", "body"]),
        "delivery": choices.choice(["layerwise", "layerwise", "chunkwise", "auto"]),
        "compute_window_s": choices.choice([None, 0.0005, 0.004, 0.02]),
    }
    if choices.random() < 0.2:
        options["layers"] = choices.choice([(0, 1), (3, 7), (7, 8)])
    if choices.random() < 0.1:
        options["rate_bytes_per_s"] = 50e6
    return prefix.fetch_and_check(choices.randint(1, 12), **options)


def get_object(prefix: Prefix, s3: Any, choices: random.Random) -> int:
    """One chunk as an object, whole or a range of it."""
    index = choices.randrange(CHUNK_COUNT)
    expected = prefix.chunks[index].tobytes()
    asked = {"Bucket": prefix.bucket.name, "Key": prefix.keys[index]}
    if choices.random() < 0.5:
        first = choices.randrange(len(expected))
        asked["Range"] = f"bytes={first}-"
        expected = expected[first:]
    assert s3.get_object(**asked)["Body"].read() == expected
    return len(expected)


def random_changes(number: int, choices: random.Random) -> ScheduleChanges:
    """A policy in turn, and some of the rest."""
    share = TenantShare(
        weight=choices.choice([0.5, 1.0, 8.0]),
        cap_gbps=choices.choice([0.0, 0.0, 0.5]),
        deliveries_max=choices.choice([0, 2, 5]),
    )
    return ScheduleChanges(
        policy=EVERY_POLICY[number % len(EVERY_POLICY)],
        cap_gbps=choices.choice([None, 0.0, 0.3, 1.0, 5.0]),
        margin_gbps=choices.choice([None, 0.0, 0.1, 5.0]),
        epoch_s=choices.choice([None, 0.001, 0.01, 0.1]),
        rates=choices.choice([None, "every_epoch", "for_life"]),
        layerwise_threshold_bytes=choices.choice([None, 0, 1 << 20]),
        tenants=choices.choice([{}, {"root": None}, {"root": share}, {"other": share}]),
    )


def test_no_delivery_is_lost_while_everything_is_changed(
    served: ScheduledServer, prefix: Prefix, s3: Any
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    choices = random.Random(seed)
    commands = [
        ("set-cap", "400Mbps"),
        ("set-policy", "stall_opt"),
        ("set-margin", "1Gbps"),
        ("set-epoch", "5ms"),
        ("set-rates", "for_life"),
        ("tenant", "root", "--weight", "2", "--deliveries-max", "3"),
        ("reset",),
    ]
    with Load(lambda own: fetch_anything(prefix, s3, own), 8, seed) as load:
        for number in range(CHANGE_COUNT):
            if number % 11 == 10:
                served.change_by_command(*commands[number // 11])
            else:
                served.change(random_changes(number, choices), reset=choices.random() < 0.1)
            load.wait_done(load.done + DELIVERIES_PER_CHANGE)
        served.change(ScheduleChanges(), reset=True)
    assert load.done >= CHANGE_COUNT * DELIVERIES_PER_CHANGE
    wait_until(lambda: served.state().delivery_count == 0, "the deliveries to leave")
    assert served.state().waiting == 0


@pytest.mark.parametrize("policy", RATE_POLICIES)
def test_a_rate_is_told_and_is_not_exceeded(
    served: ScheduledServer, prefix: Prefix, policy: PolicyName
) -> None:
    changes = ScheduleChanges(
        policy=policy, cap_gbps=0.5, margin_gbps=0.05, epoch_s=10, rates="for_life"
    )
    served.change(changes)
    asked = [("shared_memory", 0.02), ("body", 0.04), ("shared_memory", 0.08)]

    def fetch(transport: str, window_s: float) -> tuple[str, int | None]:
        with prefix.fetch(
            CHUNK_COUNT, transport=transport, delivery="layerwise", compute_window_s=window_s
        ) as delivery:
            prefix.check(delivery)
            return delivery.request_id, delivery.rate_bytes_per_s

    fetches = [Fetching(fetch, *one) for one in asked]
    wait_until(lambda: served.state().delivery_count == len(asked), "all to wait for a rate")
    served.change(ScheduleChanges(epoch_s=0.001))
    told = [fetching.outcome() for fetching in fetches]
    rates = [rate for _, rate in told]
    assert all(rates), rates
    assert sum(rates) <= 0.5 * BYTES_PER_GBIT + len(rates)
    for request_id, rate in told:
        trace = served.trace(request_id)
        assert trace.policy == policy
        assert trace.rate_bytes_per_s == pytest.approx(rate, abs=1)
        assert trace.achieved_bytes_per_s is not None
        assert trace.achieved_bytes_per_s < 1.1 * rate


def test_no_rate_is_told_without_a_pool_that_is_divided(
    served: ScheduledServer, prefix: Prefix
) -> None:
    asked: list[tuple[PolicyName, float, str, float]] = [
        ("stall_dynamic", 0.5, "layerwise", WINDOW_S),
        ("stall_opt", 0.0, "layerwise", WINDOW_S),  # without a cap
        ("stall_opt", 0.5, "chunkwise", WINDOW_S),
    ]
    for policy, cap_gbps, mode, window_s in asked:
        served.change(ScheduleChanges(policy=policy, cap_gbps=cap_gbps))
        for transport in ("shared_memory", "body"):
            with prefix.fetch(
                4, transport=transport, delivery=mode, compute_window_s=window_s
            ) as delivery:
                prefix.check(delivery)
                assert delivery.rate_bytes_per_s is None
                assert served.trace(delivery.request_id).rate_bytes_per_s is None


@pytest.mark.parametrize("policy", ["equal", "calibrated_stall_opt", "stall_dynamic"])
def test_all_together_stay_below_the_cap(
    served: ScheduledServer, prefix: Prefix, s3: Any, policy: PolicyName
) -> None:
    cap_gbps, count = 0.4, 60
    served.change(ScheduleChanges(policy=policy, cap_gbps=cap_gbps))
    begun_s = time.monotonic()
    with Load(lambda own: fetch_anything(prefix, s3, own), 6, policy) as load:
        load.wait_done(count)
    elapsed_s = time.monotonic() - begun_s
    last_fragments_bytes = 128 * KIB
    most = 1.01 * cap_gbps * BYTES_PER_GBIT * (elapsed_s + CATCH_UP_S) + last_fragments_bytes
    assert load.done_bytes <= most


@pytest.mark.parametrize("policy", ["equal", "stall_dynamic"])
def test_the_smallest_deliveries_end_under_a_very_low_cap(
    served: ScheduledServer, client: Client, s3: Any, policy: PolicyName
) -> None:
    tiny = KvLayout(
        num_layers=2, chunk_tokens=1, per_layer_chunk_bytes=1, dtype="int8", fingerprint="tiny"
    )
    name = f"tiny-{policy.replace('_', '-')}"
    prefix = stored_prefix(client, f"{name}-chunks", 3, tiny)
    objects = {"empty": b"", "one": b"1", "some": bytes(range(100))}
    s3.create_bucket(Bucket=name)
    for key, body in objects.items():
        s3.put_object(Bucket=name, Key=key, Body=body)
    served.change(ScheduleChanges(policy=policy, cap_gbps=VERY_LOW_GBPS))
    for key, body in objects.items():
        assert s3.get_object(Bucket=name, Key=key)["Body"].read() == body
    for asked, body in (("5-5", b"\x05"), ("-1", b"\x63"), ("90-", bytes(range(90, 100)))):
        answer = s3.get_object(Bucket=name, Key="some", Range=f"bytes={asked}")
        assert answer["Body"].read() == body
    for transport in ("shared_memory", "body"):
        for mode in ("layerwise", "chunkwise"):
            for window_s in (None, 0.0, WINDOW_S):
                options = {"delivery": mode, "compute_window_s": window_s}
                assert prefix.fetch_and_check(3, transport=transport, **options) == 6


@pytest.mark.parametrize("policy", ["equal", "stall_dynamic"])
@pytest.mark.parametrize("transport", ["shared_memory", "body"])
def test_what_crawls_and_what_waits_go_on_when_the_cap_is_lifted(
    served: ScheduledServer, prefix: Prefix, policy: PolicyName, transport: str
) -> None:
    served.change(ScheduleChanges(policy=policy, cap_gbps=VERY_LOW_GBPS))  # 32 s each

    def fetch(window_s: float | None) -> int:
        options = {"delivery": "layerwise", "compute_window_s": window_s, "transport": transport}
        return prefix.fetch_and_check(CHUNK_COUNT, **options)

    crawling = Fetching(fetch, WINDOW_S)
    wait_until(lambda: bool(served.state().deliveries), "the first")
    others = [Fetching(fetch, window_s) for window_s in (WINDOW_S, None)]
    wait_until(lambda: served.state().delivery_count == 3, "the others")
    served.change(ScheduleChanges(cap_gbps=0))
    for fetching in (crawling, *others):
        assert fetching.outcome() == CHUNK_COUNT * LAYOUT.chunk_bytes


def test_whole_fragments_that_a_tenants_cap_held_go_on_when_it_is_lifted(
    served: ScheduledServer, prefix: Prefix
) -> None:
    """Fragments are not cut for a tenant's cap: one of them is many seconds of it."""
    share = TenantShare(cap_gbps=VERY_LOW_GBPS)
    served.change(ScheduleChanges(tenants={"root": share}))
    fetches = [
        Fetching(partial(prefix.fetch_and_check, CHUNK_COUNT, transport=one))
        for one in ("shared_memory", "body")
    ]
    wait_until(lambda: served.state().delivery_count == 2, "both")
    served.change(ScheduleChanges(tenants={"root": None}))
    for fetching in fetches:
        fetching.outcome()


def test_a_delivery_that_is_cancelled_under_a_very_low_cap_ends_at_once(
    served: ScheduledServer, prefix: Prefix
) -> None:
    for policy in EVERY_POLICY:
        served.change(ScheduleChanges(policy=policy, cap_gbps=4 * VERY_LOW_GBPS))
        for transport in ("shared_memory", "body"):
            delivery = prefix.fetch(
                CHUNK_COUNT, transport=transport, delivery="layerwise", compute_window_s=WINDOW_S
            )
            with delivery:
                (shown,) = served.state().deliveries
                assert shown.sent_bytes < shown.payload_bytes
            wait_until(lambda: served.state().delivery_count == 0, "its end")
            assert delivery.arrivals_s[-1] is None


def test_three_hundred_deliveries_at_once_are_all_right(
    served: ScheduledServer, prefix: Prefix
) -> None:
    """More than may run at once, and more in the pool than a plan is made for."""
    served.change(ScheduleChanges(cap_gbps=STANDSTILL_GBPS))
    running_max = 192  # of storage.deliveries_max: the share of a tenant that is alone
    together = threading.Barrier(CROWD)

    def fetch(number: int) -> int:
        together.wait(BOUND_S)
        transport = "shared_memory" if number % 3 == 0 else "body"  # a client has 128 regions
        window_s = (1 + number % 5) * WINDOW_S
        options = {"delivery": "layerwise", "compute_window_s": window_s, "transport": transport}
        return prefix.fetch_and_check(1 + number % 3, **options)

    with ThreadPoolExecutor(CROWD) as pool:
        fetched = [pool.submit(fetch, number) for number in range(CROWD)]

        def all_have_come() -> bool:
            # Some end where a busy machine needs seconds until all have come; none fails.
            ended = sum(one.result() > 0 for one in fetched if one.done())
            state = served.state()
            waiting_max = CROWD - running_max
            return (state.delivery_count, state.waiting + ended) == (running_max, waiting_max)

        try:
            wait_until(all_have_come, "all to run or to wait")
            assert all(shown.pooled for shown in served.state().deliveries)
        finally:
            served.change(ScheduleChanges(cap_gbps=5))
        total_bytes = sum(one.result() for one in fetched)
    assert total_bytes == sum(1 + number % 3 for number in range(CROWD)) * LAYOUT.chunk_bytes
