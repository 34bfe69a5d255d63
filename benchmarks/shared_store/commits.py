"""What a commit takes once its bytes are in the store, and when another server has it."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.basis.measure import Row, milliseconds, timed
from benchmarks.shared_store.bench import SharedBench
from benchmarks.shared_store.one_server import (
    BUCKET,
    chunk_keys,
    commit,
    opened_server,
    staged,
    written,
)
from objectcache_schemas.limits import KIB
from objectcache_storage_server.engines.base import PrefixShape

LAYERS, SLICE_BYTES = 32, 64 * KIB
CHUNKS = 448
WAIT_S = 30.0
LOOK_EVERY_S = 0.0002


def measure_commits(bench: SharedBench) -> Iterator[Row]:
    """Commits of `CHUNKS` chunks of `LAYERS` slices; the bytes are small, their number is not."""
    address = bench.address(bench.ceph.create_pool())
    own_s: list[float] = []
    thread_s: list[float] = []
    rest_s: list[float] = []
    whole_s: list[float] = []
    visible_s: list[float] = []
    data_s: list[float] = []
    with opened_server(address, bench.folder / "commits", upkeep_s=None) as engine:
        with _Other(address, bench.folder / "other") as other:
            for number in range(bench.amount.commits):
                shape = PrefixShape(chunk_keys(f"c{number}", CHUNKS), LAYERS, KIB, layerwise=True)
                prefix = written(engine, shape)
                rest_s.append(timed(prefix.finish))
                other.watch(shape.keys)
                begun_s = time.thread_time()
                own_s.append(timed(lambda prefix=prefix: commit(engine, prefix)))  # type: ignore[misc]
                thread_s.append(time.thread_time() - begun_s)
                acknowledged_s = time.monotonic()
                visible_s.append(other.seen_s() - acknowledged_s)
                shape = PrefixShape(chunk_keys(f"w{number}", CHUNKS), LAYERS, KIB, layerwise=True)
                prefix = written(engine, shape)
                whole_s.append(timed(lambda prefix=prefix: commit(engine, prefix)))  # type: ignore[misc]
        keys = chunk_keys("whole", min(CHUNKS, bench.amount.chunk_count))
        shape = PrefixShape(keys, LAYERS, SLICE_BYTES, layerwise=True)
        data_s.append(timed(lambda: staged(engine, shape).staged[0].discard()))
    group = f"RADOS: commits of {CHUNKS} chunks of {LAYERS} slices"
    yield _row(group, "commit, the bytes being stored already", own_s, 3.0)
    yield _row(group, "of that its thread's processor time", thread_s, None)
    yield _row(group, "from the last byte handed over until it is acknowledged", whole_s, None)
    yield _row(group, "of that until the bytes are stored, without a commit", rest_s, None)
    yield _row(group, "until another server has it, from the acknowledgement", visible_s, 5.0)
    yield _row(f"{group}, the data", f"{len(keys)} chunks of 2 MiB written", data_s, None)


def _row(group: str, name: str, seconds: Sequence[float], goal_ms: float | None) -> Row:
    samples = milliseconds(seconds)
    middle = sorted(samples)[len(samples) // 2]
    ratio = None if goal_ms is None else middle / goal_ms
    goal = "" if goal_ms is None else f"<= {goal_ms:g} ms"
    return Row(group, name, "ms", samples, ratio, "the goal" if goal else "", goal, "")


class _Other:
    """A server in a process of its own, which says when it has keys."""

    def __init__(self, address: str, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_follow, args=(there, address, folder), daemon=True)

    def __enter__(self) -> _Other:
        self._process.start()
        self._answer()
        return self

    def __exit__(self, *_: object) -> None:
        self._here.close()
        self._process.join(WAIT_S)

    def watch(self, keys: Sequence[str]) -> None:
        """From here on say when these are there."""
        self._here.send(list(keys))
        self._answer()

    def seen_s(self) -> float:
        """When they were, by the clock that all processes have."""
        return float(self._answer())

    def _answer(self) -> float:
        if not self._here.poll(WAIT_S):
            raise RuntimeError("the other server does not answer")
        answer: float = self._here.recv()
        return answer


def _follow(there: Connection, address: str, folder: Path) -> None:
    with opened_server(address, folder, upkeep_s=None) as engine:
        there.send(0.0)
        while True:
            try:
                wanted = there.recv()
            except EOFError:
                return
            there.send(0.0)
            while engine.match(BUCKET, wanted[:1]) == 0:
                time.sleep(LOOK_EVERY_S)
            seen_s = time.monotonic()
            assert engine.match(BUCKET, wanted) == len(wanted)
            there.send(seen_s)
