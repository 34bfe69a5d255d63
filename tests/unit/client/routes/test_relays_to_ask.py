"""Which of many relays each client asks."""

from __future__ import annotations

from collections import Counter

from objectcache.routes.relays_to_ask import ASKED_MAX, relays_to_ask

RELAYS = [f"d{number}" for number in range(144)]


def test_few_relays_are_all_asked() -> None:
    assert relays_to_ask("p0", RELAYS[:ASKED_MAX]) == set(RELAYS[:ASKED_MAX])


def test_of_many_relays_some_are_asked_always_the_same_and_the_nodes_own_among_them() -> None:
    for node in ("", "p0", *RELAYS):
        asked = relays_to_ask(node, RELAYS)
        assert len(asked) == ASKED_MAX
        assert asked == relays_to_ask(node, RELAYS[::-1])
        assert node in asked or node not in RELAYS
    assert relays_to_ask("p0", RELAYS) != relays_to_ask("p1", RELAYS)


def test_a_relay_that_goes_changes_nothing_for_those_that_do_not_ask_it() -> None:
    left = RELAYS[1:]
    for number in range(50):
        before, after = relays_to_ask(f"p{number}", RELAYS), relays_to_ask(f"p{number}", left)
        assert len(before - after) == (1 if RELAYS[0] in before else 0)


def test_relays_are_asked_by_about_as_many_nodes_each() -> None:
    askers = Counter(name for n in range(1152) for name in relays_to_ask(f"p{n}", RELAYS))
    mean = 1152 * ASKED_MAX / len(RELAYS)
    assert mean / 2 < min(askers.values())
    assert max(askers.values()) < 2 * mean
