"""Workers decode what has landed into memory of others, and are replaced where they die."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from objectcache_encodings.frames import SliceCodec
from objectcache_relay.decoding import worker_pool
from objectcache_relay.decoding.worker_pool import WorkerPool
from objectcache_schemas.errors import DeliveryFailed, NotFound, Unavailable
from tests.fetcher.payloads import DecodedInto, LandedPayload
from tests.servers import stop_whole

BOUND_S = 60.0
pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def pool() -> AsyncIterator[WorkerPool]:
    workers = WorkerPool(2)
    await workers.start()
    try:
        yield workers
    finally:
        await workers.close()


async def until(condition: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < end_s, what
        await asyncio.sleep(0.01)


def maps(pid: int, name: str) -> int:
    """How many mappings of memory files a process has."""
    return Path(f"/proc/{pid}/maps").read_text().count(name)


def stop(pids: list[int]) -> None:
    for pid in pids:
        stop_whole(pid)


async def test_a_mixed_payload_is_decoded_layer_by_layer(pool: WorkerPool) -> None:
    landed = LandedPayload.of()
    into = DecodedInto(pool, landed)
    for layer in range(3):
        into.submit(layer)
    assert pool.queued_bytes == landed.slices.nbytes
    await until(lambda: into.is_over, "all jobs end")
    assert into.failures == []
    assert np.array_equal(into.slices, landed.slices)
    counts = pool.counts
    decoded, wire = dict(counts.decoded_bytes.items()), dict(counts.wire_bytes.items())
    assert decoded == {
        "planes-zstd": 8 * 3 * (48 << 10),
        "plain": 2 * 3 * (48 << 10),
        "planes-deflate": 4 * 3 * (48 << 10),
    }
    assert wire["plain"] == decoded["plain"]
    assert wire["planes-zstd"] < 0.75 * decoded["planes-zstd"]
    assert pool.queued_bytes == 0


async def test_jobs_whose_files_cannot_be_sent_fail_and_the_next_are_done() -> None:
    pool = WorkerPool(1)
    await pool.start()
    try:
        landed = LandedPayload.of(layers=1)
        into = DecodedInto(pool, landed)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)

        def have_no_more_descriptors() -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (1, limits[1]))

        failing = DecodedInto(pool, landed, have_no_more_descriptors)
        try:
            failing.submit(0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert isinstance(failing.failures[0].error, Unavailable)
        assert failing.is_over
        into.submit(0)
        await until(lambda: into.is_over, "all jobs end")
        assert into.failures == []
        assert np.array_equal(into.slices, landed.slices)
    finally:
        await pool.close()


async def test_a_layer_is_shared_by_all_workers(pool: WorkerPool) -> None:
    landed = LandedPayload.of(((64, SliceCodec.PLANES_ZSTD),), layers=1)
    first, second = pool.pids
    into = DecodedInto(pool, landed)
    stop([first])
    into.submit(0)
    await until(lambda: len(into.ended) == into.asked - worker_pool.JOBS_PER_WORKER, "the rest")
    await asyncio.sleep(0.1)
    assert not into.is_over  # what the one that stands still has is nobody else's
    os.kill(first, signal.SIGCONT)
    await until(lambda: into.is_over, "all jobs end")
    assert np.array_equal(into.slices, landed.slices)
    assert pool.pids == [first, second]


async def test_jobs_of_a_worker_that_is_killed_run_once_more_elsewhere(pool: WorkerPool) -> None:
    landed = LandedPayload.of(((64, SliceCodec.PLANES_ZSTD),), layers=1)
    killed, other = pool.pids
    into = DecodedInto(pool, landed)
    stop([killed])
    into.submit(0)
    await until(lambda: len(into.ended) == into.asked - worker_pool.JOBS_PER_WORKER, "the rest")
    os.kill(killed, signal.SIGKILL)
    await until(lambda: into.is_over, "all jobs end")
    assert into.failures == []
    assert np.array_equal(into.slices, landed.slices)
    assert dict(pool.counts.worker_deaths.items()) == {"signal 9": 1}
    await until(lambda: pool.ready_workers == 2, "a new worker comes")
    assert killed not in pool.pids
    assert other in pool.pids


async def test_jobs_of_two_workers_that_were_killed_fail_and_the_next_are_done() -> None:
    pool = WorkerPool(1)
    await pool.start()
    try:
        landed = LandedPayload.of()
        begun: list[int] = []

        def stand_still() -> None:
            begun.append(pool.pids[0])
            if len(set(begun)) <= 2:
                stop(pool.pids)

        into = DecodedInto(pool, landed, stand_still)
        into.submit(0)
        os.kill(begun[0], signal.SIGKILL)
        await until(lambda: len(set(begun)) == 2, "a new worker is sent them")
        os.kill(begun[-1], signal.SIGKILL)
        await until(lambda: into.is_over, "all jobs end")
        assert len(into.failures) == min(into.asked, worker_pool.JOBS_PER_WORKER)
        assert all(isinstance(one.error, DeliveryFailed) for one in into.failures)
        assert pool.queued_bytes == 0
        again = DecodedInto(pool, landed)
        again.submit(1)
        await until(lambda: again.is_over, "all jobs end")
        assert again.failures == []
        assert np.array_equal(again.slices[1], landed.slices[1])
    finally:
        await pool.close()


async def test_a_worker_that_stands_still_is_killed_and_its_jobs_are_done_elsewhere() -> None:
    for timeout_s in (0.3, 3.0, BOUND_S / 3):  # a busy machine may keep the other one for longer
        pool = WorkerPool(2, job_timeout_s=timeout_s)
        await pool.start()
        try:
            landed = LandedPayload.of()
            into = DecodedInto(pool, landed)
            still = pool.pids[0]
            stop([still])
            into.submit(0)
            await until(lambda into=into: into.is_over, "all jobs end")  # type: ignore[misc]
            assert still not in pool.pids
            if into.failures == []:
                return
        finally:
            await pool.close()
    pytest.fail("the jobs were not done elsewhere")


async def test_a_changed_byte_fails_its_job_with_the_slice_and_no_other(pool: WorkerPool) -> None:
    runs = [(1, SliceCodec.PLANES_ZSTD)] * 3 + [(4, SliceCodec.PLANES_ZSTD)]
    landed, good = LandedPayload.of(runs), LandedPayload.of(runs)
    row = list(landed.directory.rows(1))[3]
    landed.file.array()[row.offset_bytes + 1 * row.pitch_bytes + 5000] ^= 1
    into, other = DecodedInto(pool, landed), DecodedInto(pool, good)
    into.submit(1)
    other.submit(1)
    await until(lambda: into.is_over and other.is_over, "all jobs end")
    (failure,) = into.failures
    assert failure.slice_index == 4  # of the job that the rows share
    assert "does not match" in failure.damage
    assert other.failures == []
    assert np.array_equal(other.slices[1], good.slices[1])


async def test_what_is_in_the_way_is_looked_at_before_each_job(pool: WorkerPool) -> None:
    landed = LandedPayload.of()
    closed = NotFound("it is gone", code="NoSuchTarget")

    def refuse() -> None:
        raise closed

    into = DecodedInto(pool, landed, refuse)
    into.submit(0)
    await until(lambda: into.is_over, "all jobs end")
    assert [failure.error for failure in into.failures] == [closed] * into.asked
    assert not into.slices.any()


async def decode_and_look(pool: WorkerPool) -> None:
    into = DecodedInto(pool, LandedPayload.of())
    into.submit(0)
    await until(lambda: into.is_over, "all jobs end")
    assert max(maps(pid, "memfd:objectcache") for pid in pool.pids) == 2


async def test_memory_that_is_gone_is_mapped_by_no_worker(pool: WorkerPool) -> None:
    await decode_and_look(pool)
    gc.collect()
    await until(
        lambda: all(maps(pid, "memfd:objectcache") == 0 for pid in pool.pids), "it is unmapped"
    )


async def test_workers_are_pinned_in_turn() -> None:
    cpus = sorted(os.sched_getaffinity(0))[:2]
    pool = WorkerPool(3, cpus)
    await pool.start()
    try:
        pinned = [os.sched_getaffinity(pid) for pid in pool.pids]
        assert pinned == [{cpus[number % len(cpus)]} for number in range(3)]
    finally:
        await pool.close()


async def test_where_no_worker_stays_alive_jobs_fail(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pool, "NO_WORKER_DEATHS", 1)
    landed = LandedPayload.of()
    into = DecodedInto(pool, landed)
    monkeypatch.setattr("objectcache_relay.decoding.worker_process.MODULE", "there.is.none")
    stop(pool.pids)
    into.submit(0)
    for pid in pool.pids:
        os.kill(pid, signal.SIGKILL)
    await until(lambda: into.is_over, "all jobs end")
    assert {type(failure.error) for failure in into.failures} <= {Unavailable, DeliveryFailed}
    assert len(into.failures) == into.asked
    monkeypatch.setattr(worker_pool, "START_S", 0.5)
    with pytest.raises(Unavailable, match="were to be ready"):
        await WorkerPool(1).start()


PARENT = """
import asyncio, sys
from objectcache_relay.decoding.worker_pool import WorkerPool

async def main():
    pool = WorkerPool(2)
    await pool.start()
    print(*pool.pids, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_workers_end_with_their_parent_also_where_they_stand_still() -> None:
    command = [sys.executable, "-c", PARENT]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE)  # noqa: ASYNC220
    assert parent.stdout is not None
    with parent.stdout:
        pids = [int(one) for one in parent.stdout.readline().split()]
        assert len(pids) == 2
        stop(pids[:1])
        for pid in pids:
            os.kill(pid, signal.SIGTERM)  # is the parent's business
        parent.kill()
        parent.wait()
    await until(lambda: not any(is_running(pid) for pid in pids), "the workers end")


def is_running(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
