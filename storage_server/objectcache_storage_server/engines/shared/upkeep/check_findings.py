"""What a check of a shared store has found so far."""

from __future__ import annotations

import contextlib

from objectcache_schemas.errors import Unavailable
from objectcache_schemas.operators.engine_status import CheckReport
from objectcache_storage_server.engines.shared.log.log_catalog import LogCatalog
from objectcache_storage_server.engines.shared.versions import SharedVersion

EXAMPLES_MAX = 20


class CheckFindings:
    """Counts, and the first findings in words."""

    def __init__(self, catalog: LogCatalog) -> None:
        self.objects = self.bytes = self.damaged = self.misplaced = 0
        self.leaked_bytes = self.dropped = 0
        self.records = self.bad_records = 0
        self._examples: list[str] = []
        self._buckets: dict[int, str] = {}
        with contextlib.suppress(Unavailable), catalog.reading() as view:
            self._buckets = {row.number: row.info.name for row in view.bucket_rows()}

    def example(self, words: str) -> None:
        """A finding, in words."""
        if len(self._examples) < EXAMPLES_MAX:
            self._examples.append(words)

    def add_damaged(self, version: SharedVersion, reason: str) -> None:
        """An object that cannot be read whole."""
        self.damaged += 1
        number = version.bucket_number
        bucket = self._buckets.get(number, f"number {number}")
        self.example(f"bucket {bucket!r}, key {version.info.key!r}: {reason}")

    def add_bad_record(self, words: str, count: int = 1) -> None:
        """Records of the log, or a checkpoint, that a server which needs them cannot use."""
        self.bad_records += count
        self.example(words)

    def report(self) -> CheckReport:
        """All so far."""
        return CheckReport(
            objects=self.objects,
            bytes=self.bytes,
            damaged=self.damaged,
            misplaced=self.misplaced,
            leaked_bytes=self.leaked_bytes,
            dropped=self.dropped,
            log_records=self.records,
            bad_log_records=self.bad_records,
            examples=tuple(self._examples),
        )
