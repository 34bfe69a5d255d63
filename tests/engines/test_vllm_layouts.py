"""Every order of vLLM's blocks becomes the same slices, byte for byte, and back."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest
import torch

from objectcache.connectors.vllm.worker.paged_layout import ContentShape, PagedLayer
from objectcache.gpu.pieces import PagedBlocks
from objectcache.payload import Bytes
from objectcache_schemas.errors import InvalidRequest
from tests.engines.vllm_engine import ORDERS

BLOCKS, HEADS, TOKENS, WIDTH = 6, 3, 4, 8
IDS = (4, 1, 2, 0)  # a run of two, and two alone
KV = ContentShape(WIDTH, WIDTH)
LATENT = ContentShape(24, 0, latent=True)
ROWS_APART = ContentShape(WIDTH, WIDTH, rows_apart=True)


def noise(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Bytes of every value, seen as numbers of a type."""
    size = torch.empty(0, dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(7)
    flat = torch.randint(
        0, 256, (int(np.prod(shape)) * size,), dtype=torch.uint8, generator=generator
    )
    return flat.view(dtype).view(shape)


def in_order(logical: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    """The same tensor with its memory in another order of axes."""
    physical = logical.permute(axes).contiguous()
    return physical.permute([axes.index(axis) for axis in range(logical.ndim)])


def slices_of(kv: torch.Tensor) -> Bytes:
    """[B, 2, N, H, D] or [B, N, C] as the slices that are stored, of IDS."""
    chosen = kv[list(IDS)].contiguous()
    rows: Bytes = chosen.view(torch.uint8).reshape(len(IDS), -1).numpy()
    return rows


def check(cache: torch.Tensor, content: ContentShape, kv: torch.Tensor) -> None:
    """`cache` holds `kv`; stored, its slices are kv's; loaded, other blocks stay as they are."""
    layer = PagedLayer(cache, BLOCKS, content)
    expected = slices_of(kv)
    stored = np.zeros_like(expected)
    assert layer.slice_bytes == expected.shape[1]
    layer.store(IDS, stored)
    np.testing.assert_array_equal(stored, expected)

    before = cache.clone()
    cache.view(torch.uint8).zero_() if cache.is_contiguous() else cache.zero_()
    layer.load(IDS, stored)
    again = np.zeros_like(expected)
    layer.store(IDS, again)
    np.testing.assert_array_equal(again, expected)
    untouched = PagedLayer(cache, BLOCKS, content)
    rest = np.ones((BLOCKS - len(IDS), layer.slice_bytes), np.uint8)
    untouched.store([block for block in range(BLOCKS) if block not in IDS], rest)
    assert not rest.any()
    assert before.shape == cache.shape
    check_by_address(layer, cache, expected)
    check_by_index(layer, cache, expected)


def check_by_address(layer: PagedLayer, cache: torch.Tensor, expected: Bytes) -> None:
    """The runs of bytes of `block_parts` are the slices, and the blocks are nothing else."""
    places = PagedBlocks(layer.block_parts(), BLOCKS)
    assert places.slice_bytes == layer.slice_bytes
    source = np.random.default_rng(8).integers(0, 256, expected.shape, np.uint8)
    cache.view(torch.uint8).zero_() if cache.is_contiguous() else cache.zero_()
    for host, device, size in places.pieces(IDS, source).triples():
        ctypes.memmove(device, host, size)
    check_only(layer, source)


def check_by_index(layer: PagedLayer, cache: torch.Tensor, expected: Bytes) -> None:
    """Buffers of slices are laid into blocks, and gathered from them."""
    cache.view(torch.uint8).zero_() if cache.is_contiguous() else cache.zero_()
    index, buffer = layer.index(IDS), layer.buffer(len(IDS))
    buffer.copy_(torch.from_numpy(expected))
    layer.scatter(index, buffer)
    check_only(layer, expected)
    buffer.zero_()
    layer.gather(index, buffer)
    np.testing.assert_array_equal(buffer.numpy(), expected)


def check_only(layer: PagedLayer, slices: Bytes) -> None:
    """These slices are in IDS, and zeros in the other blocks."""
    everything = np.ones((BLOCKS, layer.slice_bytes), np.uint8)
    layer.store(range(BLOCKS), everything)
    np.testing.assert_array_equal(everything[list(IDS)], slices)
    assert not np.delete(everything, IDS, axis=0).any()


def test_older_orders_and_latents_have_long_runs_of_bytes_and_k_beside_v_a_heads() -> None:
    kv, latent = kv_blocks(), noise(BLOCKS, TOKENS, 24)
    row = WIDTH * 2
    half = TOKENS * HEADS * row
    kv_first = PagedLayer(kv.transpose(0, 1).contiguous(), BLOCKS, KV).block_parts()
    assert [part.length_bytes for part in kv_first] == [half, half]
    assert [part.length_bytes for part in PagedLayer(kv, BLOCKS, KV).block_parts()] == [2 * half]
    assert [part.length_bytes for part in PagedLayer(latent, BLOCKS, LATENT).block_parts()] == [
        TOKENS * 24 * 2
    ]
    beside = PagedLayer(in_order(logical_of(kv), (0, 2, 1, 3)), BLOCKS, KV).block_parts()
    assert {part.length_bytes for part in beside} == {row}
    assert len(beside) == 2 * TOKENS * HEADS


def kv_blocks() -> torch.Tensor:
    """[B, 2 (K, V), N, H, D], no two bytes' places alike."""
    return noise(BLOCKS, 2, TOKENS, HEADS, WIDTH)


def logical_of(kv: torch.Tensor) -> torch.Tensor:
    """[B, H, N, K || V] with the same content."""
    return torch.cat([kv[:, 0], kv[:, 1]], dim=-1).permute(0, 2, 1, 3)


@pytest.mark.parametrize("order", ORDERS)
def test_a_block_of_any_physical_order_becomes_k_then_v_by_token(order: str) -> None:
    kv = kv_blocks()
    layers = torch.stack([logical_of(kv), logical_of(kv.flip(0))])
    pool = in_order(layers, ORDERS[order])
    check(pool[0], KV, kv)


def test_k_and_v_in_rows_of_their_own_are_told_from_k_beside_v() -> None:
    kv = kv_blocks()
    rows = kv.permute(0, 3, 1, 2, 4).contiguous()  # [B, H, 2, N, D], as CPU_ATTN keeps it
    cache = rows.view(BLOCKS, HEADS, TOKENS, 2 * WIDTH)
    check(cache, ROWS_APART, kv)
    beside = np.zeros((len(IDS), kv[0].numel() * 2), np.uint8)
    PagedLayer(cache, BLOCKS, KV).store(IDS, beside)
    assert not np.array_equal(beside, slices_of(kv))


def test_rows_of_their_own_need_whole_blocks_in_one_piece() -> None:
    cache = in_order(logical_of(kv_blocks()), (0, 2, 1, 3))
    with pytest.raises(InvalidRequest, match="KV tensor"):
        PagedLayer(cache[..., ::2], BLOCKS, ContentShape(4, 4, rows_apart=True))


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (0, 1, 3, 2, 4)])
@pytest.mark.parametrize("kv_first", [True, False])
def test_older_versions_keep_k_and_v_on_an_axis_of_their_own(
    kv_first: bool, order: tuple[int, ...]
) -> None:
    kv = kv_blocks()
    logical = kv.transpose(0, 1) if kv_first else kv
    check(in_order(logical, order), KV, kv)


@pytest.mark.parametrize("axes", [3, 4])
def test_a_latent_is_one_row_a_token(axes: int) -> None:
    kv = noise(BLOCKS, TOKENS, 24)
    check(kv.clone() if axes == 3 else kv.clone().unsqueeze(1), LATENT, kv)


def test_a_latent_of_656_bytes_a_token_is_stored_as_it_is() -> None:
    kv = noise(BLOCKS, TOKENS, 656, dtype=torch.uint8)
    check(kv.clone().unsqueeze(1), ContentShape(656, 0, latent=True), kv)


def test_k_and_v_of_different_widths_lie_behind_each_other() -> None:
    k, v = noise(BLOCKS, TOKENS, HEADS, 8), noise(BLOCKS, TOKENS, HEADS, 4).flip(0)
    cache = torch.cat([k, v], dim=-1).permute(0, 2, 1, 3)
    layer = PagedLayer(in_order(cache, (0, 2, 1, 3)), BLOCKS, ContentShape(8, 4))
    stored = np.zeros((len(IDS), layer.slice_bytes), np.uint8)
    layer.store(IDS, stored)
    expected = np.concatenate([slices_of(k), slices_of(v)], axis=1)
    np.testing.assert_array_equal(stored, expected)


def test_blocks_that_the_kernel_splits_are_stored_whole() -> None:
    kv = kv_blocks()
    halves = logical_of(kv).unflatten(2, (2, TOKENS // 2)).transpose(1, 2).flatten(0, 1)
    check(halves.contiguous(), KV, kv)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float8_e4m3fn])
def test_the_type_of_the_numbers_does_not_matter(dtype: torch.dtype) -> None:
    kv = noise(BLOCKS, 2, TOKENS, HEADS, WIDTH, dtype=dtype)
    layer = PagedLayer(logical_of(kv).contiguous(), BLOCKS, KV)
    stored = np.zeros((len(IDS), layer.slice_bytes), np.uint8)
    layer.store(IDS, stored)
    np.testing.assert_array_equal(stored, slices_of(kv))


def test_slices_within_larger_chunks_are_copied_in_place() -> None:
    kv = kv_blocks()
    layer = PagedLayer(logical_of(kv).contiguous(), BLOCKS, KV)
    chunks = np.zeros((len(IDS), 5, layer.slice_bytes), np.uint8)
    layer.store(IDS, chunks[:, 3])
    np.testing.assert_array_equal(chunks[:, 3], slices_of(kv))
    assert not np.delete(chunks, 3, axis=1).any()


@pytest.mark.parametrize(
    ("shape", "content"),
    [
        ((BLOCKS, HEADS, TOKENS, WIDTH), KV),  # no room for V
        ((BLOCKS, HEADS, TOKENS, 24), LATENT),
        ((BLOCKS + 1, HEADS, TOKENS, 2 * WIDTH), KV),
        ((3, BLOCKS, TOKENS, HEADS, WIDTH), KV),
        ((2, 2, TOKENS, HEADS, WIDTH), KV),
        ((BLOCKS, TOKENS), KV),
    ],
)
def test_another_shape_is_refused(shape: tuple[int, ...], content: ContentShape) -> None:
    blocks = 2 if shape[:2] == (2, 2) else BLOCKS
    with pytest.raises(InvalidRequest, match="KV tensor"):
        PagedLayer(torch.zeros(shape), blocks, content)


def test_the_orders_are_those_of_vllm() -> None:
    from vllm.v1.kv_cache_layout import KVCacheLayout

    assert {layout.name: layout.value for layout in KVCacheLayout} == ORDERS
    assert len(list(itertools.permutations(range(5)))) > len(ORDERS)
