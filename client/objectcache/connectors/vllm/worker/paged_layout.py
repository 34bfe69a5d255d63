"""vLLM's paged KV tensors, and the slices that ObjectCache stores: a transpose without a detour.

A slice is one block of one layer: `[2 (K, V), block_tokens, heads, width]`, or `[block_tokens,
width]` where one latent stands for both (MLA). It is the same for every order in which vLLM may
keep its blocks, so that engines with different attention backends share what is stored. A
`PagedLayer` is a set of views; its copies read every byte once and write it once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from objectcache.gpu.pieces import BlockPart
from objectcache.payload import Bytes
from objectcache_schemas.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class ContentShape:
    """What one token of one head holds, in elements: K, then V (`latent`: one for both).

    `rows_apart` is CPU_ATTN's order: within a block and head first all rows of K, then all of V.
    """

    width_k: int
    width_v: int
    latent: bool = False
    rows_apart: bool = False


class PagedLayer:
    """One layer's KV of all blocks, as views whose last axes are in a slice's order."""

    def __init__(self, cache: Any, block_count: int, content: ContentShape) -> None:
        """`cache` is what vLLM registers: [B, H, N, C] in any physical order, or of older versions
        [2, B, N, H, D], [B, 2, N, H, D] or [B, N, C]. Its blocks may be split into smaller ones,
        which are then a whole multiple of `block_count`.

        Raises `InvalidRequest` for another shape.
        """
        try:
            halves = _halves(cache, block_count, content)
            self._parts = [_by_block(half, block_count) for half in halves]
        except RuntimeError as error:
            raise InvalidRequest(f"KV tensor {_described(cache)}: {error}") from error
        self.block_count = block_count
        self.slice_bytes = sum(_bytes_of_one(part) for part in self._parts)

    def block_parts(self) -> list[BlockPart]:
        """The runs of bytes of each block, in a slice's order."""
        return [found for part in self._parts for found in _runs_of_bytes(part)]

    def load(self, block_ids: Sequence[int], slices: Bytes) -> None:
        """Lay slices into blocks: uint8[len(block_ids), slice_bytes], rows contiguous."""
        for part, source in zip(self._parts, self._typed(slices), strict=True):
            for first, count, block in runs(block_ids):
                part[block : block + count].copy_(source[first : first + count])

    def store(self, block_ids: Sequence[int], slices: Bytes) -> None:
        """Take the blocks' slices: into uint8[len(block_ids), slice_bytes], rows contiguous."""
        for part, target in zip(self._parts, self._typed(slices), strict=True):
            for first, count, block in runs(block_ids):
                target[first : first + count].copy_(part[block : block + count])

    def index(self, block_ids: Sequence[int]) -> Any:
        """The blocks as `gather` and `scatter` take them, where the blocks are."""
        import torch  # pyright: ignore[reportMissingImports]

        return torch.tensor(block_ids, dtype=torch.int64, device=self._parts[0].device)

    def buffer(self, count: int) -> Any:
        """Memory for so many slices where the blocks are: uint8[count, slice_bytes]."""
        import torch  # pyright: ignore[reportMissingImports]

        shape = (count, self.slice_bytes)
        return torch.empty(shape, dtype=torch.uint8, device=self._parts[0].device)

    def scatter(self, index: Any, buffer: Any) -> None:
        """Lay slices of a buffer into blocks: one kernel a part, whatever the blocks' order."""
        for part, source in zip(self._parts, self._views(buffer), strict=True):
            _as_integers(part).index_copy_(0, index, _as_integers(source))

    def gather(self, index: Any, buffer: Any) -> None:
        """Take the blocks' slices into a buffer."""
        for part, target in zip(self._parts, self._views(buffer), strict=True):
            _as_integers(target).copy_(_as_integers(part).index_select(0, index))

    def _typed(self, slices: Bytes) -> list[Any]:
        """The slices as views of the parts' shapes and type."""
        import torch  # pyright: ignore[reportMissingImports]

        assert slices.shape[1] == self.slice_bytes
        return self._views(torch.from_numpy(slices))

    def _views(self, rows: Any) -> list[Any]:
        typed = []
        begin = 0
        for part in self._parts:
            end = begin + _bytes_of_one(part)
            typed.append(rows[:, begin:end].view(part.dtype).unflatten(1, part.shape[1:]))
            begin = end
        return typed

    def __repr__(self) -> str:
        shapes = ", ".join(_described(part) for part in self._parts)
        return f"<PagedLayer {shapes}, slices of {self.slice_bytes} bytes>"


def runs(block_ids: Sequence[int]) -> list[tuple[int, int, int]]:
    """(index of the first, count, first block) of each run of consecutive blocks."""
    found: list[tuple[int, int, int]] = []
    for index, block in enumerate(block_ids):
        if found and block == found[-1][2] + found[-1][1]:
            first, count, first_block = found[-1]
            found[-1] = (first, count + 1, first_block)
        else:
            found.append((index, 1, block))
    return found


def _halves(cache: Any, block_count: int, content: ContentShape) -> list[Any]:
    """Views [blocks, halves, tokens, heads, width]: one, or K and V where they differ in width."""
    if content.latent:
        return [_latent(cache)]
    if cache.ndim == 5:
        return [cache.movedim(_kv_axis(cache, block_count), 1)]
    _check_content(cache, content)
    if content.rows_apart:
        blocks, heads, tokens, _ = cache.shape
        rows = cache.view(blocks, heads, 2, tokens, content.width_k)
        return [rows.permute(0, 2, 3, 1, 4)]
    if content.width_k == content.width_v:
        return [cache.unflatten(3, (2, content.width_k)).permute(0, 3, 2, 1, 4)]
    both = cache.permute(0, 2, 1, 3).unsqueeze(1)
    return [both[..., : content.width_k], both[..., content.width_k :]]


def _latent(cache: Any) -> Any:
    if cache.ndim == 3:  # [B, N, C]
        return cache.unsqueeze(1).unsqueeze(3)
    if cache.ndim != 4 or cache.shape[1] != 1:
        raise InvalidRequest(
            f"KV tensor {_described(cache)}: a latent is [blocks, 1, tokens, width] or "
            "[blocks, tokens, width]"
        )
    return cache.permute(0, 2, 1, 3).unsqueeze(1)


def _kv_axis(cache: Any, block_count: int) -> int:
    """Which of the first two axes is K and V; the other one is the blocks."""
    first, second = cache.shape[:2]
    fits = [first == 2 and second % block_count == 0, second == 2 and first % block_count == 0]
    if fits == [True, True] or not any(fits):
        raise InvalidRequest(
            f"KV tensor {_described(cache)}: one of its first two axes must be K and V, and the "
            f"other a multiple of {block_count} blocks"
        )
    return fits.index(True)


def _check_content(cache: Any, content: ContentShape) -> None:
    width = content.width_k + content.width_v
    if cache.ndim != 4 or cache.shape[3] != width:
        raise InvalidRequest(
            f"KV tensor {_described(cache)}: the last of 4 axes must hold K and V, {width} elements"
        )
    if content.rows_apart and content.width_k != content.width_v:
        raise InvalidRequest("K and V in rows of their own must be of one width")


def _by_block(half: Any, block_count: int) -> Any:
    """[block_count, halves, parts of a block, tokens, heads, width]."""
    if half.shape[0] % block_count:
        raise InvalidRequest(
            f"KV tensor of {half.shape[0]} blocks is no whole multiple of {block_count} blocks"
        )
    return half.unflatten(0, (block_count, -1)).transpose(1, 2)


def _bytes_of_one(part: Any) -> int:
    count: int = part[0].numel() * part.element_size()
    return count


def _as_integers(tensor: Any) -> Any:
    """The same bytes as integers: not every operation knows every kind of number."""
    import torch  # pyright: ignore[reportMissingImports]

    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(kinds[tensor.element_size()])


def _runs_of_bytes(part: Any) -> list[BlockPart]:
    """What of a block's elements, in their order, lies in one piece."""
    length, inner = 1, part.ndim
    while inner > 1 and (part.shape[inner - 1] == 1 or part.stride(inner - 1) == length):
        inner -= 1
        length *= part.shape[inner]
    item_bytes = part.element_size()
    offsets = [0]
    for axis in range(1, inner):
        steps = [part.stride(axis) * index for index in range(part.shape[axis])]
        offsets = [offset + step for offset in offsets for step in steps]
    return [
        BlockPart(
            part.data_ptr() + offset * item_bytes, part.stride(0) * item_bytes, length * item_bytes
        )
        for offset in offsets
    ]


def _described(cache: Any) -> str:
    return f"{cache.dtype} {list(cache.shape)}"
