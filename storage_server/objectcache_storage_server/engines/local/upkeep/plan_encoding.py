"""Which extents are to be written again because their bucket's policy has another encoding. Pure.

Chunks that lie well keep their neighbours and order: an extent's live chunks become one extent
again. It says then which codec they were given to, whether they got shorter or not, so each is
written once for each change of a policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from objectcache_storage_server.engines.local.space.extent_geometry import Geometry
from objectcache_storage_server.engines.local.upkeep.plan_compaction import Move

Rows = npt.NDArray[np.void]
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class EncodingPlan:
    """What to encode, or decode, next, the most recently used first; and how much there is."""

    moves: list[Move]
    waiting_bytes: int  # of chunks that a policy wants otherwise, those that are not idle too


def plan_encoding(
    objects: Rows,
    extents: Rows,
    codecs: Mapping[int, int],
    *,
    extent_bytes_max: int,
    now_s: float,
    idle_s: float,
    moves_max: int,
) -> EncodingPlan:
    """Extents whose chunks are to be written again.

    `codecs`: by bucket number the `SliceCodec` of its policy, 0 where slices are to be plain. Only
    extents all of whose chunks may be moved, and none was modified less than `idle_s` ago or is
    read.
    """
    wanted, live = _wanted_codecs(objects, extents, codecs)
    has_other = extents["codec"] != np.maximum(wanted, 0)
    # Slices that a codec did not make shorter are plain already.
    has_other &= (wanted > 0) | extents["is_encoded"]
    candidates = np.flatnonzero((wanted >= 0) & has_other)
    chunk_bytes = extents["num_layers"].astype(np.int64) * extents["slice_bytes"].astype(np.int64)
    may_be = _may_be_encoded(extents, candidates, live, extent_bytes_max)
    found: Numbers = candidates[(wanted[candidates] == 0) | may_be]
    waiting_bytes = int((live[found] * chunk_bytes[found]).sum())
    modified_s = np.full(len(extents), -np.inf)
    last_used = np.zeros(len(extents), np.uint64)
    numbers = _chunks(objects)
    np.maximum.at(modified_s, objects["extent"][numbers], objects["modified_s"][numbers])
    np.maximum.at(last_used, objects["extent"][numbers], objects["last_used"][numbers])
    ready = found[(extents["readers"][found] == 0) & (modified_s[found] <= now_s - idle_s)]
    ready = ready[np.argsort(last_used[ready], kind="stable")[::-1]][:moves_max]
    return EncodingPlan(_moves(objects, extents, numbers, ready, wanted), waiting_bytes)


def _chunks(objects: Rows) -> Numbers:
    numbers: Numbers = np.flatnonzero(objects["is_used"] & (objects["size_bytes"] > 0))
    return numbers


def _wanted_codecs(
    objects: Rows, extents: Rows, codecs: Mapping[int, int]
) -> tuple[Numbers, Numbers]:
    """For each extent the codec that its slices should have been given to, -1 where it stays; and
    its live chunks.
    """
    numbers = _chunks(objects)
    rows, homes = objects[numbers], objects["extent"][numbers].astype(np.int64)
    chunk_bytes = extents["num_layers"].astype(np.int64) * extents["slice_bytes"].astype(np.int64)
    may_move = rows["is_evictable"] & (rows["size_bytes"].astype(np.int64) == chunk_bytes[homes])
    live = np.bincount(homes[may_move], minlength=len(extents))
    buckets, places = np.unique(rows["bucket"], return_inverse=True)
    of_buckets = np.array([codecs.get(int(bucket), -1) for bucket in buckets], np.int64)
    wanted = np.full(len(extents), -1, np.int64)
    wanted[homes] = of_buckets[places]
    stays = ~extents["is_used"] | extents["is_freed"] | (live != extents["live_slots"])
    wanted[stays | (live == 0)] = -1
    return wanted, live


def _may_be_encoded(
    extents: Rows, candidates: Numbers, live: Numbers, extent_bytes_max: int
) -> npt.NDArray[np.bool_]:
    """Whether each candidate's live chunks may be, asked once for each geometry."""
    columns = (live, extents["num_layers"], extents["slice_bytes"])
    shapes = np.stack([column[candidates].astype(np.int64) for column in columns], axis=1)
    kinds, of_candidates = np.unique(shapes, axis=0, return_inverse=True)
    may_be = [Geometry(*kind).may_be_encoded(extent_bytes_max) for kind in kinds.tolist()]
    return np.array(may_be, np.bool_)[of_candidates.reshape(-1)]


def _moves(
    objects: Rows, extents: Rows, numbers: Numbers, ready: Numbers, wanted: Numbers
) -> list[Move]:
    homes = objects["extent"][numbers]
    inside = numbers[np.isin(homes, ready)]
    by_extent: dict[int, list[int]] = {extent: [] for extent in ready.tolist()}
    for number in inside[np.argsort(objects["slot"][inside], kind="stable")].tolist():
        by_extent[int(objects["extent"][number])].append(number)
    return [
        Move(
            int(objects["bucket"][of_extent[0]]),
            tuple(of_extent),
            _geometry(extents, extent, len(of_extent)),
            codec=int(wanted[extent]),
        )
        for extent, of_extent in by_extent.items()
    ]


def _geometry(extents: Rows, extent: int, slots: int) -> Geometry:
    return Geometry(slots, int(extents["num_layers"][extent]), int(extents["slice_bytes"][extent]))
