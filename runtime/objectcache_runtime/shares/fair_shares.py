"""How much of something scarce one tenant may hold, so that none shuts out another. Pure.

Max-min fair, with what is idle lent out: a tenant may grow for as long as it holds no more than
LENT_PER_FREE times what stays free (the dynamic threshold for shared buffers of Choudhury and
Hahne, 1998). So one tenant alone may hold three quarters, two that take all they can three sevenths
each, and n of them 3 / (1 + 3n) each; something stays free for whoever comes next. The last
1 / RESERVED_PART is for tenants that hold little: up to a unit each. A first taking may be larger,
and than what may be lent: it leaves the reserve alone, or takes one RESERVED_PART of what is free
and leaves half of it. So the half is for units, and no tenant takes everything at once.

Nobody is made to give anything back here. Whoever has tenants wait serves the one that holds least
first.
"""

from __future__ import annotations

LENT_PER_FREE = 3
RESERVED_PART = 8  # one of so many parts
UNITS = 64  # of the whole, where nothing else is a unit


class FairShares:
    """What each tenant holds of `total`. Not safe to use from several threads."""

    def __init__(self, total: int, unit: int | None = None) -> None:
        """`unit` is what a tenant holds without further ado while anything is free; a 64th of the
        whole, at least 1, where it is not given.
        """
        self.total = total
        self._unit = max(1, total // UNITS) if unit is None else unit
        self._held: dict[str, int] = {}
        self._taken = 0

    @property
    def taken(self) -> int:
        """What all tenants hold together."""
        return self._taken

    @property
    def free(self) -> int:
        """What nobody holds; below 0 where the whole has shrunk."""
        return self.total - self._taken

    @property
    def tenants(self) -> int:
        """How many hold anything."""
        return len(self._held)

    def held(self, tenant: str) -> int:
        """What this tenant holds."""
        return self._held.get(tenant, 0)

    def room(self, tenant: str, least: int = 1, weight: float = 1.0) -> int:
        """How much more this tenant may take now, 0 or more; to one that holds nothing `least` is
        given if it can be. A tenant's weight multiplies what it may hold.
        """
        held = self.held(tenant)
        lent_per_free = LENT_PER_FREE * weight
        lent = int((lent_per_free * self.free - held) // (lent_per_free + 1))
        unreserved = self.free - self._reserved
        first = self._unit - held if held else max(self._unit, min(least, self._first_max))
        return max(0, min(self.free, max(first, min(lent, unreserved))))

    @property
    def _reserved(self) -> int:
        return self.total // RESERVED_PART

    @property
    def _first_max(self) -> int:
        """The most that may be taken first now; of all, where nobody holds anything."""
        if not self._taken:
            return self.total
        half = self.free - self._reserved // 2
        return max(self.free - self._reserved, min(self.free // RESERVED_PART, half))

    def may_take(self, tenant: str, amount: int, weight: float = 1.0) -> bool:
        """Whether this tenant may take so much more now, all of it."""
        return amount <= self.room(tenant, amount, weight)

    def take(self, tenant: str, amount: int) -> None:
        """Count it as held; whoever calls has asked."""
        self._taken += amount
        if amount:
            self._held[tenant] = self.held(tenant) + amount

    def give_back(self, tenant: str, amount: int) -> None:
        """Count it as held no more."""
        left = self.held(tenant) - amount
        assert left >= 0, f"{tenant!r} gives back {amount} more than it holds, {-left}"
        self._taken -= amount
        if left:
            self._held[tenant] = left
        else:
            self._held.pop(tenant, None)

    def __repr__(self) -> str:
        return f"<FairShares {self._taken} of {self.total} held by {self.tenants}>"
