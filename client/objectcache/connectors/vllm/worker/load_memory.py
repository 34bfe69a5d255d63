"""Memory for loads, made beside the start: making it costs more than a load into it does."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from objectcache.landing.memory_file import file_bytes_for
from objectcache.landing.target_pool import OVERSIZE_MAX
from objectcache_schemas.errors import ObjectCacheError
from objectcache_schemas.limits import MIB

logger = logging.getLogger("objectcache.connectors.vllm")
SMALLEST_BYTES = 2 * MIB  # memory for less is made in a moment


def ready_lengths(load_bytes: int, bytes_max: int) -> list[int]:
    """Lengths of memory in one of which any load of up to `load_bytes` fits, of one request at a
    time: a load takes memory up to OVERSIZE_MAX times too large. Together within `bytes_max`, if
    need be without room for the largest loads.
    """
    longest = min(load_bytes, bytes_max * (OVERSIZE_MAX - 1) // OVERSIZE_MAX)
    lengths: list[int] = []
    while longest >= SMALLEST_BYTES:
        taken = sum(file_bytes_for(length) for length in lengths)
        if taken + file_bytes_for(longest) <= bytes_max:
            lengths.append(longest)
        longest //= OVERSIZE_MAX
    return lengths


def make_ready(stock: Callable[[Sequence[int]], int], lengths: Sequence[int]) -> threading.Thread:
    """Make it in a thread. Where the store is out of reach none is made, and the first loads make
    theirs.
    """
    thread = threading.Thread(target=_make, args=(stock, lengths), name="objectcache-memory")
    thread.daemon = True
    thread.start()
    return thread


def _make(stock: Callable[[Sequence[int]], int], lengths: Sequence[int]) -> None:
    try:
        made_bytes = stock(lengths)
    except ObjectCacheError as error:
        logger.info("memory for loads is made when it is needed: %s", error.message)
    else:
        logger.info("%d MiB of memory for loads are ready", made_bytes // MIB)
