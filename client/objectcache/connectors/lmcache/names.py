"""Keys of LMCache's chunks: its own leave out the geometry, the weights and the configuration.

Pure; LMCache's key objects are only looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from objectcache.connectors.identity.model_identity import ModelIdentity
from objectcache.connectors.identity.namespace import KvNamespace
from objectcache.connectors.lmcache.geometry import ChunkGeometry
from objectcache.connectors.store.route_hints import relay_of

RELAY_HINT = "lmcache.objectcache.relay"  # of kv_transfer_params
_NAMESPACES_MAX = 1024  # remembered; one a model, rank and tag or salt

IdentityOf = Callable[[str], ModelIdentity]  # of the model with this name


def keys_of_engine_keys(
    engine_keys: Sequence[Any], geometry: ChunkGeometry, identity_of: IdentityOf, hashing: str
) -> list[str]:
    """Keys of chunks that `CacheEngineKey`s name: model, rank of the world, hash, dtype, tags.

    `hashing` is LMCache's `pre_caching_hash_algorithm`.
    """
    return [
        _prefix(
            identity_of(key.model_name),
            str(key.dtype),
            geometry.name,
            f"lmcache {hashing} tags {sorted(key.tags or ())}",
            key.worker_id,
            key.world_size,
        )
        + key.chunk_hash_hex
        for key in engine_keys
    ]


def hinted_relay(engine_keys: Sequence[Any]) -> str:
    """The relay that the request of these `CacheEngineKey`s names, of which LMCache keeps what
    begins with its own name; empty where it names none.
    """
    configs: Any = getattr(engine_keys[0], "request_configs", None) if engine_keys else None
    return relay_of(configs.get(RELAY_HINT)) if isinstance(configs, dict) else ""  # pyright: ignore[reportUnknownMemberType]


def key_of_object_key(
    object_key: Any, geometry: ChunkGeometry, identity_of: IdentityOf, dtypes: str
) -> str:
    """The key of a chunk that an `ObjectKey` of the multiprocess mode names.

    Its `kv_rank` packs the size of the world, the rank, and both within the host, a byte each.
    """
    rank, rank_count = object_key.kv_rank >> 16 & 0xFF, object_key.kv_rank >> 24
    prefix = _prefix(
        identity_of(object_key.model_name),
        dtypes,
        f"{geometry.name} group {object_key.object_group_id} rank {object_key.kv_rank:08x}",
        f"lmcache multiprocess salt {object_key.cache_salt}",
        rank,
        max(rank_count, rank + 1),
    )
    return f"{prefix}{object_key.chunk_hash.hex()}"


def interleaved(sequences: Sequence[Any]) -> list[int]:
    """The order in which all first members of equal sequences come first, then all second ones.

    `sequences` names the sequence of each item. A match over items in this order tells how many
    chunks all ranks have, whichever order they were given in.
    """
    seen: dict[Any, int] = {}
    places: list[int] = []
    for sequence in sequences:
        places.append(seen.get(sequence, 0))
        seen[sequence] = places[-1] + 1
    return sorted(range(len(places)), key=places.__getitem__)


@lru_cache(_NAMESPACES_MAX)
def _prefix(
    identity: ModelIdentity,
    dtype: str,
    layout: str,
    hashing: str,
    rank: int,
    rank_count: int,
) -> str:
    return KvNamespace(
        identity.model,
        identity.weights_revision,
        dtype,
        layout,
        hashing,
        rank,
        rank_count,
        identity.configuration,
    ).prefix
