"""What a worker is asked and does not take at once, how long it may take, and how it ends."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from objectcache.landing.memory_file import MemoryFile
from objectcache_encodings import SliceEncoder, pack_row
from objectcache_encodings.frames import SliceCodec, codec_of
from objectcache_encodings.lossy import LOSSY_DTYPES, KvShape, dtype_text
from objectcache_relay.decoding import worker_process
from objectcache_relay.decoding.jobs import DecodeJob, JobRow
from objectcache_relay.decoding.worker_pool import JobFailure, PoolJob, WorkerPool
from objectcache_relay.decoding.worker_process import (
    MAP_BYTES_PER_S_MIN,
    SharedFile,
    WorkerProcess,
)
from objectcache_schemas.limits import MIB
from tests.fetcher.payloads import DecodedInto, LandedPayload
from tests.fetcher.test_worker_pool import maps, stop, until

pytestmark = pytest.mark.asyncio
PAGE_BYTES = 4096
PACKET_COST_BYTES = 512  # of a socket's buffer, at least


def resident_bytes(pid: int, field: str) -> int:
    """Of a process: `VmRSS` now, `VmHWM` at most so far; what it has mapped is part of both."""
    status = Path(f"/proc/{pid}/status").read_text("ascii")
    return 1024 * int(status.partition(f"{field}:")[2].split()[0])


class Engine:
    """Somebody whose memory is mapped for as long as he lives."""


def packets_beyond_a_socket() -> int:
    """More than its buffer takes while nobody reads."""
    buffer_bytes = int(Path("/proc/sys/net/core/wmem_default").read_text())
    return buffer_bytes // PACKET_COST_BYTES + 10


def copy_job(number: int, source: SharedFile, target: SharedFile) -> DecodeJob:
    rows = (JobRow(0, 1, PAGE_BYTES, 0, PAGE_BYTES),)
    return DecodeJob(number, source.number, target.number, 0, rows)


async def test_a_full_socket_loses_neither_unmaps_nor_jobs() -> None:
    pool = WorkerPool(1)
    await pool.start()
    try:
        (pid,) = pool.pids
        memory = MemoryFile(PAGE_BYTES)
        source = pool.share(memory, memory.fd, PAGE_BYTES, is_target=False)
        engines = [Engine() for _ in range(packets_beyond_a_socket())]
        ended: list[JobFailure | None] = []
        for engine in engines:
            target = pool.share(engine, memory.fd, PAGE_BYTES, is_target=True)
            job = copy_job(pool.next_number(), source, target)
            pool.submit([PoolJob(job, (source, target), lambda: None, ended.append)])
        await until(lambda: len(ended) == len(engines), "all are mapped")
        assert maps(pid, "memfd:objectcache") == len(engines) + 1
        stop([pid])
        del engine
        engines.clear()
        await asyncio.sleep(0.1)
        landed = LandedPayload.of()
        into = DecodedInto(pool, landed)
        into.submit(0)
        os.kill(pid, signal.SIGCONT)
        await until(lambda: into.is_over, "a job behind them is done")
        assert into.failures == []
        assert np.array_equal(into.slices[0], landed.slices[0])
        await until(lambda: maps(pid, "memfd:objectcache") == 3, "what is gone is unmapped")
        assert pool.pids == [pid]
        assert set(ended) == {None}
    finally:
        await pool.close()


async def test_a_file_that_is_mapped_before_a_job_has_time_of_its_own() -> None:
    worker = WorkerProcess()
    memory, large = MemoryFile(PAGE_BYTES), MemoryFile(8 * MAP_BYTES_PER_S_MIN)
    source = SharedFile(1, memory.fd, PAGE_BYTES, is_target=False)
    target = SharedFile(2, memory.fd, PAGE_BYTES, is_target=True)
    other = SharedFile(3, large.fd, large.length_bytes, is_target=True)
    try:
        worker.jobs.add(4)
        worker.send(copy_job(4, source, target), (source, target))
        await until(lambda: [answer.number for answer in worker.answers()] == [4], "it is done")
        assert not worker.is_late(time.monotonic() + 100.0, 10.0)
        stop([worker.pid])
        begun_s = time.monotonic()
        worker.send(copy_job(5, source, other), (source, other))
        assert not worker.is_late(begun_s + 10.0 + 7.0, 10.0)
        assert worker.is_late(time.monotonic() + 10.0 + 9.0, 10.0)
    finally:
        worker.kill()
        assert await worker.ended() == -signal.SIGKILL
        for file in (source, target, other):
            file.close()


async def test_a_job_took_as_long_as_its_worker_was_at_it_whenever_its_end_is_heard() -> None:
    worker = WorkerProcess()
    memory = MemoryFile(PAGE_BYTES)
    source = SharedFile(1, memory.fd, PAGE_BYTES, is_target=False)
    target = SharedFile(2, memory.fd, PAGE_BYTES, is_target=True)
    try:
        worker.jobs.add(4)
        worker.send(copy_job(4, source, target), (source, target))
        await until(
            lambda: [answer.number for answer in worker.answers()] == [4], "files are mapped"
        )
        worker.jobs.add(5)
        begun_s = time.monotonic()
        worker.send(copy_job(5, source, target), (source, target))
        await until(lambda: bool(select.select([worker.control], [], [], 0)[0]), "it is done")
        done_s = time.monotonic()
        heard_s = done_s + 2 * (done_s - begun_s)
        await until(lambda: time.monotonic() > heard_s, "it is heard much later")
        (answer,) = worker.answers()
        assert 0 < answer.took_s <= done_s - begun_s
    finally:
        worker.kill()
        assert await worker.ended() == -signal.SIGKILL
        for file in (source, target):
            file.close()


async def test_the_end_of_a_process_is_waited_for_beside_other_work_and_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for end_s in (0.3, 3.0, 20.0):  # in which a busy machine may let nothing else run
        worker = WorkerProcess()
        monkeypatch.setattr(worker_process, "END_S", end_s)
        ending = asyncio.create_task(worker.ended())  # nobody has killed it
        turns = 0
        while not ending.done():
            await asyncio.sleep(0.01)
            turns += 1
        assert await ending == -signal.SIGKILL
        worker.kill()
        assert await worker.ended() == -signal.SIGKILL
        if turns > 1:
            return
    pytest.fail("nothing else ran")


@pytest.mark.parametrize("encoding", ["", "planes-zstd"])
async def test_a_worker_dequantises_a_long_slice_in_memory_for_a_few_of_its_tokens(
    encoding: str,
) -> None:
    shape = KvShape(tokens=8192, heads=8, width=128)
    lossy = LOSSY_DTYPES["lossy-q8"](shape)
    numbers = np.random.default_rng(1).standard_normal(shape.count, np.float32)
    slice_ = (numbers.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
    quantised = lossy.quantise(slice_[np.newaxis], 0)
    row = quantised
    if encoding:
        row = pack_row(SliceEncoder(encoding, 1).encode_slices(quantised))
    codec = codec_of(encoding) if encoding else SliceCodec.PLAIN
    pool = WorkerPool(1)
    await pool.start()
    try:
        (pid,) = pool.pids
        landed, memory = MemoryFile(row.nbytes), MemoryFile(shape.slice_bytes)
        landed.array()[:] = row.ravel()
        source = pool.share(landed, landed.fd, landed.length_bytes, is_target=False)
        target = pool.share(memory, memory.fd, memory.length_bytes, is_target=True)
        ended: list[JobFailure | None] = []
        job = copy_job(pool.next_number(), source, target)  # which maps both
        pool.submit([PoolJob(job, (source, target), lambda: None, ended.append)])
        await until(lambda: ended == [None], "both are mapped")
        before = resident_bytes(pid, "VmRSS")
        rows = (JobRow(0, 1, row.shape[1], codec, lossy.slice_bytes),)
        job = DecodeJob(
            pool.next_number(), source.number, target.number, 0, rows, dtype_text(lossy)
        )
        pool.submit([PoolJob(job, (source, target), lambda: None, ended.append)])
        await until(lambda: len(ended) == 2, "the slice is dequantised")
        assert ended[1] is None
        expected = np.empty((1, shape.slice_bytes), np.uint8)
        lossy.dequantise(quantised, 0, expected)
        assert np.array_equal(memory.array(), expected[0])
        copies = 2 if encoding else 0  # its symbols, and the plane that they are decoded from
        grown = resident_bytes(pid, "VmHWM") - before
        assert grown < copies * lossy.slice_bytes + 8 * MIB, grown / MIB
    finally:
        await pool.close()
