"""Pacing: when the next byte may go, at a rate."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

METER_BINS = 10
METER_S = 1.0


class Pace:
    """A clock that runs ahead by what was sent: a token bucket of `catch_up_s` seconds.

    Whoever was late may catch up what it missed within `catch_up_s`, and no more. Rate infinity
    never waits.
    """

    __slots__ = ("_next_at_s", "catch_up_s", "rate_bytes_per_s")

    def __init__(self, rate_bytes_per_s: float, catch_up_s: float, now_s: float) -> None:
        self.rate_bytes_per_s = rate_bytes_per_s
        self.catch_up_s = catch_up_s
        self._next_at_s = now_s

    @property
    def next_at_s(self) -> float:
        """When the next piece may go; in the past it may go now."""
        return self._next_at_s

    def charge(self, length_bytes: int, now_s: float) -> None:
        """A piece goes now."""
        begun_s = max(self._next_at_s, now_s - self.catch_up_s)
        self._next_at_s = begun_s + length_bytes / self.rate_bytes_per_s

    def change(self, rate_bytes_per_s: float, now_s: float) -> None:
        """Another rate from now on. What was sent too early is still owed; nothing is caught up."""
        ahead_s = max(0.0, self._next_at_s - now_s)
        ahead_bytes = ahead_s * self.rate_bytes_per_s if ahead_s else 0.0
        self.rate_bytes_per_s = rate_bytes_per_s
        self._next_at_s = now_s + ahead_bytes / rate_bytes_per_s

    def turn(self, rate_bytes_per_s: float, now_s: float) -> None:
        """Another rate from now on, neither of which is infinite. What was sent too early is owed,
        and what was missed may be caught up, by the byte.
        """
        ahead_s = max(self._next_at_s - now_s, -self.catch_up_s)
        self._next_at_s = now_s + ahead_s * self.rate_bytes_per_s / rate_bytes_per_s
        self.rate_bytes_per_s = rate_bytes_per_s

    def __repr__(self) -> str:
        return f"<Pace {self.rate_bytes_per_s:.3g} B/s>"


class TenantPaces:
    """A clock for each tenant that has a cap of its own."""

    def __init__(self, catch_up_s: float) -> None:
        self._catch_up_s = catch_up_s
        self._paces: dict[str, Pace] = {}

    def change(self, caps: Mapping[str, float], now_s: float) -> None:
        """Other caps from now on, bytes per second by tenant. What a tenant was sent too early is
        still owed; a cap that stays is as if nothing had changed.
        """
        before, self._paces = self._paces, {}
        for tenant, cap_bytes_per_s in caps.items():
            pace = before.get(tenant) or Pace(cap_bytes_per_s, self._catch_up_s, now_s)
            if pace.rate_bytes_per_s != cap_bytes_per_s:
                pace.change(cap_bytes_per_s, now_s)
            self._paces[tenant] = pace

    def next_at_s(self, tenant: str) -> float:
        """When the tenant's next piece may go; -infinity without a cap of its own."""
        pace = self._paces.get(tenant)
        return -math.inf if pace is None else pace.next_at_s

    def has_cap(self, tenant: str) -> bool:
        """Whether the tenant has a cap of its own."""
        return tenant in self._paces

    def charge(self, tenant: str, length_bytes: int, now_s: float) -> None:
        """A piece of the tenant's goes now."""
        if pace := self._paces.get(tenant):
            pace.charge(length_bytes, now_s)

    def __repr__(self) -> str:
        return f"<TenantPaces of {len(self._paces)}>"


class RateMeter:
    """Bytes per second over the last second, and the most that was seen lately."""

    def __init__(self) -> None:
        self._bins: deque[tuple[int, int]] = deque()  # number of the bin, bytes
        self._peak = 0.0
        self._peak_at_s = 0.0

    def add(self, length_bytes: int, now_s: float) -> None:
        """Count bytes that go now."""
        number = int(now_s * METER_BINS / METER_S)
        if self._bins and self._bins[-1][0] == number:
            self._bins[-1] = (number, self._bins[-1][1] + length_bytes)
            return
        rate = self.rate_bytes_per_s(now_s)
        if rate >= self.peak_bytes_per_s(now_s):
            self._peak, self._peak_at_s = rate, now_s
        self._bins.append((number, length_bytes))

    def rate_bytes_per_s(self, now_s: float) -> float:
        """Over the last second, by whole tenths of it."""
        oldest = int(now_s * METER_BINS / METER_S) - METER_BINS
        while self._bins and self._bins[0][0] < oldest:
            self._bins.popleft()
        return sum(length for _, length in self._bins) / METER_S

    def peak_bytes_per_s(self, now_s: float) -> float:
        """The highest rate that was seen; it halves every ten seconds. 0.0 before any."""
        return self._peak * math.exp2((self._peak_at_s - now_s) / 10.0)
