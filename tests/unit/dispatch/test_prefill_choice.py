"""Algorithm 1 of the paper: categories, their thresholds and ties."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from objectcache_dispatch import NodeLoad, Topology, WorkerLoad, assign_prefill
from tests.unit.dispatch.clusters import RATE, node, request

ALPHA_S, BETA = 3.0, 500
THREE = Topology(tuple(node(name, "prefill") for name in "abc"))


def chosen(tok: dict[str, int], queue_s: dict[str, float], count: int = 1) -> list[str]:
    assigned = assign_prefill(
        [request(f"r{number}") for number in range(count)],
        THREE,
        {f"{name}.0": WorkerLoad(f"{name}.0", 0, tokens) for name, tokens in tok.items()},
        {name: NodeLoad(name, int(queue * RATE)) for name, queue in queue_s.items()},
        beta_tokens=BETA,
        alpha_s=ALPHA_S,
    )
    return [worker for _, worker in assigned]


def test_a_short_queue_comes_before_fewer_tokens() -> None:
    assert chosen({"a": 10, "b": 400, "c": 300}, {"a": 4}) == ["c.0"]


def test_a_long_queue_is_taken_where_there_is_no_short_one() -> None:
    assert chosen({"a": 20, "b": 10, "c": 501}, {"a": 4, "b": 5}) == ["b.0"]


def test_a_queue_of_alpha_is_short_and_one_byte_more_is_long() -> None:
    assert chosen({"a": 0, "b": 1, "c": 1}, {"a": ALPHA_S}) == ["a.0"]
    assert chosen({"a": 0, "b": 1, "c": 1}, {"a": ALPHA_S + 1 / RATE}) == ["b.0"]


def test_tokens_of_beta_are_open_and_one_more_is_overloaded() -> None:
    assert chosen({"a": BETA, "b": BETA + 1, "c": BETA + 1}, {}) == ["a.0"]
    assert chosen({"a": BETA + 1, "b": BETA + 1, "c": BETA + 1}, {}) == []


def test_of_equal_tokens_the_shorter_queue_then_the_first() -> None:
    assert chosen({}, {"a": 2, "b": 1, "c": 2}) == ["b.0"]
    assert chosen({}, {"a": 1, "b": 1, "c": 1}) == ["a.0"]


def test_a_fetch_ends_where_all_are_overloaded_and_counts_what_it_assigned() -> None:
    # Each takes 100 tokens: a 450 and 550, b 401, 501, c 500, 600.
    assert chosen({"a": 450, "b": 401, "c": 500}, {}, count=9) == ["b.0", "a.0", "c.0"]


def test_bytes_that_a_fetch_assigned_lengthen_the_queue_at_once() -> None:
    # A request reads for 1 s: of equal tokens, a's third would be read after more than 3 s.
    assert chosen({"a": 0, "b": 300, "c": 300}, {"a": 2}, count=4) == ["a.0", "a.0", "b.0", "c.0"]


def test_alpha_is_a_time_so_a_faster_nic_may_have_more_bytes() -> None:
    topology = Topology((node("slow", "prefill"), node("fast", "prefill", rate=4 * RATE)))
    loads = {name: NodeLoad(name, int(4 * RATE)) for name in ("slow", "fast")}
    [(_, worker)] = assign_prefill([request("r")], topology, {}, loads, beta_tokens=BETA)
    assert worker == "fast.0"


def test_another_group_and_dead_nodes_get_nothing() -> None:
    topology = Topology(
        (node("a", "prefill", group="one"), *(node(n, "prefill", group="two") for n in "bc"))
    )
    dead = {"b": NodeLoad("b", is_alive=False)}
    assigned = assign_prefill([request("r")], topology, {}, dead, beta_tokens=BETA, group="two")
    assert [worker for _, worker in assigned] == ["c.0"]
    assert assign_prefill([request("r")], topology, {}, {}, beta_tokens=BETA, group="no") == []


@given(
    tok=st.lists(st.integers(0, 900), min_size=3, max_size=3),
    queue=st.lists(st.integers(0, 6000), min_size=3, max_size=3),
    count=st.integers(0, 12),
)
def test_it_is_the_algorithm_of_the_paper(tok: list[int], queue: list[int], count: int) -> None:
    assigned = chosen(
        dict(zip("abc", tok, strict=True)),
        {name: length / RATE for name, length in zip("abc", queue, strict=True)},
        count,
    )
    expected = list[str]()
    for _ in range(count):
        open_workers = [n for n in range(3) if tok[n] <= BETA]
        short = [n for n in open_workers if queue[n] <= ALPHA_S * RATE]
        category = short or open_workers
        if not category:
            break
        best = min(category, key=lambda n: (tok[n], queue[n], n))
        tok[best] += 100
        queue[best] += 1000
        expected.append(f"{'abc'[best]}.0")
    assert assigned == expected
