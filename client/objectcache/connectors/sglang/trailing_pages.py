"""Which prefix ends with a window of pages that are all stored, in few round trips."""

from __future__ import annotations

from collections.abc import Callable, Sequence

MATCHES_MAX = 16  # round trips until a prefix is taken for a miss


def longest_prefix(keys: Sequence[str], window: int, match: Callable[[Sequence[str]], int]) -> int:
    """The longest length whose last `window` pages (or all, where there are fewer) are stored.

    `match` tells how many leading pages of some are stored. A page that is missing rules out every
    prefix whose window holds it, so each round trip goes back behind one.
    """
    length = len(keys)
    for _ in range(MATCHES_MAX):
        if length == 0:
            return 0
        start = max(0, length - window)
        stored = match(keys[start:length])
        if start + stored == length:
            return length
        length = start + stored
    return 0
