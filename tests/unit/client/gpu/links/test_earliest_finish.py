"""Who gets one of what is left, against handing it out one by one."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from objectcache.gpu.links.earliest_finish import FreeLink, finished_before
from tests.unit.examples import examples


def handed_out(links: list[FreeLink], left: int) -> set[int]:
    """The links that get one, each micro-task going to where it is finished first."""
    free_s = {link.number: link.free_s for link in links}
    got = set()
    for _ in range(left):
        first = min(links, key=lambda link: (free_s[link.number] + link.task_s, link.number))
        free_s[first.number] += first.task_s
        got.add(first.number)
    return got


# Whole numbers: sums are exact, and equals are found.
@settings(max_examples=examples(100))
@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 12)), min_size=1, max_size=6),
    st.integers(0, 40),
)
def test_a_link_gets_one_as_if_they_were_handed_out_one_by_one(
    each: list[tuple[int, int]], left: int
) -> None:
    links = [FreeLink(number, free, task) for number, (free, task) in enumerate(each)]
    got = handed_out(links, left)
    for link in links:
        others = [other for other in links if other is not link]
        assert (left > finished_before(link, others)) == (link.number in got)
