"""Which requests are served where there are more than may be at once. Pure.

The places are shared max-min among tenants: what one does not use is lent to the others, and taken
back when it is asked for. Whoever holds most then gives a request up, as though it had come later:
one whose client is waited for, the one that has had its place longest; where there is none, the
youngest.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar


class Placed(Protocol):
    """A request that may hold a place."""

    @property
    def waits_for_client(self) -> bool:
        """Whether nothing is done for it before its client sends more."""
        ...


R = TypeVar("R", bound=Placed)


class RequestPlaces(Generic[R]):
    """The requests that are served, at most `places_max`."""

    def __init__(self, places_max: int) -> None:
        self._places_max = places_max
        self._tenants: dict[str, dict[R, None]] = {}  # the oldest first
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def take(self, request: R, tenant: str) -> tuple[bool, R | None]:
        """Whether the request is served, and the one that is given up for it, if one has to be; it
        has its place no more.
        """
        given_up: R | None = None
        if self._count >= self._places_max:
            given_up = self._give_up_for(tenant)
            if given_up is None:
                return False, None
        self._tenants.setdefault(tenant, {})[request] = None
        self._count += 1
        return True, given_up

    def leave(self, request: R, tenant: str) -> None:
        """The request needs its place no more. Repeating has no effect."""
        held = self._tenants.get(tenant)
        if held is None or request not in held:
            return
        del held[request]
        self._count -= 1
        if not held:
            del self._tenants[tenant]

    def _give_up_for(self, tenant: str) -> R | None:
        """Take a place of whoever holds most, where that leaves it no fewer than the asker has."""
        most = max(self._tenants, key=lambda name: len(self._tenants[name]))
        if len(self._tenants[most]) - 1 < len(self._tenants.get(tenant, ())) + 1:
            return None
        held = self._tenants[most]
        waiting = (request for request in held if request.waits_for_client)
        request = next(waiting, None) or next(reversed(held))
        self.leave(request, most)
        return request

    def __repr__(self) -> str:
        return f"<RequestPlaces {self._count}/{self._places_max}, {len(self._tenants)} tenants>"
