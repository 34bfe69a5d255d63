"""Which chunks go when space or a quota runs out, or their time is over. Pure.

A chunk is useless without those before it, so a prefix goes from its end: a chunk's *use* is the
latest use of itself and of all that follow it. Space comes back by extents, when the last chunk of
one has gone, so extents are what is chosen: the least recently used first, where an extent is as
recent as its most recent chunk. With an extent go its chunks and all that follow them.

So each chunk that goes lies in an extent that becomes empty or follows one that does, none of them
was used later than the last extent that was chosen, and without that extent it were too few bytes.
A chunk less recent than these stays where its extent could not become empty: it would free nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from objectcache_storage_server.engines.eviction.link_prefixes import (
    PrefixLinks,
    highest_after,
    lowest_before,
    prefix_links,
)

Rows = npt.NDArray[np.void]
Numbers = npt.NDArray[np.int64]
STAYS = np.iinfo(np.uint64).max  # as a use: later than any
NEVER = np.iinfo(np.int64).max  # as a turn


def choose_victims(
    objects: Rows, extents: Rows, wanted_bytes: int, *, bucket: int | None = None
) -> Numbers:
    """Numbers of the objects that go, in the order in which they go.

    `objects` and `extents` are rows of `OBJECT_COLUMNS` and `EXTENT_COLUMNS`. Extents of at least
    `wanted_bytes` together become empty, or all that can where that is less. What is pinned, read,
    no cache content, or outside of `bucket` stays, and all before it in its prefix.

    Of extents used at the same time the one further from its prefix's beginning goes first, then
    the one with fewer chunks left, which gives most space back for what is lost.
    """
    numbers = np.flatnonzero(objects["is_used"])
    if wanted_bytes <= 0 or not len(numbers):
        return np.empty(0, np.int64)
    links = prefix_links(objects["own_hash"][numbers], objects["parent_hash"][numbers])
    may_go = _may_go(objects, extents, numbers, bucket) & ~links.is_named_besides
    uses = np.where(may_go, objects["last_used"][numbers], STAYS)
    uses = highest_after(links.parents, uses)
    lies_in = objects["extent"][numbers].astype(np.int64)
    lies_in[objects["size_bytes"][numbers] == 0] = -1

    queue = _extents_in_turn(extents, lies_in, uses, links.depths)
    turns = _turns(queue, len(extents), lies_in, links)
    last = _last_turn(queue, extents, lies_in, turns, wanted_bytes)
    going = np.flatnonzero(turns <= last)
    order = np.lexsort((-links.depths[going], uses[going], turns[going]))
    return numbers[going[order]]


def _may_go(
    objects: Rows, extents: Rows, numbers: Numbers, bucket: int | None
) -> npt.NDArray[np.bool_]:
    """Which may go as far as they are concerned themselves."""
    may_go: npt.NDArray[np.bool_] = (objects["is_evictable"] & ~objects["is_pinned"])[numbers]
    is_busy = (extents["readers"] > 0) | extents["is_freed"]
    has_bytes = objects["size_bytes"][numbers] > 0
    may_go[has_bytes] &= ~is_busy[objects["extent"][numbers[has_bytes]]]
    if bucket is not None:
        may_go &= objects["bucket"][numbers] == bucket
    return may_go


def _extents_in_turn(
    extents: Rows, lies_in: Numbers, uses: npt.NDArray[np.uint64], depths: Numbers
) -> Numbers:
    """Extents that can become empty, in the order in which they are to."""
    going = np.flatnonzero((uses < STAYS) & (lies_in >= 0))
    homes = lies_in[going]
    counts = np.bincount(homes, minlength=len(extents))
    can_empty = extents["is_used"] & (counts > 0) & (counts == extents["live_slots"])
    latest = np.zeros(len(extents), np.uint64)
    np.maximum.at(latest, homes, uses[going])
    nearest = np.full(len(extents), NEVER)
    np.minimum.at(nearest, homes, depths[going])
    candidates = np.flatnonzero(can_empty)
    fullness = extents["live_slots"][candidates] / extents["slots"][candidates]
    order = np.lexsort((candidates, fullness, -nearest[candidates], latest[candidates]))
    return candidates[order]


def _turns(queue: Numbers, extent_count: int, lies_in: Numbers, links: PrefixLinks) -> Numbers:
    """For each chunk the turn in which it goes: its extent's, or an earlier one before it."""
    turn_of = np.full(extent_count + 1, NEVER)  # the last is for chunks in no extent, at -1
    turn_of[queue] = np.arange(len(queue))
    return lowest_before(links.parents, turn_of[lies_in])


def _last_turn(
    queue: Numbers, extents: Rows, lies_in: Numbers, turns: Numbers, wanted_bytes: int
) -> int:
    """The first turn after which enough extents are empty, or the last of all."""
    empty_at = np.full(len(extents) + 1, -1)
    np.maximum.at(empty_at, lies_in, turns)
    freed_bytes = np.zeros(len(queue), np.uint64)
    np.add.at(freed_bytes, empty_at[queue], extents["length_bytes"][queue])
    enough = np.searchsorted(np.cumsum(freed_bytes), np.uint64(wanted_bytes))
    return min(int(enough), len(queue) - 1)


def expired(objects: Rows, ttl_s_by_bucket: Mapping[int, float], now_s: float) -> Numbers:
    """Numbers of the objects that are older than their bucket allows, ends of prefixes first.

    Not what is pinned, nor what a pinned chunk follows. A chunk's time is over also where one that
    follows it is younger.
    """
    numbers = np.flatnonzero(objects["is_used"] & ~objects["is_pinned"])
    buckets, places = np.unique(objects["bucket"][numbers], return_inverse=True)
    ttls_s = np.array([ttl_s_by_bucket.get(int(bucket), np.inf) for bucket in buckets], np.float64)
    numbers = numbers[objects["modified_s"][numbers] + ttls_s[places] <= now_s]
    numbers = numbers[~_before_pinned(objects, np.unique(objects["bucket"][numbers]))[numbers]]
    links = prefix_links(objects["own_hash"][numbers], objects["parent_hash"][numbers])
    return numbers[np.lexsort((numbers, -links.depths))]


def _before_pinned(objects: Rows, buckets: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
    """Which of all objects are pinned, or before a pinned one, in these buckets."""
    stays = np.zeros(len(objects), np.bool_)
    pinned = objects["is_used"] & objects["is_pinned"]
    buckets = np.intersect1d(buckets, objects["bucket"][pinned])
    if not len(buckets):
        return stays
    numbers = np.flatnonzero(objects["is_used"] & np.isin(objects["bucket"], buckets))
    links = prefix_links(objects["own_hash"][numbers], objects["parent_hash"][numbers])
    keeps = pinned[numbers] | links.is_named_besides
    stays[numbers] = highest_after(links.parents, keeps.astype(np.uint64)) > 0
    return stays
