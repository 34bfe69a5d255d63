"""Moves chunks together, a little at a time.

Reads them, writes them into one extent, and has the index name the new place. A chunk that changed
or is read meanwhile stays where it is.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence

import numpy as np

from objectcache_runtime.settings import StorageSettings
from objectcache_schemas.errors import DamagedData, ObjectCacheError, StorageFull
from objectcache_storage_server.engines.base import PrefixShape
from objectcache_storage_server.engines.local.commits.judged_commit import fill_rows
from objectcache_storage_server.engines.local.objects.stored_objects import StoredObjects
from objectcache_storage_server.engines.local.puts.staged_prefix import LocalStagedPrefix
from objectcache_storage_server.engines.local.puts.writer_space import WriterSpace
from objectcache_storage_server.engines.local.records import Version
from objectcache_storage_server.engines.local.upkeep.plan_compaction import (
    Move,
    candidate_count,
    plan_moves,
)

MOVES_MAX = 64  # of one plan
PLAN_EVERY_S = 5.0  # a plan looks at every object

log = logging.getLogger("objectcache.storage_server.engines.local.compactor")


class Compactor:
    """Carries out plans at the rate that the settings allow."""

    def __init__(
        self,
        stored: StoredObjects,
        space: WriterSpace,
        settings: StorageSettings,
        extent_bytes_max: int,
        clock: Callable[[], float],
    ) -> None:
        """`space` gives out extents without evicting for them; `clock` tells objects' time."""
        self.moved_objects = self.moved_bytes = self.candidates = 0
        self._stored = stored
        self.space = space
        self._settings = settings
        self.extent_bytes_max = extent_bytes_max
        self._clock = clock
        self._moves: list[Move] = []
        self._planned_s = float("-inf")
        self._settled: tuple[int, int] | None = None  # what was so when nothing was left to move
        self._allowed_bytes = 0.0
        self._last_s: float | None = None

    @property
    def state(self) -> str:
        """In words, for operators."""
        if self._settings.compaction_bytes_per_s == 0:
            return "off"
        return f"moving, {len(self._moves)} extents to go" if self._moves else "idle"

    def round(self, now_s: float) -> None:
        """Move what the time since the last round allows."""
        rate = self._settings.compaction_bytes_per_s
        if rate == 0:
            return
        elapsed_s = 0.0 if self._last_s is None else now_s - self._last_s
        self._last_s = now_s
        # At most a second's worth is saved up; one extent may overdraw it.
        self._allowed_bytes = min(float(rate), self._allowed_bytes + rate * elapsed_s)
        if not self._moves and now_s - self._planned_s >= PLAN_EVERY_S:
            self._planned_s = now_s
            self._plan()
        while self._moves and self._allowed_bytes > 0:
            move = self._moves.pop(0)
            self._allowed_bytes -= move.geometry.chunk_bytes * len(move.numbers)
            self._carry_out(move)

    def _plan(self) -> None:
        stored, settings = self._stored, self._settings
        state = (stored.holdings.clock_of_uses, len(stored.holdings.objects))
        if state == self._settled:
            return
        objects, extents = stored.holdings.snapshot()
        self._objects = objects
        self.candidates = candidate_count(
            objects, extents, settings.extent_row_bytes, self.extent_bytes_max
        )
        is_read = bool(extents["readers"].any())  # and may be a candidate when it is not
        self._settled = None if self.candidates or is_read else state
        if self.candidates:
            self._moves = plan_moves(
                objects,
                extents,
                row_bytes=settings.extent_row_bytes,
                extent_bytes_max=self.extent_bytes_max,
                now_s=self._clock(),
                idle_s=settings.compaction_idle_s,
                moves_max=MOVES_MAX,
            )

    def _carry_out(self, move: Move) -> None:
        try:
            versions = self._versions(move)
            if len(versions) == len(move.numbers) and not self._are_read(versions):
                self._move_whole(move, versions)
        except StorageFull:
            self._moves.clear()  # room is for puts
        except ObjectCacheError as error:
            log.warning("compaction goes on after: %s", error)

    def _move_whole(self, move: Move, versions: Sequence[Version]) -> None:
        """Move chunks; one that is not what was stored is dropped instead, and the others stay."""
        try:
            self._move(move, versions)
        except DamagedData as damage:
            by_key = {version.info.key: version for version in versions}
            damaged = by_key.get(damage.details.key or "")
            if damaged is None:
                raise
            self._stored.drop_damaged(damaged, str(damage))

    def _versions(self, move: Move) -> list[Version]:
        """The chunks of a move, those that are still what the plan saw."""
        found: list[Version] = []
        with self._stored.index.reading() as view:
            names = [view.name_of(number) for number in move.numbers]
            keys = [name[1] for name in names if name is not None and name[0] == move.bucket]
            stored = view.versions(move.bucket, keys)
        for number, name in zip(move.numbers, names, strict=True):
            version = stored.get(name[1]) if name is not None else None
            if version is not None and version.serial == int(self._objects["serial"][number]):
                found.append(version)
        return found

    def _are_read(self, versions: Sequence[Version]) -> bool:
        extents = np.array(sorted({n for version in versions for n in version.extents}), np.int64)
        with self._stored.holdings.lock:
            return bool(self._stored.holdings.extents.rows["readers"][extents].any())

    def _move(self, move: Move, versions: Sequence[Version]) -> None:
        stored, geometry = self._stored, move.geometry
        keys = [version.info.key for version in versions]
        shape = PrefixShape(keys, geometry.num_layers, geometry.slice_bytes, layerwise=False)
        prefix = LocalStagedPrefix(self.space, "", shape, [geometry])
        try:
            with stored.holdings.looking_up():
                versions = self._still_stored(move, versions)
                if len(versions) < len(keys):
                    return
                opened = stored.open_versions(versions)
            with contextlib.closing(opened):
                chunk = memoryview(bytearray(geometry.chunk_bytes))
                for index in range(len(versions)):
                    opened.read_into(index, 0, chunk)
                    prefix.write(index * geometry.chunk_bytes, chunk)
            prefix.finish()
            stored.flushes.flush([prefix.place(0)[0]])
            self._rename(versions, prefix)
        finally:
            prefix.discard()

    def _still_stored(self, move: Move, versions: Sequence[Version]) -> list[Version]:
        with self._stored.index.reading() as view:
            stored = view.versions(move.bucket, [version.info.key for version in versions])
        return [
            version
            for version in versions
            if (now := stored.get(version.info.key)) is not None and now.serial == version.serial
        ]

    def _rename(self, versions: Sequence[Version], prefix: LocalStagedPrefix) -> None:
        stored, holdings = self._stored, self._stored.holdings
        new = prefix.moved(versions)
        with stored.changing:
            if self._are_read(versions):
                return
            with stored.index.writing(durable=False) as change:
                with holdings.lock:
                    rows = holdings.objects.rows[[version.number for version in versions]]
                    extent_rows = holdings.extents.rows[[new[0].extents[0]]]
                change.add_extents([new[0].extents[0]], extent_rows)
                fill_rows(rows, new)
                moved = [
                    index
                    for index, version in enumerate(versions)
                    if change.move(version.name, new[index], rows[index : index + 1])
                ]
                if not moved:
                    change.remove_extents([new[0].extents[0]])
                old = [versions[index] for index in moved]
                emptied = holdings.emptied_by(old)
                change.remove_extents(emptied)
                change.unmark_unflushed(emptied)
            holdings.move([new[index] for index in moved], old, rows[moved])
            for index in moved:
                prefix.keep(index)
        stored.index.sync()
        stored.flusher.drop(emptied)
        self.moved_objects += len(moved)
        self.moved_bytes += sum(version.info.size_bytes for version in old)
