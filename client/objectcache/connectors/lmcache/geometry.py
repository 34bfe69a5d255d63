"""How a chunk of LMCache lies in memory, and how it is stored.

LMCache keeps a chunk as [K and V, layer, token, width]. It is stored as [layer, K and V, token,
width], so that a layer is one slice. One layer's keys, or its values, are a run of bytes either
way: a row. So a chunk is read and written in rows, each copied once, with nothing inside a row
moved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from objectcache.payload import Bytes
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.layout import KvLayout


@dataclass(frozen=True, slots=True)
class ChunkGeometry:
    """Shape of a chunk: `parts` (2 for keys and values, 1 for a latent) times `num_layers` rows.

    A chunk of several groups of layers, or of an unknown shape, is one row.
    """

    parts: int
    num_layers: int
    chunk_tokens: int
    row_bytes: int
    name: str

    @classmethod
    def of(
        cls, shapes: Sequence[Sequence[int]], itemsizes: Sequence[int], chunk_tokens: int = 1
    ) -> ChunkGeometry:
        """The geometry of a chunk whose groups have these shapes and bytes per element.

        `chunk_tokens` counts where the shapes do not say. Raises `InvalidRequest` for no bytes.
        """
        groups = [tuple(int(extent) for extent in shape) for shape in shapes]
        total_bytes = sum(
            math.prod(group) * size for group, size in zip(groups, itemsizes, strict=True)
        )
        if total_bytes < 1:
            raise InvalidRequest(f"a chunk of shapes {groups} holds no bytes")
        if len(groups) == 1 and len(groups[0]) == 4 and groups[0][0] in (1, 2):
            parts, num_layers, tokens, width = groups[0]
            name = f"layer,part,token;{parts}x{num_layers}x{tokens}x{width}x{itemsizes[0]}"
            return cls(parts, num_layers, tokens, tokens * width * itemsizes[0], name)
        sizes = "+".join(
            "x".join(map(str, (*group, size)))
            for group, size in zip(groups, itemsizes, strict=True)
        )
        return cls(1, 1, chunk_tokens, total_bytes, f"as it is;{sizes}")

    @property
    def row_count(self) -> int:
        """Rows of a chunk."""
        return self.parts * self.num_layers

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk."""
        return self.row_count * self.row_bytes

    @property
    def layout(self) -> KvLayout:
        """The chunk as the store is asked for it: a slice a row, in the order of storage."""
        return KvLayout(
            num_layers=self.row_count,
            chunk_tokens=self.chunk_tokens,
            per_layer_chunk_bytes=self.row_bytes,
            dtype="uint8",
            fingerprint=self.name,
        )

    def row(self, chunk: Bytes, stored_row: int) -> Bytes:
        """The bytes of a chunk in memory that are row `stored_row` of the stored one: a view."""
        layer, part = divmod(stored_row, self.parts)
        begin = (part * self.num_layers + layer) * self.row_bytes
        return chunk[begin : begin + self.row_bytes]
