"""Which requests are in a forward batch, and with how many tokens (section 6.2).

GPUs that wait for each other after every attention layer should spend the same time in it: a batch
is filled in order of arrival until its attention would take longer than a quota, and the request
that no longer fits is cut to the token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from objectcache_dispatch.checks import check_at_least, check_positive
from objectcache_dispatch.requests import DispatchRequest
from objectcache_schemas.errors import InvalidRequest

QUOTA_S = 0.3  # the paper's


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Seconds of a batch's attention: base_s + s_per_flop x FLOP of its (cached, bsz) pairs.

    FLOP of a pair: bsz x `flop_per_token` (projections) and `flop_per_pair` for each token and each
    that it attends to: bsz x cached + bsz x (bsz + 1) / 2.
    """

    s_per_flop: float
    flop_per_pair: float
    flop_per_token: float = 0.0
    base_s: float = 0.0

    def __post_init__(self) -> None:
        check_positive("s_per_flop", self.s_per_flop)
        check_positive("flop_per_pair", self.flop_per_pair)
        check_at_least("flop_per_token", self.flop_per_token, 0)
        check_at_least("base_s", self.base_s, 0)

    def flop(self, cached: int, bsz: int) -> float:
        """Of one request's part."""
        return bsz * self.flop_per_token + self.flop_per_pair * bsz * (cached + (bsz + 1) / 2)

    def seconds(self, batch: Iterable[tuple[int, int]]) -> float:
        """Of a batch of (cached, bsz)."""
        return self.base_s + self.s_per_flop * sum(self.flop(*pair) for pair in batch)

    @classmethod
    def fitted(
        cls,
        profile: Sequence[tuple[Sequence[tuple[int, int]], float]],
        *,
        flop_per_pair: float,
        flop_per_token: float = 0.0,
    ) -> LayerTime:
        """Of measured batches, each with its seconds: the least squares of base_s and s_per_flop.

        Raises `InvalidRequest` for batches whose times do not grow with their FLOP, and for fewer
        than two that differ.
        """
        unit = cls(1.0, flop_per_pair, flop_per_token)
        flop = np.array([unit.seconds(batch) for batch, _ in profile])
        seconds = np.array([measured_s for _, measured_s in profile])
        if len(profile) < 2 or np.ptp(flop) == 0:
            raise InvalidRequest("the profile needs at least two batches whose FLOP differ")
        slope, base_s = np.polyfit(flop / flop.max(), seconds, 1)
        if slope <= 0:
            raise InvalidRequest("the profile's seconds do not grow with its FLOP; measure again")
        return cls(
            float(slope) / float(flop.max()), flop_per_pair, flop_per_token, max(0.0, float(base_s))
        )


def fill_batch(
    queue: Iterable[DispatchRequest], layer_time: LayerTime, quota_s: float = QUOTA_S
) -> list[tuple[DispatchRequest, int]]:
    """Requests from the queue's head, each with the tokens of it that this batch computes (bsz).

    All new tokens of each, but of the last maybe fewer: as many as the quota lets in. The first
    gets at least one token, or else it would never be computed. What is left of a request goes on
    as `request.after(bsz)`.
    """
    check_positive("quota_s", quota_s)
    batch = list[tuple[DispatchRequest, int]]()
    spent_s = layer_time.base_s
    for request in queue:
        whole_s = layer_time.s_per_flop * layer_time.flop(request.cached_tokens, request.new_tokens)
        if spent_s + whole_s <= quota_s:
            spent_s += whole_s
            batch.append((request, request.new_tokens))
            continue
        bsz = _most_tokens(request, layer_time, quota_s - spent_s)
        if bsz or not batch:
            batch.append((request, max(bsz, 1)))
        break
    return batch


def _most_tokens(request: DispatchRequest, layer_time: LayerTime, left_s: float) -> int:
    """The most tokens of a request whose attention takes no longer; bisected."""
    fits, too_many = 0, request.new_tokens
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if layer_time.s_per_flop * layer_time.flop(request.cached_tokens, middle) <= left_s:
            fits = middle
        else:
            too_many = middle
    return fits
