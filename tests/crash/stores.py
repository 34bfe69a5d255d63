"""The engines that are put through it, with settings so small that everything happens often."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from objectcache_runtime.settings import Settings, load_settings
from objectcache_schemas.limits import GIB, KIB, MIB
from objectcache_storage_server.engines import open_engine
from objectcache_storage_server.engines.base import Engine
from objectcache_storage_server.engines.disk import file_systems
from objectcache_storage_server.engines.local.engine import LocalEngine
from objectcache_storage_server.engines.local.reads import path_use
from objectcache_storage_server.engines.local.upkeep import move_chunks, upkeep_thread
from tests.contract.opened_engines.local_engines import EncodingLocalEngine, FickleLocalEngine
from tests.crash.verdict import Promises
from tests.hardware.nvme_namespaces import DEVICES, wipe

SMALL_LOCAL: dict[str, Any] = {
    "engine": "local",
    "capacity_bytes": 64 * MIB,
    "capacity_reserve_bytes": 0,
    "data_file_bytes": 4 * MIB,
    "extent_row_bytes": 64 * KIB,
    "extent_bytes_max": 1 * MIB,
    "index_bytes_max": 64 * MIB,
    "put_buffer_bytes_max": 8 * MIB,
    "compaction_bytes_per_s": 1 * GIB,
    "compaction_idle_s": 0.0,
    "page_cache_bytes": 2 * MIB,  # so that extents change their path
}


HASTE_S = 0.01
SHORT_WAITS = (
    (upkeep_thread, "ROUND_S", HASTE_S),
    (upkeep_thread, "BUDGET_EVERY_S", HASTE_S),
    (upkeep_thread, "USES_EVERY_S", HASTE_S),
    (move_chunks, "PLAN_EVERY_S", HASTE_S),
    (move_chunks, "ENCODE_AGAIN_S", HASTE_S),
    (path_use, "QUIET_S", 0.0),  # a store that is killed is never left alone for longer
)
# The file system that loses what was not flushed is of this host alone: what a power cut leaves of
# a lease is no other host's, which would be waited for.
LOCAL_TYPES = file_systems.LOCAL_TYPES | {"fuse"}


def settings_of(storage: Mapping[str, object]) -> Settings:
    """Those of a server whose engine has these; without a folder."""
    return load_settings(None, {}, [f"storage.{name}={value}" for name, value in storage.items()])


@dataclass(frozen=True, slots=True)
class StoreKind:
    """Settings of a store, and what they promise."""

    settings: Settings
    promises: Promises = field(default_factory=Promises)
    engine: type[LocalEngine] = LocalEngine  # where the settings say local

    def open(self, folder: Path) -> Engine:
        """Open or create it below `folder`. Upkeep has no time to lose: processes live briefly."""
        if self.settings.storage.nvme_device and not folder.exists():
            wipe(Path(self.settings.storage.nvme_device))
        for module, name, wait_s in SHORT_WAITS:
            setattr(module, name, wait_s)
        server = msgspec.structs.replace(self.settings.server, data_dir=str(folder))
        with (
            mock.patch.object(file_systems, "LOCAL_TYPES", LOCAL_TYPES),
            mock.patch.object(open_engine, "LocalEngine", self.engine),
        ):
            return open_engine.open_engine(msgspec.structs.replace(self.settings, server=server))


STORE_KINDS = {
    "files": StoreKind(settings_of({"engine": "files"})),
    "local": StoreKind(settings_of(SMALL_LOCAL)),
    "local-full": StoreKind(
        settings_of(SMALL_LOCAL | {"capacity_bytes": 12 * MIB}), Promises(evicts=True)
    ),
    "local-encoded": StoreKind(settings_of(SMALL_LOCAL), engine=EncodingLocalEngine),
    "local-full-fickle": StoreKind(
        settings_of(SMALL_LOCAL | {"capacity_bytes": 12 * MIB}),
        Promises(evicts=True),
        engine=FickleLocalEngine,
    ),
    "local-threads": StoreKind(
        settings_of(SMALL_LOCAL | {"page_cache_bytes": 0, "direct_io": "threads"})
    ),
}
NVME_KINDS = {
    Path(device).name: StoreKind(settings_of(SMALL_LOCAL | {"nvme_device": device}))
    for device in DEVICES
}
STORE_KINDS |= NVME_KINDS
