"""The engine over S3, beside bare reads of the same objects by obstore."""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Iterator, Sequence
from functools import partial

import obstore
import psutil
from obstore.store import S3Store as Bucket

from benchmarks.basis.measure import Row
from benchmarks.compare.clients.s3_bucket import S3Bucket, S3Server
from benchmarks.s3.radosgw import missing_programs
from benchmarks.shared_engine import BUCKET as ENGINE_BUCKET
from benchmarks.shared_engine import LAYERS, Prefix
from benchmarks.shared_store.bare_reads import Cost, Part
from benchmarks.shared_store.bench import SharedBench, cost_rows, with_servers
from benchmarks.shared_store.one_server import opened_server
from benchmarks.shared_store.reads import Pass, here, object_parts
from objectcache_schemas.records import BucketPolicy, Verification
from objectcache_storage_server.engines.shared.engine import SharedEngine
from objectcache_storage_server.engines.stores.s3.s3_settings import S3Settings, obstore_options
from tests.seaweedfs import reason_to_skip, running_seaweedfs

NAME = "bench"
BARE = "limit: the same objects whole, obstore"


def measure_s3_reads(bench: SharedBench) -> Iterator[Row]:
    """On SeaweedFS and on radosgw."""
    if reason := reason_to_skip():
        print(f"SeaweedFS is left out: {reason}")
    else:
        with running_seaweedfs() as found:
            port = int(found.endpoint.rpartition(":")[2])
            keys = (found.credentials.access_key, found.credentials.secret_key)
            server = S3Server("SeaweedFS", port, *keys, "127.0.0.1", "localhost", NAME)
            weed = [each.pid for each in psutil.Process().children() if each.name() == "weed"]
            yield from _measured(bench, server, tuple(weed))
    if missing := missing_programs():
        print(f"radosgw is left out: {missing}")
        return
    gateway = bench.gateway
    keys = (gateway.access_key, gateway.secret_key)
    server = S3Server("radosgw", gateway.port, *keys, "127.0.0.1", "localhost", NAME)
    yield from _measured(bench, server, gateway.pids)


def _measured(bench: SharedBench, server: S3Server, pids: tuple[int, ...]) -> Iterator[Row]:
    S3Bucket(server, NAME).create()
    os.environ["AWS_ACCESS_KEY_ID"] = server.access_key
    os.environ["AWS_SECRET_ACCESS_KEY"] = server.secret_key
    address = f"s3://{NAME}/store?endpoint={server.url}&style=path"
    settings = S3Settings.from_address(address, server.access_key, server.secret_key)
    with opened_server(address, bench.folder / server.name) as engine:
        engine.create_bucket(ENGINE_BUCKET)
        prefix = Prefix(engine, "delivered", bench.amount.s3_chunks)
        prefix.put(layerwise=True)
        costs = _by_turns(bench, engine, prefix, settings, pids)
    goals = {name: ">= 0.9" for name in costs if name != BARE}
    group = f"{server.name}: {bench.amount.s3_chunks} chunks of {LAYERS} x 64 KiB"
    yield from cost_rows(group, costs, prefix.total_bytes, BARE, goals)


def _by_turns(
    bench: SharedBench,
    engine: SharedEngine,
    prefix: Prefix,
    settings: S3Settings,
    pids: tuple[int, ...],
) -> dict[str, list[Cost]]:
    memory = memoryview(mmap.mmap(-1, prefix.total_bytes))
    bucket = Bucket(settings.bucket, **obstore_options(settings))
    parts = object_parts(engine, ENGINE_BUCKET.name, prefix.keys)
    depth = engine.capabilities.queue_depth

    def read(verification: Verification) -> None:
        engine.set_policy(ENGINE_BUCKET.name, BucketPolicy(verification=verification))
        prefix.read(memory)

    passes: dict[str, Pass] = {
        BARE: partial(here, lambda: asyncio.run(_bare(bucket, settings, parts, depth)))
    }
    for each in (Verification.FULL, Verification.SAMPLED):
        name = f"layerwise by the engine, verification {each.value}"
        passes[name] = partial(here, partial(read, each))
    costs: dict[str, list[Cost]] = {name: [] for name in passes}
    for round_number in range(bench.amount.rounds + 1):
        for name, work in passes.items():
            cost = with_servers(pids, work)
            if round_number:
                costs[name].append(cost)
    return costs


async def _bare(bucket: Bucket, settings: S3Settings, parts: Sequence[Part], depth: int) -> None:
    """Whole objects as ranges, `depth` under way, left where obstore puts them."""
    slots = asyncio.Semaphore(depth)

    async def read(part: Part) -> None:
        async with slots:
            key = settings.key(f"o/{part.name}")
            data = await obstore.get_range_async(bucket, key, start=0, end=part.size_bytes)
            assert len(data) == part.size_bytes

    await asyncio.gather(*(read(part) for part in parts))
