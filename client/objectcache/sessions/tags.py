"""The tags of a session's deliveries."""

from __future__ import annotations

from collections.abc import Container

from objectcache_fabrics.verbs.address import TAG_END
from objectcache_schemas.errors import Unavailable


class Tags:
    """Draws one tag after the other, and begins again behind the last: an announcement over verbs
    has room for no more. Not thread-safe.
    """

    def __init__(self) -> None:
        self._last = 0

    def draw(self, in_use: Container[int]) -> int:
        """The next tag that is not in use, from 1 to below `TAG_END`. What was used longest ago
        comes first, so events that are late concern nobody. Raises `Unavailable` where all are.
        """
        for _ in range(1, TAG_END):
            self._last = self._last % (TAG_END - 1) + 1
            if self._last not in in_use:
                return self._last
        raise Unavailable(f"the session has {TAG_END - 1} deliveries; let some end")

    def __repr__(self) -> str:
        return f"<Tags after {self._last}>"
