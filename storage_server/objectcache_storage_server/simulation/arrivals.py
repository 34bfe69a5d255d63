"""Who comes when, wanting what."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

ZIPF_EXPONENT = 1.0  # of tenants' shares of the requests


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request whose first `cached_tokens` tokens are stored. GPUs compute each layer of it for
    `compute_window_s`.
    """

    at_s: float
    cached_tokens: int
    compute_window_s: float
    tenant: str = ""


def at_load(arrivals: Sequence[Arrival], load: float) -> list[Arrival]:
    """The same requests, coming `load` times as fast."""
    return [replace(arrival, at_s=arrival.at_s / load) for arrival in arrivals]


def among_tenants(arrivals: Sequence[Arrival], tenants: int, seed: int) -> list[Arrival]:
    """The same requests, spread over tenants: number n has 1/n of the requests of number 1."""
    weights = [1.0 / (number + 1) ** ZIPF_EXPONENT for number in range(tenants)]
    totals = list(itertools.accumulate(weights))
    chooser = random.Random(seed)  # noqa: S311 - to be repeated, not secret
    names = [f"tenant-{number + 1}" for number in range(tenants)]
    chosen = chooser.choices(names, cum_weights=totals, k=len(arrivals))
    return [
        replace(arrival, tenant=tenant) for arrival, tenant in zip(arrivals, chosen, strict=True)
    ]
