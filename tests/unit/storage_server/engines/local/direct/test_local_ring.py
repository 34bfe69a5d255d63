"""io_uring by its system calls."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from objectcache_storage_server.engines.local.direct import ring as ring_module
from objectcache_storage_server.engines.local.direct.batches import address_of
from objectcache_storage_server.engines.local.direct.ring import (
    OP_READ,
    OP_WRITE,
    SQE128_DTYPE,
    SQE_DTYPE,
    Ring,
    Sqes,
)

PAGE = 4096


def make_ring(entries: int = 8, *, sqe128: bool = False, cqe32: bool = False) -> Ring:
    try:
        return Ring(entries, sqe128=sqe128, cqe32=cqe32)
    except OSError as error:
        pytest.skip(f"no such io_uring here: {error}")


@pytest.fixture
def ring() -> Iterator[Ring]:
    made = make_ring()
    yield made
    made.close()


@pytest.fixture
def file_descriptor(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "file").write_bytes(bytes(i % 251 for i in range(100 * PAGE)))
    opened = os.open(tmp_path / "file", os.O_RDWR)
    yield opened
    os.close(opened)


def reads(ring: Ring, file_descriptor: int, offsets: list[int], memory: memoryview) -> Sqes:
    """Reads of a page at each offset into page after page of `memory`."""
    sqes = ring.prepare(len(offsets))
    sqes["opcode"], sqes["fd"], sqes["len"] = OP_READ, file_descriptor, PAGE
    sqes["off"] = offsets
    sqes["addr"] = address_of(memory) + PAGE * np.arange(len(offsets), dtype=np.uint64)
    return sqes


def test_entries_have_the_sizes_that_the_kernel_expects() -> None:
    assert SQE_DTYPE.itemsize == 64
    assert SQE128_DTYPE.itemsize == 128
    assert SQE128_DTYPE.fields is not None
    assert SQE128_DTYPE.fields["cmd"][1] == 48


@pytest.mark.parametrize("count", [0, 1, 8, 9, 100])
def test_any_number_of_entries_completes_in_their_order(
    ring: Ring, file_descriptor: int, count: int
) -> None:
    memory = memoryview(mmap.mmap(-1, 100 * PAGE))
    offsets = [PAGE * (i * 37 % 100) for i in range(count)]
    for _ in range(3):  # the counters of the queues pass their end
        results = ring.run(reads(ring, file_descriptor, offsets, memory))
        assert results.tolist() == [PAGE] * count
    for i, offset in enumerate(offsets):
        expected = os.pread(file_descriptor, PAGE, offset)
        assert memory[i * PAGE : (i + 1) * PAGE] == expected


def test_each_entry_has_its_own_result(ring: Ring, file_descriptor: int) -> None:
    memory = memoryview(mmap.mmap(-1, 4 * PAGE))
    sqes = reads(ring, file_descriptor, [0, PAGE, 99 * PAGE + 96, 100 * PAGE], memory)
    sqes["fd"][1] = -1
    assert ring.run(sqes).tolist() == [PAGE, -errno.EBADF, PAGE - 96, 0]


def test_a_write_is_seen_by_a_read(ring: Ring, file_descriptor: int) -> None:
    memory = memoryview(mmap.mmap(-1, PAGE))
    memory[:] = b"w" * PAGE
    sqes = reads(ring, file_descriptor, [PAGE], memory)
    sqes["opcode"] = OP_WRITE
    assert ring.run(sqes).tolist() == [PAGE]
    assert os.pread(file_descriptor, PAGE, PAGE) == b"w" * PAGE


@pytest.mark.parametrize(("sqe128", "cqe32"), [(True, False), (False, True), (True, True)])
def test_large_entries_and_completions_work_like_small_ones(
    file_descriptor: int, sqe128: bool, cqe32: bool
) -> None:
    ring = make_ring(4, sqe128=sqe128, cqe32=cqe32)
    memory = memoryview(mmap.mmap(-1, 30 * PAGE))
    sqes = reads(ring, file_descriptor, [PAGE * i for i in range(30)], memory)
    assert ring.run(sqes).tolist() == [PAGE] * 30
    assert bytes(memory) == os.pread(file_descriptor, 30 * PAGE, 0)
    ring.close()


def test_an_older_kernel_s_ring_does_the_same(
    file_descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_ring().close()
    monkeypatch.setattr(ring_module, "_SETUP_PREFERRED", 1 << 31)  # which no kernel knows
    monkeypatch.setattr(ring_module, "_FEATURE_SINGLE_MMAP", 0)  # so both queues are mapped
    ring = make_ring()
    memory = memoryview(mmap.mmap(-1, 20 * PAGE))
    sqes = reads(ring, file_descriptor, [PAGE * i for i in range(20)], memory)
    assert ring.run(sqes).tolist() == [PAGE] * 20
    ring.close()


def test_a_run_that_is_interrupted_waits_for_what_is_in_flight(
    ring: Ring, file_descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = memoryview(mmap.mmap(-1, 20 * PAGE))
    enter = ring_module._system_enter
    calls = 0

    def interrupted(descriptor: int, submit: int, wait_for: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        enter(descriptor, submit, 0 if calls == 1 else wait_for)

    monkeypatch.setattr(ring_module, "_system_enter", interrupted)
    sqes = reads(ring, file_descriptor, [PAGE * i for i in range(20)], memory)
    with pytest.raises(KeyboardInterrupt):
        ring.run(sqes)
    monkeypatch.undo()
    assert ring.run(sqes).tolist() == [PAGE] * 20


def test_a_kernel_out_of_requests_is_waited_for_while_some_are_in_flight(
    ring: Ring, file_descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = memoryview(mmap.mmap(-1, 20 * PAGE))
    pipe_read, pipe_write = os.pipe()
    enter = ring_module._system_enter
    calls = 0

    def short_of_requests(descriptor: int, submit: int, wait_for: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            enter(descriptor, min(submit, 1), 0)  # takes a part of what is queued
        elif calls == 2:
            os.write(pipe_write, b"late")
            raise BlockingIOError(errno.EAGAIN, "out of requests")
        else:
            enter(descriptor, submit, wait_for)

    monkeypatch.setattr(ring_module, "_system_enter", short_of_requests)
    sqes = reads(ring, file_descriptor, [PAGE * i for i in range(20)], memory)
    sqes["fd"][0] = pipe_read
    assert ring.run(sqes).tolist() == [4] + [PAGE] * 19
    os.close(pipe_read)
    os.close(pipe_write)


def test_a_kernel_that_takes_nothing_is_an_error(
    ring: Ring, file_descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, submit: int, wait_for: int) -> None:
        raise BlockingIOError(errno.EAGAIN, "out of requests")

    memory = memoryview(mmap.mmap(-1, 2 * PAGE))
    sqes = reads(ring, file_descriptor, [0, PAGE], memory)
    monkeypatch.setattr(ring_module, "_system_enter", refuse)
    with pytest.raises(BlockingIOError):
        ring.run(sqes)
    monkeypatch.undo()
    assert ring.run(sqes).tolist() == [PAGE] * 2


def test_a_ring_that_the_kernel_refuses_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_module, "_SYS_SETUP", 100_000)
    with pytest.raises(OSError, match="io_uring_setup") as raised:
        Ring(8)
    assert raised.value.errno == errno.ENOSYS


def test_closing_releases_the_descriptor_and_may_be_repeated() -> None:
    gc.collect()  # so that what other tests left does not close meanwhile
    before = len(os.listdir("/proc/self/fd"))
    ring = make_ring()
    assert len(os.listdir("/proc/self/fd")) > before
    ring.close()
    ring.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert repr(ring) == "<Ring closed>"
    with pytest.raises(AssertionError):
        ring.run(ring.prepare(1))


def test_a_ring_goes_with_its_last_reference() -> None:
    gc.collect()  # so that what other tests left does not close meanwhile
    before = len(os.listdir("/proc/self/fd"))
    ring = make_ring()
    reference = weakref.ref(ring)
    del ring
    assert reference() is None
    assert len(os.listdir("/proc/self/fd")) == before


def test_threads_have_rings_of_their_own(file_descriptor: int) -> None:
    make_ring().close()
    outcomes: list[bool] = []

    def read_much() -> None:
        ring = make_ring()
        memory = memoryview(mmap.mmap(-1, 100 * PAGE))
        sqes = reads(ring, file_descriptor, [PAGE * i for i in range(100)], memory)
        results = [ring.run(sqes).tolist() for _ in range(20)]
        outcomes.append(results == [[PAGE] * 100] * 20)
        ring.close()

    threads = [threading.Thread(target=read_much) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [True] * 4
