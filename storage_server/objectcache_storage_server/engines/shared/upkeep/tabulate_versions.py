"""The index as tables, in the columns by which victims of an eviction are chosen.

A row of an object takes 57 bytes, one of an extent 60, for as long as somebody chooses.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from objectcache_storage_server.engines.key_order import BUCKET_BYTES, raw_hash
from objectcache_storage_server.engines.shared.index.replayed_change import PLACE_BITS
from objectcache_storage_server.engines.shared.index.replayed_view import ReplayedView
from objectcache_storage_server.engines.shared.index.version_rows import (
    EVICTABLE,
    PINNED,
    heads_of,
    names_of,
)
from objectcache_storage_server.engines.shared.versions import ExtentName

PAGE_ROWS = 4096  # taken apart at a time; other threads have their turn in between

Rows = npt.NDArray[np.void]

_OBJECTS = np.dtype(
    [
        ("is_used", "?"),
        ("is_evictable", "?"),
        ("is_pinned", "?"),
        ("bucket", "u4"),
        ("extent", "u4"),  # place of its first extent in the other table
        ("own_hash", "u8"),
        ("parent_hash", "u8"),
        ("size_bytes", "u8"),
        ("last_used", "u8"),  # number of a record: when its extent was read or stored
        ("modified_s", "f8"),
        ("serial", "u8"),
    ]
)
_EXTENTS = np.dtype(
    [
        ("is_used", "?"),
        ("is_freed", "?"),
        ("readers", "u4"),  # nobody knows: the grace is for them
        ("slots", "u4"),
        ("live_slots", "u4"),
        ("length_bytes", "u8"),
        ("last_used", "u8"),
        ("writer", "u8"),
        ("number", "u8"),
    ]
)


@dataclass(frozen=True, slots=True)
class StoreTables:
    """One moment of the index."""

    objects: Rows
    extents: Rows
    end: int  # number of the first record that is not in it


def store_tables(view: ReplayedView, buckets: Collection[int] | None = None) -> StoreTables:
    """All versions, or those of some buckets, and the extents. Raises `IndexDamage`."""
    extents, places = _extents(view)
    objects = list[Rows]()
    rows = view.stored_rows()
    while page := list(itertools.islice(rows, PAGE_ROWS)):
        table = _objects(page, places)
        if buckets is not None:
            table = table[np.isin(table["bucket"], list(buckets))]
        objects.append(table)
        time.sleep(0)
    joined = np.concatenate(objects) if objects else np.empty(0, _OBJECTS)
    has_bytes = joined["size_bytes"] > 0
    joined["last_used"][has_bytes] = extents["last_used"][joined["extent"][has_bytes]]
    return StoreTables(joined, extents, view.state.end)


def _extents(view: ReplayedView) -> tuple[Rows, Mapping[ExtentName, int]]:
    rows: list[tuple[object, ...]] = []
    places: dict[ExtentName, int] = {}
    after: ExtentName | None = None
    while page := view.extents(after, PAGE_ROWS):
        for name, row in page:
            places[name] = len(rows)
            shape = row.shape
            rows.append(
                (
                    True,
                    False,
                    0,
                    shape.slots,
                    row.live_count,
                    shape.size_bytes,
                    row.last_used,
                    *name,
                )
            )
        after = page[-1][0]
        time.sleep(0)
    return np.array(rows, _EXTENTS), places


def _objects(page: Iterable[tuple[int, bytes]], places: Mapping[ExtentName, int]) -> Rows:
    serials, rows = map(list, zip(*page, strict=True))
    heads = heads_of(rows)
    names = names_of(rows, heads)
    table = np.zeros(len(rows), _OBJECTS)
    table["is_used"] = True
    table["is_evictable"] = heads["flags"] & EVICTABLE > 0
    table["is_pinned"] = heads["flags"] & PINNED > 0
    numbers = b"".join([name[:BUCKET_BYTES] for name in names])
    table["bucket"] = np.frombuffer(numbers, ">u4")
    lies_in = zip(heads["writer"].tolist(), heads["extent"].tolist(), strict=True)
    table["extent"] = [places.get(ExtentName(*name), 0) for name in lies_in]
    table["own_hash"] = [raw_hash(name) for name in names]
    for column in ("parent_hash", "size_bytes", "modified_s"):
        table[column] = heads[column]
    table["serial"] = serials
    # Without bytes there is no extent that could have been read.
    table["last_used"] = table["serial"] >> np.uint64(PLACE_BITS)
    return table


def parents_since(view: ReplayedView, end: int) -> set[int]:
    """Hashes of the chunks that are continued by versions which records from number `end` on have
    stored.
    """
    hashes = set[int]()
    rows = view.stored_rows(end << PLACE_BITS)
    while page := [row for _, row in itertools.islice(rows, PAGE_ROWS)]:
        hashes.update(heads_of(page)["parent_hash"].tolist())
    return hashes
