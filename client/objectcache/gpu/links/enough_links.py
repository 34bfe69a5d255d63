"""How many links are worth using."""

from __future__ import annotations

from collections.abc import Sequence

_AS_GOOD = 0.99  # of the highest rate


def enough_links(rates_bytes_per_s: Sequence[float]) -> int:
    """The fewest links that are as good as any number of them: `rates_bytes_per_s` are of a long
    copy over the first one, two, and so on.

    Where some share a way, as GPUs of the far node that between the nodes, more of them carry
    nothing more, and each is slower: a short copy ends with waiting for the last of them.
    """
    best = max(rates_bytes_per_s)
    return next(n for n, rate in enumerate(rates_bytes_per_s, 1) if rate >= _AS_GOOD * best)
