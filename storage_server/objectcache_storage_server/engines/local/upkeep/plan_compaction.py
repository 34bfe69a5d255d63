"""Which chunks are to lie together. Pure.

A prefix that came in many small puts lies in many small extents, each a read of its own in every
layer; and an extent of which most chunks have gone keeps all of its space. Both are mended by
copying chunks that follow each other into one extent.

Copying must pay and must end. With m live chunks in an extent, let the *order* of a store be the
sum of m * log2(m) over its extents, less the space of its extents in chunks. A move of k chunks is
made only where it raises the order by about k: extents of twice the slots do, and half the space
does, or some of each. The order of n chunks cannot exceed n * log2(slots of a full extent), so with
nothing put or removed a chunk is copied at most about that logarithm times, and once more for each
slot of space that is given back; and no move can undo another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from math import log2

import numpy as np
import numpy.typing as npt

from objectcache_storage_server.engines.eviction.link_prefixes import (
    beginnings,
    depths,
    prefix_links,
)
from objectcache_storage_server.engines.local.space.extent_geometry import Geometry, slots_for

Rows = npt.NDArray[np.void]
Numbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
COUNT_MAX = 10_000  # candidates that are counted; each takes some microseconds of the interpreter
WORTH = 0.9  # of a chunk's copy, in order; 1 would be lost on the padding of rows


@dataclass(frozen=True, slots=True)
class Move:
    """Chunks (`numbers`, in prefix order) that are to fill one extent."""

    bucket: int
    numbers: tuple[int, ...]
    geometry: Geometry
    # Of a move that is made for its sake, the codec that slices are to be given to, 0 for none; any
    # other move goes by the policy that it meets.
    codec: int | None = None


@dataclass(frozen=True, slots=True)
class _Piece:
    """Chunks that follow each other in a chain and lie in one extent."""

    chain: int
    extent: int
    numbers: tuple[int, ...]


def plan_moves(
    objects: Rows,
    extents: Rows,
    *,
    row_bytes: int,
    extent_bytes_max: int,
    now_s: float,
    idle_s: float,
    moves_max: int,
) -> list[Move]:
    """What to move next, to be done in this order; the most recently used prefixes first.

    `objects` and `extents` are rows of `OBJECT_COLUMNS` and `EXTENT_COLUMNS`. Chunks modified less
    than `idle_s` ago, or in an extent that is read, stay where they are.
    """
    is_idle = objects["modified_s"] <= now_s - idle_s
    moves = _moves(objects, extents, is_idle, row_bytes, extent_bytes_max)
    return list(islice(moves, moves_max))


def candidate_count(objects: Rows, extents: Rows, row_bytes: int, extent_bytes_max: int) -> int:
    """Chunks that would be moved were all of them idle; 0 when all lie as they should.

    Counting ends with the move that reaches `COUNT_MAX`: there are that many, or more.
    """
    is_idle = np.ones(len(objects), np.bool_)
    moves = _moves(objects, extents, is_idle, row_bytes, extent_bytes_max)
    found = 0
    for move in moves:
        found += len(move.numbers)
        if found >= COUNT_MAX:
            break
    return found


def _moves(
    objects: Rows, extents: Rows, is_idle: Mask, row_bytes: int, extent_bytes_max: int
) -> Iterator[Move]:
    full_slots, kinds = _full_slots(extents, row_bytes, extent_bytes_max)
    numbers = _candidates(objects, extents, is_idle, full_slots)
    if not len(numbers):
        return
    rows = objects[numbers]
    chains = _chains(rows, kinds[rows["extent"]])
    pieces = _pieces(chains, rows["extent"].astype(np.int64), numbers, extents)
    live_slots: dict[int, int] = {}  # of extents that the moves so far take something from
    for _, chain in groupby(pieces, key=lambda piece: piece.chain):
        yield from _moves_of_chain(chain, objects, extents, full_slots, live_slots)


# --- what can move ---


def _full_slots(extents: Rows, row_bytes: int, extent_bytes_max: int) -> tuple[Numbers, Numbers]:
    """For each extent the slots of a full one, 0 where it stays; and a number of its geometry."""
    may_move = extents["is_used"] & (extents["readers"] == 0) & ~extents["is_freed"]
    may_move &= (extents["num_layers"] > 0) & (extents["slice_bytes"] > 0)
    full_slots = np.zeros(len(extents), np.int64)
    _, slices = np.unique(extents["slice_bytes"], return_inverse=True)
    keys = slices.astype(np.int64) << 32 | extents["num_layers"].astype(np.int64)
    _, firsts, kinds = np.unique(keys, return_index=True, return_inverse=True)
    by_kind = np.zeros(len(firsts), np.int64)
    for kind, first in enumerate(firsts):
        num_layers, slice_bytes = _shape(extents, int(first))
        if num_layers and slice_bytes:
            by_kind[kind] = slots_for(num_layers, slice_bytes, row_bytes, extent_bytes_max)
    full_slots[may_move] = by_kind[kinds[may_move]]
    return full_slots, kinds


def _shape(extents: Rows, extent: int) -> tuple[int, int]:
    return int(extents["num_layers"][extent]), int(extents["slice_bytes"][extent])


def _candidates(objects: Rows, extents: Rows, is_idle: Mask, full_slots: Numbers) -> Numbers:
    """Chunks in extents that are small for their geometry, or at most half live."""
    is_small = extents["slots"] < full_slots
    is_wasteful = (full_slots > 0) & _is_half_empty(extents)
    chunk_bytes = extents["num_layers"] * extents["slice_bytes"]
    numbers = np.flatnonzero(
        objects["is_used"] & objects["is_evictable"] & is_idle & (objects["size_bytes"] > 0)
    )
    homes = objects["extent"][numbers]
    is_known = objects["size_bytes"][numbers] == chunk_bytes[homes]
    candidates: Numbers = numbers[(is_small | is_wasteful)[homes] & is_known]
    return candidates


def _is_half_empty(extents: Rows) -> Mask:
    is_half_empty: Mask = 2 * extents["live_slots"].astype(np.int64) <= extents["slots"]
    return is_half_empty


# --- in which order they belong ---


def _chains(rows: Rows, kinds: Numbers) -> Numbers:
    """int64[2, n]: for each candidate the number of its chain, and its place in it.

    Chains are numbered by their latest use, latest first.
    """
    parents = _only_followers(
        rows, kinds, prefix_links(rows["own_hash"], rows["parent_hash"]).parents
    )
    _join_strangers(rows, kinds, parents)
    first = beginnings(parents)
    latest = np.zeros(len(rows), np.uint64)
    np.maximum.at(latest, first, rows["last_used"])
    heads = np.flatnonzero(parents < 0)
    ranked = heads[np.argsort(latest[heads], kind="stable")[::-1]]
    chain_of = np.empty(len(rows), np.int64)
    chain_of[ranked] = np.arange(len(ranked))
    return np.stack([chain_of[first], depths(parents)])


def _only_followers(rows: Rows, kinds: Numbers, parents: Numbers) -> Numbers:
    """Parents where the link stays within a bucket and geometry, one child each: the last used."""
    at = np.flatnonzero(parents >= 0)
    above = parents[at]
    at = at[(rows["bucket"][at] == rows["bucket"][above]) & (kinds[at] == kinds[above])]
    order = np.lexsort((at, rows["serial"][at], rows["last_used"][at], parents[at]))
    at = at[order]
    follows = np.ones(len(at), np.bool_)
    follows[:-1] = parents[at[1:]] != parents[at[:-1]]
    kept = np.full(len(parents), -1, np.int64)
    kept[at[follows]] = parents[at[follows]]
    return kept


def _join_strangers(rows: Rows, kinds: Numbers, parents: Numbers) -> None:
    """String together, in place, those of whom no neighbour is known, in the order of their put."""
    is_parent = np.zeros(len(rows), np.bool_)
    is_parent[parents[parents >= 0]] = True
    alone = np.flatnonzero((rows["parent_hash"] == 0) & (parents < 0) & ~is_parent)
    columns = (
        alone,
        rows["slot"][alone],
        rows["serial"][alone],
        kinds[alone],
        rows["bucket"][alone],
    )
    alone = alone[np.lexsort(columns)]
    before, after = alone[:-1], alone[1:]
    same = (rows["bucket"][before] == rows["bucket"][after]) & (kinds[before] == kinds[after])
    parents[after[same]] = before[same]


def _pieces(chains: Numbers, homes: Numbers, numbers: Numbers, extents: Rows) -> Iterator[_Piece]:
    """Pieces in order, without the chains that are one piece in an extent that is full enough."""
    order = np.lexsort((chains[1], chains[0]))
    chain, home, numbers = chains[0][order], homes[order], numbers[order]
    begins = np.ones(len(order), np.bool_)
    begins[1:] = (chain[1:] != chain[:-1]) | (home[1:] != home[:-1])
    begin = np.flatnonzero(begins)
    end = np.append(begin[1:], len(order))
    chain, home = chain[begin], home[begin]
    matters = (np.bincount(chain)[chain] > 1) | _is_half_empty(extents)[home]
    for piece in np.flatnonzero(matters).tolist():
        inside = numbers[begin[piece] : end[piece]].tolist()
        yield _Piece(int(chain[piece]), int(home[piece]), tuple(inside))


# --- what is worth a move ---


def _moves_of_chain(
    pieces: Iterator[_Piece],
    objects: Rows,
    extents: Rows,
    full_slots: Numbers,
    live_slots: dict[int, int],
) -> Iterator[Move]:
    """Greedily from the beginning: as many whole pieces as fit, or the same without the first.

    Looks at no more pieces than that, since a chain may be all that is stored.
    """
    ahead = list(islice(pieces, 1))
    slots_max = int(full_slots[ahead[0].extent])
    num_layers, slice_bytes = _shape(extents, ahead[0].extent)
    while True:
        group = _next_that_fit(ahead, pieces, slots_max)
        if not ahead:
            return
        slots = sum(len(piece.numbers) for piece in group)
        geometry = Geometry(slots, num_layers, slice_bytes)
        if group and _is_worth_it(group, geometry, extents, live_slots):
            for piece in group:
                live = live_slots.get(piece.extent, int(extents["live_slots"][piece.extent]))
                live_slots[piece.extent] = live - len(piece.numbers)
            numbers = tuple(number for piece in group for number in piece.numbers)
            yield Move(int(objects["bucket"][numbers[0]]), numbers, geometry)
            del ahead[: len(group)]
        else:
            del ahead[0]


def _next_that_fit(ahead: list[_Piece], pieces: Iterator[_Piece], slots_max: int) -> list[_Piece]:
    """The longest beginning of `ahead` that fits an extent, once `ahead` has got enough pieces."""
    slots = looked_at = 0
    while slots <= slots_max:
        if looked_at == len(ahead):
            ahead.extend(islice(pieces, 1))
        if looked_at == len(ahead):
            return ahead.copy()
        slots += len(ahead[looked_at].numbers)
        looked_at += 1
    return ahead[: looked_at - 1]


def _is_worth_it(
    group: list[_Piece], geometry: Geometry, extents: Rows, live_slots: dict[int, int]
) -> bool:
    taken: Counter[int] = Counter()
    for piece in group:
        taken[piece.extent] += len(piece.numbers)
    gain = _together(geometry.slots)
    grown_bytes = geometry.extent_bytes
    for extent, count in taken.items():
        live = live_slots.get(extent, int(extents["live_slots"][extent]))
        gain -= _together(live) - _together(live - count)
        if count == live:
            # Whether slices are encoded or not, space counts as if they were plain: so moves end.
            was = Geometry(int(extents["slots"][extent]), *_shape(extents, extent))
            grown_bytes -= was.extent_bytes
    return gain - grown_bytes / geometry.chunk_bytes >= WORTH * geometry.slots


def _together(live_slots: int) -> float:
    """What an extent with so many live chunks adds to the order of the store."""
    return live_slots * log2(live_slots) if live_slots else 0.0
