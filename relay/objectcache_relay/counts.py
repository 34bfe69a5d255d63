"""What a relay counts."""

from __future__ import annotations

from objectcache_runtime.metrics.metric_cells import SECONDS, Counts, Histogram


class RelayCounts:
    """Since the start."""

    def __init__(self) -> None:
        self.forwarded_bytes = Counts[str]()  # by transport
        self.ended: Counts[str] = Counts()  # deliveries, by error code, empty for success
        self.refused: Counts[str] = Counts()  # by reason
        self.claims = Counts[str]()  # gets, by whether what they ask for was there
        self.reports = Counts[str]()  # to the dispatch service, by how they ended
        self.asked = Counts[tuple[()]]()  # for its report, by clients
        self.forward_lag = Histogram(SECONDS)
