"""ObjectCache as SGLang's HiCache storage (L3): pages of host memory, a batch a request.

Loaded by `--hicache-storage-backend dynamic`; docs/sglang.md has the flags. SGLang's own contract
is `HiCacheStorage` in `sglang/srt/mem_cache/hicache_storage.py` of 0.5.23.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from objectcache.connectors.missing_engine import missing_engine
from objectcache.connectors.sglang.host_layouts import MHA_LAYOUTS
from objectcache.connectors.sglang.host_pool import HostPool, PageBufferPool, has_common_order
from objectcache.connectors.sglang.page_source import HostPages, Page
from objectcache.connectors.sglang.page_store import PageStore
from objectcache.connectors.sglang.served_model import identity_of, published_arguments
from objectcache.connectors.sglang.settings import Rank, Shape, Stores, read_settings
from objectcache.connectors.sglang.trailing_pages import longest_prefix
from objectcache.connectors.store.lossy_setting import refuse_lossy
from objectcache_schemas.errors import InvalidRequest

try:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage as _HiCacheStorage  # pyright: ignore[reportMissingImports]
    from sglang.srt.mem_cache.hicache_storage import PoolName as _PoolName  # pyright: ignore[reportMissingImports]
    from sglang.srt.mem_cache.hicache_storage import PoolTransferResult as _PoolTransferResult  # pyright: ignore[reportMissingImports]
except ImportError as error:
    _HiCacheStorage = missing_engine("sglang", error)
    _PoolName = missing_engine("sglang", error)
    _PoolTransferResult = missing_engine("sglang", error)

_KV = "kv"
_MAMBA = "mamba"
_ALL_PAGES = "all_pages"
_TRAILING_PAGES = "trailing_pages"

_logger = logging.getLogger("objectcache.connectors.sglang")
T = TypeVar("T")


class _Pool:
    """A host pool and where its pages are kept."""

    def __init__(self, pages: HostPool | PageBufferPool, store: PageStore) -> None:
        self.pages = pages
        self.store = store

    def of(self, host_indices: Any, key_count: int) -> list[Page]:
        """The pages of these slots; raises `InvalidRequest` where there is not one for each key."""
        found = self.pages.chunks(host_indices)
        if len(found) != key_count:
            raise InvalidRequest(f"{key_count} keys for {len(found)} pages of slots")
        return [page if isinstance(page, list) else [page] for page in found]


class ObjectCacheHiCache(_HiCacheStorage):
    """Pages of SGLang's host memory, as chunks of an ObjectCache bucket.

    The constructor and the registration of pools raise what is wrong with the configuration.
    Afterwards nothing raises: a failure reads as a miss, or as pages that were not stored.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        """Raises `InvalidRequest` naming the setting that is wrong."""
        super().__init__()
        settings = read_settings(storage_config.extra_config)
        refuse_lossy(settings.lossy, "HiCache's storage takes pages as they are; the linker can")
        _check_supported(storage_config)
        self._config = storage_config
        self._rank = _rank(storage_config, replicated=storage_config.is_mla_model)
        identity = identity_of(published_arguments(), settings.weights_revision, os.environ)
        self._stores = Stores(settings, identity)
        self._pools: dict[str, _Pool] = {}

    # --- pools ---

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Learn where KV pages are, and check the bucket.

        Raises `InvalidRequest` for memory that cannot be stored, and what is wrong with the bucket:
        `AccessDenied`, `Conflict`, `Unavailable`.
        """
        self.mem_pool_host = mem_pool_host
        self._add(_KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """As `register_mem_pool_host`, for a pool beside it."""
        name = _name(host_pool_name)
        if name != _KV or _KV not in self._pools:
            self._add(name, host_pool)

    def _add(self, name: str, host_pool: Any) -> None:
        pages = _pages_of(name, host_pool)
        tag = pages.layout_name if name == _KV else f"{name}:{pages.layout_name}"
        if format_tag := getattr(host_pool, "storage_format_tag", None):
            tag = f"{tag}:{format_tag}"
        shape = Shape(tag, pages.dtype, pages.num_layers, pages.chunk_tokens, pages.slice_bytes)
        rank = self._rank
        if name == _MAMBA:  # its state is split among ranks even where KV is not
            rank = _rank(self._config, replicated=False)
        self._pools[name] = _Pool(pages, self._stores.open(shape, rank))

    # --- existence ---

    def exists(self, key: str) -> bool:
        """Whether a page is stored."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many leading pages are stored, in one round trip."""
        return self._pools[_KV].store.match(keys)

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> Any:
        """The longest prefix that every pool can restore; one round trip a pool that holds all
        pages, a few for one that holds the last.
        """
        usable = self.batch_exists(keys)
        hits = {_PoolName.KV: usable} if usable else {}
        for transfer in pool_transfers or []:
            if usable == 0:
                break
            name = _name(transfer.name)
            if name == _KV:
                continue
            usable = self._usable(name, keys[:usable], transfer)
            if usable:
                hits[transfer.name] = usable
        return _PoolTransferResult(usable, hits)

    def _usable(self, name: str, keys: list[str], transfer: Any) -> int:
        pool = self._pools.get(name)
        policy = _name(transfer.hit_policy)
        if pool is None or policy not in (_ALL_PAGES, _TRAILING_PAGES):
            return 0
        if policy == _ALL_PAGES:
            return pool.store.match(keys)
        window = max(1, len(transfer.keys or ()))
        return longest_prefix(keys, window, pool.store.match)

    # --- pages of host memory ---

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Fill pages of host memory; for each whether it is filled."""
        return self._get(_KV, keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Store pages of host memory; for each whether it is stored."""
        return self._set(_KV, keys, host_indices, _parent(extra_info))

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """As `batch_get_v1`, for several pools."""
        return {
            transfer.name: self._get(
                _name(transfer.name), transfer.keys or [], transfer.host_indices
            )
            for transfer in transfers
        }

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """As `batch_set_v1`, for several pools."""
        return {
            transfer.name: self._set(
                _name(transfer.name), transfer.keys or [], transfer.host_indices, None
            )
            for transfer in transfers
        }

    def _get(self, name: str, keys: list[str], host_indices: Any) -> list[bool]:
        def get() -> list[bool]:
            pool = self._pools[name]
            return pool.store.fetch(keys, pool.of(host_indices, len(keys)))

        return _or_false(f"a get of {name}", keys, get)

    def _set(self, name: str, keys: list[str], host_indices: Any, parent: str | None) -> list[bool]:
        def put() -> list[bool]:
            pool = self._pools[name]
            return pool.store.store(keys, HostPages(pool.of(host_indices, len(keys))), parent)

        return _or_false(f"a set of {name}", keys, put)

    # --- pages in tensors of their own ---

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Fill a flat tensor in the pool's order; None where the page is not to be had."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Any]:
        """Fill flat tensors in the pool's order; None for each page that is not to be had."""
        locations = list(target_locations or ())
        filled = _or_false(
            "a get", keys, lambda: self._pools[_KV].store.fetch(keys, self._tensors(locations))
        )
        return [page if ok else None for page, ok in zip(locations, filled, strict=False)]

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store a tensor in the pool's order; whether it is stored."""
        return self.batch_set([key], [value if value is not None else target_location])

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store tensors in the pool's order; whether all are stored."""
        pages = list(values if values is not None else target_locations or ())
        done = _or_false(
            "a set",
            keys,
            lambda: self._pools[_KV].store.store(keys, HostPages(self._tensors(pages))),
        )
        return all(done)

    def _tensors(self, tensors: Sequence[Any]) -> list[Page]:
        pages = self._pools[_KV].pages
        if not isinstance(pages, HostPool):
            raise InvalidRequest(
                "pages of this pool are stored by the zero-copy interface alone; "
                'set "interface_v1": 1'
            )
        return [[pages.chunk_of(tensor)] for tensor in tensors]

    # --- the end ---

    def clear(self) -> None:
        """No effect: others use the bucket too. Delete keys by their prefix to empty it."""

    def close(self) -> None:
        """Close connections. Repeating has no effect."""
        self._stores.close()

    def __repr__(self) -> str:
        return f"<ObjectCacheHiCache {self._rank}, pools {sorted(self._pools)}>"


def _or_false(what: str, keys: list[str], call: Callable[[], list[bool]]) -> list[bool]:
    """The call's answer; False for each page where the engine's slots make no sense."""
    try:
        return call()
    except (InvalidRequest, KeyError) as error:
        _logger.error("%s was refused: %r", what, error)
        return [False] * len(keys)


def _check_supported(config: Any) -> None:
    if getattr(config, "should_split_heads", False):
        raise InvalidRequest("heads split for tp_lcm_size are not supported; remove tp_lcm_size")
    if getattr(config, "dcp_size", 1) > 1:
        raise InvalidRequest("decode context parallelism is not supported; set --dcp-size 1")


def _rank(config: Any, *, replicated: bool) -> Rank:
    return Rank.of(
        (config.pp_rank, config.pp_size),
        (config.attn_cp_rank, config.attn_cp_size),
        (0, 1) if replicated else (config.tp_rank, config.tp_size),
    )


def _pages_of(name: str, host_pool: Any) -> HostPool | PageBufferPool:
    """KV in an order that chunks can share; anything else as its buffers are."""
    memory = getattr(host_pool, "kv_buffer", None)
    known = getattr(host_pool, "layout", None) in MHA_LAYOUTS and hasattr(memory, "is_contiguous")
    if name == _KV and known and has_common_order(host_pool):
        return HostPool(host_pool)
    return PageBufferPool(host_pool, name)


def _parent(extra_info: Any) -> str | None:
    prefix = getattr(extra_info, "prefix_keys", None)
    return prefix[-1] if prefix else None


def _name(value: Any) -> str:
    return str(getattr(value, "value", value))
