"""What SGLang's configuration says about the store, and where a rank's pages are kept."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from objectcache.client import Client
from objectcache.connectors.device.engine_copier import EngineCopier, GpuCopies
from objectcache.connectors.identity.model_identity import ModelIdentity
from objectcache.connectors.identity.namespace import KvNamespace
from objectcache.connectors.sglang.page_store import PageStore
from objectcache.connectors.store.configuration import StoreConfiguration
from objectcache.connectors.store.lossy_setting import lossy_dtype_of, stored_dtype
from objectcache.connectors.store.open_bucket import open_bucket
from objectcache.connectors.store.outage import Outage
from objectcache.landing.target_pool import memory_file_region
from objectcache.landing.targets import SessionTarget
from objectcache_schemas.layout import KvLayout

TIMEOUT_S = 5.0  # of loads and puts, which threads wait for; recomputing is always possible
LOADS_MAX = 128  # requests of a batch that the linker loads, a delivery and a connection each
CONNECTIONS_MAX = LOADS_MAX + 32
HASHING = "sglang-sha256"  # sha256 over the digest before and the page's token ids
# Keys of SGLang's own in the same JSON object.
_OF_SGLANG = frozenset(
    (
        "backend_name",
        "module_path",
        "class_name",
        "interface_v1",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "hicache_storage_pass_prefix_keys",
    )
)


def read_settings(extra_config: Mapping[str, Any] | None) -> StoreConfiguration:
    """The store's part of `--hicache-storage-backend-extra-config` or `linker_extra_config`.

    Raises `InvalidRequest` naming what is unknown, of the wrong type, or missing.
    """
    own = {key: value for key, value in (extra_config or {}).items() if key not in _OF_SGLANG}
    return StoreConfiguration.from_mapping({"timeout_s": TIMEOUT_S, **own}, os.environ)


def read_linker_settings(
    extra_config: Mapping[str, Any] | None,
) -> tuple[StoreConfiguration, GpuCopies]:
    """As `read_settings`, with the linker's own beside them: those of `GpuCopies`."""
    rest = dict(extra_config or {})
    copies = GpuCopies.from_settings(rest)
    store = read_settings(rest)
    copies.check_layers(store.encodings, store.lossy)
    return store, copies


@dataclass(frozen=True, slots=True)
class Shape:
    """One pool's pages: `uint8[num_layers, slice_bytes]` each, in the order that `layout_name`
    names.
    """

    layout_name: str
    dtype: str
    num_layers: int
    chunk_tokens: int
    slice_bytes: int
    slice_axes: tuple[int, int, int] = (0, 0, 0)  # parts, heads, width; only what quantises asks


@dataclass(frozen=True, slots=True)
class Rank:
    """Whose pages: those of one rank, or of all ranks that hold the same."""

    rank: int = 0
    rank_count: int = 1

    @classmethod
    def of(cls, *parallel: tuple[int, int]) -> Rank:
        """From (rank, size) of each way in which the pages are split, the outermost first."""
        rank, count = 0, 1
        for part, size in parallel:
            rank, count = rank * size + part, count * size
        return cls(rank, count)


class Stores:
    """The page stores of one engine's rank, over one client."""

    def __init__(
        self,
        settings: StoreConfiguration,
        identity: ModelIdentity,
        copier: EngineCopier | None = None,
    ) -> None:
        """With a `copier` their memory is page-locked for its GPU."""
        self._settings = settings
        self._identity = identity
        self._copier = copier
        make_region = memory_file_region if copier is None else copier.region
        self._client: Client = settings.connect(CONNECTIONS_MAX, make_region)
        self._outage = Outage(logging.getLogger("objectcache.connectors.sglang"))
        self._opened: list[PageStore] = []

    @property
    def outage(self) -> Outage:
        """Whether the store is left alone at the moment."""
        return self._outage

    def open(self, shape: Shape, rank: Rank) -> PageStore:
        """A store for one pool; the bucket is made where it is missing.

        Raises what is wrong with it: `AccessDenied`, `Conflict` where it has a KV layout or is
        another's, or `Unavailable`.
        """
        namespace = KvNamespace(
            model=self._identity.model,
            weights_revision=self._identity.weights_revision,
            dtype=stored_dtype(self._settings.lossy, shape.dtype),
            layout=shape.layout_name,
            hashing=HASHING,
            rank=rank.rank,
            rank_count=rank.rank_count,
            configuration=self._identity.configuration,
        )
        layout = KvLayout(
            num_layers=shape.num_layers,
            chunk_tokens=shape.chunk_tokens,
            per_layer_chunk_bytes=shape.slice_bytes,
            dtype=shape.dtype,
            fingerprint=namespace.prefix,
        )
        parts, heads, width = shape.slice_axes
        lossy = lossy_dtype_of(layout, self._settings.lossy, heads, width, parts)
        store = PageStore(
            open_bucket(self._client, self._settings.bucket, layout, lossy),
            namespace,
            self._outage,
            lookup_timeout_s=self._settings.lookup_timeout_s,
            timeout_s=self._settings.timeout_s,
            load_bytes_max=self._settings.load_bytes_max,
            put_memory=self._put_memory(),
        )
        self._opened.append(store)
        return store

    def _put_memory(self) -> Callable[[int], SessionTarget] | None:
        register = self._settings.put_memory(self._client)
        if register is None or self._copier is None:
            return register
        return self._copier.reachable(register)

    def close(self) -> None:
        """Close the client; open deliveries fail. Repeating has no effect."""
        for store in self._opened:
            store.close()
        self._client.close()
