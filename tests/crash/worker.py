"""What runs in the processes that are killed, and in those that look at what is left."""

from __future__ import annotations

import enum
import itertools
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from objectcache_schemas.errors import ObjectCacheError
from objectcache_schemas.operators.engine_status import CheckReport
from objectcache_schemas.records import BucketInfo
from objectcache_storage_server.engines.base import Engine
from tests.crash.actions import act, wrong_bytes
from tests.crash.journal import Began, Ended, Journal, Trouble, Upkept
from tests.crash.stores import STORE_KINDS
from tests.crash.workload import THREADS, Get, Operation, Value, operations

NOTE_EVERY_S = 0.02
PAGE = 100  # objects listed and read together
REFUSALS = {"StorageFull", "SlowDown"}  # which a store may answer that is small


class Sabotage(enum.Enum):
    """What makes any engine break its promises, to see that it would be noticed."""

    NONE = "none"
    NO_FSYNC = "no fsync"  # by Python code; the index's own library goes on
    EARLY = "early"  # acknowledge before it is done


class Work(msgspec.Struct, frozen=True, tag=True):
    """Put a store through operations, without an end."""

    kind: str
    folder: str
    journal: str
    seed: int
    has_async: bool
    sabotage: Sabotage = Sabotage.NONE


class Look(msgspec.Struct, frozen=True, tag=True):
    """Write to `report` what is in a store."""

    kind: str
    folder: str
    report: str
    buckets: list[BucketInfo]
    may_drop: bool  # objects that were never promised to survive


class Found(msgspec.Struct, frozen=True):
    """What is in a store."""

    values: dict[str, dict[str, Value]]  # by bucket and key
    troubles: list[str]


Job = Work | Look


def run(job: Job, on_open: Callable[[], None]) -> None:
    """Do a job in this process; `on_open` is called when its store is open."""
    match job:
        case Work():
            _work(job, on_open)
        case Look():
            _look(job)


# --- until killed ---


def _work(job: Work, on_open: Callable[[], None]) -> None:
    kind = STORE_KINDS[job.kind]
    journal = Journal(Path(job.journal))
    if job.sabotage is Sabotage.NO_FSYNC:
        os.fsync = os.fdatasync = lambda file: None  # type: ignore[assignment]
    try:
        engine = kind.open(Path(job.folder))
    except Exception:
        journal.write(Trouble(f"the store does not open:\n{traceback.format_exc()}"))
        return
    on_open()
    numbers = itertools.count()
    threads = [
        threading.Thread(
            target=_run,
            args=(
                engine,
                journal,
                numbers,
                operations(job.seed, number, evicts=kind.promises.evicts, has_async=job.has_async),
                job.sabotage is Sabotage.EARLY,
            ),
        )
        for number in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        journal.write(_upkept(engine))
        threads[0].join(NOTE_EVERY_S)


def _upkept(engine: Engine) -> Upkept:
    status = engine.status()
    paths = [path.name for path in status.paths if path.extents]
    return Upkept(status.compacted_objects, status.reencoded_objects, status.evicted_objects, paths)


def _run(
    engine: Engine,
    journal: Journal,
    numbers: Iterator[int],
    to_do: Iterator[Operation],
    is_early: bool,
) -> None:
    try:
        for number, operation in zip(numbers, to_do, strict=False):
            for trouble in _do(engine, journal, number, operation, is_early):
                journal.write(Trouble(trouble))
    except Exception:
        journal.write(Trouble(traceback.format_exc()))


def _do(
    engine: Engine, journal: Journal, number: int, operation: Operation, is_early: bool
) -> list[str]:
    if isinstance(operation, Get):
        return act(engine, operation)
    journal.write(Began(number, operation))
    if is_early:
        journal.write(Ended(number, ""))
        return act(engine, operation)
    try:
        troubles = act(engine, operation)
    except ObjectCacheError as error:
        if error.code not in REFUSALS:
            raise
        journal.write(Ended(number, error.code))
        return []
    journal.write(Ended(number, ""))
    return troubles


# --- afterwards ---


def _look(job: Look) -> None:
    troubles: list[str] = []
    values: dict[str, dict[str, Value]] = {}
    try:
        engine = STORE_KINDS[job.kind].open(Path(job.folder))
        for bucket in job.buckets:
            values[bucket.name] = _stored(engine, bucket, troubles)
        troubles += _misfits(engine, job.may_drop)
        engine.close()
    except Exception:
        troubles.append(traceback.format_exc())
    Path(job.report).write_bytes(msgspec.json.encode(Found(values, troubles)))


def _stored(engine: Engine, bucket: BucketInfo, troubles: list[str]) -> dict[str, Value]:
    values: dict[str, Value] = {}
    if engine.bucket(bucket.name) != bucket:
        troubles.append(f"the bucket is {engine.bucket(bucket.name)}, not {bucket}")
    while page := engine.scan(bucket.name, "", max(values, default=""), PAGE):
        keys = [info.key for info in page]
        values |= {info.key: Value(info.etag, info.size_bytes) for info in page}
        troubles += wrong_bytes(engine, bucket.name, keys)
        if engine.match(bucket.name, keys) != len(keys):
            troubles.append(f"match and scan disagree about {keys}")
    return values


def _misfits(engine: Engine, may_drop: bool) -> list[str]:
    """What the store's own check finds, and damage that nobody did."""
    misfits: list[str] = []
    if engine.damaged_count and not may_drop:
        misfits.append(f"{engine.damaged_count} objects are damaged")
    if engine.capabilities.name != "local":
        return misfits
    report = engine.check(False, lambda _: True)
    clean = CheckReport(objects=report.objects, bytes=report.bytes)
    return misfits if report == clean else [*misfits, f"the check found {report}"]
