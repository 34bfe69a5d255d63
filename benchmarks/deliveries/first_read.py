"""The first read of what was just put, with default settings: nothing comes between the two."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

from benchmarks.basis.bench import Bench
from benchmarks.basis.measure import COPY_BYTES_PER_S_PER_THREAD, Row, Samples, rates
from benchmarks.basis.prefix import MLA_TOKEN_BYTES, Geometry, check_delivery, fill_chunks
from benchmarks.basis.server import Server
from benchmarks.basis.store import BUCKET, Store
from benchmarks.deliveries.cold import IN_ORDER, IN_PROCESS, SERVED, InOrder
from benchmarks.deliveries.warm import COPY, GOALS
from benchmarks.machine.page_cache_copy import PageCacheCopy
from objectcache import Client, KvBucket
from objectcache_schemas.limits import GIB, MIB
from objectcache_schemas.records import Verification

VERIFICATIONS = (Verification.SAMPLED, Verification.FULL)


def measure_first_reads(bench: Bench) -> Iterator[Row]:
    """Rows for slices of a large and of a small model, in process and served."""
    chunk_count = bench.scale.chunk_count
    for geometry in (Geometry(16, chunk_count), Geometry(16, chunk_count, MLA_TOKEN_BYTES)):
        with bench.server() as server, server.client() as client, bench.store() as store:
            reads = _FirstReads(server, client, store, geometry)
            samples = Samples()
            for number in range(bench.scale.rounds + 1):
                reads.take(samples if number else Samples(), number)
            reads.close()
        yield from _rows(samples, geometry, reads.found)


class _FirstReads:
    """Puts a prefix under keys of its own each time, and reads it."""

    def __init__(self, server: Server, client: Client, store: Store, geometry: Geometry) -> None:
        self.found: dict[str, list[int]] = {}  # bytes of each read that were in memory
        self._server = server
        self._store = store
        self._geometry = geometry
        self._bucket: KvBucket = client.kv_bucket("first", geometry.layout(), create=True)
        self._source = client.shared_memory_target(geometry.payload_bytes)
        self._target = client.shared_memory_target(geometry.payload_bytes)
        self._chunks = self._source.chunks(geometry.chunk_count, geometry.layout())
        self._check()

    def _check(self) -> None:
        """Each way once, with bytes that are those of their keys."""
        keys = self._geometry.keys()
        fill_chunks(self._chunks, self._geometry, keys)
        self._store.put(self._geometry, keys, self._source.array.data)
        self._store.check(self._geometry, keys, self._target.array.data)
        self._bucket.put(keys, self._chunks, transport="shared_memory")
        check_delivery(self._bucket, self._geometry, keys, "shared_memory")
        self._delete(keys)

    def take(self, samples: Samples, number: int) -> None:
        """Each way once, and the limits; which verification comes first changes."""
        for index, verification in enumerate(VERIFICATIONS[:: 1 if number % 2 else -1]):
            keys = self._geometry.keys(series=1 + number * len(VERIFICATIONS) + index)
            self._in_process(samples, keys, verification)
            self._served(samples, keys, verification)
            self._delete(keys)

    def _in_process(self, samples: Samples, keys: list[str], verification: Verification) -> None:
        store, memory, name = self._store, self._target.array.data, _name(IN_PROCESS, verification)
        store.verify(verification)
        store.put(self._geometry, keys, self._source.array.data)
        before_bytes = store.hit_bytes()
        samples.take(name, lambda: store.deliver(self._geometry, keys, memory))
        self.found.setdefault(name, []).append(store.hit_bytes() - before_bytes)
        InOrder(store, memory).take(samples)
        with ExitStack() as stack:
            samples.take(COPY, PageCacheCopy(store.runs(), memory, stack).into_target)

    def _served(self, samples: Samples, keys: list[str], verification: Verification) -> None:
        self._server.verify(self._bucket.name, verification)
        self._bucket.put(keys, self._chunks, transport="shared_memory")
        samples.take(_name(SERVED, verification), lambda: self._fetch(keys))

    def _fetch(self, keys: list[str]) -> None:
        with self._bucket.fetch(
            keys, delivery="layerwise", transport="shared_memory", target=self._target
        ) as delivery:
            delivery.wait()

    def _delete(self, keys: list[str]) -> None:
        self._store.engine.delete(BUCKET, keys)
        self._server.delete(self._bucket.name, keys)

    def close(self) -> None:
        """Let the targets go."""
        self._source.close()
        self._target.close()


def _name(way: str, verification: Verification) -> str:
    return f"{way}, verification {verification.value}"


def _rows(samples: Samples, geometry: Geometry, found: dict[str, list[int]]) -> Iterator[Row]:
    goals = {
        _name(way, verification): f"at least {GOALS[verification]}"
        for way in (IN_PROCESS, SERVED)
        for verification in VERIFICATIONS
    }
    settings = {
        _name(way, Verification.SAMPLED): "the bucket's verification sampled"
        for way in (IN_PROCESS, SERVED)
    }
    shown = [(name, COPY, name) for name in samples.seconds]
    shown += [(name, IN_ORDER, f"{name}, against the device") for name in goals]
    for name, limit, text in shown:
        yield Row(
            group=f"First read after a put of {geometry.payload_bytes / MIB:.0f} MiB, {geometry}",
            name=text,
            unit="GiB/s",
            samples=rates(samples.seconds[name], geometry.payload_bytes),
            ratio=samples.median_s(limit) / samples.median_s(name),
            ratio_of=limit,
            goal=goals.get(name, "") if limit == COPY else "",
            by_hand=f"2 threads x {COPY_BYTES_PER_S_PER_THREAD / GIB:.0f} GiB/s",
            settings=settings.get(name, ""),
            details={"payload_bytes": geometry.payload_bytes, "hit_bytes": found.get(name, [])},
        )
