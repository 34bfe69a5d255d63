"""Which victims of an eviction are spared, for what happened since they were chosen.

They are chosen on a copy of the tables, while puts and reads go on. A chunk that was used since
then stays, and so does every chunk before it, also before one that was stored meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from objectcache_storage_server.engines.local.space.holdings import Holdings


class Spared:
    """The hashes of chunks that stay, as they become known. For one eviction, in its order."""

    def __init__(self, holdings: Holdings, snapshot: npt.NDArray[np.void]) -> None:
        """`snapshot` are the object rows by which the victims were chosen."""
        self._holdings = holdings
        self._snapshot = snapshot
        self._seen_use = int(snapshot["last_used"][snapshot["is_used"]].max(initial=0))
        self._hashes: set[int] = set()

    def filter(self, victims: Sequence[int]) -> list[int]:
        """Those of the next victims, ends of prefixes first, that may go. To be called while the
        index cannot change.
        """
        going: list[int] = []
        with self._holdings.lock:
            objects, extents = self._holdings.objects.used, self._holdings.extents.rows
            fresh = objects[objects["is_used"] & (objects["last_used"] > self._seen_use)]
            self._hashes.update(fresh["own_hash"].tolist(), fresh["parent_hash"].tolist())
            for number in victims:
                now, then = objects[number], self._snapshot[number]
                is_same = now["is_used"] and now["serial"] == then["serial"]
                is_read = then["size_bytes"] > 0 and extents["readers"][now["extent"]] > 0
                if is_same and not is_read and int(then["own_hash"]) not in self._hashes:
                    going.append(number)
                elif now["is_used"]:  # it stays, so what is before it does
                    self._hashes.add(int(then["parent_hash"]))
        return going
