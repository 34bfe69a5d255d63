"""SGLang's host memory layouts, seen as chunks: pure arithmetic on strides, no byte is copied.

A chunk holds one page in one order, whatever the layout it came from: layer, K or V, token, head.
So engines with different layouts read each other's chunks. Sources: `pool_host/mha.py`,
`pool_host/mla.py` and `pool_host/page_unified.py` of SGLang 0.5.23.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from objectcache.payload import Bytes
from objectcache_schemas.errors import InvalidRequest

MHA_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head", "page_unified")
MLA_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_unified")


@dataclass(frozen=True, slots=True)
class PageGeometry:
    """What one page holds. MLA has one component, the latent, and one head."""

    num_layers: int
    components: int
    page_tokens: int
    head_groups: int
    heads_per_group: int
    head_bytes: int

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of a page: a slice."""
        return self.components * self.page_tokens * self.token_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer and component."""
        return self.head_groups * self.heads_per_group * self.head_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, and of its chunk."""
        return self.num_layers * self.layer_bytes

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """A chunk as (layer, component, token, head group, head, byte)."""
        return (
            self.num_layers,
            self.components,
            self.page_tokens,
            self.head_groups,
            self.heads_per_group,
            self.head_bytes,
        )


def pages_view(memory: Bytes, layout: str, geometry: PageGeometry) -> Bytes:
    """A view of `memory` as uint8[page, *chunk_shape], strided as the layout needs.

    `memory` is whole pages in the layout's order: a host pool, or one page alone. Raises
    `InvalidRequest` for a layout that is not known, and for a part of a page.
    """
    page_count, rest = divmod(memory.size, geometry.page_bytes)
    if rest or not memory.flags.c_contiguous:
        raise InvalidRequest(
            f"{memory.size} bytes of host memory are not whole pages of {geometry.page_bytes} "
            f"in one run"
        )
    stored, order = _axes(layout, geometry, page_count)
    return memory.reshape(-1).view(np.uint8).reshape(stored).transpose(order)


def _axes(
    layout: str, geometry: PageGeometry, pages: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape as it is stored, and where page, layer, component, token, group, head and byte are
    in it.
    """
    layers, components, tokens, groups, heads, head_bytes = geometry.chunk_shape
    if layout not in (MHA_LAYOUTS if components == 2 else MLA_LAYOUTS):
        raise InvalidRequest(
            f"--hicache-mem-layout {layout} is not supported; use page_first, page_first_direct or "
            f"layer_first"
        )
    if layout == "page_unified":
        stored = (pages, groups, layers, components, tokens, heads, head_bytes)
        return stored, (0, 2, 3, 4, 1, 5, 6)
    if layout == "page_head":
        stored = (components, pages, groups, heads, tokens, layers, head_bytes)
        return stored, (1, 5, 0, 4, 2, 3, 6)
    if layout == "layer_first":
        stored = (components, layers, pages, tokens, groups, heads, head_bytes)
        return stored, (2, 1, 0, 3, 4, 5, 6)
    if layout == "page_first":
        stored = (components, pages, tokens, layers, groups, heads, head_bytes)
        return stored, (1, 3, 0, 2, 4, 5, 6)
    stored = (components, pages, layers, tokens, groups, heads, head_bytes)
    return stored, (1, 2, 0, 3, 4, 5, 6)
