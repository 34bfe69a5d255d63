"""What a lifecycle sweep expires and aborts, at a time of our own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from objectcache_schemas.messages.uploads import CreateUpload, ListUploads
from objectcache_schemas.records import (
    BucketConfiguration,
    BucketInfo,
    LifecycleRule,
    ObjectAttributes,
    ObjectInfo,
)
from objectcache_storage_server.engines.base import Engine, StagedPut
from objectcache_storage_server.engines.memory.engine import MemoryEngine
from objectcache_storage_server.s3 import multipart
from objectcache_storage_server.s3.lifecycle import (
    PAGE_OBJECTS,
    LifecycleCounts,
    LifecycleSweep,
    LifecycleSweeper,
    covering_prefixes,
)
from objectcache_storage_server.testing import FaultyEngine, MeteredEngine

DAY_S = 100.0
START_S = 1_000_000.0


class Clock:
    """Time that a test sets."""

    def __init__(self) -> None:
        self.now_s = START_S

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def engine(clock: Clock) -> Iterator[Engine]:
    opened = MemoryEngine(clock)
    multipart.create_bucket(opened)
    opened.create_bucket(BucketInfo(name="b", owner="root", region="r", created_s=0.0))
    yield opened
    opened.close()


def put(engine: Engine, *keys: str) -> None:
    for key in keys:
        staged = engine.stage("b", key)
        staged.write_at(0, memoryview(b"12345"))
        engine.commit([StagedPut(staged, "e")])


def upload(engine: Engine, key: str) -> str:
    request = CreateUpload(bucket="b", key=key, attributes=ObjectAttributes())
    return multipart.create_upload(engine, "b", key, request.attributes).upload_id


def set_rules(engine: Engine, *rules: LifecycleRule) -> None:
    engine.configure_bucket("b", BucketConfiguration(lifecycle=rules))


def sweep(
    engine: Engine,
    now_s: float,
    rest: Callable[[float], bool] = lambda _: False,
    ended: list[str] | None = None,
) -> LifecycleCounts:
    counts = LifecycleCounts()
    names = [] if ended is None else ended
    LifecycleSweep(engine, counts, DAY_S, now_s, rest, names.append).run()
    return counts


def keys(engine: Engine) -> list[str]:
    return [info.key for info in engine.scan("b", "", "", 10_000)]


def days(prefix: str, count: int, **more: bool) -> LifecycleRule:
    rule_id = f"{prefix}{count}"
    return LifecycleRule(rule_id=rule_id, prefix=prefix, expiration_days=count, **more)


def test_an_object_goes_when_its_days_are_over_and_not_before(engine: Engine) -> None:
    put(engine, "logs/a", "other")
    set_rules(engine, days("logs/", 2))
    assert sweep(engine, START_S + 2 * DAY_S - 1).expired_objects == 0
    counts = sweep(engine, START_S + 2 * DAY_S)
    assert (counts.expired_objects, counts.expired_bytes, counts.sweeps) == (1, 5, 1)
    assert keys(engine) == ["other"]


def test_the_rule_that_comes_first_counts_and_a_disabled_one_does_not(engine: Engine) -> None:
    put(engine, "a/1", "a/b/2", "c")
    set_rules(engine, days("a/", 5), days("a/b/", 1), days("", 9), days("c", 1, enabled=False))
    sweep(engine, START_S + 2 * DAY_S)
    assert keys(engine) == ["a/1", "c"]
    sweep(engine, START_S + 6 * DAY_S)
    assert keys(engine) == ["c"]
    sweep(engine, START_S + 10 * DAY_S)
    assert keys(engine) == []


def test_what_was_put_again_is_young(engine: Engine, clock: Clock) -> None:
    put(engine, "again", "old")
    set_rules(engine, days("", 1))
    clock.now_s += DAY_S
    put(engine, "again")
    sweep(engine, clock.now_s)
    assert keys(engine) == ["again"]


def test_old_uploads_are_aborted_with_their_parts(engine: Engine) -> None:
    gone, kept = upload(engine, "in/a"), upload(engine, "out/b")
    part = engine.stage(multipart.BUCKET, multipart.part_key(gone, 1))
    part.write_at(0, memoryview(b"part"))
    engine.commit([StagedPut(part, "e")])
    put(engine, "in/a")
    set_rules(engine, LifecycleRule(rule_id="u", prefix="in/", abort_uploads_days=3))
    ended: list[str] = []
    assert sweep(engine, START_S + 3 * DAY_S - 1, ended=ended).aborted_uploads == 0
    assert sweep(engine, START_S + 3 * DAY_S, ended=ended).aborted_uploads == 1
    assert ended == [gone]
    left = multipart.list_uploads(engine, ListUploads(bucket="b"))
    assert [info.upload_id for info in left.uploads] == [kept]
    assert engine.usage(multipart.BUCKET).object_count == 1
    assert keys(engine) == ["in/a"]


def test_the_rest_is_as_long_as_a_page_took_with_its_look_up(clock: Clock) -> None:
    class SlowScans(MeteredEngine):
        def scan(self, bucket: str, prefix: str, start_after: str, limit: int) -> list[ObjectInfo]:
            clock.now_s += 7.0
            return super().scan(bucket, prefix, start_after, limit)

    inner = MemoryEngine(clock)
    multipart.create_bucket(inner)
    inner.create_bucket(BucketInfo(name="b", owner="root", region="r", created_s=0.0))
    with contextlib.closing(SlowScans(inner)) as engine:
        put(engine, *[f"{number:05d}" for number in range(PAGE_OBJECTS + 1)])
        set_rules(engine, days("", 1))
        rests: list[float] = []

        def rest(seconds: float) -> bool:
            rests.append(seconds)
            return False

        names: list[str] = []
        counts = LifecycleCounts()
        LifecycleSweep(engine, counts, DAY_S, START_S, rest, names.append, clock).run()
    assert rests == [7.0] * 4  # the last looks for parts without an upload
    assert (counts.sweeps, counts.expired_objects) == (1, 0)


def test_a_sweep_goes_page_by_page_and_ends_where_it_is_told_to(engine: Engine) -> None:
    put(engine, *[f"{number:05d}" for number in range(2 * PAGE_OBJECTS + 1)])
    set_rules(engine, days("", 1))
    rests: list[float] = []

    def rest(seconds: float) -> bool:
        rests.append(seconds)
        return len(rests) == 2

    counts = sweep(engine, START_S + DAY_S, rest)
    assert (counts.expired_objects, counts.sweeps) == (2 * PAGE_OBJECTS, 0)
    assert all(seconds >= 0 for seconds in rests)
    assert len(keys(engine)) == 1


def test_a_bucket_without_rules_is_not_looked_at(engine: Engine) -> None:
    put(engine, "key")
    metered = MeteredEngine(engine)
    sweep(metered, START_S + 100 * DAY_S)
    assert metered.meter.calls["scan"] == 1  # for parts without an upload


def test_a_bucket_that_fails_does_not_keep_the_next_from_its_rules(engine: Engine) -> None:
    put(engine, "key")
    set_rules(engine, days("", 1))
    faulty = FaultyEngine(engine, seed=1, fault_rate=1.0, operations={"scan"})
    counts = sweep(faulty, START_S + DAY_S)
    # The second failure is the look for parts without an upload.
    assert (counts.failures, counts.sweeps, counts.expired_objects) == (2, 1, 0)


@pytest.mark.parametrize(
    ("prefixes", "covering"),
    [
        ((), []),
        (("b", "a/", "a/b", "a"), ["a", "b"]),
        (("logs/", ""), [""]),
        (("ab", "a/", "abc"), ["a/", "ab"]),
    ],
)
def test_no_key_is_looked_at_twice(prefixes: tuple[str, ...], covering: list[str]) -> None:
    rules = [days(prefix, 1) for prefix in prefixes]
    assert covering_prefixes(rules) == covering


def test_a_sweeper_sweeps_at_its_start_and_again_and_ends_at_once(
    engine: Engine, clock: Clock
) -> None:
    put(engine, "key")
    set_rules(engine, days("", 1))
    clock.now_s += 2 * DAY_S
    swept = threading.Event()

    def now() -> float:
        if counts.sweeps >= 2:
            swept.set()
        return clock()

    counts = LifecycleCounts()
    sweeper = LifecycleSweeper(engine, counts, 0.001, DAY_S, lambda _: None, now)
    assert swept.wait(60)
    sweeper.close()
    sweeper.close()
    assert counts.expired_objects == 1
    idle = LifecycleSweeper(engine, LifecycleCounts(), 3600.0, DAY_S, lambda _: None)
    idle.close()  # does not wait for the next sweep


def test_the_settings_of_lifecycles_are_an_hour_and_a_day(tmp_path: Path) -> None:
    from objectcache_runtime.settings import parse_command_line

    arguments = ["--data-dir", str(tmp_path)]
    settings, _ = parse_command_line("test", "test", arguments, {})
    assert settings.storage.lifecycle_interval_s == 3600.0  # storage.lifecycle_interval_s
    assert settings.storage.lifecycle_day_s == 86400.0  # storage.lifecycle_day_s


def test_parts_whose_upload_is_gone_are_deleted_and_those_of_open_uploads_are_not(
    engine: Engine, clock: Clock
) -> None:
    upload_id = upload(engine, "in/open")
    for one in (upload_id, "gone"):
        staged = engine.stage(multipart.BUCKET, multipart.part_key(one, 1))
        engine.commit([StagedPut(staged, "etag")])
    sweep(engine, clock.now_s)
    left = [part[0] for part in multipart.all_parts(engine)]
    assert left == [upload_id]
