"""What a store does when it opens: tables, free space, and doubts settled.

Nothing of the data is read but what a power loss may have torn: the extents that were written with
asynchronous durability and not flushed yet.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from objectcache_schemas.errors import DamagedData, Unavailable
from objectcache_schemas.limits import MIB
from objectcache_storage_server.engines.disk.system_errors import translated
from objectcache_storage_server.engines.local.index.lmdb_index import IndexChange
from objectcache_storage_server.engines.local.objects.stored_objects import StoredObjects
from objectcache_storage_server.engines.local.records import Version

READ_BYTES = 1 * MIB
PAGE_VERSIONS = 4096

log = logging.getLogger("objectcache.storage_server.engines.local.recovery")


def recover(stored: StoredObjects) -> None:
    """Fill the engine's holdings, and drop what cannot be what was stored."""
    holdings = stored.holdings
    with stored.index.reading() as view:
        view.load_objects(holdings.objects)
        holdings.pitches = view.load_extents(holdings.extents)
        view.load_uses(holdings.objects)
        unflushed = view.unflushed()
    _drop_lost_extents(stored)
    try:
        holdings.load()
    except ValueError as error:
        raise Unavailable(
            f"the index is damaged: {error}; remove the data directory (server.data_dir) to start "
            "empty"
        ) from error
    if unflushed:
        _settle_unflushed(stored, unflushed)


def _drop_lost_extents(stored: StoredObjects) -> None:
    """Forget extents whose data file is gone, and objects in them or in no known extent at all.

    Before anything else is derived from the tables.
    """
    extents, objects = stored.holdings.extents, stored.holdings.objects
    segments = extents.used["offset_bytes"] // np.uint64(stored.volume.segment_bytes)
    exists = np.isin(segments, np.array(stored.volume.segments(), np.uint64))
    known = extents.used["is_used"] & exists
    lost = np.flatnonzero(extents.used["is_used"] & ~exists).tolist()
    of_objects = objects.used["extent"]
    has_extent = np.zeros(len(of_objects), np.bool_)
    inside = of_objects < len(known)
    has_extent[inside] = known[of_objects[inside]]
    homeless = objects.used["is_used"] & (objects.used["size_bytes"] > 0) & ~has_extent
    if not lost and not homeless.any():
        return
    versions = _all_versions(stored, lambda each: not all(_holds(known, n) for n in each.extents))

    def change_index(change: IndexChange) -> list[Version]:
        change.remove_extents(lost)
        return change.delete(version.name for version in versions)

    for version in stored.index.change_with_reserve(change_index):
        objects.remove(version.number)
        stored.damage.add(version.info.key, "its data file, or its place in it, is missing")
    for number in lost:
        extents.remove(number)
        stored.holdings.pitches.pop(number, None)


def _holds(known: npt.NDArray[np.bool_], number: int) -> bool:
    return number < len(known) and bool(known[number])


def _all_versions(stored: StoredObjects, wanted: Callable[[Version], bool]) -> list[Version]:
    found: list[Version] = []
    after: tuple[int, str] | None = None
    while True:
        with stored.index.reading() as view:
            page = view.every_version(after, PAGE_VERSIONS)
        if not page:
            return found
        found += filter(wanted, page)
        after = (page[-1].bucket_number, page[-1].info.key)


def _versions_in(stored: StoredObjects, extents: npt.NDArray[np.int64]) -> Iterator[Version]:
    """Versions whose first extent is one of these."""
    objects = stored.holdings.objects.used
    in_them = objects["is_used"] & np.isin(objects["extent"], extents) & (objects["size_bytes"] > 0)
    for number in np.flatnonzero(in_them).tolist():
        with stored.index.reading() as view:
            name = view.name_of(number)
            version = view.versions(name[0], [name[1]]).get(name[1]) if name else None
        if version is not None and version.number == number:
            yield version


def _settle_unflushed(stored: StoredObjects, numbers: list[int]) -> None:
    """Keep what matches its checksums, and make it durable; drop the rest."""
    kept = 0
    ranges = stored.holdings.ranges(
        [number for number in numbers if stored.holdings.extents.rows["is_used"][number]]
    )
    # What the device does not have is not to be found in memory: a page whose write failed is kept.
    with translated("flush the data files", "the volume"):
        _flush_after_errors(stored, ranges)
        for offset_bytes, length_bytes in ranges:
            stored.volume.drop_cache(offset_bytes, length_bytes)
    for version in list(_versions_in(stored, np.array(numbers, np.int64))):
        reason = _damage_of(stored, version)
        if reason is None:
            kept += 1
        else:
            stored.drop_damaged(version, reason)
    with stored.index.writing() as change:
        change.unmark_unflushed(numbers)
    log.warning("the last stop was no orderly one: %d unflushed objects are whole", kept)


def _flush_after_errors(stored: StoredObjects, ranges: list[tuple[int, int]]) -> None:
    """Flush. A write-back that failed before is said of once; what it left out is found by the
    checksums. Raises `OSError` where it fails still.
    """
    try:
        stored.volume.flush(ranges)
    except OSError as error:  # of the process before, said to nobody until now
        if error.errno != errno.EIO:
            raise
        log.warning("what the data files were last written is partly lost: %s", error)
        stored.volume.flush(ranges)


def _damage_of(stored: StoredObjects, version: Version) -> str | None:
    """Why its bytes are not what was stored; None where they are."""
    with contextlib.closing(stored.open_versions([version])) as opened:
        memory = memoryview(bytearray(min(READ_BYTES, version.info.size_bytes)))
        try:
            for offset_bytes in range(0, version.info.size_bytes, READ_BYTES):
                opened.read_into(0, offset_bytes, memory[: version.info.size_bytes - offset_bytes])
        except DamagedData as damage:
            return str(damage)
    return None
