"""Decode workers in two phases (section 6.1)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache_dispatch import ClusterWorker, WorkerLoad, assign_decode, to_decode_groups
from objectcache_schemas.errors import InvalidRequest
from tests.unit.dispatch.clusters import request


def workers(group: str, *capacities: int) -> list[ClusterWorker]:
    return [
        ClusterWorker(f"{group}{number}", "decode", group, capacity)
        for number, capacity in enumerate(capacities)
    ]


def loads(**tok_seq: tuple[int, int]) -> dict[str, WorkerLoad]:
    return {name: WorkerLoad(name, seq, tok) for name, (tok, seq) in tok_seq.items()}


def of(tokens: int, name: str = "r") -> list[object]:
    return [request(name, tokens - 1, 1)]


def test_phase_1_takes_the_group_with_the_least_total() -> None:
    groups = {"a": workers("a", 900, 900), "b": workers("b", 900)}
    # One of a has less than b's one, and both of a have more.
    of_groups = to_decode_groups(
        [request("r")], groups, loads(a0=(10, 1), a1=(500, 1), b0=(400, 9))
    )
    assert [r.name for r in of_groups["b"]] == ["r"]
    assert of_groups["a"] == []


def test_phase_1_counts_what_it_assigned_and_takes_the_first_of_equals() -> None:
    groups = {"a": workers("a", 900), "b": workers("b", 900)}
    requests = [request(f"r{number}") for number in range(5)]
    of_groups = to_decode_groups(requests, groups, loads(b0=(150, 0)))
    assert [r.name for r in of_groups["a"]] == ["r0", "r1", "r3"]
    assert [r.name for r in of_groups["b"]] == ["r2", "r4"]


def test_a_group_that_could_never_hold_a_request_does_not_get_it() -> None:
    groups = {"small": workers("s", 99, 99), "large": workers("l", 100)}
    of_groups = to_decode_groups([request("r")], groups, loads(l0=(900, 1)))
    assert [r.name for r in of_groups["large"]] == ["r"]
    with pytest.raises(InvalidRequest, match=r"r has 100 tokens; the largest .* holds 99"):
        to_decode_groups([request("r")], {"small": groups["small"]}, {})


def test_of_balanced_workers_the_one_with_the_fewest_requests() -> None:
    # Z = 1.05 x (100 + 600) / 3 = 245: 120 + 100 and 100 + 100 are below it.
    assigned = assign_decode(
        [request("r")],
        workers("w", 9000, 9000, 9000),
        loads(w0=(120, 1), w1=(100, 2), w2=(380, 0)),
    )
    assert [worker for _, worker in assigned] == ["w0"]


def test_a_worker_that_would_have_z_tokens_is_balanced_and_with_one_more_it_is_high() -> None:
    # Z = 1.0 x (100 + 800) / 3 = 300, which w0 would have; then 300.3, and it would have 301.
    three = workers("w", 9000, 9000, 9000)
    others = {"w1": (100, 5), "w2": (500, 0)}
    [(_, at_z)] = assign_decode([request("r")], three, loads(w0=(200, 0), **others), slack=1.0)
    [(_, above)] = assign_decode([request("r")], three, loads(w0=(201, 0), **others), slack=1.0)
    assert (at_z, above) == ("w0", "w1")


def test_where_all_would_be_high_the_least_tokens_win_not_the_fewest_requests() -> None:
    # Z = 1.0 x (100 + 400) / 2 = 250; both would have more.
    assigned = assign_decode(
        [request("r")], workers("w", 9000, 9000), loads(w0=(190, 5), w1=(210, 0)), slack=1.0
    )
    assert [worker for _, worker in assigned] == ["w0"]


def test_z_of_one_worker_never_keeps_a_request_from_it() -> None:
    [(_, worker)] = assign_decode([request("r")], workers("w", 1000), loads(w0=(900, 3)))
    assert worker == "w0"
    assert assign_decode([request("r")], workers("w", 1000), loads(w0=(901, 3))) == []


def test_r_is_what_would_fit_into_all_memory_together() -> None:
    # 150 tokens are free: R is the first request alone, so Z = 1.0 x (100 + 50) / 2 = 75.
    pair = workers("w", 100, 100)
    assigned = assign_decode(
        [request("r0"), request("r1")], pair, loads(w0=(0, 5), w1=(50, 0)), slack=1.0
    )
    assert [worker for _, worker in assigned] == ["w0"]  # w1 has no room; then r1 fits nowhere


def test_a_queue_is_served_in_order_and_nobody_passes_one_that_does_not_fit() -> None:
    queue = [request("small", 49, 1), request("large", 99, 1), request("tiny", 1, 1)]
    assigned = assign_decode(queue, workers("w", 100), {})
    assert [r.name for r, _ in assigned] == ["small"]


@given(
    capacities=st.lists(st.integers(50, 500), min_size=1, max_size=4),
    lengths=st.lists(st.integers(2, 300), max_size=8),
    data=st.data(),
)
def test_no_worker_holds_more_than_it_can(
    capacities: list[int], lengths: list[int], data: st.DataObject
) -> None:
    group = workers("w", *capacities)
    tok = {w.name: data.draw(st.integers(0, w.kv_capacity_tokens)) for w in group}
    queue = [request(f"r{n}", length - 1, 1) for n, length in enumerate(lengths)]
    assigned = assign_decode(queue, group, {n: WorkerLoad(n, 0, t) for n, t in tok.items()})
    assert [r.name for r, _ in assigned] == [r.name for r in queue[: len(assigned)]]
    for assigned_request, worker in assigned:
        tok[worker] += assigned_request.tokens
    assert all(tok[w.name] <= w.kv_capacity_tokens for w in group)
    if len(assigned) < len(queue):
        length = queue[len(assigned)].tokens
        assert all(w.kv_capacity_tokens - tok[w.name] < length for w in group)
