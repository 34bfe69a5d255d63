"""Cold deliveries, straight off the device, against its sequential rate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import NamedTuple, Protocol

from benchmarks.basis.bench import Bench
from benchmarks.basis.measure import DEVICE_READ_BYTES_PER_S, Row, Samples, device_read_bytes, rates
from benchmarks.basis.prefix import MLA_TOKEN_BYTES, Geometry, check_delivery, fill_chunks
from benchmarks.basis.store import Store, data_file
from benchmarks.machine.device import device_reads
from objectcache import KvBucket, SharedMemoryTarget
from objectcache_schemas.limits import GIB, MIB
from objectcache_storage_server.engines.local.direct.alignment import split_at
from objectcache_storage_server.engines.local.volumes.volume import IoPath, Transfer

DIRECT = 0  # page_cache_bytes
SETTINGS = f"storage.page_cache_bytes={DIRECT}"
GOALS = {64: 0.9, 18: 0.85}  # of the device's rate, by KiB of a slice at G=16
SAME_RATE = 0.95  # of the rate at G=256
THREADS, BATCH_BYTES, PIECE_BYTES = 2, 8 * MIB, 1 * MIB  # of reading in order
IN_ORDER = "limit: read, the direct path alone, 1m x 8 in 2 threads"
IN_PROCESS, SERVED = "in process", "served into shared memory"
DEFAULT = "in process, default budget, none of it in memory"


def measure_cold(bench: Bench) -> Iterator[Row]:
    """Rows for slices of a large and of a small model, in chunks of 16 and of 256 tokens."""
    chunk_count = bench.scale.chunk_count
    for small in (Geometry(16, chunk_count), Geometry(16, chunk_count, MLA_TOKEN_BYTES)):
        yield from _measure(bench, small, small.in_chunks_of(256))


def _measure(bench: Bench, small: Geometry, large: Geometry) -> Iterator[Row]:
    with ExitStack() as stack:
        server = stack.enter_context(bench.server(SETTINGS))
        client = stack.enter_context(server.client())
        target = client.shared_memory_target(small.payload_bytes)
        stack.callback(target.close)
        samples = Samples()
        works: list[_Deliveries] = []
        for geometry in (small, large):
            store = stack.enter_context(bench.store(page_cache_bytes=DIRECT))
            name = f"cold-{geometry.chunk_tokens}"
            bucket = client.kv_bucket(name, geometry.layout(), create=True)
            _put(geometry, store, bucket, target)
            works.append(_Deliveries(geometry, store, bucket, target))
        budgeted = stack.enter_context(bench.store())
        by_default = _ByDefault(small, budgeted, target)
        limit = device_reads(
            data_file(works[0].store.folder, 0),
            small.payload_bytes,
            is_quick=bench.scale.is_quick,
        )
        in_order = InOrder(works[0].store, target.array.data)
        turns: list[_Turn] = [limit, in_order, by_default, *works]
        for number in range(bench.scale.rounds):
            for turn in range(len(turns)):  # another one first each time
                turns[(number + turn) % len(turns)].take(samples)
        best = min(limit.best(samples), IN_ORDER, key=samples.median_s)
        limits = _Limits(best, limit.best_of_fio(samples))
        yield from _rows(samples, small, large, limits, works[0].store)
        yield _default_row(samples, by_default, limits.fastest)


def _put(geometry: Geometry, store: Store, bucket: KvBucket, target: SharedMemoryTarget) -> None:
    keys = geometry.keys()
    fill_chunks(target.chunks(geometry.chunk_count, geometry.layout()), geometry, keys)
    store.put(geometry, keys, target.array.data)
    bucket.put(keys, target.chunks(geometry.chunk_count, geometry.layout()))
    store.check(geometry, keys, target.array.data)
    check_delivery(bucket, geometry, keys, "shared_memory")


class InOrder:
    """The volume's direct path alone, from begin to end by two threads, into the target.

    A limit beside the device's, and often the tighter one: the same memory is written to, and the
    same kind of request asks for it.
    """

    def __init__(self, store: Store, memory: memoryview) -> None:
        self._volume = store.engine.volume
        self._batches: list[list[Transfer]] = []
        begin = 0
        for run in store.ranges():
            for offset_bytes, length_bytes in split_at(*run, BATCH_BYTES):
                end = begin + length_bytes
                self._batches.append(_batch(offset_bytes, memory[begin:end]))
                begin = end

    def take(self, samples: Samples) -> None:
        """Read everything once."""
        samples.take(IN_ORDER, self._read)

    def _read(self) -> None:
        shares = [self._batches[first::THREADS] for first in range(THREADS)]
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(self._read_share, shares))

    def _read_share(self, share: Sequence[Sequence[Transfer]]) -> None:
        for batch in share:
            self._volume.read(batch, IoPath.DIRECT)


def _batch(offset_bytes: int, memory: memoryview) -> list[Transfer]:
    return [
        Transfer(offset_bytes + begin, memory[begin : begin + PIECE_BYTES])
        for begin in range(0, len(memory), PIECE_BYTES)
    ]


class _Deliveries:
    """The same prefix, in process and served."""

    def __init__(
        self, geometry: Geometry, store: Store, bucket: KvBucket, target: SharedMemoryTarget
    ) -> None:
        self.geometry = geometry
        self.store = store
        self._bucket = bucket
        self._target = target
        self._keys = geometry.keys()
        self._ways = [(IN_PROCESS, self._in_process), (SERVED, self._served)]

    def take(self, samples: Samples) -> None:
        """Deliver once each way, another one first each time."""
        for way, deliver in self._ways:
            samples.take(f"{way}, {self.geometry}", deliver)
        self._ways.reverse()

    def _in_process(self) -> None:
        self.store.deliver(self.geometry, self._keys, self._target.array.data)

    def _served(self) -> None:
        with self._bucket.fetch(
            self._keys, delivery="layerwise", transport="shared_memory", target=self._target
        ) as delivery:
            delivery.wait()


class _ByDefault:
    """A prefix on the page-cache path of the default budget, with nothing of it in memory."""

    def __init__(self, geometry: Geometry, store: Store, target: SharedMemoryTarget) -> None:
        self.geometry = geometry
        self.store = store
        # Of each delivery. What is asked of the page cache starts the kernel's readahead, so that
        # some is found there after all, and the device reads more than the payload.
        self.found: list[dict[str, int]] = []
        self._memory = target.array.data
        self._keys = geometry.keys()
        fill_chunks(target.chunks(geometry.chunk_count, geometry.layout()), geometry, self._keys)
        store.put(geometry, self._keys, self._memory)
        store.check(geometry, self._keys, self._memory)
        store.forget_cached()

    def take(self, samples: Samples) -> None:
        """Deliver once; what it leaves for upkeep to read is not left to the next one's time."""
        self.store.forget_cached()
        hit_bytes, device_bytes = self.store.hit_bytes(), device_read_bytes()
        samples.take(DEFAULT, lambda: self.store.deliver(self.geometry, self._keys, self._memory))
        self.found.append(
            {
                "counted_hit_bytes": self.store.hit_bytes() - hit_bytes,
                "device_bytes": device_read_bytes() - device_bytes,
            }
        )
        self.store.forget_cached()


class _Turn(Protocol):
    """What is measured in turn with the others."""

    def take(self, samples: Samples) -> None:
        """Measure once."""
        ...


class _Limits(NamedTuple):
    """Names of what deliveries are measured by."""

    fastest: str
    fio: str | None  # its fastest shape


def _rows(
    samples: Samples, small: Geometry, large: Geometry, limits: _Limits, store: Store
) -> Iterator[Row]:
    def row(name: str, ratio_of: str, goal: str = "", shown: str = "") -> Row:
        return _row(samples, small, name, ratio_of, goal, shown, store)

    goal = _goal(small)
    for way in (IN_PROCESS, SERVED):
        ours, of_large = f"{way}, {small}", f"{way}, {large}"
        yield row(ours, limits.fastest, goal)
        if limits.fio is not None:
            yield row(ours, limits.fio, shown=f"{ours}, against fio")
        yield row(of_large, limits.fastest)
        yield row(ours, of_large, f"at least {SAME_RATE}", f"{ours}, against {large}")
    for name in samples.seconds:
        if name.startswith("limit"):
            yield row(name, limits.fastest)


def _default_row(samples: Samples, by_default: _ByDefault, limit: str) -> Row:
    geometry, store = by_default.geometry, by_default.store
    shown = f"{DEFAULT}, {geometry}"
    row = _row(samples, geometry, DEFAULT, limit, _goal(geometry), shown, store)
    budget = {
        "deliveries": by_default.found,
        "page_cache_path_bytes": store.engine.holdings.resident_bytes,
    }
    return replace(row, details=row.details | budget)


def _goal(small: Geometry) -> str:
    return f"at least {GOALS[small.slice_bytes >> 10]}"


def _row(
    samples: Samples,
    small: Geometry,
    name: str,
    ratio_of: str,
    goal: str,
    shown: str,
    store: Store,
) -> Row:
    size = f"{small.payload_bytes / MIB:.0f} MiB"
    return Row(
        group=f"Cold deliveries, layerwise, of {size} by one put, S={small.slice_bytes >> 10} KiB",
        name=shown or name,
        unit="GiB/s",
        samples=rates(samples.seconds[name], small.payload_bytes),
        ratio=samples.median_s(ratio_of) / samples.median_s(name),
        ratio_of=ratio_of,
        goal=goal,
        by_hand=f"a device of {DEVICE_READ_BYTES_PER_S / GIB:.0f} GiB/s",
        details={
            "payload_bytes": small.payload_bytes,
            "direct_io": store.engine.volume.device_path,
        },
        settings=SETTINGS if name.startswith((IN_PROCESS, SERVED)) and name != DEFAULT else "",
    )
