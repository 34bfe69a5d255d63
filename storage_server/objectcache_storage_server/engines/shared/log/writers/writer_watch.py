"""Which writers have been silent for how long, by this server's own clock. Pure.

Only time counts in which this server knew the log's end: one that could not ask, or was stopped
itself, has not heard the others, and takes nobody for dead because of that.
"""

from __future__ import annotations

from collections.abc import Mapping

STEP_S_MAX = 3.0  # between two looks at the log, of which no more counts


class WriterWatch:
    """The newest record of each writer, and when it was first seen."""

    def __init__(self) -> None:
        self._heard_s: dict[int, tuple[int, float]] = {}  # record, and what `_watched_s` was then
        self._watched_s = 0.0
        self._looked_s: float | None = None

    def saw(self, last_records: Mapping[int, int], now_s: float) -> None:
        """The log was followed to its end. `last_records`: of each writer that may be silent."""
        if self._looked_s is not None:
            self._watched_s += min(max(now_s - self._looked_s, 0.0), STEP_S_MAX)
        self._looked_s = now_s
        heard: dict[int, tuple[int, float]] = {}
        for writer, record in last_records.items():
            before = self._heard_s.get(writer)
            if before is None or before[0] != record:
                before = (record, self._watched_s)
            heard[writer] = before
        self._heard_s = heard

    def silent(self, lease_s: float) -> list[int]:
        """Writers that have appended nothing for longer than this."""
        return [
            writer
            for writer, (_, heard_s) in self._heard_s.items()
            if self._watched_s - heard_s > lease_s
        ]
