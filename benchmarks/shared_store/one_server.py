"""One server of a shared store, opened in this process."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Generator, Sequence
from pathlib import Path

from objectcache_schemas.errors import Conflict
from objectcache_schemas.records import BucketInfo, BucketPolicy, Condition, Freshness
from objectcache_storage_server.engines.base import PrefixShape, StagedPrefix, StagedPut
from objectcache_storage_server.engines.disk.flush_latch import FlushLatch
from objectcache_storage_server.engines.shared.cache.extent_cache import ExtentCache
from objectcache_storage_server.engines.shared.engine import SharedEngine
from objectcache_storage_server.engines.shared.extents.staged_prefix import SharedStagedPrefix
from objectcache_storage_server.engines.shared.log.log_catalog import LogCatalog
from objectcache_storage_server.engines.shared.upkeep.upkeep_rules import UpkeepRules
from objectcache_storage_server.engines.shared.upkeep.upkeep_thread import SharedUpkeep
from objectcache_storage_server.engines.stores.open_store import open_store

BUCKET = "bench"
PUT_BUFFER_BYTES_MAX = 1 << 30
RULES = UpkeepRules(
    capacity_bytes=0,
    high_watermark=0.95,
    low_watermark=0.9,
    evicts=False,
    grace_s=1200,
    writer_lease_s=600,
)


@contextlib.contextmanager
def opened_server(
    address: str, folder: Path, *, upkeep_s: float | None = None, cache_bytes: int = 0
) -> Generator[SharedEngine]:
    """A server of the store at `address`, which is made, and its cache in `folder`. With `upkeep_s`
    None nothing is kept up but by calls of `engine.upkeep.round`.
    """
    with contextlib.ExitStack() as opened:
        store = opened.enter_context(contextlib.closing(open_store(address, create=True)))
        cache = None
        if cache_bytes:
            slot_bytes = store.capabilities.object_bytes_max
            cache = ExtentCache(folder / "cache", cache_bytes, slot_bytes)
            opened.callback(cache.close)
        catalog = LogCatalog(store, folder / "index" if cache else folder)
        opened.callback(catalog.close)
        upkeep = SharedUpkeep(catalog, store, RULES, round_s=upkeep_s)
        opened.callback(upkeep.close)
        close = opened.pop_all().close
    engine = SharedEngine(
        catalog, store, upkeep, PUT_BUFFER_BYTES_MAX, FlushLatch(), close, cache=cache
    )
    with contextlib.closing(engine):
        with contextlib.suppress(Conflict):
            engine.create_bucket(BucketInfo(name=BUCKET, owner="root", region="", created_s=0.0))
            engine.set_policy(BUCKET, BucketPolicy(reads=Freshness.INDEXED))  # as a KV bucket's
        yield engine


def staged(engine: SharedEngine, shape: PrefixShape) -> SharedStagedPrefix:
    """A prefix whose bytes are in the store, and which no record names yet."""
    prefix = written(engine, shape)
    prefix.finish()
    return prefix


def written(engine: SharedEngine, shape: PrefixShape) -> SharedStagedPrefix:
    """A prefix whose bytes are handed over; the store is still writing the last of them."""
    prefix = engine.stage_prefix(BUCKET, shape)
    assert isinstance(prefix, SharedStagedPrefix)
    payload = memoryview(bytes(min(shape.total_bytes, 1 << 21)))
    for position in range(0, shape.total_bytes, len(payload)):
        prefix.write(position, payload[: shape.total_bytes - position])
    return prefix


def commit(engine: SharedEngine, prefix: StagedPrefix) -> None:
    """Have a record name it."""
    puts = [StagedPut(each, "") for each in prefix.staged]
    engine.commit(puts, Condition(immutable=True))


def chunk_keys(name: str, count: int) -> Sequence[str]:
    """Keys as chunks have them: hashes, of 64 characters and in no order."""
    return [hashlib.sha256(f"{name}-{number}".encode()).hexdigest() for number in range(count)]
