"""What is stored: the index, and what memory holds of it, changed together.

`changing` guards every change of the index together with the holdings that follow from it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from objectcache_schemas.errors import DamagedData
from objectcache_schemas.records import Verification
from objectcache_storage_server.engines.catalog_engine import DamageCount
from objectcache_storage_server.engines.disk.flush_latch import FlushLatch
from objectcache_storage_server.engines.disk.system_errors import as_our_error, translated
from objectcache_storage_server.engines.local.index.lmdb_index import IndexChange, LocalIndex
from objectcache_storage_server.engines.local.objects.extent_flushes import ExtentFlushes
from objectcache_storage_server.engines.local.objects.flush_later import Flusher
from objectcache_storage_server.engines.local.reads.hold_versions import open_sources
from objectcache_storage_server.engines.local.reads.path_use import PathUse
from objectcache_storage_server.engines.local.reads.verified_reads import (
    DamagedVersion,
    LocalOpenObjects,
)
from objectcache_storage_server.engines.local.records import Version, VersionName
from objectcache_storage_server.engines.local.space.holdings import Holdings
from objectcache_storage_server.engines.local.volumes.volume import Volume

DELETE_KEYS = 256  # of one transaction, which bounds what a delete on a full device needs


class StoredObjects:
    """Safe to use from any thread."""

    def __init__(
        self,
        index: LocalIndex,
        holdings: Holdings,
        volume: Volume,
        path_use: PathUse,
        flush_latch: FlushLatch,
        damage: DamageCount,
    ) -> None:
        self.index = index
        self.holdings = holdings
        self.volume = volume
        self.path_use = path_use
        self.flush_latch = flush_latch
        self.damage = damage
        self.changing = threading.Lock()
        self.flushes = ExtentFlushes(volume, holdings, flush_latch)
        self.flusher = Flusher(index, holdings, self.flushes, flush_latch)

    def remove(self, choose: Callable[[IndexChange], Iterable[VersionName]]) -> list[Version]:
        """Delete the versions that `choose` names within the transaction, durably; returns those
        that were there. Works on a full device. Raises our errors only.
        """
        emptied: list[int] = []

        def change_index(change: IndexChange) -> list[Version]:
            deleted = change.delete(choose(change))
            emptied[:] = self.holdings.emptied_by(deleted)
            change.remove_extents(emptied)
            change.unmark_unflushed(emptied)
            return deleted

        with translated("delete objects", "the store"), self.changing:
            deleted = self.index.change_with_reserve(change_index)
            self.holdings.forget(deleted)
            self.flusher.drop(emptied)
        return deleted

    def remove_numbers(
        self,
        numbers: npt.NDArray[np.int64],
        objects: npt.NDArray[np.void],
        filtered: Callable[[Sequence[int]], Sequence[int]] = lambda numbers: numbers,
    ) -> list[Version]:
        """Delete objects by number, those that are still what the snapshot `objects` says and that
        `filtered` leaves, which is asked while nothing can change.
        """
        removed: list[Version] = []
        for begin in range(0, len(numbers), DELETE_KEYS):
            some = numbers[begin : begin + DELETE_KEYS].tolist()

            def names(change: IndexChange, some: Sequence[int] = some) -> list[VersionName]:
                found: list[VersionName] = []
                for number in filtered(some):
                    name = change.name_of(number)
                    if name is not None:
                        found.append(VersionName(*name, int(objects["serial"][number])))
                return found

            removed += self.remove(names)
        return removed

    def open_versions(
        self, versions: Sequence[Version], *, verification: Verification = Verification.FULL
    ) -> LocalOpenObjects:
        """Hold these very versions, which the index must name at this moment: call it inside of
        `holdings.looking_up`, or with `changing` held. Damage is raised and nothing is dropped.
        """
        return open_sources(self.holdings, self.path_use, versions, verification, _as_damage)

    def read_failed(self, error: DamagedVersion | OSError) -> Exception:
        """What a failed read raises; damage drops the version that was read."""
        if isinstance(error, DamagedVersion):
            self.drop_damaged(error.version, str(error))
        return _as_damage(error)

    def drop_damaged(self, version: Version, reason: str) -> bool:
        """Drop this very version; false where it was replaced, deleted or dropped meanwhile, and
        where nothing can be changed any more.
        """
        if self.flush_latch.failure:
            return False
        dropped = self.remove(lambda _: [version.name])
        if dropped:
            self.damage.add(version.info.key, reason)
        return bool(dropped)

    def forget_lost(self) -> None:
        """Let go of what the index has dropped by itself, because its rows were damaged."""
        lost = self.index.take_lost()
        if not lost:
            return
        with self.changing:
            with self.index.reading() as view:
                gone = [number for number in lost if view.name_of(number) is None]
            emptied = self.holdings.forget_lost(gone)
            if emptied:
                self.index.change_with_reserve(lambda change: change.remove_extents(emptied))
            self.flusher.drop(emptied)


def _as_damage(error: DamagedVersion | OSError) -> Exception:
    if isinstance(error, OSError):
        return as_our_error(error, "read an object", "the data files")
    key = error.version.info.key
    return DamagedData(f"{key!r} is damaged: {error}", key=key)
