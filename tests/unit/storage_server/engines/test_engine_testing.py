"""The engines that wrap another one do what they say."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, cast

import pytest

from objectcache_schemas.errors import ObjectCacheError, StorageFull, Unavailable
from objectcache_storage_server.engines.base import (
    BegunReads,
    Engine,
    OpenObjects,
    PrefixShape,
    Staged,
    StagedPrefix,
    StagedPut,
)
from objectcache_storage_server.engines.memory.engine import MemoryEngine
from objectcache_storage_server.engines.passing_engine import PassingEngine
from objectcache_storage_server.testing import (
    FaultyEngine,
    MeteredEngine,
    SlowEngine,
    WrappedOpenObjects,
    WrappedReads,
    WrappedStaged,
    WrappedStagedPrefix,
)
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


SHAPE = PrefixShape(["a", "b"], 2, 100, layerwise=True)


def test_the_chunks_of_a_put_are_metered_as_one() -> None:
    engine = MeteredEngine(with_bucket())
    prefix = engine.stage_prefix(BUCKET.name, SHAPE)
    prefix.write(0, memoryview(bytes(400)))
    engine.commit([StagedPut(staged, "") for staged in prefix.staged])
    assert engine.meter.calls == {"stage_prefix": 1, "write": 1, "commit": 1}
    assert engine.meter.size_bytes["write"] == 400
    assert read(engine, "b") == bytes(200)


@pytest.mark.parametrize("operation", ["stage_prefix", "write"])
def test_a_fault_in_the_chunks_of_a_put_stores_nothing(operation: str) -> None:
    inner = with_bucket()
    engine = FaultyEngine(inner, 3, fault_rate=1.0, operations=[operation])

    def put_chunks() -> None:
        prefix = engine.stage_prefix(BUCKET.name, SHAPE)
        prefix.write(0, memoryview(bytes(400)))

    with pytest.raises(StorageFull, match=f"{operation}: seed 3, call 1"):
        put_chunks()
    assert stored_keys(inner) == []


class _PrefixEngine(MemoryEngine):
    """Remembers what `open_many` was told of its keys."""

    are_prefix = False

    def open_many(
        self, bucket: str, keys: Sequence[str], *, are_prefix: bool = False
    ) -> OpenObjects:
        self.are_prefix = are_prefix
        return super().open_many(bucket, keys)


def test_a_wrapped_engine_is_told_that_keys_are_a_prefix() -> None:
    inner = _PrefixEngine()
    inner.create_bucket(BUCKET)
    MeteredEngine(inner).open_many(BUCKET.name, ["a"], are_prefix=True).close()
    assert inner.are_prefix


def public_methods(contract: type[object]) -> dict[str, Any]:
    """What a contract's class declares, but for what it makes of its own methods alone."""
    return {
        name: member
        for name, member in vars(contract).items()
        if not name.startswith("_") and name not in {"each_bucket", "read_into"}
        if callable(member) or isinstance(member, property)
    }


@pytest.mark.parametrize(
    ("wrapper", "contract"),
    [
        (PassingEngine, Engine),
        (WrappedOpenObjects, OpenObjects),
        (WrappedStaged, Staged),
        (WrappedStagedPrefix, StagedPrefix),
        (WrappedReads, BegunReads),
    ],
)
def test_a_wrapper_has_every_method_of_its_contract(
    wrapper: type[object], contract: type[object]
) -> None:
    methods = public_methods(contract)
    assert methods
    assert methods.keys() <= vars(wrapper).keys()


class _Asked:
    """Notes what it is asked, and answers with itself."""

    capabilities = None

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[object, ...], dict[str, object]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: object, **kwargs: object) -> _Asked:
            self.calls.append((name, args, kwargs))
            return self

        return call


def test_a_passing_engine_hands_on_every_call_as_it_is() -> None:
    for name, member in public_methods(Engine).items():
        if isinstance(member, property) or name in {"close", "scanning"}:
            continue
        inner = _Asked()
        engine = PassingEngine(cast(Engine, inner))
        parameters = list(inspect.signature(member).parameters.values())[1:]
        keywords = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
        args = tuple(object() for _ in range(len(parameters) - len(keywords)))
        kwargs = {keyword: object() for keyword in keywords}
        assert getattr(engine, name)(*args, **kwargs) is inner
        assert inner.calls == [(name, args, kwargs)]


def test_a_wrapped_scan_of_several_pages_is_the_inner_engines_own() -> None:
    engine = MeteredEngine(with_bucket())
    put(engine, "key", b"data")
    with engine.scanning(BUCKET.name) as scan:
        assert [info.key for info in scan("", "", 10)] == ["key"]
    assert engine.meter.calls["scan"] == 1


def test_a_wrapped_copy_is_the_inner_engines_own() -> None:
    engine = MeteredEngine(with_bucket())
    put(engine, "key", b"data")
    staged = engine.stage(BUCKET.name, "copied")
    assert engine.copy(BUCKET.name, "key", staged) == 4
    engine.commit([StagedPut(staged, "")])
    assert read(engine, "copied") == b"data"
    assert engine.meter.calls["copy"] == 1
