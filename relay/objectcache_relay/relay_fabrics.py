"""The fabrics that a relay writes over: out of landing memory, which each peer is lent."""

from __future__ import annotations

import msgspec

from objectcache_fabrics.peers import TrafficLane, WriteTimeout
from objectcache_runtime.settings import Settings, StorageSettings
from objectcache_storage_server.transports.fabrics import STAGED_FRAGMENT_BYTES_MAX, Fabrics


class RelayFabrics(Fabrics):
    """NIXL and verbs, with the relay's own deadline and lane. Nothing is staged."""

    def __init__(self, settings: Settings) -> None:
        relay = settings.relay
        lane = TrafficLane(relay.ib_traffic_class, relay.ib_service_level)
        timeout = WriteTimeout(relay.fabric_timeout_s, "relay.fabric_timeout_s")
        super().__init__(_without_staging(settings.storage, lane), timeout, lane)


def _without_staging(storage: StorageSettings, lane: TrafficLane) -> StorageSettings:
    """One buffer, which fabrics want to have registered, and UCX's words for the lane."""
    words = {"IB_TRAFFIC_CLASS": lane.traffic_class, "IB_SL": lane.service_level}
    said = [f"{name}={value}" for name, value in words.items() if value]
    ucx = ",".join([*([storage.nixl_ucx] if storage.nixl_ucx else []), *said])
    return msgspec.structs.replace(
        storage, nixl_ucx=ucx, fabric_staging_bytes=STAGED_FRAGMENT_BYTES_MAX
    )
