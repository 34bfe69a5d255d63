"""`python -m benchmarks.shared_engine`: the shared engine beside bare reads of its store's objects.

    python -m benchmarks.shared_engine                       a throwaway Ceph of one OSD
    python -m benchmarks.shared_engine --store file:///DIR   a store by its address, which is made

A prefix is put layer by layer and chunk by chunk, and read layer by layer into one memory, with as
many batches under way as the store wants, in two threads; beside it the same objects are read
whole, in the same way and by turns. Where client and store share this machine's cores the ratios
count, not the rates. About a minute, and `--chunks` x 4 MiB of the store's space.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from objectcache_runtime.settings import load_settings
from objectcache_schemas.descriptor import DeliveryMode
from objectcache_schemas.limits import GIB, KIB, MIB
from objectcache_schemas.records import BucketInfo, BucketPolicy, Condition, Verification
from objectcache_storage_server.deliveries.plan import ChunkPlan
from objectcache_storage_server.engines.base import Engine, PrefixShape, StagedPut
from objectcache_storage_server.engines.open_engine import open_engine
from objectcache_storage_server.engines.shared.engine import SharedEngine
from objectcache_storage_server.engines.stores.open_store import create_store
from objectcache_storage_server.engines.stores.shared_store import ObjectRead
from objectcache_storage_server.scheduling.fragments import Fragment
from tests.ceph import ceph_cluster, reason_to_skip

LAYERS, SLICE_BYTES = 32, 64 * KIB
RECEIVED_BYTES = 2 * MIB  # that a server receives of a put before it writes them
FRAGMENT_BYTES = 4 * MIB
THREADS = 2
BUCKET = BucketInfo(name="kv", owner="root", region="", created_s=0.0)

Finish = Callable[[], None]


class Sample(NamedTuple):
    """One run."""

    wall_s: float
    processor_s: float  # of this process


def timed(work: Callable[[], object]) -> Sample:
    wall_s, processor_s = time.perf_counter(), time.process_time()
    work()
    return Sample(time.perf_counter() - wall_s, time.process_time() - processor_s)


def pipelined(begins: Sequence[Callable[[], Finish]], depth: int) -> None:
    """Begin all, at most `depth` of them under way, and finish each in the thread that began it."""

    def run(own: Sequence[Callable[[], Finish]]) -> None:
        under_way: deque[Finish] = deque()
        for begin in own:
            if len(under_way) == max(1, depth // THREADS):
                under_way.popleft()()
            under_way.append(begin())
        while under_way:
            under_way.popleft()()

    threads = [
        threading.Thread(target=run, args=(begins[number::THREADS],)) for number in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Prefix:
    """The chunks of one put, and how they are read."""

    def __init__(self, engine: Engine, name: str, chunk_count: int) -> None:
        self.engine = engine
        self.keys = [f"{name}-{number:06}" for number in range(chunk_count)]
        self.total_bytes = chunk_count * LAYERS * SLICE_BYTES

    def put(self, *, layerwise: bool) -> None:
        """Store it, as it comes over a socket."""
        shape = PrefixShape(self.keys, LAYERS, SLICE_BYTES, layerwise)
        received = memoryview(os.urandom(RECEIVED_BYTES))
        prefix = self.engine.stage_prefix(BUCKET.name, shape)
        for position in range(0, shape.total_bytes, RECEIVED_BYTES):
            prefix.write(position, received[: shape.total_bytes - position])
        puts = [StagedPut(staged, "") for staged in prefix.staged]
        self.engine.commit(puts, Condition(immutable=True))

    def read(self, memory: memoryview) -> None:
        """All layers, in order."""
        with self.engine.open_many(BUCKET.name, self.keys, are_prefix=True) as opened:
            plan = ChunkPlan(
                opened.placements(), SLICE_BYTES, 0, LAYERS, DeliveryMode.LAYERWISE, FRAGMENT_BYTES
            )

            def begin(fragment: Fragment) -> Finish:
                begin_bytes = fragment.offset_bytes
                landing = memory[begin_bytes : begin_bytes + fragment.length_bytes]
                return opened.begin_reads(plan.reads(fragment), landing).finish

            begins = [partial(begin, fragment) for fragment in plan.fragments()]
            pipelined(begins, self.engine.capabilities.queue_depth)

    def read_bare(self, memory: memoryview) -> None:
        """The same objects of the store, whole."""
        assert isinstance(self.engine, SharedEngine)
        store, deadline_s = self.engine.store, time.monotonic() + 600
        with self.engine.catalog.reading() as view:
            versions = view.versions(view.bucket(BUCKET.name).number, self.keys)
            names = {name for version in versions.values() for name in version.extents}
            shapes = view.shapes(names)
        wanted: list[ObjectRead] = []
        position = 0
        for name, shape in sorted(shapes.items()):
            for piece in range(shape.object_count):
                left_bytes = shape.size_bytes - piece * shape.object_bytes
                landing = memory[position:][: min(shape.object_bytes, left_bytes)]
                wanted.append(ObjectRead(name.object_name(piece), 0, landing))
                position += len(landing)

        def begin(read: ObjectRead) -> Finish:
            return store.begin_reads([read], deadline_s).result

        pipelined([partial(begin, read) for read in wanted], self.engine.capabilities.queue_depth)


def show(name: str, total_bytes: int, samples: Sequence[Sample], base_s: float | None) -> float:
    """A line of results; returns the median time."""
    walls = [sample.wall_s for sample in samples]
    median_s = statistics.median(walls)
    processor_ms = min(sample.processor_s for sample in samples) * 1e3 / (total_bytes / MIB)
    best, median = (total_bytes / GIB / wall_s for wall_s in (min(walls), median_s))
    ratio = "" if base_s is None else f"  of bare {base_s / median_s:4.2f}"
    print(
        f"  {name:<22} best {best:5.2f}  median {median:5.2f} GiB/s"
        f"  {processor_ms:5.2f} ms of processor time a MiB{ratio}"
    )
    return median_s


def measure(address: str, folder: Path, chunk_count: int, rounds: int) -> None:
    given = [f"storage.engine={address}", f"server.data_dir={folder}"]
    create_store(address)
    engine = open_engine(load_settings(None, {}, given))
    assert isinstance(engine, SharedEngine)
    with contextlib.closing(engine):
        engine.create_bucket(BUCKET)
        prefix = Prefix(engine, "layerwise", chunk_count)
        print(f"{chunk_count} chunks of {LAYERS} layers of {SLICE_BYTES // KIB} KiB: {engine!r}")
        put = timed(lambda: prefix.put(layerwise=True))
        show("put layerwise", prefix.total_bytes, [put], None)
        other = Prefix(engine, "chunkwise", chunk_count)
        put = timed(lambda: other.put(layerwise=False))
        show("put chunkwise", prefix.total_bytes, [put], None)
        measure_reads(engine, prefix, rounds)


def measure_reads(engine: SharedEngine, prefix: Prefix, rounds: int) -> None:
    memory = memoryview(mmap.mmap(-1, prefix.total_bytes))
    prefix.read_bare(memory)  # touches the memory, and warms the store
    bare: list[Sample] = []
    reads: dict[Verification, list[Sample]] = {each: [] for each in Verification}
    for _ in range(rounds):
        bare.append(timed(lambda: prefix.read_bare(memory)))
        for verification, samples in reads.items():
            engine.set_policy(BUCKET.name, BucketPolicy(verification=verification))
            samples.append(timed(lambda: prefix.read(memory)))
    base_s = show("bare, whole objects", prefix.total_bytes, bare, None)
    for verification, samples in reads.items():
        show(f"verification {verification.value}", prefix.total_bytes, samples, base_s)


@contextlib.contextmanager
def store_of(address: str) -> Iterator[str]:
    """The address, or that of a throwaway Ceph where there is none."""
    if address:
        yield address
        return
    with ceph_cluster() as ceph:
        yield f"rados://{ceph.create_pool()}?conf={ceph.conf}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--store", default="", metavar="URL", help="as storage.engine takes it")
    parser.add_argument("--chunks", type=int, default=448)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args(arguments)
    if not asked.store and (reason := reason_to_skip()):
        print(reason, file=sys.stderr)
        return 2
    with store_of(asked.store) as address, tempfile.TemporaryDirectory() as folder:
        measure(address, Path(folder), asked.chunks, asked.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
