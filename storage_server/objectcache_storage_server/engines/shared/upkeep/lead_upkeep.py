"""Who is dead, and who does the upkeep of a store: both are settled by records."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import TypeVar

from objectcache_schemas.errors import Unavailable
from objectcache_storage_server.engines.shared.index.replayed_change import ReplayedChange
from objectcache_storage_server.engines.shared.index.writer_rows import WriterRow
from objectcache_storage_server.engines.shared.log.log_catalog import LogCatalog

T = TypeVar("T")

log = logging.getLogger("objectcache.storage_server.engines.shared")


class NotLeading(Exception):
    """The upkeep lease is another server's, or nobody's, at the log's end."""


class UpkeepLead:
    """This server's claim to the upkeep lease. Used by one thread; any may have it stop."""

    def __init__(self, catalog: LogCatalog, writer_lease_s: float) -> None:
        self._catalog = catalog
        self._writer_lease_s = writer_lease_s
        self._heard: dict[int, int] = {}  # newest record of each writer, a round ago
        self._is_stopped = False

    @property
    def is_ours(self) -> bool:
        """As far as this server has replayed. It may have lost it since: see `change`."""
        if self._is_stopped:
            return False
        with self._catalog.reading() as view:
            return view.state.upkeep_holder == self._catalog.entered_writer

    def is_leading(self) -> bool:
        """The same, and false where nothing can be looked up."""
        with contextlib.suppress(Unavailable):
            return self.is_ours
        return False

    def change(self, act: Callable[[ReplayedChange], T], deadline_s: float) -> T:
        """A change that is made only by who holds the lease at the log's end. Raises `NotLeading`,
        and as `SharedCatalog.change`.
        """

        def act_if_ours(change: ReplayedChange) -> T:
            if self._is_stopped or change.state.upkeep_holder != change.writer:
                raise NotLeading
            return act(change)

        return self._catalog.change(act_if_ours, deadline_s)

    def stop(self) -> None:
        """Do nothing more with the lease: this server ends. What is under way comes to its next
        record or page of objects.
        """
        self._is_stopped = True

    def fence_the_silent(self, deadline_s: float) -> None:
        """Take writers for dead that have been silent for longer than the lease. Raises
        `StoreTimeout`, `Unavailable`.
        """
        with self._catalog.reading() as view:
            heard = {writer: row.last_record for writer, row in view.writers().items()}
        # Who appended something after its silence was measured is not judged before the next round.
        before, self._heard = self._heard, heard
        silent = {
            writer: heard[writer]
            for writer in self._catalog.silent_writers(self._writer_lease_s)
            if writer in heard and before.get(writer) == heard[writer]
        }
        if not silent:
            return

        def act(change: ReplayedChange) -> list[int]:
            dead = [writer for writer in silent if _is_silent(change, writer, silent)]
            for writer in dead:
                change.fence(writer)
            return dead

        for writer in self._catalog.change(act, deadline_s):
            log.warning(
                "server %016x was silent for longer than storage.writer_lease_s: it is taken for "
                "dead, and what it has not named in the log is deleted",
                writer,
            )

    def claim(self, deadline_s: float) -> bool:
        """Take the lease where nobody holds it; whether it is ours. Raises `StoreTimeout`,
        `Unavailable`.
        """
        with self._catalog.reading() as view:
            holder = view.state.upkeep_holder
        if holder is None:
            holder = self._catalog.change(_take, deadline_s)
        return holder == self._catalog.writer


def _is_silent(change: ReplayedChange, writer: int, heard: Mapping[int, int]) -> bool:
    row: WriterRow | None = change.writer_row(writer)
    is_known = row is not None and row.fenced_by is None and row.last_record == heard[writer]
    return is_known and writer != change.writer


def _take(change: ReplayedChange) -> int | None:
    if change.state.upkeep_holder is None:
        change.take_upkeep()
    return change.state.upkeep_holder
