"""How the pool and the fair turns divide the link: by tenants, not by deliveries."""

from __future__ import annotations

from collections.abc import Mapping

from objectcache_storage_server.scheduling.schedule_terms import Terms

FAIR_FLOOR = 0.02  # of the cap, for fair turns, where rates leave nothing


class Sides:
    """Each tenant's weight once, split between the two sides by its deliveries on each.

    So a tenant gains nothing by more deliveries, nor by having them on both sides.
    """

    def __init__(self) -> None:
        self.pool_weight = 0.0
        self.fair_weight = 0.0
        self._counts: dict[str, tuple[int, int]] = {}  # deliveries of a tenant: pool, fair turns
        self._pool_count = self._fair_count = 0
        self._weights: Mapping[str, float] = {}

    def change(self, weights: Mapping[str, float]) -> None:
        """Other weights by tenant from now on; 1 where a tenant has no entry."""
        self._weights = weights
        self.pool_weight = self.fair_weight = 0.0
        for tenant in self._counts:
            self._weigh(tenant, 1)

    def add(self, tenant: str, *, pooled: bool) -> None:
        """A delivery of the tenant counts on this side."""
        self._count(tenant, 1, pooled=pooled)

    def discard(self, tenant: str, *, pooled: bool) -> None:
        """A delivery of the tenant, which was counted on this side, counts no longer."""
        self._count(tenant, -1, pooled=pooled)

    def _count(self, tenant: str, change: int, *, pooled: bool) -> None:
        self._weigh(tenant, -1)
        pool, fair = self._counts.get(tenant, (0, 0))
        pool, fair = (pool + change, fair) if pooled else (pool, fair + change)
        assert pool >= 0
        assert fair >= 0
        self._counts[tenant] = pool, fair
        self._pool_count += change if pooled else 0
        self._fair_count += 0 if pooled else change
        if pool or fair:
            self._weigh(tenant, 1)
        else:
            del self._counts[tenant]
        if not self._pool_count:  # exactly, whatever was rounded
            self.pool_weight = 0.0
        if not self._fair_count:
            self.fair_weight = 0.0

    def _weigh(self, tenant: str, sign: int) -> None:
        pool, fair = self._counts.get(tenant, (0, 0))
        if pool or fair:
            each = sign * self._weights.get(tenant, 1.0) / (pool + fair)
            self.pool_weight += each * pool
            self.fair_weight += each * fair

    @property
    def pool_share(self) -> float:
        """Of the link; 1 where nobody is on either side."""
        both = self.pool_weight + self.fair_weight
        return self.pool_weight / both if both > 0 else 1.0

    def claims(self, terms: Terms, rated_bytes_per_s: float) -> tuple[float, float]:
        """What the pool and the fair turns may claim of the link, one against the other, where
        rates of that sum are assigned.
        """
        if not terms.assigns_rates:
            return self.pool_weight or 1.0, self.fair_weight or 1.0
        cap_bytes_per_s = terms.cap_bytes_per_s
        fair = max(cap_bytes_per_s - rated_bytes_per_s, FAIR_FLOOR * cap_bytes_per_s)
        return rated_bytes_per_s or 1.0, fair

    def __repr__(self) -> str:
        return f"<Sides: pool {self.pool_weight:g}, fair turns {self.fair_weight:g}>"
