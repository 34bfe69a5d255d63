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
    `compute_window_s`; the scheduler is told `window_error` times that, or nothing where it is
    None. A chunkwise one computes once all of it is there. `nic` is the storage NIC that it goes
    to, see `Machine.nics`.
    """

    at_s: float
    cached_tokens: int
    compute_window_s: float
    tenant: str = ""
    window_error: float | None = 1.0
    is_chunkwise: bool = False
    nic: str = ""

    @property
    def told_window_s(self) -> float | None:
        """The compute window as the scheduler knows it."""
        return None if self.window_error is None else self.compute_window_s * self.window_error

    @property
    def is_pooled(self) -> bool:
        """Whether it shares the pool; others take fair turns."""
        return self.window_error is not None and not self.is_chunkwise


def at_load(arrivals: Sequence[Arrival], load: float) -> list[Arrival]:
    """The same requests, coming `load` times as fast."""
    return [replace(arrival, at_s=arrival.at_s / load) for arrival in arrivals]


def tenant_name(number: int) -> str:
    """Of the tenant that has the `number`th most requests, from 1."""
    return f"tenant-{number}"


def among_tenants(arrivals: Sequence[Arrival], tenants: int, seed: int) -> list[Arrival]:
    """The same requests, spread over tenants: number n has 1/n of the requests of number 1."""
    weights = [1.0 / (number + 1) ** ZIPF_EXPONENT for number in range(tenants)]
    totals = list(itertools.accumulate(weights))
    chooser = random.Random(seed)  # noqa: S311 - to be repeated, not secret
    names = [tenant_name(number + 1) for number in range(tenants)]
    chosen = chooser.choices(names, cum_weights=totals, k=len(arrivals))
    return [
        replace(arrival, tenant=tenant) for arrival, tenant in zip(arrivals, chosen, strict=True)
    ]


def with_window_errors(arrivals: Sequence[Arrival], factor: float, seed: int) -> list[Arrival]:
    """The same requests, told windows that are wrong by a factor in [1 / factor, factor], even on
    a logarithmic scale. A larger factor makes every error larger, in the same direction.
    """
    chooser = _chooser(seed, "windows")
    return [
        replace(arrival, window_error=factor ** chooser.uniform(-1.0, 1.0)) for arrival in arrivals
    ]


def with_chunkwise(arrivals: Sequence[Arrival], part: float, seed: int) -> list[Arrival]:
    """The same requests, of which that part is chunkwise."""
    chooser = _chooser(seed, "chunkwise")
    return [replace(arrival, is_chunkwise=chooser.random() < part) for arrival in arrivals]


def without_windows(arrivals: Sequence[Arrival], part: float, seed: int) -> list[Arrival]:
    """The same requests, of which that part is told no window."""
    chooser = _chooser(seed, "windowless")
    return [
        replace(arrival, window_error=None) if chooser.random() < part else arrival
        for arrival in arrivals
    ]


def _chooser(seed: int, of: str) -> random.Random:
    """One for each purpose, so that no choice moves another one."""
    return random.Random(f"{of} {seed}")  # noqa: S311 - to be repeated, not secret
