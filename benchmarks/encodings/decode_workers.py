"""A fetcher's workers: their rate of the bare loop's, two of them, and the memory that they take.

Rates are of decoded bytes, by processor time: of the thread for loops in this process, of the
workers' processes, by the system's count of nanoseconds, for theirs. So others who keep the machine
busy take less from them than from a clock. All decode the same layers, out of one memory file into
another, in turns.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.basis.bench import Bench
from benchmarks.basis.measure import Row
from benchmarks.encodings.codecs import bare_loop, coded_rows
from benchmarks.encodings.kv_samples import gaussian
from objectcache.landing.memory_file import MemoryFile
from objectcache_encodings import ENCODINGS, SliceDecoder
from objectcache_encodings.plane_coders import plane_coder
from objectcache_relay.decoding.jobs import cut_rows
from objectcache_relay.decoding.worker_pool import JobFailure, PoolJob, WorkerPool
from objectcache_relay.landing.landed_rows import LandedRow
from objectcache_schemas.limits import MIB

ENCODING = "planes-zstd"
CHUNK_TOKENS = 64  # slices of 48 KiB
ROUNDS, PASSES = 5, 4
WORKERS = 2
RATE_GOAL, SHARE_GOAL, MEMORY_GOAL = 0.85, 0.9, 1.1
GB = 1e9


class Layers:
    """Layers as they land, one after the other, and memory for them decoded."""

    def __init__(self) -> None:
        self.coded = coded_rows(gaussian(), CHUNK_TOKENS, ENCODING)
        self.source = MemoryFile(sum(one.row.nbytes for one in self.coded))
        self.target = MemoryFile(sum(one.slices.nbytes for one in self.coded))
        begin, landed = 0, self.source.array()
        self.rows: list[LandedRow] = []
        for one in self.coded:
            count, pitch = one.row.shape
            landed[begin : begin + one.row.nbytes] = one.row.ravel()
            codec, slice_bytes = ENCODINGS[ENCODING], one.slices.shape[1]
            self.rows.append(LandedRow(0, count, begin, pitch, codec, slice_bytes))
            begin += one.row.nbytes

    @property
    def decoded_bytes(self) -> int:
        """Of all layers."""
        return self.target.length_bytes

    def check(self) -> None:
        """All are where they belong."""
        there = self.target.array()
        assert np.array_equal(there, np.concatenate([one.slices.ravel() for one in self.coded]))
        there[:] = 0

    def decode_here(self, decoder: SliceDecoder) -> None:
        """All, one after the other."""
        source, target, at = self.source.array(), self.target.array(), 0
        for row in self.rows:
            end = row.offset_bytes + row.slice_count * row.pitch_bytes
            out = target[at : at + row.decoded_bytes].reshape(row.slice_count, -1)
            decoder.decode_row(source[row.offset_bytes : end].reshape(row.slice_count, -1), out)
            at += row.decoded_bytes

    def bare(self) -> None:
        """All, without a check."""
        coder, target, at = plane_coder(ENCODINGS[ENCODING]), self.target.array(), 0
        for one in self.coded:
            bare_loop(coder, one, target[at : at + one.slices.nbytes].reshape(one.slices.shape))
            at += one.slices.nbytes

    async def by_workers(self, pool: WorkerPool) -> None:
        """All, by workers."""
        source = pool.share(self.source, self.source.fd, self.source.length_bytes, is_target=False)
        target = pool.share(self.target, self.target.fd, self.target.length_bytes, is_target=True)
        done = asyncio.Event()
        ended: list[JobFailure | None] = []
        jobs: list[PoolJob] = []

        def one_ended(failure: JobFailure | None) -> None:
            ended.append(failure)
            if len(ended) == len(jobs):
                done.set()

        at = 0
        for row in self.rows:
            for part in cut_rows([row], pool.workers):
                job = part.job(pool.next_number(), source.number, target.number, at)
                jobs.append(PoolJob(job, (source, target), lambda: None, one_ended))
            at += row.decoded_bytes
        pool.submit(jobs)
        await done.wait()
        assert not any(ended)


def measure_decode_workers(bench: Bench) -> Iterator[Row]:
    """Rows of one worker beside loops in this process, of two, and of their memory."""
    rounds = 1 if bench.scale.is_quick else ROUNDS * bench.scale.repeats
    yield from asyncio.run(_measured(rounds))


async def _measured(rounds: int) -> list[Row]:
    layers = Layers()
    decoder = SliceDecoder()
    one, two = WorkerPool(1), WorkerPool(WORKERS)
    await one.start()
    await two.start()
    idle_bytes = max(_own_bytes(pid) for pid in two.pids)
    try:
        for pool in (one, two):  # which maps the files
            await layers.by_workers(pool)
            layers.check()
        rates: dict[str, list[float]] = {"bare": [], "decoder": [], "one": [], "two": []}
        walls: list[float] = []
        shares: list[float] = []
        passed_bytes = PASSES * layers.decoded_bytes
        for _ in range(rounds):
            for name, way in (
                ("bare", layers.bare),
                ("decoder", lambda: layers.decode_here(decoder)),
            ):
                begun_s = time.thread_time()
                for _ in range(PASSES):
                    way()
                rates[name].append(passed_bytes / (time.thread_time() - begun_s) / GB)
            taken: dict[str, float] = {}
            for name, pool in (("one", one), ("two", two)):
                begun_s, own_s = time.monotonic(), time.process_time()
                before_s = _processor_s(pool.pids)
                for _ in range(PASSES):
                    await layers.by_workers(pool)
                each_s = (_processor_s(pool.pids) - before_s) / pool.workers
                rates[name].append(passed_bytes / each_s / GB)
                taken[name] = time.monotonic() - begun_s
                if name == "one":
                    shares.append(100 * (time.process_time() - own_s) / each_s)
            walls.append(taken["one"] / taken["two"])
        layers.check()
        used_bytes = max(_own_bytes(pid) for pid in two.pids)
    finally:
        await one.close()
        await two.close()
    return _rows(layers, rates, walls, shares, (idle_bytes, used_bytes))


def _rows(
    layers: Layers,
    rates: dict[str, list[float]],
    walls: Sequence[float],
    shares: Sequence[float],
    own_bytes: tuple[int, int],
) -> list[Row]:
    group = f"A fetcher's workers: {ENCODING}, slices of 48 KiB, normal numbers"
    median = {name: float(np.median(of)) for name, of in rates.items() if of}
    scratch_bytes = max(0, own_bytes[1] - own_bytes[0])
    landing_bytes = layers.source.length_bytes
    used_bytes = landing_bytes + scratch_bytes
    return [
        Row(group, "bare loop, in this process", "GB/s", tuple(rates["bare"]), None, "", "",
            "half the bytes at 1.6, joined at 15: 2.6 GB/s"),
        Row(group, "SliceDecoder, in this process", "GB/s", tuple(rates["decoder"]),
            median["decoder"] / median["bare"], "the bare loop", "", "and xxh3: 2.4 GB/s"),
        Row(group, "one worker", "GB/s", tuple(rates["one"]), median["one"] / median["bare"],
            "the bare loop", f"at least {RATE_GOAL}", "and 30 us a job of 750 KiB: 0.93 of it",
            details={"of_decoder": median["one"] / median["decoder"]}),
        Row(group, f"{WORKERS} workers together, each with a core", "GB/s", tuple(rates["two"]),
            median["two"] / (WORKERS * median["one"]), f"{WORKERS} x one worker",
            f"at least {SHARE_GOAL}", "twice one, but for caches and memory that they share"),
        Row(group, f"{WORKERS} workers by the clock, others' work included", "x", tuple(walls),
            float(np.median(walls)), "one worker", "", "2 on two idle cores"),
        Row(group, "processor time of the control, of one worker's", "%", tuple(shares), None, "",
            "", "100 us a job of 500 us of decoding: 20 %"),
        Row(group, "landing memory, and what a worker has more than an idle one", "MiB",
            (used_bytes / MIB,), used_bytes / landing_bytes,
            "landing memory", f"at most {MEMORY_GOAL}", "the plane of a slice: nothing"),
    ]  # fmt: skip


def _processor_s(pids: Sequence[int]) -> float:
    """What the scheduler has counted for processes of one thread."""
    return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) for pid in pids) / 1e9


def _own_bytes(pid: int) -> int:
    """Memory that a process shares with nobody."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("the system counts it")
