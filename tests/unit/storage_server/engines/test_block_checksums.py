"""Block checksums are those of the blocks, however the bytes arrive."""

from __future__ import annotations

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from objectcache_schemas.limits import KIB, MIB
from objectcache_storage_server.engines.block_checksums import (
    BLOCK_BYTES_MAX,
    BLOCK_BYTES_MIN,
    BlockHasher,
    block_checksums,
    block_count,
    stored_block_bytes,
)


@given(st.binary(max_size=300), st.integers(1, 400))
def test_each_block_has_its_own_checksum(data: bytes, block_bytes: int) -> None:
    blocks = [data[begin : begin + block_bytes] for begin in range(0, len(data), block_bytes)]
    checksums = block_checksums(memoryview(data), block_bytes)
    assert checksums == [xxhash.xxh3_64_intdigest(block) for block in blocks]
    assert block_count(len(data), block_bytes) == len(blocks)


@given(st.lists(st.binary(max_size=50)), st.integers(1, 120))
def test_a_hasher_takes_pieces_of_any_length(pieces: list[bytes], block_bytes: int) -> None:
    hasher = BlockHasher(block_bytes)
    for piece in pieces:
        hasher.update(memoryview(piece))
    assert hasher.finish().tolist() == block_checksums(memoryview(b"".join(pieces)), block_bytes)


@given(st.integers(1, 1 << 30))
def test_writes_in_multiples_of_the_asked_block_are_multiples_of_the_stored_one(asked: int) -> None:
    stored = stored_block_bytes(asked)
    assert asked % stored == 0
    assert stored == asked or BLOCK_BYTES_MIN <= stored <= BLOCK_BYTES_MAX


def test_blocks_up_to_the_limit_are_stored_as_asked() -> None:
    for asked in (1, 18 * KIB, 64 * KIB, 288 * KIB, BLOCK_BYTES_MAX):
        assert stored_block_bytes(asked) == asked


def test_large_blocks_are_divided_as_little_as_possible() -> None:
    assert stored_block_bytes(12 * MIB) == 1 * MIB
    assert stored_block_bytes(3 * MIB // 2) == 3 * MIB // 4
    assert stored_block_bytes(BLOCK_BYTES_MAX + 7) == BLOCK_BYTES_MAX + 7  # a prime
