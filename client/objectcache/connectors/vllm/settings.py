"""What the vLLM connector is told by `kv_connector_extra_config`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from objectcache.connectors.device.engine_copier import GpuCopies
from objectcache.connectors.store.configuration import StoreConfiguration
from objectcache.connectors.vllm.load_mode import LoadMode
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.limits import GIB

_COUNTS = ("fetch_tokens_min", "staging_bytes_max", "ready_bytes_max")
_WORDS = ("load_mode", "gpu_copies", "gpu_calibration", "gpu_links")


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """The connector's own settings; the rest of the mapping is a `StoreConfiguration`.

    `load_mode` is that of `LoadMode`. `load_timeout_s` bounds what a step, or a parked request,
    waits for all of its layers, after which the blocks that are not there are computed. Hits of
    fewer than `fetch_tokens_min` tokens are computed as well. `staging_bytes_max` is each worker's
    memory for blocks on their way to the store; what finds no room is not stored.
    `ready_bytes_max` bounds each worker's memory for loads that is made at the start.
    `gpu_copies`, `gpu_calibration` and `gpu_links` are those of `GpuCopies`.
    """

    load_mode: str = LoadMode.AUTO.value
    load_timeout_s: float = 10.0
    fetch_tokens_min: int = 256
    staging_bytes_max: int = GIB
    ready_bytes_max: int = GIB
    gpu_copies: str = "off"
    gpu_calibration: str = ""
    gpu_links: str = "direct"

    def __post_init__(self) -> None:
        LoadMode.parse(self.load_mode)
        self.copies()
        for entry in fields(self):
            if entry.name in _WORDS:
                continue
            value = getattr(self, entry.name)
            kinds = int if entry.name in _COUNTS else int | float
            if isinstance(value, bool) or not isinstance(value, kinds) or value <= 0:
                kind = "a whole number" if entry.name in _COUNTS else "seconds"
                raise InvalidRequest(
                    f"connector setting {entry.name!r} must be {kind} above 0, got {value!r}"
                )

    def copies(self) -> GpuCopies:
        """Raises `InvalidRequest` naming the setting."""
        return GpuCopies(self.gpu_copies, self.gpu_calibration, self.gpu_links)


def read_settings(values: Mapping[str, Any]) -> tuple[VllmSettings, StoreConfiguration]:
    """Both halves of the mapping; what the store's half lacks comes from the environment.

    Raises `InvalidRequest` naming the key that is unknown, of the wrong type, or missing.
    """
    own = {entry.name for entry in fields(VllmSettings)}
    known = own | {entry.name for entry in fields(StoreConfiguration)} | {"credentials_file"}
    for name in sorted(set(values) - known):
        raise InvalidRequest(
            f"connector setting {name!r} is unknown; there are {', '.join(sorted(known))}"
        )
    settings = VllmSettings(**{name: value for name, value in values.items() if name in own})
    rest = {name: value for name, value in values.items() if name not in own}
    store = StoreConfiguration.from_mapping(rest, os.environ)
    settings.copies().check_layers(store.encodings, store.lossy)
    return settings, store
