"""Every metric that the processes have, from the code that yields them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from prometheus_client.core import Metric

from objectcache.channel.access_key import SigningKey
from objectcache.sessions.fabric_joining import FabricSettings
from objectcache_gateway.admin.processes.metrics_page import Scrapes
from objectcache_gateway.connections.turned_away import TurnedAway
from objectcache_gateway.dispatch_service.cluster_state import ClusterState
from objectcache_gateway.dispatch_service.families import dispatch_families
from objectcache_gateway.metrics.families import gateway_families
from objectcache_gateway.metrics.levels import GatewayLevels
from objectcache_gateway.metrics.request_counts import RequestCounts
from objectcache_relay.decoding.decoded_regions import DecodedRegions
from objectcache_relay.decoding.worker_pool import WorkerPool
from objectcache_relay.forward_get import ForwardMeans
from objectcache_relay.landing.forward_spans import ForwardTracer
from objectcache_relay.landing.landed_prefixes import Landings
from objectcache_relay.landing.upstream import Upstream
from objectcache_relay.relay_families import relay_families, worker_families
from objectcache_runtime.metrics.metric_cells import Counts, Histogram
from objectcache_runtime.settings import DispatchServiceSettings, ServerSettings, Settings
from objectcache_storage_server.engines.memory.engine import MemoryEngine
from objectcache_storage_server.metrics.families import storage_families
from objectcache_storage_server.service import Service

LEVELS = GatewayLevels(0, 0, 0, TurnedAway(), "", 0, 0, False, 0, 0)


class Described(NamedTuple):
    """A metric's type and the names of its labels."""

    kind: str
    labels: tuple[str, ...]


def described(families: Iterable[Metric]) -> dict[str, Described]:
    """Types and labels by the name that is documented."""
    found: dict[str, Described] = {}
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert name not in found, f"{name} is there twice"
        labels: tuple[str, ...] = tuple(getattr(family, "_labelnames"))  # noqa: B009 - not public
        found[name] = Described(family.type, labels)
    return found


def every_metric(data_dir: str) -> dict[str, Described]:
    """Of all processes."""
    service = Service(Settings(server=ServerSettings(data_dir=data_dir)), MemoryEngine())
    try:
        of_storage = described(storage_families(service.gets, service.lifecycle))
    finally:
        service.close()
    of_gateway = described(gateway_families(RequestCounts(1), lambda: LEVELS))
    of_admin = described(Scrapes().families())
    cluster = ClusterState(DispatchServiceSettings())
    of_dispatch = described(dispatch_families(cluster, Histogram(), Counts[tuple[str, str]](), 0.0))
    assert not of_storage.keys() & of_gateway.keys(), "a name means one thing"
    of_relay = described(relay_families(relay_means()))
    of_fetcher = described(worker_families(asyncio.run(no_workers()), DecodedRegions(0)))
    return of_storage | of_gateway | of_admin | of_relay | of_fetcher | of_dispatch


async def no_workers() -> WorkerPool:
    """Of a fetcher that has not started."""
    return WorkerPool(1)


def relay_means() -> ForwardMeans:
    """Of a relay that has not been asked for anything."""
    upstream = Upstream("http://127.0.0.1:1", SigningKey("KEY", "secret", None), FabricSettings())
    landings = Landings(upstream, 1 << 20, 0.05, 2.0, ThreadPoolExecutor(1))
    return ForwardMeans(landings, 1 << 20, ForwardTracer(None))
