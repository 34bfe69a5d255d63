"""SGLang's device pools as pages: one layer of many pages is written, whole pages are read.

Sources: `MHATokenToKVPool` and `MLATokenToKVPool` in `sglang/srt/mem_cache/memory_pool.py` 0.5.23.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from objectcache.connectors.device.engine_copier import EngineCopier
from objectcache.connectors.sglang.host_layouts import PageGeometry
from objectcache.connectors.sglang.host_pool import layout_name, page_starts
from objectcache.connectors.sglang.page_source import PageSource
from objectcache.gpu.copier import BlockSave, wait_for_all
from objectcache.gpu.pieces import BlockPart, PagedBlocks
from objectcache.payload import Bytes
from objectcache_schemas.errors import InvalidRequest


class DevicePool:
    """K and V, or the latent, of every layer: tensors of (slot, head, dim) on one device. `places`
    are each layer's pages by their addresses.

    A chunk is a page in the order of `host_layouts`: layer, K or V, token, head. Its bytes are
    copied once in memory of the CPU; to and from a GPU they cross the bus once, as one run, and are
    put in place on the device.
    """

    def __init__(self, kvcache: Any, page_tokens: int) -> None:
        """Raises `InvalidRequest` for a pool that is neither plain MHA nor plain MLA."""
        components = _components(kvcache)
        self._page_tokens = page_tokens
        layers = [
            [_paged(part[layer], page_tokens) for part in components]
            for layer in range(len(components[0]))
        ]
        self.device = layers[0][0].device
        self._page_count = min(len(part) for layer in layers for part in layer)
        self.places = [_places(layer, self._page_count) for layer in layers]
        # numpy copies rows as runs of bytes; torch's index_copy_ took ten times as long on a CPU.
        self._on_cpu = self.device.type == "cpu"
        self._layers = (
            [[part.numpy() for part in layer] for layer in layers] if self._on_cpu else layers
        )
        self.geometry = _geometry(kvcache, components, page_tokens)
        self.dtype = str(kvcache.store_dtype)
        self.layout_name = layout_name("kv", kvcache.start_layer or 0, self.geometry)
        self.rank_replicated = len(components) == 1
        _, heads, width = components[0][0].shape
        self.slice_axes = (len(components), heads, width)  # beside a page's tokens

    @property
    def num_layers(self) -> int:
        """Layers of the pool."""
        return len(self._layers)

    def page_ids(self, slots: Any) -> npt.NDArray[np.int64]:
        """The pages of these slots, in host memory.

        Raises `InvalidRequest` unless they are whole, aligned pages of the pool.
        """
        starts = page_starts(slots.detach().cpu(), self._page_tokens, self._page_count)
        return np.array(starts, np.int64) // self._page_tokens

    def pages(self, slots: Any) -> Any:
        """The same, on the device where it is a GPU."""
        return self.on_device(self.page_ids(slots))

    def on_device(self, ids: npt.NDArray[np.int64]) -> Any:
        """Pages as `write_layer` and `read_pages` take them."""
        if self._on_cpu:
            return ids
        import torch  # pyright: ignore[reportMissingImports]

        return torch.from_numpy(ids).to(self.device)

    def write_layer(self, layer: int, pages: Any, payload: Bytes) -> None:
        """Put a layer payload, uint8[pages, slice_bytes], into its place.

        On a GPU the copies are queued on the current stream; `payload` must live until they end.
        """
        parts = self._layers[layer]
        if self._on_cpu:
            by_part = payload.reshape(len(payload), len(parts), -1)
            for component, part in enumerate(parts):
                part[pages] = by_part[:, component]
            return
        import torch  # pyright: ignore[reportMissingImports]

        source = torch.from_numpy(payload).to(self.device, non_blocking=True)
        source = source.view(len(payload), len(parts), -1)
        for component, part in enumerate(parts):
            part.index_copy_(0, pages, source[:, component])

    def read_pages(self, pages: Any, chunks: Bytes) -> None:
        """Copy pages into `chunks`: uint8[pages, num_layers, slice_bytes]."""
        shape = (len(chunks), self.num_layers, self.geometry.components, -1)
        if self._on_cpu:
            by_part = chunks.reshape(shape)
            for layer, parts in enumerate(self._layers):
                for component, part in enumerate(parts):
                    for position, page in enumerate(pages):
                        by_part[position, layer, component] = part[page]
            return
        import torch  # pyright: ignore[reportMissingImports]

        target = torch.from_numpy(chunks)
        block = torch.empty_like(target, device=self.device)
        by_layer = block.view(shape)
        for layer, parts in enumerate(self._layers):
            for component, part in enumerate(parts):
                by_layer[:, layer, component] = part.index_select(0, pages)
        target.copy_(block)

    def __repr__(self) -> str:
        return f"<DevicePool {self.layout_name}, {self._page_count} pages on {self.device}>"


class DevicePages(PageSource):
    """Pages of a device pool, for a put: by its copier, where there is one that reaches the memory
    that they go to. What has computed them is through.
    """

    def __init__(self, pool: DevicePool, slots: Any, copier: EngineCopier | None = None) -> None:
        """Raises `InvalidRequest` unless the slots are whole, aligned pages of the pool."""
        self._pool = pool
        self._ids = pool.page_ids(slots)
        self._copier = copier

    def read(self, start: int, end: int, chunks: Bytes) -> None:
        ids = self._ids[start:end]
        if self._copier is None or not self._copier.reaches(chunks):
            self._pool.read_pages(self._pool.on_device(ids), chunks)
            return
        self._copier.enter_thread()
        saves: list[BlockSave] = []
        try:
            for layer, places in enumerate(self._pool.places):
                saves.append(self._copier.copier.save(places.pieces(ids, chunks[:, layer])))
        finally:
            wait_for_all(saves)


def _components(kvcache: Any) -> list[Any]:
    """The buffers of each component, one tensor a layer."""
    kind = type(kvcache).__name__
    if kind == "MHATokenToKVPool":
        plain = kvcache.kv_cache_layout == "nhd" and kvcache.k_scale_buffer is None
        if plain and kvcache.head_dim == kvcache.v_head_dim:
            return [kvcache.k_buffer, kvcache.v_buffer]
    elif kind == "MLATokenToKVPool" and not kvcache.use_dsa and kvcache.kv_scale_buffer is None:
        return [kvcache.kv_buffer]
    raise InvalidRequest(
        f"the linker stores plain MHA and MLA pools, not {kind} in this configuration; use "
        f"--hicache-storage-backend dynamic with objectcache.connectors.sglang"
    )


def _paged(buffer: Any, page_tokens: int) -> Any:
    """uint8[page, bytes], a view of (slot, head, dim)."""
    import torch  # pyright: ignore[reportMissingImports]

    if not buffer.is_contiguous():
        raise InvalidRequest("a layer's KV must lie in one run")
    page_count = len(buffer) // page_tokens
    return buffer.view(torch.uint8)[: page_count * page_tokens].view(page_count, -1)


def _places(parts: list[Any], page_count: int) -> PagedBlocks:
    """Where a layer's pages are: slices are the parts' pages one after the other."""
    runs = [BlockPart(part.data_ptr(), part.shape[1], part.shape[1]) for part in parts]
    return PagedBlocks(runs, page_count)


def _geometry(kvcache: Any, components: list[Any], page_tokens: int) -> PageGeometry:
    buffer = components[0][0]
    _, heads, width = buffer.shape
    head_bytes = width * buffer.element_size()
    return PageGeometry(len(components[0]), len(components), page_tokens, 1, heads, head_bytes)
