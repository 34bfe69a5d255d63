"""What the two sides of a copy hold, in a database of its own, however much that is.

SQLite keeps it in memory as long as it is little, and else in a file that ends with the process.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self

SOURCE, TARGET = 0, 1
INSERT = "INSERT OR REPLACE INTO held VALUES (?, ?, ?, ?, ?)"
ALL = "SELECT count(*), coalesce(sum(size_bytes), 0) FROM held WHERE side = 0"
BOTH = """
SELECT count(*), coalesce(sum(source.size_bytes), 0) FROM held source
JOIN held target ON target.side = 1 AND target.key = source.key
AND target.size_bytes = source.size_bytes AND (target.etag = source.etag OR ?)
WHERE source.side = 0
"""
MISSING = """
SELECT source.key, source.size_bytes, source.etag, source.modified FROM held source
LEFT JOIN held target ON target.side = 1 AND target.key = source.key
AND target.size_bytes = source.size_bytes AND target.etag = source.etag
WHERE source.side = 0 AND target.key IS NULL ORDER BY source.modified, source.key
"""


@dataclass(frozen=True, slots=True)
class Listed:
    """One object of a listing."""

    key: str
    size_bytes: int
    etag: str
    modified: str  # as S3 writes it, so that later ones sort behind


@dataclass(frozen=True, slots=True)
class Amount:
    """How much there is of something."""

    count: int
    size_bytes: int


class Inventory:
    """Both listings, and what is the same in them. For one thread."""

    def __init__(self) -> None:
        self._rows = sqlite3.connect("")
        self._rows.execute(
            "CREATE TABLE held (side INTEGER, key TEXT, size_bytes INTEGER, etag TEXT, "
            "modified TEXT, PRIMARY KEY (side, key)) WITHOUT ROWID"
        )

    def fill(self, side: int, pages: Iterable[list[Listed]]) -> None:
        """Take a listing in the place of the side's last one."""
        self._rows.execute("DELETE FROM held WHERE side = ?", (side,))
        for page in pages:
            rows = [(side, one.key, one.size_bytes, one.etag, one.modified) for one in page]
            self._rows.executemany(INSERT, rows)

    def forget(self, keys: Iterable[str]) -> None:
        """Take keys that are gone out of the source's listing."""
        self._rows.executemany("DELETE FROM held WHERE side = 0 AND key = ?", ((k,) for k in keys))

    def source(self) -> Amount:
        """All that the source holds."""
        return self._amount(ALL)

    def same(self) -> Amount:
        """What the target has under the same key, of the same size, with the same ETag."""
        return self._amount(BOTH, False)

    def arrived(self) -> Amount:
        """What the target has under the same key, of the same size."""
        return self._amount(BOTH, True)

    def missing(self) -> Iterator[Listed]:
        """What is not the same in the target: what was stored together is together, by its key."""
        rows = self._rows.execute(MISSING)
        for row in rows:
            yield Listed(*row)

    def _amount(self, query: str, *given: bool) -> Amount:
        return Amount(*self._rows.execute(query, given).fetchone())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._rows.close()
