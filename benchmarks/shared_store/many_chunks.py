"""A million chunks: match, what a new server takes to have them, and their index."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from benchmarks.basis.measure import Row, milliseconds, timed
from benchmarks.shared_store.bench import SharedBench
from benchmarks.shared_store.one_server import BUCKET, chunk_keys, commit, opened_server, staged
from objectcache_storage_server.engines.base import PrefixShape
from objectcache_storage_server.engines.shared.engine import SharedEngine

LAYERS, SLICE_BYTES = 32, 16  # as many checksums as a chunk of 2 MiB has
PUT_CHUNKS = 1792
MATCH_KEYS = 448
MATCHES = 200
START_S_MAX = 300.0


def measure_many_chunks(bench: SharedBench) -> Iterator[Row]:
    """On RADOS."""
    address = bench.address(bench.ceph.create_pool())
    put_count = -(-bench.amount.many_chunks // PUT_CHUNKS)
    chunk_count = put_count * PUT_CHUNKS
    with opened_server(address, bench.folder / "many") as engine:
        begun_s = time.perf_counter()
        for number in range(put_count):
            keys = chunk_keys(f"m{number}", PUT_CHUNKS)
            commit(engine, staged(engine, PrefixShape(keys, LAYERS, SLICE_BYTES, layerwise=True)))
        put_s = time.perf_counter() - begun_s
        matches = [_match_s(engine, put_count) for _ in range(MATCHES)]
        with engine.catalog.reading() as view:
            log_bytes = view.state.log_bytes
        from_log = _started(address, bench.folder / "from-log")
        checkpoint_s = timed(engine.upkeep.round)
        with engine.catalog.reading() as view:
            is_taken = view.state.checkpoint is not None
        from_checkpoint = _started(address, bench.folder / "from-checkpoint")
    group = f"RADOS: {chunk_count:,} chunks of {LAYERS} slices"
    middle_ms = sorted(milliseconds(matches))[MATCHES // 2]
    yield Row(
        group, f"match of {MATCH_KEYS} keys", "ms", milliseconds(matches), middle_ms, "1 ms",
        "<= 1 ms", "",
    )  # fmt: skip
    how = "from a checkpoint" if is_taken else "no checkpoint was due, from the log again"
    for name, (seconds, own_s, index_bytes, private_bytes) in (
        ("from the log", from_log),
        (how, from_checkpoint),
    ):
        yield Row(
            group, f"a new server, {name}", "s", (seconds,), seconds / 10, "10 s", "< 10 s", ""
        )
        yield Row(group, f"its processor time, {name}", "s", (own_s,), None, "", "", "")
        each = index_bytes / chunk_count
        yield Row(group, f"its index on disk, a chunk, {name}", "bytes", (each,), None, "", "", "")
        grown = private_bytes / chunk_count
        yield Row(group, f"its memory, a chunk, {name}", "bytes", (grown,), None, "", "", "")
    yield Row(group, "the log, a chunk", "bytes", (log_bytes / chunk_count,), None, "", "", "")
    rate = chunk_count / put_s
    yield Row(group, f"puts of {PUT_CHUNKS}, in all", "chunks/s", (rate,), None, "", "", "")
    yield Row(group, "taking a checkpoint", "s", (checkpoint_s,), None, "", "", "")


def _match_s(engine: SharedEngine, put_count: int) -> float:
    keys = chunk_keys(f"m{random.randrange(put_count)}", PUT_CHUNKS)
    first = random.randrange(PUT_CHUNKS - MATCH_KEYS)
    wanted = keys[first : first + MATCH_KEYS]
    begun_s = time.perf_counter()
    count = engine.match(BUCKET, wanted)
    seconds = time.perf_counter() - begun_s
    assert count == MATCH_KEYS
    return seconds


def _started(address: str, folder: Path) -> tuple[float, float, int, int]:
    """Seconds, its processor time, bytes of the index and private bytes of a new server in a
    process of its own.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_start, args=(there, address, folder), daemon=True)
    process.start()
    assert here.poll(START_S_MAX), "a new server does not start"
    answer: tuple[float, float, int, int] = here.recv()
    process.join()
    return answer


def _start(there: Connection, address: str, folder: Path) -> None:
    own = psutil.Process()
    before_bytes = own.memory_full_info().uss
    begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
    with opened_server(address, folder):
        seconds, own_s = time.perf_counter() - begun_s, time.process_time() - begun_cpu_s
        private_bytes = own.memory_full_info().uss - before_bytes
        used_bytes = sum(file.stat().st_blocks * 512 for file in folder.rglob("*.mdb"))
        there.send((seconds, own_s, used_bytes, private_bytes))
