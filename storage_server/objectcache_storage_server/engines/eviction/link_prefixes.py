"""Which chunk follows which, as arrays. Pure.

A chunk names the one before it by hash, so links are whatever clients made them: they may name
nothing that is stored, share a hash, or run in a circle. What comes out is a forest: every walk
along `parents` ends. All chunks walk at once, in strides that double, so a million chunks in one
prefix cost twenty steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class PrefixLinks:
    """Links among n chunks, by position in what they were made from."""

    parents: Positions  # int64[n]: the chunk before it; -1 where none of these is
    depths: Positions  # int64[n]: how many chunks are before it
    is_named_besides: npt.NDArray[np.bool_]  # bool[n]: also by a chunk that has another parent here


def prefix_links(own_hashes: Hashes, parent_hashes: Hashes) -> PrefixLinks:
    """Join chunks (uint64[n] each) to those that they name; a parent hash of 0 names none.

    Chunks that share a hash stand in a row: what names the hash follows the first of them, and only
    the last keeps its own parent. A link that is part of a circle is dropped.
    """
    order = np.argsort(own_hashes, kind="stable")
    parents = _joined(own_hashes[order], order, parent_hashes)
    is_named_besides = _stand_in_rows(own_hashes[order], order, parents)
    depths, circling = _depths(parents)
    if len(circling):
        parents[circling] = -1
        depths, circling = _depths(parents)
        assert not len(circling)
    return PrefixLinks(parents, depths, is_named_besides)


def _joined(sorted_hashes: Hashes, order: Positions, parent_hashes: Hashes) -> Positions:
    parents = np.full(len(order), -1, np.int64)
    # In order of their hash, so that the search walks through memory rather than jumps.
    asking = np.argsort(parent_hashes, kind="stable")
    asking = asking[np.searchsorted(parent_hashes[asking], np.uint64(1)) :]
    asked = parent_hashes[asking]
    found = np.searchsorted(sorted_hashes, asked)
    found[found == len(order)] = 0
    hits = sorted_hashes[found] == asked
    parents[asking[hits]] = order[found[hits]]
    return parents


def _stand_in_rows(
    sorted_hashes: Hashes, order: Positions, parents: Positions
) -> npt.NDArray[np.bool_]:
    """Put those of one hash in a row, in place; returns whose children were taken away by that."""
    is_named_besides = np.zeros(len(order), np.bool_)
    shared = np.flatnonzero(sorted_hashes[1:] == sorted_hashes[:-1])
    if len(shared):
        former = parents[order[shared]]
        is_named_besides[former[former >= 0]] = True
        parents[order[shared]] = order[shared + 1]
    return is_named_besides


def _depths(parents: Positions) -> tuple[Positions, Positions]:
    """How many chunks are before each, and which chunks are part of a circle."""
    depths = (parents >= 0).astype(np.int64)
    circling = np.empty(0, np.int64)
    for step, (walkers, ancestors) in enumerate(_strides(parents)):
        depths[walkers] += depths[ancestors]
        if 1 << step >= len(parents):  # no walk that ends is as long
            circling = np.unique(ancestors)
    return depths, circling


def _strides(parents: Positions) -> Iterator[tuple[Positions, Positions]]:
    """Those who have a 1st, 2nd, 4th, 8th, ... chunk before them, and which it is."""
    ancestors = parents.copy()
    walkers = np.flatnonzero(parents >= 0)
    for _ in range(len(parents).bit_length() + 1):
        if not len(walkers):
            return
        reached = ancestors[walkers]
        yield walkers, reached
        further = ancestors[reached]
        ancestors[walkers] = further
        walkers = walkers[further >= 0]


def highest_after(parents: Positions, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """For each chunk the highest value of itself and of all that follow it."""
    values = values.copy()
    for walkers, ancestors in _strides(parents):
        np.maximum.at(values, ancestors, values[walkers])
    return values


def lowest_before(parents: Positions, values: Positions) -> Positions:
    """For each chunk the lowest value of itself and of all before it."""
    values = values.copy()
    for walkers, ancestors in _strides(parents):
        values[walkers] = np.minimum(values[walkers], values[ancestors])
    return values


def depths(parents: Positions) -> Positions:
    """How many chunks are before each, where no walk is a circle."""
    return _depths(parents)[0]


def beginnings(parents: Positions) -> Positions:
    """For each chunk the first of its walk."""
    first = np.arange(len(parents))
    for walkers, ancestors in _strides(parents):
        first[walkers] = first[ancestors]
    return first
