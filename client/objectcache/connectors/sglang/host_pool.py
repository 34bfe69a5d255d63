"""One of SGLang's host pools as a list of chunks to fill, or to store."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from objectcache.connectors.sglang.host_layouts import PageGeometry, pages_view
from objectcache.payload import Bytes
from objectcache_schemas.errors import InvalidRequest


class HostPool:
    """The pages of an MHA or MLA pool: `pool.kv_buffer` in `pool.layout`.

    Raises `InvalidRequest` for a layout that is not known.
    """

    def __init__(self, pool: Any) -> None:
        self.geometry = _geometry(pool)
        self._layout = str(pool.layout)
        self._page_tokens = self.geometry.page_tokens
        self._pages = pages_view(_bytes_of(pool.kv_buffer), self._layout, self.geometry)
        tag = getattr(pool, "storage_format_tag", None) or "kv"
        first_layer = getattr(pool, "start_layer", 0) or 0
        self.layout_name = layout_name(tag, first_layer, self.geometry)
        self.dtype = str(pool.dtype)
        self.num_layers = self.geometry.num_layers
        self.slice_bytes = self.geometry.layer_bytes
        self.chunk_tokens = self.geometry.page_tokens

    def chunks(self, host_indices: Any) -> list[Bytes]:
        """The pages of these token slots, each as uint8[*chunk_shape], a view of the pool.

        Raises `InvalidRequest` unless they are whole pages of the pool.
        """
        starts = page_starts(host_indices, self._page_tokens, len(self._pages))
        return [self._pages[start // self._page_tokens] for start in starts]

    def chunk_of(self, page: Any) -> Bytes:
        """One page in a tensor of its own, in the pool's order, as uint8[*chunk_shape]."""
        memory = _bytes_of(page)
        if memory.size != self.geometry.page_bytes:
            raise InvalidRequest(
                f"a page of {memory.size} bytes where the pool's have {self.geometry.page_bytes}"
            )
        chunk: Bytes = pages_view(memory, self._layout, self.geometry)[0]
        return chunk


class PageBufferPool:
    """The pages of any other pool: its page buffers back to back, as one layer.

    What the pool gives out by `get_page_buffer_meta` must be addresses of this process's memory.
    """

    num_layers = 1

    def __init__(self, pool: Any, name: str) -> None:
        """Raises `InvalidRequest` where a page has no bytes."""
        self._pool = pool
        self.chunk_tokens = int(getattr(pool, "page_size", 1) or 1)
        first = self._buffers(np.arange(self.chunk_tokens))[0]
        self.slice_bytes = sum(size for _, size in first)
        if self.slice_bytes == 0:
            raise InvalidRequest(f"host pool {name} has pages of no bytes")
        kind = type(pool).__name__
        sizes = "-".join(str(size) for _, size in first)
        self.layout_name = f"{name}:{kind}:{getattr(pool, 'layout', '')}:{sizes}"
        self.dtype = str(getattr(pool, "dtype", "uint8"))

    def chunks(self, host_indices: Any) -> list[list[Bytes]]:
        """The buffers of each page of these slots, views of the pool."""
        pages = self._buffers(np.asarray(host_indices))
        return [[_memory_at(address, size) for address, size in page] for page in pages]

    def _buffers(self, host_indices: Any) -> list[list[tuple[int, int]]]:
        import torch  # pyright: ignore[reportMissingImports]

        addresses, sizes = self._pool.get_page_buffer_meta(torch.as_tensor(host_indices))
        page_count = len(host_indices) // self.chunk_tokens
        per_page = len(addresses) // max(1, page_count)
        if isinstance(sizes, int):
            sizes = [sizes] * len(addresses)
        pairs = list(zip(addresses, sizes, strict=True))
        return [pairs[n * per_page : (n + 1) * per_page] for n in range(page_count)]


def page_starts(host_indices: Any, page_tokens: int, page_count: int) -> Sequence[int]:
    """The first slot of each page.

    Raises `InvalidRequest` where the slots are not whole, aligned pages of a pool of `page_count`.
    """
    slots = np.asarray(host_indices, np.int64).reshape(-1)
    if slots.size % page_tokens:
        raise InvalidRequest(f"{slots.size} slots are not whole pages of {page_tokens} tokens")
    pages = slots.reshape(-1, page_tokens)
    starts = pages[:, 0]
    aligned = bool(np.all(starts % page_tokens == 0))
    if not aligned or not np.array_equal(pages, starts[:, None] + np.arange(page_tokens)):
        raise InvalidRequest("slots of a page must be aligned and in one run")
    if slots.size and not 0 <= starts.min() <= starts.max() < page_count * page_tokens:
        raise InvalidRequest(f"slots are outside of the pool's {page_count} pages")
    return [int(start) for start in starts]


def layout_name(tag: str, first_layer: int, geometry: PageGeometry) -> str:
    """The order of bytes in a chunk, for `KvNamespace.layout`.

    Head groups are an arrangement of the pool alone: chunks have heads in one run.
    """
    heads = geometry.head_groups * geometry.heads_per_group
    return (
        f"{tag}:l{geometry.num_layers}+{first_layer}:c{geometry.components}"
        f":t{geometry.page_tokens}:h{heads}:b{geometry.head_bytes}"
    )


def has_common_order(pool: Any) -> bool:
    """Whether the pool holds MLA rows, or K and V of one width."""
    if hasattr(pool, "kv_cache_dim"):
        return True
    width = getattr(pool, "head_dim", None)
    return width is not None and getattr(pool, "v_head_dim", width) == width


def _geometry(pool: Any) -> PageGeometry:
    itemsize = pool.dtype.itemsize
    latent = getattr(pool, "kv_cache_dim", None)
    if latent is not None:
        return PageGeometry(pool.layer_num, 1, pool.page_size, 1, 1, latent * itemsize)
    groups = getattr(pool, "head_group_num", 1) if pool.layout == "page_unified" else 1
    heads = pool.head_num // groups
    return PageGeometry(pool.layer_num, 2, pool.page_size, groups, heads, pool.head_dim * itemsize)


def _bytes_of(tensor: Any) -> Bytes:
    """A tensor's memory as uint8, also where numpy lacks its dtype; no copy."""
    import torch  # pyright: ignore[reportMissingImports]

    if not tensor.is_contiguous():
        raise InvalidRequest("a tensor of KV must be contiguous")
    memory: Bytes = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memory


def _memory_at(address: int, size: int) -> Bytes:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
