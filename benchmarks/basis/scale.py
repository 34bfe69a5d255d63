"""How much is measured: enough to leave caches of the processor, little enough to fit memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from objectcache_schemas.limits import MIB

CHUNKS_EACH = 16  # prefixes are cut in steps of so many, one of 16 times the size
CHUNK_BYTES = 2 * MIB  # of the largest prefix: Llama 3.1 8B, 16 tokens
# Page cache of two stores, the target, what a stream receives, a copy on its way into a put.
PAYLOADS_IN_MEMORY = 8


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured. `chunk_count` is of the prefixes of 16 tokens a chunk."""

    chunk_count: int
    first_layer_chunks: int
    pressed_chunks: int  # read again and again while memory is short
    pressed_rounds: int  # a claim needs several
    pressed_shares: tuple[float, ...]  # of them that memory has room for
    small_chunks: int
    many_objects: int
    repeats: int  # of what is quick
    rounds: int  # of what goes to the device
    is_quick: bool = False


FULL = Scale(
    chunk_count=448,
    first_layer_chunks=64,
    pressed_chunks=256,
    pressed_rounds=5,
    pressed_shares=(0.25, 0.5, 0.75, 1.5),
    small_chunks=100_000,
    many_objects=1_000_000,
    repeats=7,
    rounds=5,
)
QUICK = Scale(
    chunk_count=16,
    first_layer_chunks=16,
    pressed_chunks=16,
    pressed_rounds=1,
    pressed_shares=(0.5,),
    small_chunks=1_000,
    many_objects=2_000,
    repeats=1,
    rounds=1,
    is_quick=True,
)


def scale_that_fits(scale: Scale, available_bytes: int) -> Scale:
    """The scale with its prefixes cut to what memory can hold."""
    room = available_bytes // PAYLOADS_IN_MEMORY // CHUNK_BYTES // CHUNKS_EACH * CHUNKS_EACH
    chunk_count = max(CHUNKS_EACH, min(scale.chunk_count, room))
    return replace(scale, chunk_count=chunk_count)
