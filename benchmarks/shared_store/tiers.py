"""A prefix read layer by layer through a store behind a link of 1 Gbit/s, and out of the cache that
a server may have before it; beside both the local engine, and what the cache costs a put.

The store is a SeaweedFS in a network namespace, and the kernel bounds what it sends. Every cold
read is of a server whose cache is empty.
"""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial

from benchmarks.basis.measure import Row
from benchmarks.basis.store import opened_store
from benchmarks.compare.clients.s3_bucket import S3Bucket
from benchmarks.compare.clients.s3_bucket import S3Server as BucketServer
from benchmarks.figures.experiment import NotPossible
from benchmarks.figures.shaped_link import ShapedLink, shaped_link
from benchmarks.shared_engine import BUCKET, LAYERS, Prefix
from benchmarks.shared_store.bare_reads import Cost
from benchmarks.shared_store.bench import SharedBench, cost_rows
from benchmarks.shared_store.one_server import opened_server
from benchmarks.shared_store.reads import here
from objectcache_storage_server.engines.disk.flush_latch import forget_cached
from objectcache_storage_server.engines.shared.cache.cache_file import FILE_NAME
from objectcache_storage_server.engines.shared.engine import SharedEngine
from tests.seaweedfs import reason_to_skip, running_seaweedfs

NAME = "bench"
CACHED = "cached"  # folder of the server with a cache
LINK_BYTES_PER_S = 125e6
ROUNDS_MAX = 3  # a cold read takes as long as its link
STORE = "through the store, no cache"
COLD = "through the store, the cache empty"
WARM = "out of the cache, in the page cache"
DEVICE = "out of the cache, from the device"
LOCAL = "the local engine, in the page cache"
LOCAL_DEVICE = "the local engine, from the device"
PUT = "put, no cache"
PUT_THROUGH = "put, into the cache as well"

Costs = dict[str, list[Cost]]


def measure_tiers(bench: SharedBench) -> Iterator[Row]:
    """See the module's docstring."""
    try:
        if reason := reason_to_skip():
            raise NotPossible(reason)
        with shaped_link() as link, _store_behind(link) as address:
            yield from _measured(bench, link, address)
    except NotPossible as why:
        print(f"the two tiers are left out: {why}")


@contextmanager
def _store_behind(link: ShapedLink) -> Generator[str]:
    """The address of a store at the link's far side."""
    with running_seaweedfs("0.0.0.0", link.address, link.within) as found:
        keys = (found.credentials.access_key, found.credentials.secret_key)
        port = int(found.endpoint.rpartition(":")[2])
        server = BucketServer("SeaweedFS", port, *keys, link.address, link.address, NAME)
        S3Bucket(server, NAME).create()
        os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"] = keys
        yield f"s3://{NAME}/store?endpoint={found.endpoint}&style=path"


def _measured(bench: SharedBench, link: ShapedLink, address: str) -> Iterator[Row]:
    count, rounds = bench.amount.chunk_count, min(bench.amount.rounds, ROUNDS_MAX)
    reads: Costs = {}
    with (
        opened_server(address, bench.folder / "uncached") as uncached,
        opened_store(bench.folder / "local") as local,
    ):
        uncached.create_bucket(BUCKET)
        local.engine.create_bucket(BUCKET)
        prefix, near = (Prefix(each, "delivered", count) for each in (uncached, local.engine))
        prefix.put(layerwise=True)
        near.put(layerwise=True)
        memory = memoryview(mmap.mmap(-1, prefix.total_bytes))
        near.read(memory)  # makes the memory's pages
        for _ in range(rounds):
            link.shape(LINK_BYTES_PER_S)
            _take(reads, STORE, prefix, memory)
            with _cached(bench, address, prefix.total_bytes) as cached:
                _read_tiers(bench, reads, cached, memory)
            _take(reads, LOCAL, near, memory)
            local.forget_cached()
            _take(reads, LOCAL_DEVICE, near, memory)
            near.read(memory)
        link.shape(None)
        puts = _puts(bench, address, uncached, rounds)
    chunks = f"{count} chunks of {LAYERS} x 64 KiB"
    goals = {COLD: ">= 0.95", WARM: ">= 4", DEVICE: ">= 2"}
    total_bytes = prefix.total_bytes
    yield from cost_rows(f"Two tiers, 1 Gbit/s: {chunks}", reads, total_bytes, STORE, goals)
    put_bytes = total_bytes // count * bench.amount.s3_chunks
    goals = {PUT_THROUGH: ">= 0.9"}
    yield from cost_rows("Two tiers, puts, no bound", puts, put_bytes, PUT, goals)


@contextmanager
def _cached(bench: SharedBench, address: str, cache_bytes: int) -> Generator[SharedEngine]:
    """A server whose cache is empty."""
    folder = bench.folder / CACHED
    try:
        with opened_server(address, folder, cache_bytes=cache_bytes) as engine:
            yield engine
    finally:
        shutil.rmtree(folder)


def _take(costs: Costs, name: str, prefix: Prefix, memory: memoryview) -> None:
    costs.setdefault(name, []).append(here(partial(prefix.read, memory)))


def _read_tiers(bench: SharedBench, costs: Costs, engine: SharedEngine, memory: memoryview) -> None:
    """A cold read, and two out of what it left in the cache."""
    cache, file = engine.cache, bench.folder / CACHED / "cache" / FILE_NAME
    prefix = Prefix(engine, "delivered", bench.amount.chunk_count)
    assert cache is not None
    _take(costs, COLD, prefix, memory)
    cache.settle()
    print(f"{cache.status().written_bytes / prefix.total_bytes:.3f} of a cold read was kept")
    while cache.status().written_bytes < prefix.total_bytes:  # what there was no memory for
        prefix.read(memory)
        cache.settle()
    misses = cache.status().misses
    _take(costs, WARM, prefix, memory)
    forget_cached(file)
    _take(costs, DEVICE, prefix, memory)
    assert cache.status().misses == misses, cache.status()


def _puts(bench: SharedBench, address: str, uncached: SharedEngine, rounds: int) -> Costs:
    """By turns."""
    costs: Costs = {}
    count = bench.amount.s3_chunks
    total_bytes = Prefix(uncached, "", count).total_bytes
    with _cached(bench, address, 2 * total_bytes) as cached:
        for number in range(rounds):
            for name, engine in ((PUT, uncached), (PUT_THROUGH, cached)):
                prefix = Prefix(engine, f"{name} {number}", count)
                costs.setdefault(name, []).append(here(partial(prefix.put, layerwise=True)))
    return costs
