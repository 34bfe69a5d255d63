"""The store of these tests: a running server, what is in its bucket, and what it delivered."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from objectcache_schemas.operators.schedule import ScheduleChanges, ScheduleState, SetSchedule
from objectcache_schemas.operators.traces import DeliveryTrace, GetTraces, Traces
from tests.s3_clients import s3_client
from tests.servers import RunningServer, start_server
from tests.storage_client import StorageClient

BUCKET = "vllm-kv"
BOUND_S = 180.0  # for whatever a test waits for; generous, because machines may be busy
POLL_S = 0.05
TRACES_MAX = 1000
# Above any wait that a busy machine causes, so that only what a test does fails a load or a lookup.
LOAD_TIMEOUT_S = 60.0
LOOKUP_TIMEOUT_S = 30.0


class Store:
    """A storage server and a gateway, and what tests do to them."""

    def __init__(self, data_dir: Path) -> None:
        self.server: RunningServer = start_server(data_dir, "storage.log_level=info")
        self._s3: Any = s3_client(self.server)

    # --- how an engine is told of it ---

    def connector(self, **settings: Any) -> str:
        """vLLM's `--kv-transfer-config` for the connector, as docs/vllm.md has it."""
        document = {
            "kv_connector": "ObjectCacheConnector",
            "kv_connector_module_path": "objectcache.connectors.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": self._settings()
            | {"load_timeout_s": LOAD_TIMEOUT_S, **settings},
        }
        return json.dumps(document)

    def tier(self, host_bytes: int) -> str:
        """The same for the offloading connector, with so much of the host's memory and the tier."""
        tier = {
            "type": "ObjectCacheTier",
            "module_path": "objectcache.connectors.vllm_tier",
            **self._settings(),
        }
        document = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "TieringOnCpuSpec",
                "spec_module_path": "tests.vllm_serve.copies_on_cpu",
                "cpu_bytes_to_use": host_bytes,
                "secondary_tiers": [tier],
            },
        }
        return json.dumps(document)

    def lmcache_adapter(self, bucket: str) -> str:
        """LMCache's `--l2-adapter`, as docs/lmcache.md has it."""
        document = {
            "type": "plugin",
            "module_path": "objectcache.connectors.lmcache_l2",
            "class_name": "ObjectCacheL2Adapter",
            "adapter_params": self._settings() | {"bucket": bucket},
        }
        return json.dumps(document)

    def _settings(self) -> dict[str, Any]:
        return {
            "endpoint": self.server.endpoint,
            "bucket": BUCKET,
            "credentials_file": str(self.server.credentials_file),
            "weights_revision": "1",
            "lookup_timeout_s": LOOKUP_TIMEOUT_S,
        }

    # --- what is stored ---

    def keys(self, bucket: str = BUCKET) -> set[str]:
        """The keys of all that is stored; none where there is no bucket yet."""
        try:
            pages = self._s3.get_paginator("list_objects_v2").paginate(Bucket=bucket)
            return {found["Key"] for page in pages for found in page.get("Contents", ())}
        except self._s3.exceptions.NoSuchBucket:
            return set()

    def wait_stored(self, before: set[str], count: int) -> set[str]:
        """Wait until so many objects more are stored than `before`; returns their keys."""
        wait_until(lambda: len(self.keys() - before) >= count, f"{count} blocks to be stored")
        return self.keys() - before

    def replace(self, key: str, by: str) -> None:
        """Have an object's bytes be those of another one, as any S3 client could."""
        body = self._s3.get_object(Bucket=BUCKET, Key=by)["Body"].read()
        self._s3.delete_object(Bucket=BUCKET, Key=key)
        self._s3.put_object(Bucket=BUCKET, Key=key, Body=body)

    # --- what it delivers ---

    def deliveries(self) -> tuple[DeliveryTrace, ...]:
        """The last deliveries of the running storage server, the latest first."""
        with self._connect() as connection:
            return connection.ask(GetTraces(limit=TRACES_MAX), Traces).traces

    def delivered_count(self) -> int:
        """Deliveries of the running storage server that came whole."""
        return sum(one.duration_s is not None and one.error is None for one in self.deliveries())

    def wait_delivering(self) -> None:
        """Wait until some layers of a delivery are with the client, and others are not."""
        wait_until(lambda: any(_half_way(one) for one in self.deliveries()), "a load under way")

    @contextmanager
    def slow(self, cap_gbps: float) -> Iterator[None]:
        """Bound the rate of all deliveries together, as `admin schedule set-cap` does."""
        self._change(ScheduleChanges(cap_gbps=cap_gbps))
        try:
            yield
        finally:
            self._change(ScheduleChanges(cap_gbps=0))

    def _change(self, changes: ScheduleChanges) -> None:
        with self._connect() as connection:
            connection.ask(SetSchedule(changes=changes), ScheduleState)

    def _connect(self) -> StorageClient:
        return StorageClient(self.server.run_dir / "storage.sock")

    # --- its life ---

    @contextmanager
    def away(self) -> Iterator[None]:
        """Nothing listens at the endpoint meanwhile."""
        self.server.gateway.terminate()
        self.server.storage.terminate()
        try:
            yield
        finally:
            self.server.restart_storage()
            self.server.restart_gateway()

    def stop(self) -> None:
        """End it."""
        self._s3.close()
        self.server.stop()


def _half_way(delivery: DeliveryTrace) -> bool:
    arrived = [layer.ready_s is not None for layer in delivery.layers]
    return delivery.duration_s is None and any(arrived) and not all(arrived)


def wait_until(true: Callable[[], bool], what: str) -> None:
    """Return when it is so; fails after BOUND_S."""
    deadline_s = time.monotonic() + BOUND_S
    while not true():
        assert time.monotonic() < deadline_s, f"waited {BOUND_S:g} s for {what}"
        time.sleep(POLL_S)
