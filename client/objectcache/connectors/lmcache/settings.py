"""What LMCache's configuration says to the connector of the in-process mode. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from objectcache.connectors.store.configuration import StoreConfiguration
from objectcache_schemas.errors import InvalidRequest

_OF_THE_LOADER = ("module_path", "class_name")


def store_configuration(
    config: Any, plugin_name: str, environment: Mapping[str, str]
) -> StoreConfiguration:
    """The store that `extra_config` names under `remote_storage_plugin.PLUGIN_NAME.`, where
    LMCache has the connector's module and class too; see `StoreConfiguration.from_mapping`.

    Raises `InvalidRequest` for a mode of LMCache that cannot be served, and for wrong settings.
    """
    _check_mode(config)
    prefix = f"remote_storage_plugin.{plugin_name}."
    values = {
        name.removeprefix(prefix): value
        for name, value in (config.extra_config or {}).items()
        if name.startswith(prefix)
    }
    for name in _OF_THE_LOADER:
        values.pop(name, None)
    return StoreConfiguration.from_mapping(values, environment)


def _check_mode(config: Any) -> None:
    if config.use_layerwise:
        raise InvalidRequest(
            "use_layerwise is not served: LMCache goes on with a layer that a remote store could "
            "not deliver as if it were there, so a failure would be wrong KV. Set it to false, or "
            "use objectcache.connectors.vllm, which delivers layerwise"
        )
    if config.remote_serde not in (None, "naive"):
        raise InvalidRequest(
            f"remote_serde {config.remote_serde!r} is not served: its chunks have no fixed size. "
            "Set it to naive"
        )
