"""A prefix read layer by layer by the engine, beside whole objects, ranges of chunks, and clients
of radosgw over the same OSD; all of them by turns.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from benchmarks.basis.measure import Row
from benchmarks.compare import servers
from benchmarks.compare.cells import LLAMA, Cell
from benchmarks.compare.clients.lmcache_client import LmcacheClient
from benchmarks.compare.clients.nixl_obj_client import NixlObjClient
from benchmarks.compare.clients.s3_bucket import S3Server
from benchmarks.compare.clients.store_client import StoreClient
from benchmarks.compare.ways import RADOSGW, Way
from benchmarks.compare.worker import Worker, WorkerFailed, running_worker
from benchmarks.s3.radosgw import missing_programs
from benchmarks.shared_engine import BUCKET as ENGINE_BUCKET
from benchmarks.shared_engine import LAYERS, SLICE_BYTES, Prefix
from benchmarks.shared_store.bare_reads import (
    Cost,
    Part,
    bare_program,
    missing_compiler,
    read_bare,
)
from benchmarks.shared_store.bench import SharedBench, cost_rows, with_servers
from benchmarks.shared_store.one_server import opened_server
from objectcache_schemas.records import BucketPolicy, Verification
from objectcache_storage_server.engines.shared.engine import SharedEngine
from objectcache_storage_server.engines.stores.rados.librados import (
    Cluster,
    RadosPool,
    WriteOperation,
)
from objectcache_storage_server.engines.stores.rados.operations import Deadlines, WriteAnswer
from objectcache_storage_server.engines.stores.rados.rados_settings import NAMESPACE_DEFAULT

RANGE_DEPTH = 64  # reads of 64 KiB; fewer are slower
CHUNK_BYTES = LAYERS * SLICE_BYTES
NAMESPACE = "plain"
WHOLE = "limit: the same objects whole, a C program"
WHOLE_HERE = "the same objects whole, librados by ctypes"
RANGES = "2-MiB objects in 64-KiB ranges, librados by ctypes"
RANGES_C = "2-MiB objects in 64-KiB ranges, a C program"

Pass = Callable[[], Cost]


def measure_reads(bench: SharedBench) -> Iterator[Row]:
    """See the module's docstring."""
    pool = bench.ceph.create_pool()
    with ExitStack() as undo:
        folder = bench.folder / "reads"
        engine = undo.enter_context(opened_server(bench.address(pool), folder))
        engine.create_bucket(ENGINE_BUCKET)
        prefix = Prefix(engine, "delivered", bench.amount.chunk_count)
        prefix.put(layerwise=True)
        memory = memoryview(mmap.mmap(-1, prefix.total_bytes))
        passes = {
            **_engine_passes(engine, prefix, memory),
            **_bare_passes(bench, undo, pool, engine, prefix, memory),
        }
        pids = dict.fromkeys(passes, bench.osd_pids)
        for name, work in _gateway_passes(bench, undo):
            passes[name] = work
            pids[name] = bench.gateway.pids
        costs = _by_turns(bench, passes, pids)
    base = WHOLE if WHOLE in costs else WHOLE_HERE
    goals = {name: ">= 0.85" for name in costs if name.startswith("layerwise")}
    chunks = f"{bench.amount.chunk_count} chunks of {LAYERS} x 64 KiB"
    yield from cost_rows(f"RADOS: {chunks}, warm", costs, prefix.total_bytes, base, goals)


def _by_turns(
    bench: SharedBench, passes: dict[str, Pass], pids: dict[str, tuple[int, ...]]
) -> dict[str, list[Cost]]:
    costs: dict[str, list[Cost]] = {}
    for round_number in range(bench.amount.rounds + 1):
        for name, work in list(passes.items()):
            try:
                cost = with_servers(pids[name], work)
            except WorkerFailed as error:
                print(f"{name} is left out: {error}")
                del passes[name]
                continue
            if round_number:  # the first warms the OSD's cache
                costs.setdefault(name, []).append(cost)
    return costs


def here(work: Callable[[], object]) -> Cost:
    """A pass in this process."""
    wall_s, processor_s = time.perf_counter(), time.process_time()
    work()
    return Cost(time.perf_counter() - wall_s, time.process_time() - processor_s)


def _engine_passes(engine: SharedEngine, prefix: Prefix, memory: memoryview) -> dict[str, Pass]:
    def read(verification: Verification) -> Cost:
        engine.set_policy(ENGINE_BUCKET.name, BucketPolicy(verification=verification))
        return here(lambda: prefix.read(memory))

    return {
        f"layerwise by the engine, verification {each.value}": partial(read, each)
        for each in (Verification.FULL, Verification.SAMPLED)
    }


def object_parts(engine: SharedEngine, bucket: str, keys: list[str]) -> list[Part]:
    """The objects of the store that these keys lie in, whole."""
    with engine.catalog.reading() as view:
        versions = view.versions(view.bucket(bucket).number, keys)
        names = {name for version in versions.values() for name in version.extents}
        shapes = view.shapes(names)
    return [
        Part(
            name.object_name(number),
            0,
            min(shape.object_bytes, shape.size_bytes - number * shape.object_bytes),
        )
        for name, shape in sorted(shapes.items())
        for number in range(shape.object_count)
    ]


def _bare_passes(
    bench: SharedBench,
    undo: ExitStack,
    pool: str,
    engine: SharedEngine,
    prefix: Prefix,
    memory: memoryview,
) -> dict[str, Pass]:
    conf, depth = bench.ceph.conf, engine.capabilities.queue_depth
    cluster = Cluster("client.admin", str(conf), {})
    undo.callback(cluster.close)
    whole = object_parts(engine, ENGINE_BUCKET.name, prefix.keys)
    ranges = [
        Part(f"chunk-{chunk}", layer * SLICE_BYTES, SLICE_BYTES)
        for layer in range(LAYERS)
        for chunk in range(bench.amount.chunk_count)
    ]
    found: dict[str, Pass] = {}
    asked = (
        (WHOLE, WHOLE_HERE, NAMESPACE_DEFAULT, whole, depth),
        (RANGES_C, RANGES, NAMESPACE, ranges, RANGE_DEPTH),
    )
    for in_c, by_ctypes, namespace, parts, at_once in asked:
        own = RadosPool(cluster, pool, namespace)
        undo.callback(own.close)
        if namespace == NAMESPACE:
            _put_chunks(own, bench.amount.chunk_count, memory)
        found[by_ctypes] = partial(here, partial(read_bare, own, parts, memory, at_once))
        if not missing_compiler():
            program = bare_program(bench.folder, conf, pool, namespace, parts, at_once)
            found[in_c] = undo.enter_context(program).read
    return found


def _put_chunks(pool: RadosPool, count: int, memory: memoryview) -> None:
    deadlines = Deadlines(pool.calls)
    for number in range(count):
        with WriteOperation(pool.calls) as steps:
            steps.write_full(memory[number * CHUNK_BYTES :][:CHUNK_BYTES])
            WriteAnswer(deadlines, pool, f"chunk-{number}", steps, time.monotonic() + 60).end()
    deadlines.close()


def _gateway_passes(bench: SharedBench, undo: ExitStack) -> Iterator[tuple[str, Pass]]:
    missing = missing_programs()
    if missing:
        print(f"radosgw is left out: {missing}")
        return
    gateway = bench.gateway
    keys = (gateway.access_key, gateway.secret_key)
    server = S3Server(RADOSGW, gateway.port, *keys, "127.0.0.1", "localhost", "localhost")
    clients: list[tuple[StoreClient, str]] = [
        (NixlObjClient(server), servers.missing_modules("nixl_cu12")),
        (LmcacheClient(server), servers.missing_modules("lmcache", "torch", "awscrt")),
    ]
    cell = Cell(LLAMA, bench.amount.chunk_count * 16, 16)
    for client, absent in clients:
        if absent:
            print(f"{client.ways[0].name} is left out: {absent}")
            continue
        worker = undo.enter_context(_opened(client, bench.folder / "clients.log", cell))
        for way in client.ways:
            if not way.ranged:  # 20 times slower: `benchmarks.compare` has it
                yield way.name, partial(_fetched, worker, way)


@contextmanager
def _opened(client: StoreClient, log: Path, cell: Cell) -> Iterator[Worker]:
    with running_worker(client, log) as worker:
        worker.open()
        worker.store(cell)
        for way in client.ways:
            if not way.ranged:
                worker.fetch(way)
                worker.check(way)
        yield worker


def _fetched(worker: Worker, way: Way) -> Cost:
    fetched = worker.fetch(way)
    return Cost(max(fetched.arrivals_s), fetched.processor_s)
