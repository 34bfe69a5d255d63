"""Which connection goes where there are too many, and which request."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from objectcache_gateway.admin.processes.processes import gateway_states
from objectcache_gateway.connections.connection_places import ConnectionPlaces
from objectcache_gateway.connections.request_places import RequestPlaces
from objectcache_gateway.connections.turned_away import INTERVAL_S, TROUBLE_MIN, Crowding
from objectcache_operations.admin.storage.state import process_lines
from objectcache_schemas.errors import ObjectCacheError, Unavailable

# --- connections ---------------------------------------------------------------------------------


def known(places: ConnectionPlaces[str], name: str, tenant: str, *, idle: bool = True) -> str:
    """A connection of a tenant's, let in without another's end."""
    assert places.open(name, 0.0) is None
    assert places.begin(name, tenant) == (True, None)
    if idle:
        places.end(name, 0.0)
    return name


def test_a_newcomer_takes_the_oldest_strangers_place_and_nobody_elses() -> None:
    places = ConnectionPlaces[str](3)
    known(places, "of a", "a")
    assert places.open("first", 1.0) is None
    assert places.open("second", 2.0) is None
    assert places.open("third", 3.0) == "first"
    assert places.open("fourth", 4.0) == "second"
    assert (len(places), places.strangers) == (3, 2)


def test_however_many_tenants_there_are_a_newcomer_has_a_place() -> None:
    places = ConnectionPlaces[str](32)
    for number in range(30):
        known(places, f"of {number}", str(number), idle=False)
    assert places.open("first", 0.0) is None
    assert places.open("second", 0.0) is None
    assert places.open("third", 0.0) == "first"
    assert places.begin("third", "new") == (False, None), "all others work, and hold as few"
    assert places.strangers == 2


def test_what_is_idle_ends_before_strangers_until_they_have_a_quarter() -> None:
    places = ConnectionPlaces[str](32)
    for number in range(29):
        known(places, f"a{number}", "a", idle=number >= 2)
    known(places, "of b", "b")
    assert [places.open(f"s{number}", 0.0) for number in range(9)] == [
        None,
        None,
        *(f"a{number}" for number in range(2, 8)),
        "s0",
    ]
    assert places.strangers == 8


def test_a_stranger_is_nobodys_connection_again_once_it_was_refused_its_place() -> None:
    places = ConnectionPlaces[str](2)
    known(places, "of a", "a", idle=False)
    assert places.open("second of a", 1.0) is None
    assert places.begin("second of a", "a") == (False, None)
    assert places.open("newcomer", 2.0) == "second of a"


def test_whoever_holds_most_gives_up_what_is_idle_longest() -> None:
    places = ConnectionPlaces[str](8)
    for number in range(5):
        known(places, f"a{number}", "a")
    known(places, "b0", "b")
    known(places, "b1", "b")
    places.begin("a0", "a")
    places.end("a0", 0.0)  # used since: a1 is idle longest
    places.open("c0", 0.0)
    assert places.begin("c0", "c") == (True, "a1")
    places.open("a5", 0.0)
    assert places.begin("a5", "a") == (True, "a2"), "its own"


def test_a_request_under_way_is_ended_only_for_a_tenant_with_fewer() -> None:
    places = ConnectionPlaces[str](4)
    for number in range(3):
        known(places, f"a{number}", "a", idle=False)
    places.open("a3", 0.0)
    assert places.begin("a3", "a") == (False, None)
    places.open("b0", 0.0)
    assert places.begin("b0", "b") == (True, "a0")
    places.open("b1", 0.0)
    assert places.begin("b1", "b") == (False, None), "two and one are as even as two and one"


def test_what_is_idle_goes_before_what_works_among_those_with_no_fewer() -> None:
    places = ConnectionPlaces[str](6)
    for number in range(3):
        known(places, f"a{number}", "a", idle=False)
    known(places, "b0", "b")
    known(places, "b1", "b")
    places.open("c0", 0.0)
    assert places.begin("c0", "c") == (True, "b0")
    places.open("c1", 0.0)
    assert places.begin("c1", "c") == (True, "a0"), "b has fewer now"


def test_a_connection_that_needs_no_signature_is_a_strangers_between_its_requests() -> None:
    places = ConnectionPlaces[str](4)
    places.open("anonymous", 0.0)
    assert places.begin("anonymous", "") == (True, None)
    assert places.strangers == 0
    places.end("anonymous", 5.0, stays_known=False)
    assert places.strangers == 1
    assert list(places.overdue(5.0)) == []


def test_strangers_have_little_time_only_where_half_of_the_places_are_taken() -> None:
    places = ConnectionPlaces[str](4)
    places.open("first", 0.0)
    places.open("second", 1.0)
    assert list(places.overdue(9.0)) == []
    places.open("third", 9.0)
    assert list(places.overdue(9.0)) == ["first"], "then no more than half are taken"
    known(places, "of a", "a")
    assert list(places.overdue(9.0)) == ["second"]


def test_a_connection_that_was_ended_is_served_no_more() -> None:
    places = ConnectionPlaces[str](2)
    places.open("first", 0.0)
    places.open("second", 0.0)
    assert places.open("third", 0.0) == "first"
    assert places.begin("first", "a") == (False, None)
    places.end("first", 0.0)
    places.lost("first")
    assert len(places) == 2


def test_a_connection_that_another_tenant_uses_is_that_tenants() -> None:
    places = ConnectionPlaces[str](16)
    known(places, "shared", "a")
    assert places.begin("shared", "b") == (True, None)
    places.end("shared", 0.0)
    places.lost("shared")
    assert repr(places) == "<ConnectionPlaces 0/16, 0 strangers, 0 tenants>"


# --- requests ------------------------------------------------------------------------------------


@dataclass(eq=False)
class Request:
    """A request; two are never the same one."""

    waits_for_client: bool = False


def taken(places: RequestPlaces[Request], tenant: str, *waits: bool) -> list[Request]:
    requests = [Request(one) for one in waits]
    for one in requests:
        assert places.take(one, tenant) == (True, None)
    return requests


def test_one_tenant_may_have_all_places_until_another_asks() -> None:
    places = RequestPlaces[Request](4)
    first, second, third, fourth = taken(places, "a", False, True, True, False)
    assert places.take(Request(), "a") == (False, None)
    assert places.take(Request(), "b") == (True, second), "whose client it waits for longest"
    assert places.take(Request(), "b") == (True, third)
    assert places.take(Request(), "b") == (False, None), "two and two are even"
    assert places.take(Request(), "c") == (True, fourth)
    assert places.take(Request(), "a") == (False, None), "one, two and one"
    places.leave(first, "a")
    places.leave(first, "a")
    assert len(places) == 3
    assert places.take(Request(), "c") == (True, None)


def test_where_no_client_is_waited_for_the_youngest_is_given_up() -> None:
    places = RequestPlaces[Request](3)
    *_, youngest = taken(places, "a", False, False, False)
    assert places.take(Request(), "b") == (True, youngest)
    assert repr(places) == "<RequestPlaces 3/3, 2 tenants>"


def test_any_number_of_tenants_that_hold_all_give_up_one_for_another() -> None:
    places = RequestPlaces[Request](8)
    held = [one for name in "abcd" for one in taken(places, name, True, True)]
    has_place, given_up = places.take(Request(), "victim")
    assert has_place is True
    assert given_up in held


# --- what is said of it --------------------------------------------------------------------------


def test_few_that_were_turned_away_are_logged_and_many_make_the_health_worse() -> None:
    crowding = Crowding(0.0)
    assert (crowding.reason, crowding.look(INTERVAL_S)) == ("", "")
    crowding.total.strangers_ended += TROUBLE_MIN - 1
    assert crowding.reason == ""
    assert crowding.look(INTERVAL_S + 1.0) == "", "once an interval"
    assert crowding.look(2 * INTERVAL_S) == "9 connections ended on which nobody had signed"
    crowding.total.requests_refused += TROUBLE_MIN
    assert "10 requests refused (gateway.requests_in_flight_max)" in crowding.reason
    crowding.look(3 * INTERVAL_S)
    assert crowding.reason, "of the last interval"
    assert crowding.look(4 * INTERVAL_S) == ""
    assert crowding.reason == ""


@pytest.mark.parametrize("places_max", [1, 2])
def test_the_least_bound_has_a_place_for_a_tenant_and_one_for_a_newcomer(places_max: int) -> None:
    places = ConnectionPlaces[str](places_max)
    known(places, "of a", "a")
    assert places.open("newcomer", 0.0) is None
    assert places.begin("newcomer", "b") == (True, "of a")


def test_a_gateway_that_turns_clients_away_makes_the_health_degraded_and_is_named() -> None:
    crowding = Crowding(0.0)
    crowding.total.strangers_ended += 412
    answers: dict[str, bytes | ObjectCacheError] = {
        "gateway-0": json.dumps({"pid": 1, "crowded": crowding.reason}).encode(),
        "gateway-1": json.dumps({"pid": 2, "crowded": ""}).encode(),
        "gateway-2": Unavailable("gateway-2 does not answer"),
    }
    states = gateway_states(answers)
    assert [one.degraded for one in states] == [True, False, False]
    assert process_lines(states) == [
        "gateway-0     degraded: in 10 s: 412 connections ended on which nobody had signed",
        "gateway-1     ok",
        "gateway-2     gateway-2 does not answer",
    ]
