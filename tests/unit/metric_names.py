"""Every metric that the processes have, from the code that yields them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from prometheus_client.core import Metric

from objectcache_gateway.admin.processes.metrics_page import Scrapes
from objectcache_gateway.connections.turned_away import TurnedAway
from objectcache_gateway.metrics.families import gateway_families
from objectcache_gateway.metrics.levels import GatewayLevels
from objectcache_gateway.metrics.request_counts import RequestCounts
from objectcache_runtime.settings import ServerSettings, Settings
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
    assert not of_storage.keys() & of_gateway.keys(), "a name means one thing"
    return of_storage | of_gateway | of_admin
