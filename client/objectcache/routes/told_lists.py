"""Which relays the replicas of a dispatch service have told of: pure, time is an argument."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from objectcache.routes.route_settings import RelayAddress

R = TypeVar("R", bound=Hashable)

LIST_KEPT_S = 60.0  # a replica's list, beside those of others, when it answers no more


@dataclass(frozen=True, slots=True)
class ToldList:
    """The relays of which a replica told last; `tag` is that of the list, unless it is empty."""

    relays: tuple[RelayAddress, ...]
    tag: str
    told_s: float
    is_answering: bool = True  # whether the replica answered when it was to be asked last


class ToldLists(Generic[R]):
    """The lists of replicas, which `order` names in the order in which they count."""

    def __init__(self, order: Sequence[R]) -> None:
        self._order = order
        self._lists: dict[R, ToldList] = {}

    def of(self, replica: R) -> ToldList | None:
        """What this one told last."""
        return self._lists.get(replica)

    def told(self, replica: R, said: ToldList) -> None:
        """It has answered."""
        self._lists[replica] = said

    def answered_alone(self, replicas: Sequence[R]) -> None:
        """Of all only these have answered in this round."""
        for one, said in self._lists.items():
            self._lists[one] = replace(said, is_answering=one in replicas)

    def relays(self, now_s: float) -> list[RelayAddress]:
        """Each relay where the first replica that names it has it; what those told that answer no
        more counts for LIST_KEPT_S, and only for relays that nobody else names: one may have moved.
        """
        lists = [self._lists[one] for one in self._order if one in self._lists]
        found = dict[str, RelayAddress]()
        for said in sorted(lists, key=lambda one: not one.is_answering):
            if now_s - said.told_s <= LIST_KEPT_S:
                for relay in said.relays:
                    found.setdefault(relay.node, relay)
        return list(found.values())
