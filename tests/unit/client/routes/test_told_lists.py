"""Which relays count of the lists of replicas, as these answer and answer no more."""

from __future__ import annotations

from objectcache.routes.route_settings import RelayAddress
from objectcache.routes.told_lists import LIST_KEPT_S, ToldList, ToldLists


def told(now_s: float, *relays: str) -> ToldList:
    return ToldList(tuple(RelayAddress.parse(one) for one in relays), "", now_s)


def named(lists: ToldLists[str], now_s: float) -> dict[str, int]:
    """Ports of the relays."""
    return {one.node: one.endpoint.port for one in lists.relays(now_s)}


def test_of_two_urls_that_of_the_first_replica_counts_while_it_answers() -> None:
    lists = ToldLists(["a", "b"])
    lists.told("b", told(1.0, "d0=http://h:2"))
    lists.told("a", told(1.0, "d0=http://h:1"))
    lists.answered_alone(["b", "a"])
    assert named(lists, 1.0) == {"d0": 1}
    lists.answered_alone(["b"])  # where the relay may have moved meanwhile
    assert named(lists, 1.0) == {"d0": 2}
    lists.told("a", told(2.0, "d0=http://h:1"))
    assert named(lists, 2.0) == {"d0": 1}


def test_relays_that_only_a_dead_replica_named_count_for_a_minute() -> None:
    lists = ToldLists(["a", "b"])
    lists.told("a", told(0.0, "d0=http://h:1", "d1=http://h:3"))
    lists.told("b", told(50.0, "d0=http://h:2"))
    lists.answered_alone(["b"])
    assert named(lists, LIST_KEPT_S - 1) == {"d0": 2, "d1": 3}
    assert named(lists, LIST_KEPT_S + 1) == {"d0": 2}
