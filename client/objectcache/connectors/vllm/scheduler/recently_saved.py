"""Which blocks were handed to the store a moment ago, so that nobody saves them twice."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

BLOCKS_MAX = 65_536
VALID_S = 60.0  # then a block that is still not stored is saved again


class RecentlySaved:
    """A bounded memory of block hashes; time is an argument."""

    def __init__(self) -> None:
        self._saved_s: OrderedDict[bytes, float] = OrderedDict()

    def has(self, block_hash: bytes, now_s: float) -> bool:
        """Whether the block was saved within `VALID_S`."""
        saved_s = self._saved_s.get(block_hash)
        return saved_s is not None and now_s - saved_s < VALID_S

    def add(self, hashes: Iterable[bytes], now_s: float) -> None:
        """Remember blocks; the oldest are forgotten where there are too many."""
        for block_hash in hashes:
            self._saved_s[block_hash] = now_s
            self._saved_s.move_to_end(block_hash)
        while len(self._saved_s) > BLOCKS_MAX:
            self._saved_s.popitem(last=False)

    def forget(self, hashes: Iterable[bytes]) -> None:
        """They were not stored after all."""
        for block_hash in hashes:
            self._saved_s.pop(block_hash, None)

    def __repr__(self) -> str:
        return f"<RecentlySaved {len(self._saved_s)} blocks>"
