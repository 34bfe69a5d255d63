"""Engines that wrap another one: slower, faulty, or counted."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from objectcache_schemas.errors import ObjectCacheError, StorageFull, Unavailable
from objectcache_schemas.records import Condition, ObjectInfo
from objectcache_storage_server.engines.base import (
    ALWAYS,
    CHECKSUM_BLOCK_BYTES,
    BegunReads,
    Committed,
    Engine,
    FramePlace,
    OpenObjects,
    Placement,
    PrefixShape,
    Read,
    Staged,
    StagedPrefix,
    StagedPut,
)
from objectcache_storage_server.engines.passing_engine import PassingEngine
from objectcache_storage_server.engines.puts.received_frames import ReceivedFrames

T = TypeVar("T")

READS = frozenset({"stat", "match", "open_many", "read_small", "scan", "read_many"})
WRITES = frozenset({"stage", "stage_prefix", "write_at", "write", "commit", "delete"})


class WrappedEngine(PassingEngine):
    """A passing engine whose parts, what is staged or open, pass their calls through `call`, too.

    `size_bytes` is what `read_many` reads, or `write_at` or `write` writes, else 0. `write_frames`
    counts as `write`, by the frames' bytes.
    """

    def stage(
        self, bucket: str, key: str, checksum_block_bytes: int = CHECKSUM_BLOCK_BYTES
    ) -> Staged:
        staged = self.call("stage", 0, lambda: self.inner.stage(bucket, key, checksum_block_bytes))
        return WrappedStaged(self, staged)

    def stage_prefix(self, bucket: str, shape: PrefixShape) -> StagedPrefix:
        prefix = self.call("stage_prefix", 0, lambda: self.inner.stage_prefix(bucket, shape))
        return WrappedStagedPrefix(self, prefix)

    def stage_joined(
        self,
        bucket: str,
        key: str,
        source_bucket: str,
        sources: Sequence[ObjectInfo],
        checksum_block_bytes: int = CHECKSUM_BLOCK_BYTES,
    ) -> Staged | None:
        staged = self.call(
            "stage_joined",
            0,
            lambda: self.inner.stage_joined(
                bucket, key, source_bucket, sources, checksum_block_bytes
            ),
        )
        return None if staged is None else WrappedStaged(self, staged)

    def commit(self, puts: Sequence[StagedPut], condition: Condition = ALWAYS) -> list[Committed]:
        inner_puts = [put._replace(staged=_unwrapped(put.staged)) for put in puts]
        try:
            return self.call("commit", 0, lambda: self.inner.commit(inner_puts, condition))
        finally:
            for put in inner_puts:
                put.staged.discard()

    def copy(
        self,
        source_bucket: str,
        source_key: str,
        staged: Staged,
        offset_bytes: int = 0,
        length_bytes: int | None = None,
        source_etag: str = "",
    ) -> int:
        inner = _unwrapped(staged)
        asked = (source_bucket, source_key, inner, offset_bytes, length_bytes, source_etag)
        return self.call("copy", 0, lambda: self.inner.copy(*asked))

    def open_many(
        self, bucket: str, keys: Sequence[str], *, are_prefix: bool = False
    ) -> OpenObjects:
        opened = self.call(
            "open_many", 0, lambda: self.inner.open_many(bucket, keys, are_prefix=are_prefix)
        )
        return WrappedOpenObjects(self, opened)


class WrappedStaged(Staged):
    """A staged object of a `WrappedEngine`."""

    def __init__(self, engine: WrappedEngine, inner: Staged) -> None:
        self.inner = inner
        self.bucket = inner.bucket
        self.key = inner.key
        self.checksum_block_bytes = inner.checksum_block_bytes
        self._engine = engine

    def write_at(self, offset_bytes: int, data: memoryview) -> None:
        self._engine.call("write_at", len(data), lambda: self.inner.write_at(offset_bytes, data))

    def discard(self) -> None:
        self.inner.discard()


class WrappedStagedPrefix(StagedPrefix):
    """Staged chunks of a `WrappedEngine`."""

    def __init__(self, engine: WrappedEngine, inner: StagedPrefix) -> None:
        self.inner = inner
        self.staged = [WrappedStaged(engine, staged) for staged in inner.staged]
        self._engine = engine

    def write(self, position_bytes: int, data: memoryview) -> None:
        self._engine.call("write", len(data), lambda: self.inner.write(position_bytes, data))

    def write_frames(self, position_bytes: int, frames: ReceivedFrames) -> None:
        size_bytes = int(sum(frames.lengths))
        self._engine.call(
            "write", size_bytes, lambda: self.inner.write_frames(position_bytes, frames)
        )

    def discard(self) -> None:
        self.inner.discard()


class WrappedOpenObjects(OpenObjects):
    """Open objects of a `WrappedEngine`."""

    def __init__(self, engine: WrappedEngine, inner: OpenObjects) -> None:
        self.inner = inner
        self.infos = inner.infos
        self._engine = engine

    def placements(self) -> Sequence[Placement]:
        return self.inner.placements()

    def frames(self) -> Sequence[FramePlace | None] | None:
        return self.inner.frames()

    def read_many(self, reads: Sequence[Read], buffer: memoryview) -> None:
        size_bytes = sum(read.length_bytes for read in reads)
        self._engine.call("read_many", size_bytes, lambda: self.inner.read_many(reads, buffer))

    def begin_reads(self, reads: Sequence[Read], buffer: memoryview) -> BegunReads:
        size_bytes = sum(read.length_bytes for read in reads)
        begun = self.inner.begin_reads(reads, buffer)
        return WrappedReads(self._engine, size_bytes, begun)

    def close(self) -> None:
        self.inner.close()


class WrappedReads(BegunReads):
    """Reads of a `WrappedEngine`, which count as its `read_many` when they are finished."""

    def __init__(self, engine: WrappedEngine, size_bytes: int, inner: BegunReads) -> None:
        self.inner = inner
        self._engine = engine
        self._size_bytes = size_bytes

    def when_landed(self, call: Callable[[], None]) -> None:
        self.inner.when_landed(call)

    def finish(self) -> None:
        self._engine.call("read_many", self._size_bytes, self.inner.finish)

    def cancel(self) -> None:
        self.inner.cancel()


def _unwrapped(staged: Staged) -> Staged:
    return staged.inner if isinstance(staged, WrappedStaged) else staged


class SlowEngine(WrappedEngine):
    """Every operation waits before it begins: a fixed time, and a time for its bytes."""

    def __init__(
        self,
        inner: Engine,
        *,
        read_delay_s: float = 0.0,
        write_delay_s: float = 0.0,
        rate_bytes_per_s: float | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(inner)
        self._delay_s = dict.fromkeys(READS, read_delay_s) | dict.fromkeys(WRITES, write_delay_s)
        self._rate_bytes_per_s = rate_bytes_per_s
        self._sleep = sleep

    def call(self, operation: str, size_bytes: int, action: Callable[[], T]) -> T:
        delay_s = self._delay_s.get(operation, 0.0)
        if self._rate_bytes_per_s is not None:
            delay_s += size_bytes / self._rate_bytes_per_s
        if delay_s > 0:
            self._sleep(delay_s)
        return action()


class FaultyEngine(WrappedEngine):
    """Operations fail before they begin, with probability `fault_rate`, the same for one seed.

    Reads raise `Unavailable`, writes `StorageFull`; each message holds the seed and the number of
    the call. Calls from one thread fail in the same order every time.
    """

    def __init__(
        self,
        inner: Engine,
        seed: int,
        *,
        fault_rate: float = 0.1,
        operations: Collection[str] = READS | WRITES,
    ) -> None:
        super().__init__(inner)
        assert set(operations) <= READS | WRITES, operations
        self.fault_count = 0
        self._seed = seed
        self._random = random.Random(seed)  # noqa: S311  repeatable faults, not secrets
        self._fault_rate = fault_rate
        self._operations = frozenset(operations)
        self._call_count = 0
        self._lock = threading.Lock()

    def call(self, operation: str, size_bytes: int, action: Callable[[], T]) -> T:
        if operation in self._operations:
            with self._lock:
                self._call_count += 1
                fails = self._random.random() < self._fault_rate
                self.fault_count += fails
                call_number = self._call_count
            if fails:
                raise self._fault(operation, call_number)
        return action()

    def _fault(self, operation: str, call_number: int) -> ObjectCacheError:
        error_class = StorageFull if operation in WRITES else Unavailable
        return error_class(f"injected into {operation}: seed {self._seed}, call {call_number}")


@dataclass(slots=True)
class Meter:
    """What an engine was asked to do, by operation."""

    calls: Counter[str] = field(default_factory=Counter[str])
    failures: Counter[str] = field(default_factory=Counter[str])
    size_bytes: Counter[str] = field(default_factory=Counter[str])
    busy_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    in_flight: int = 0
    in_flight_highest: int = 0


class MeteredEngine(WrappedEngine):
    """Counts calls, failures, bytes and (summed over threads) seconds in `meter`."""

    def __init__(self, inner: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(inner)
        self.meter = Meter()
        self._clock = clock
        self._lock = threading.Lock()

    def call(self, operation: str, size_bytes: int, action: Callable[[], T]) -> T:
        meter = self.meter
        with self._lock:
            meter.calls[operation] += 1
            meter.in_flight += 1
            meter.in_flight_highest = max(meter.in_flight_highest, meter.in_flight)
        start_s = self._clock()
        succeeded = False
        try:
            result = action()
            succeeded = True
            return result
        finally:
            with self._lock:
                meter.in_flight -= 1
                meter.busy_s[operation] += self._clock() - start_s
                if succeeded:
                    meter.size_bytes[operation] += size_bytes
                else:
                    meter.failures[operation] += 1
