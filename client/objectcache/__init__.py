"""ObjectCache's client: LLM prefix KV cache, fetched layer by layer from object storage.

    client = objectcache.Client("http://127.0.0.1:9000", access_key=..., secret_key=...)
    bucket = client.kv_bucket("llama-3.1-8b", layout, create=True)
    keys = bucket.chunk_keys(tokens)
    with bucket.fetch(keys[: bucket.match(keys)]) as delivery:
        for layer, kv in delivery:
            ...

`Client` and `AsyncClient` are two faces of one core. `objectcache.boto3_integration` adds the
extension to boto3 clients. A name's module is imported when the name is first used, so that the
command line, which lies below this package, starts without the client.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from objectcache.async_client import AsyncClient, AsyncDelivery, AsyncKvBucket, AsyncLayerPut
    from objectcache.channel.responses import PutResult
    from objectcache.client import Client
    from objectcache.deliveries.delivery import Delivery
    from objectcache.errors import (
        AccessDenied,
        Busy,
        Conflict,
        DamagedData,
        DeliveryFailed,
        ErrorDetails,
        InvalidRequest,
        NotFound,
        ObjectCacheError,
        PreconditionFailed,
        StorageFull,
        Unavailable,
        Unsupported,
    )
    from objectcache.kv_bucket import KvBucket
    from objectcache.landing.targets import FabricTarget, PlainTarget, SharedMemoryTarget, Target
    from objectcache.puts.putting import LayerPut
    from objectcache.sessions.fabric_joining import FabricSettings
    from objectcache_schemas.layout import KvLayout

__version__ = "0.1.0"

__all__ = [
    "AccessDenied",
    "AsyncClient",
    "AsyncDelivery",
    "AsyncKvBucket",
    "AsyncLayerPut",
    "Busy",
    "Client",
    "Conflict",
    "DamagedData",
    "Delivery",
    "DeliveryFailed",
    "ErrorDetails",
    "FabricSettings",
    "FabricTarget",
    "InvalidRequest",
    "KvBucket",
    "KvLayout",
    "LayerPut",
    "NotFound",
    "ObjectCacheError",
    "PlainTarget",
    "PreconditionFailed",
    "PutResult",
    "SharedMemoryTarget",
    "StorageFull",
    "Target",
    "Unavailable",
    "Unsupported",
    "__version__",
]

_NAMES = {
    "objectcache.async_client": (
        "AsyncClient",
        "AsyncDelivery",
        "AsyncKvBucket",
        "AsyncLayerPut",
    ),
    "objectcache.channel.responses": ("PutResult",),
    "objectcache.client": ("Client",),
    "objectcache.deliveries.delivery": ("Delivery",),
    "objectcache.puts.putting": ("LayerPut",),
    "objectcache.kv_bucket": ("KvBucket",),
    "objectcache.sessions.fabric_joining": ("FabricSettings",),
    "objectcache.landing.targets": (
        "FabricTarget",
        "PlainTarget",
        "SharedMemoryTarget",
        "Target",
    ),
    "objectcache_schemas.layout": ("KvLayout",),
}
_ERRORS = "objectcache.errors"  # has all other names
_MODULES = dict.fromkeys(__all__, _ERRORS) | {
    name: module for module, names in _NAMES.items() for name in names
}


if not TYPE_CHECKING:  # a checker takes the names from above, and knows which there are not

    def __getattr__(name: str) -> object:
        module = _MODULES.get(name)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(module), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return __all__
