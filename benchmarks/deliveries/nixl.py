"""Deliveries over NIXL against bare NIXL writes of the same bytes, within this host.

A bare write has its bytes in memory and copies them once; a delivery has them in the page cache,
verifies them, and copies them twice, the second time out of the processor's cache.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

import psutil

from benchmarks.basis.bench import Bench
from benchmarks.basis.measure import COPY_BYTES_PER_S_PER_THREAD, Row, Samples, rates
from benchmarks.basis.prefix import Geometry, check_layer, fill_chunks
from benchmarks.deliveries.nixl_writer import READER, WRITER
from objectcache import Client, FabricTarget, KvBucket
from objectcache_fabrics.nixl.agent import MemoryPiece, NixlAgent, library
from objectcache_schemas.errors import Unavailable
from objectcache_schemas.limits import GIB, MIB

GROUP = "Over NIXL, out of the page cache: layerwise, G=16"
BUCKET = "nixl"
BARE_PIECES = "bare NIXL writes of 2 MiB, a notification a layer"
BARE_LAYERS = "bare NIXL writes of whole layers, a notification each"
OURS = "layerwise, nixl"
SHARED = "layerwise, shared_memory"
PIECE_BYTES = 2 * MIB
LOOK_PAUSE_S = 50e-6
GOAL = 0.8  # of a bare write


class BareWrites:
    """A process that writes into our memory as fast as NIXL alone does."""

    def __init__(self, geometry: Geometry, target: FabricTarget) -> None:
        self._geometry = geometry
        self._agent = NixlAgent(READER, "lo", "")
        address, length_bytes = target.array.ctypes.data, geometry.payload_bytes
        registered = self._agent.register(MemoryPiece(address, length_bytes))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.deliveries.nixl_writer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        metadata = self._agent.metadata(registered).hex()
        self._tell(address=address, length_bytes=length_bytes, metadata=metadata)
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise SystemExit("the process for bare NIXL writes did not start")

    def _tell(self, **what: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def run(self, piece_bytes: int) -> None:
        """Have the whole payload written; returns when the last layer is notified."""
        geometry = self._geometry
        layer_bytes = geometry.chunk_count * geometry.slice_bytes
        self._tell(
            layer_bytes=layer_bytes,
            layer_count=geometry.num_layers,
            piece_bytes=min(piece_bytes, layer_bytes),
        )
        heard = 0
        while heard < geometry.num_layers:
            heard += len(self._agent.notifications().get(WRITER, ()))
            time.sleep(LOOK_PAUSE_S)  # as our client does

    @property
    def pid(self) -> int:
        """Of the process that writes."""
        return self._process.pid

    def close(self) -> None:
        """End the process and the agent."""
        self._process.communicate()
        self._agent.close()


class Writers:
    """What the processes that write spend of the processors' time, by what they do."""

    def __init__(self, bare_pid: int, storage_pid: int) -> None:
        bare, storage = psutil.Process(bare_pid), psutil.Process(storage_pid)
        self._processes = {BARE_PIECES: bare, BARE_LAYERS: bare, OURS: storage, SHARED: storage}
        self.cpu_s: dict[str, float] = {}

    def take(self, samples: Samples, name: str, work: Callable[[], object]) -> None:
        """Time `work` once, and add what its writer spends."""
        before_s = self._spent_s(name)
        samples.take(name, work)
        self.cpu_s[name] = self.cpu_s.get(name, 0.0) + self._spent_s(name) - before_s

    def _spent_s(self, name: str) -> float:
        times = self._processes[name].cpu_times()
        return float(times.user + times.system)


@contextmanager
def _bare(geometry: Geometry, target: FabricTarget) -> Generator[BareWrites]:
    bare = BareWrites(geometry, target)
    try:
        yield bare
    finally:
        bare.close()


def measure_nixl(bench: Bench) -> Iterator[Row]:
    """Rows for both ways of bare writes and for ours; none where NIXL is not installed."""
    try:
        library()
    except Unavailable as error:
        print(error.message, file=sys.stderr)
        return
    geometry, samples = Geometry(16, bench.scale.chunk_count), Samples()
    with bench.server() as server, server.client() as client:
        bucket = _filled(client, geometry)
        target = client.fabric_target(geometry.payload_bytes)
        with _bare(geometry, target) as bare:
            writers = Writers(bare.pid, server.storage_pid)
            _sample(samples, writers, bucket, geometry, target, bare, bench.scale.repeats)
        target.close()
    yield from _rows(samples, writers, geometry)


def _filled(client: Client, geometry: Geometry) -> KvBucket:
    bucket = client.kv_bucket(BUCKET, geometry.layout(), create=True)
    keys = geometry.keys()
    source = client.shared_memory_target(geometry.payload_bytes)
    chunks = source.chunks(len(keys), geometry.layout())
    fill_chunks(chunks, geometry, keys)
    bucket.put(keys, chunks)
    source.close()
    return bucket


def _sample(
    samples: Samples,
    writers: Writers,
    bucket: KvBucket,
    geometry: Geometry,
    target: FabricTarget,
    bare: BareWrites,
    repeats: int,
) -> None:
    keys = geometry.keys()

    def ours() -> None:
        with bucket.fetch(keys, delivery="layerwise", target=target) as delivery:
            delivery.wait()

    def shared() -> None:
        with bucket.fetch(keys, delivery="layerwise", transport="shared_memory") as delivery:
            delivery.wait()

    with bucket.fetch(keys, delivery="layerwise", target=target) as delivery:
        for layer, payload in delivery:
            check_layer(geometry, keys, layer, payload)
    shared()
    bare.run(PIECE_BYTES)
    for _ in range(repeats):
        writers.take(samples, BARE_PIECES, lambda: bare.run(PIECE_BYTES))
        writers.take(samples, OURS, ours)
        writers.take(samples, BARE_LAYERS, lambda: bare.run(geometry.payload_bytes))
        writers.take(samples, SHARED, shared)


def _rows(samples: Samples, writers: Writers, geometry: Geometry) -> Iterator[Row]:
    fastest = min((BARE_PIECES, BARE_LAYERS), key=samples.median_s)
    payload_gib = geometry.payload_bytes / GIB
    size = f"{geometry}, {geometry.payload_bytes // MIB} MiB"
    for name, seconds in samples.seconds.items():
        yield Row(
            group=GROUP,
            name=f"{name}, {size}",
            unit="GiB/s",
            samples=rates(seconds, geometry.payload_bytes),
            ratio=samples.median_s(fastest) / samples.median_s(name),
            ratio_of=fastest,
            goal=f"at least {GOAL}" if name == OURS else "",
            by_hand=f"one copy by one thread: {COPY_BYTES_PER_S_PER_THREAD / GIB:g} GiB/s",
            details={"writer_cpu_s_per_gib": writers.cpu_s[name] / len(seconds) / payload_gib},
        )
