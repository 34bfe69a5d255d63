"""`python -m benchmarks.rados_store`: the store in RADOS beside bare calls of librados.

On a throwaway Ceph of one OSD on this machine, which shares its cores: the ratios count, not the
rates. Each pair is measured by turns in the same run, on the same objects, at the same depth. Needs
root and Debian's ceph-mon, ceph-mgr and ceph-osd; about a minute.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from ctypes import addressof, byref, c_int, c_size_t, c_void_p

from objectcache_schemas.limits import GIB, KIB, MIB
from objectcache_storage_server.engines.stores.rados.librados import (
    FULL_TRY,
    Cluster,
    RadosPool,
    WriteOperation,
    address_of,
)
from objectcache_storage_server.engines.stores.rados.rados_settings import RadosSettings
from objectcache_storage_server.engines.stores.rados.rados_store import PUT_DEPTH, RadosStore
from objectcache_storage_server.engines.stores.shared_store import ObjectRead
from tests.ceph import CephCluster, ceph_cluster, reason_to_skip

OBJECT_BYTES = 4 * MIB
DEPTH = 8
RECORD_BYTES = 20_000  # of a put of 28 chunks
NAMESPACE = "benchmark"


def soon() -> float:
    """A deadline that nothing here misses."""
    return time.monotonic() + 60


class BareCalls:
    """What the library can do, called with nothing in between."""

    def __init__(self, conf: str, pool: str) -> None:
        self._cluster = Cluster("client.admin", conf, {})
        self._pool = RadosPool(self._cluster, pool, NAMESPACE)
        self._calls = self._pool.calls

    def close(self) -> None:
        self._pool.close()
        self._cluster.close()

    def read(self, count: int, memory: memoryview, range_count: int) -> None:
        """Read objects one after the other, each in so many ranges, `DEPTH` under way."""
        under_way: deque[tuple[c_void_p, object]] = deque()
        for index in range(count):
            if len(under_way) == DEPTH:
                self._wait(*under_way.popleft())
            under_way.append(self._begin_read(index, count, memory, range_count))
        while under_way:
            self._wait(*under_way.popleft())

    def _begin_read(
        self, index: int, count: int, memory: memoryview, range_count: int
    ) -> tuple[c_void_p, object]:
        quick, base, size_bytes = self._calls.quick, address_of(memory), OBJECT_BYTES // range_count
        sizes, codes = (c_size_t * range_count)(), (c_int * range_count)()
        steps, completion = c_void_p(quick.create_read_op()), self._completion()
        for each in range(range_count):
            quick.read_op_read(
                steps,
                each * size_bytes,
                size_bytes,
                base + landing_bytes(index, each, count, range_count),
                addressof(sizes) + each * 8,
                addressof(codes) + each * 4,
            )
        name = b"w/%d" % index
        quick.aio_read_op_operate(steps, self._pool.handle, completion, name, 0)
        quick.release_read_op(steps)
        return completion, (sizes, codes)

    def put(self, name: str, data: bytes) -> None:
        """Write an object."""
        with WriteOperation(self._calls) as steps:
            steps.write_full(data)
            self._write(steps, name)

    def append(self, number: int, data: bytes) -> None:
        """What an append to the log must at least do: compare, write, set."""
        with WriteOperation(self._calls) as steps:
            if number:
                steps.compare_attribute(b"n", b"%d" % number)
            steps.set_attribute(b"n", b"%d" % (number + 1))
            steps.write(data, number * len(data))
            self._write(steps, "bare log")

    def _write(self, steps: WriteOperation, name: str) -> None:
        completion = self._completion()
        self._calls.quick.aio_write_op_operate(
            steps.handle, self._pool.handle, completion, name.encode(), None, FULL_TRY
        )
        self._wait(completion, steps)

    def _completion(self) -> c_void_p:
        completion = c_void_p()
        self._calls.quick.aio_create_completion2(None, None, byref(completion))
        return completion

    def _wait(self, completion: c_void_p, _kept: object) -> None:
        if not self._calls.quick.aio_is_complete(completion):
            self._calls.waiting.aio_wait_for_complete(completion)
        assert self._calls.quick.aio_get_return_value(completion) >= 0
        self._calls.quick.aio_release(completion)


def landing_bytes(index: int, each: int, count: int, range_count: int) -> int:
    """Where range `each` of object `index` lands: ranges of one object lie apart."""
    return (each * count + index) * (OBJECT_BYTES // range_count)


def read_store(store: RadosStore, count: int, memory: memoryview, range_count: int) -> None:
    """As `BareCalls.read`, by the store."""
    size_bytes = OBJECT_BYTES // range_count
    under_way: deque[Future[None]] = deque()
    for index in range(count):
        if len(under_way) == DEPTH:
            under_way.popleft().result()
        reads = []
        for each in range(range_count):
            first = landing_bytes(index, each, count, range_count)
            landing = memory[first : first + size_bytes]
            reads.append(ObjectRead(f"w/{index}", each * size_bytes, landing))
        under_way.append(store.begin_reads(reads, soon()))
    while under_way:
        under_way.popleft().result()


def read_batch(store: RadosStore, count: int, memory: memoryview) -> None:
    """All objects in one batch."""
    reads = [
        ObjectRead(f"w/{index}", 0, memory[index * OBJECT_BYTES :][:OBJECT_BYTES])
        for index in range(count)
    ]
    store.begin_reads(reads, soon()).result()


def timed(work: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    work()
    return time.perf_counter() - begun_s


def side_by_side(rounds: int, **works: Callable[[], object]) -> dict[str, list[float]]:
    """Seconds of each, by turns."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            seconds[name].append(timed(work))
    return seconds


def show_rates(title: str, total_bytes: int, seconds: dict[str, list[float]]) -> None:
    print(f"\n{title}, GiB/s")
    base = statistics.median(next(iter(seconds.values())))
    for name, samples in seconds.items():
        middle = statistics.median(samples)
        best, median = total_bytes / min(samples) / GIB, total_bytes / middle / GIB
        print(f"  {name:<16} best {best:5.2f}  median {median:5.2f}  ratio {base / middle:5.2f}")


def show_times(title: str, seconds: dict[str, list[float]]) -> None:
    print(f"\n{title}, ms")
    base = statistics.median(next(iter(seconds.values())))
    for name, samples in seconds.items():
        p50, p90 = statistics.median(samples), sorted(samples)[len(samples) * 9 // 10]
        times = f"p50 {p50 * 1e3:6.3f}  p90 {p90 * 1e3:6.3f}"
        print(f"  {name:<16} {times}  of the first {p50 / base:.2f}")


def measure(ceph: CephCluster, objects: int, rounds: int) -> None:
    pool = ceph.create_pool()
    settings = RadosSettings(pool, namespace=NAMESPACE, conf=str(ceph.conf))
    store, bare = RadosStore(settings, create=True), BareCalls(str(ceph.conf), pool)
    try:
        measure_objects(store, bare, objects, rounds)
        measure_log(store, bare, 40 * rounds)
    finally:
        bare.close()
        store.close()


def measure_objects(store: RadosStore, bare: BareCalls, objects: int, rounds: int) -> None:
    total_bytes, data = objects * OBJECT_BYTES, os.urandom(OBJECT_BYTES)

    def put_all(put: Callable[[str], None]) -> None:
        with ThreadPoolExecutor(PUT_DEPTH) as threads:
            list(threads.map(put, (f"w/{index}" for index in range(objects))))

    puts = side_by_side(
        max(2, rounds // 2),
        bare=lambda: put_all(lambda name: bare.put(name, data)),
        store=lambda: put_all(lambda name: store.put(name, [memoryview(data)], soon())),
    )
    show_rates(f"puts of 4 MiB, {PUT_DEPTH} at a time", total_bytes, puts)
    memory = memoryview(bytearray(total_bytes))
    reads = side_by_side(
        rounds,
        bare=lambda: bare.read(objects, memory, 1),
        store=lambda: read_store(store, objects, memory, 1),
        one_batch=lambda: read_batch(store, objects, memory),
    )
    assert memory[-OBJECT_BYTES:] == data
    show_rates(f"whole objects of 4 MiB, {DEPTH} at a time", total_bytes, reads)
    ranges = side_by_side(
        rounds,
        bare=lambda: bare.read(objects, memory, 64),
        store=lambda: read_store(store, objects, memory, 64),
    )
    show_rates("the same in 64 ranges each, which lie apart in memory", total_bytes, ranges)


def measure_log(store: RadosStore, bare: BareCalls, records: int) -> None:
    record = os.urandom(RECORD_BYTES)
    numbers = {"bare": 0, "store": store.log_end(0, soon())}

    def append_bare() -> None:
        bare.append(numbers["bare"], record)
        numbers["bare"] += 1

    def append() -> None:
        assert store.append(numbers["store"], record, soon())
        numbers["store"] += 1

    appends = side_by_side(records, bare=append_bare, store=append)
    show_times(f"appends of {RECORD_BYTES // KIB} KiB", appends)
    store.read_log(numbers["store"] - 1, MIB, soon())
    asked = side_by_side(
        records,
        log_end=lambda: store.log_end(0, soon()),
        read_log=lambda: store.read_log(numbers["store"], MIB, soon()),
    )
    show_times("asking whether there is a record", asked)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rados_store")
    parser.add_argument("--quick", action="store_true", help="few objects, few rounds")
    quick = parser.parse_args(arguments).quick
    reason = reason_to_skip()
    if reason:
        sys.exit(reason)
    with ceph_cluster() as ceph:
        measure(ceph, 8 if quick else 56, 2 if quick else 10)


if __name__ == "__main__":
    main(sys.argv[1:])
