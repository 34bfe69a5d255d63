"""Cold deliveries, straight off the device, against its sequential rate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from benchmarks.bench import Bench
from benchmarks.device import DeviceLimit, device_reads
from benchmarks.measure import DEVICE_READ_BYTES_PER_S, Row, Samples, rates
from benchmarks.prefix import MLA_TOKEN_BYTES, Geometry, check_delivery, fill_chunks
from benchmarks.store import Store, data_file
from objectcache import KvBucket, SharedMemoryTarget
from objectcache_schemas.limits import GIB, MIB
from objectcache_storage_server.engines.local.direct.alignment import split_at
from objectcache_storage_server.engines.local.volumes.volume import Path, Transfer

DIRECT = 0  # page_cache_bytes
GOALS = {64: 0.9, 18: 0.85}  # of the device's rate, by KiB of a slice at G=16
SAME_RATE = 0.95  # of the rate at G=256
THREADS, BATCH_BYTES, PIECE_BYTES = 2, 8 * MIB, 1 * MIB  # of reading in order
IN_ORDER = "limit: read, the direct path alone, 1m x 8 in 2 threads"
IN_PROCESS, SERVED = "in process", "served into shared memory"


def measure_cold(bench: Bench) -> Iterator[Row]:
    """Rows for slices of a large and of a small model, in chunks of 16 and of 256 tokens."""
    chunk_count = bench.scale.chunk_count
    for small in (Geometry(16, chunk_count), Geometry(16, chunk_count, MLA_TOKEN_BYTES)):
        yield from _measure(bench, small, small.in_chunks_of(256))


def _measure(bench: Bench, small: Geometry, large: Geometry) -> Iterator[Row]:
    with ExitStack() as stack:
        setting = f"storage.page_cache_bytes={DIRECT}"
        server = stack.enter_context(bench.server(setting))
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
        limit = device_reads(
            data_file(works[0].store.folder, 0),
            small.payload_bytes,
            is_quick=bench.scale.is_quick,
        )
        in_order = InOrder(works[0].store, target.array.data)
        turns: list[DeviceLimit | InOrder | _Deliveries] = [limit, in_order, *works]
        for number in range(bench.scale.rounds):
            for turn in range(len(turns)):  # another one first each time
                turns[(number + turn) % len(turns)].take(samples)
        best = min(limit.best(samples), IN_ORDER, key=samples.median_s)
        yield from _rows(samples, small, large, best, works[0].store)


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
            self._volume.read(batch, Path.DIRECT)


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


def _rows(
    samples: Samples, small: Geometry, large: Geometry, limit: str, store: Store
) -> Iterator[Row]:
    size = f"{small.payload_bytes / MIB:.0f} MiB"
    group = f"Cold deliveries, layerwise, of {size} by one put, S={small.slice_bytes >> 10} KiB"
    direct = store.engine.volume.device_path

    def row(name: str, ratio_of: str, goal: str = "", shown: str = "") -> Row:
        return Row(
            group=group,
            name=shown or name,
            unit="GiB/s",
            samples=rates(samples.seconds[name], small.payload_bytes),
            ratio=samples.median_s(ratio_of) / samples.median_s(name),
            ratio_of=ratio_of,
            goal=goal,
            by_hand=f"a device of {DEVICE_READ_BYTES_PER_S / GIB:.0f} GiB/s",
            details={"payload_bytes": small.payload_bytes, "direct_io": direct},
        )

    goal = GOALS[small.slice_bytes >> 10]
    for way in (IN_PROCESS, SERVED):
        ours, of_large = f"{way}, {small}", f"{way}, {large}"
        yield row(ours, limit, f"at least {goal}")
        yield row(of_large, limit)
        yield row(ours, of_large, f"at least {SAME_RATE}", f"{ours}, against {large}")
    for name in samples.seconds:
        if name.startswith("limit"):
            yield row(name, limit)
