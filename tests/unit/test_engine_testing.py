"""The engines that wrap another one do what they say."""

from __future__ import annotations

import pytest

from objectcache_schemas.errors import ObjectCacheError, StorageFull, Unavailable
from objectcache_storage_server.engines.base import Engine
from objectcache_storage_server.engines.memory import MemoryEngine
from objectcache_storage_server.testing import FaultyEngine, MeteredEngine, SlowEngine
from tests.contract.engine_suite import BUCKET, put, read, staged_put, stored_keys


def with_bucket() -> MemoryEngine:
    engine = MemoryEngine()
    engine.create_bucket(BUCKET)
    return engine


def outcomes(engine: Engine, count: int) -> list[str]:
    """Codes of the errors of `count` puts and reads, empty for a success."""
    codes: list[str] = []
    for i in range(count):
        for action in (lambda key: put(engine, key, b"data"), lambda key: read(engine, key)):
            try:
                action(f"{i}")
                codes.append("")
            except ObjectCacheError as error:
                codes.append(error.code)
    return codes


def test_faults_repeat_with_their_seed() -> None:
    first, again, other = (outcomes(FaultyEngine(with_bucket(), seed), 50) for seed in (7, 7, 8))
    assert first == again
    assert first != other
    assert set(first) == {"", "StorageFull", "ServiceUnavailable"}


def test_a_fault_names_its_seed_and_call() -> None:
    engine = FaultyEngine(with_bucket(), 42, fault_rate=1.0)
    with pytest.raises(Unavailable, match="seed 42, call 1"):
        read(engine, "key")
    with pytest.raises(StorageFull, match="stage: seed 42, call 2"):
        put(engine, "key", b"data")
    assert engine.fault_count == 2


def test_a_faulty_commit_stores_nothing() -> None:
    inner = with_bucket()
    engine = FaultyEngine(inner, 1, fault_rate=1.0, operations=["commit"])
    staged = staged_put(engine, "key", b"data")
    with pytest.raises(StorageFull):
        engine.commit([staged])
    assert stored_keys(inner) == []


def test_delays_follow_operations_and_bytes() -> None:
    delays_s: list[float] = []
    engine = SlowEngine(
        with_bucket(),
        read_delay_s=1.0,
        write_delay_s=10.0,
        rate_bytes_per_s=100,
        sleep=delays_s.append,
    )
    put(engine, "key", bytes(50))  # stage, write_at, commit
    assert delays_s == [10.0, 10.5, 10.0]
    delays_s.clear()
    read(engine, "key")  # open_many, read_many
    assert delays_s == [1.0, 1.5]


def test_a_meter_counts_calls_bytes_failures_and_seconds() -> None:
    now_s = iter(range(100))
    engine = MeteredEngine(with_bucket(), clock=lambda: float(next(now_s)))
    put(engine, "key", bytes(50))
    read(engine, "key")
    with pytest.raises(ObjectCacheError):
        engine.stat(BUCKET.name, "missing")
    meter = engine.meter
    assert meter.calls == {
        "stage": 1, "write_at": 1, "commit": 1, "open_many": 1, "read_many": 1, "stat": 1
    }  # fmt: skip
    assert meter.size_bytes["write_at"] == meter.size_bytes["read_many"] == 50
    assert meter.failures == {"stat": 1}
    assert meter.busy_s["commit"] == 1.0
    assert (meter.in_flight, meter.in_flight_highest) == (0, 1)
