"""Shares of weighted deficit round robin."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache_storage_server.scheduling.lanes.round_robin import QUANTUM_BYTES, DeficitRoundRobin


def served(ring: DeficitRoundRobin[str], lengths: dict[str, int], turns: int) -> dict[str, int]:
    totals = dict.fromkeys(lengths, 0)
    for _ in range(turns):
        item = ring.turn()
        assert item is not None
        ring.charge(item, lengths[item])
        totals[item] += lengths[item]
    return totals


def test_an_empty_round_has_no_turn() -> None:
    ring: DeficitRoundRobin[str] = DeficitRoundRobin()
    assert ring.turn() is None
    ring.add("a", 1.0)
    ring.discard("a")
    ring.discard("a")
    assert ring.turn() is None
    assert "a" not in ring


@given(
    st.lists(
        st.tuples(st.floats(0.1, 10), st.integers(1, 8 * QUANTUM_BYTES)), min_size=2, max_size=6
    )
)
def test_shares_follow_weights_whatever_the_fragments_lengths(
    shapes: list[tuple[float, int]],
) -> None:
    ring: DeficitRoundRobin[str] = DeficitRoundRobin()
    lengths = {str(index): length for index, (_, length) in enumerate(shapes)}
    for index, (weight, _) in enumerate(shapes):
        ring.add(str(index), weight)
    totals = served(ring, lengths, 400)
    rounds = [total / weight for total, (weight, _) in zip(totals.values(), shapes, strict=True)]
    slack = max((length + QUANTUM_BYTES * weight) / weight for weight, length in shapes)
    assert max(rounds) - min(rounds) <= 2 * slack


def test_nobody_waits_longer_than_one_fragment_of_each_other() -> None:
    ring: DeficitRoundRobin[str] = DeficitRoundRobin()
    for item in "abcd":
        ring.add(item, 1.0)
    order: list[str] = []
    for _ in range(40):
        turn = ring.turn()
        assert turn is not None
        ring.charge(turn, QUANTUM_BYTES)
        order.append(turn)
    assert all(sorted(order[at : at + 4]) == list("abcd") for at in range(0, 40, 4))


def test_a_changed_weight_counts_from_now_on() -> None:
    ring: DeficitRoundRobin[str] = DeficitRoundRobin()
    ring.add("a", 1.0)
    ring.add("b", 1.0)
    lengths = {"a": QUANTUM_BYTES // 4, "b": QUANTUM_BYTES // 4}
    before = served(ring, lengths, 400)
    assert before["a"] == pytest.approx(before["b"], rel=0.05)
    ring.add("a", 3.0)
    after = served(ring, lengths, 400)
    assert after["a"] / after["b"] == pytest.approx(3.0, rel=0.05)


def test_a_debt_of_many_rounds_is_paid_at_once() -> None:
    ring: DeficitRoundRobin[str] = DeficitRoundRobin()
    ring.add("small", 0.001)
    ring.add("smaller", 0.0005)
    totals = served(ring, {"small": 1 << 40, "smaller": 1 << 40}, 300)
    assert totals["small"] / totals["smaller"] == pytest.approx(2.0, rel=0.05)
