"""Comparing what was read with the checksums that were stored, as far as a bucket's policy asks."""

from __future__ import annotations

from collections.abc import Sequence

from objectcache_schemas.records import Verification
from objectcache_storage_server.engines.block_checksums import block_checksum

SAMPLE_BLOCKS = 16  # one of so many is verified, where a bucket's policy is `sampled`


def compared_blocks(
    block_count: int, verification: Verification, first_block: int, sample: int
) -> range:
    """Which of the blocks from `first_block` on are compared. `sample` is any number: blocks are
    counted within their source, so that pieces of any size sample alike.
    """
    end_block = first_block + block_count
    if verification is Verification.FULL:
        return range(first_block, end_block)
    if verification is Verification.SAMPLED:
        skipped = (sample - first_block) % SAMPLE_BLOCKS
        return range(first_block + skipped, end_block, SAMPLE_BLOCKS)
    return range(0)


def find_misfit(
    memory: memoryview,
    block_bytes: int,
    expected: Sequence[int],
    verification: Verification = Verification.FULL,
    first_block: int = 0,
    sample: int = 0,
) -> int | None:
    """The first of these blocks that does not match its checksum, of those that are compared, which
    `compared_blocks` says.
    """
    for block in compared_blocks(len(expected), verification, first_block, sample):
        index = block - first_block
        if (
            block_checksum(memory[index * block_bytes : (index + 1) * block_bytes])
            != expected[index]
        ):
            return index
    return None
