"""Forward batches by a quota of attention time (section 6.2)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache_dispatch import LayerTime, fill_batch
from objectcache_schemas.errors import InvalidRequest
from tests.unit.dispatch.clusters import request

# A second for each token that attends to a token, and one for each token; 8 s a batch.
SECONDS = LayerTime(1.0, 1.0, 1.0, base_s=8.0)


def filled(quota_s: float, *pairs: tuple[int, int]) -> list[int]:
    queue = [request(f"r{n}", cached, new) for n, (cached, new) in enumerate(pairs)]
    batch = fill_batch(queue, SECONDS, quota_s)
    assert [r for r, _ in batch] == queue[: len(batch)]
    return [bsz for _, bsz in batch]


def test_seconds_are_those_of_causal_attention() -> None:
    # Tokens 6 and 7 of a request attend to 6 and 7 tokens, itself included: 13, and 2 for the two.
    assert SECONDS.seconds([(5, 2)]) == 8 + 13 + 2
    assert SECONDS.seconds([(5, 2), (0, 1)]) == 8 + 15 + 2


def test_requests_join_until_the_quota_and_the_last_is_cut_to_the_token() -> None:
    # (5, 2) takes 15 s, (9, 3) 33 + 3 s: 10 + 1 the first token, 11 + 1 the second, 12 + 1.
    assert filled(8 + 15 + 36, (5, 2), (9, 3), (0, 1)) == [2, 3]
    assert filled(8 + 15 + 35, (5, 2), (9, 3)) == [2, 2]
    assert filled(8 + 15 + 23, (5, 2), (9, 3)) == [2, 2]
    assert filled(8 + 15 + 22, (5, 2), (9, 3)) == [2, 1]
    assert filled(8 + 15 + 10, (5, 2), (9, 3), (0, 1)) == [2]  # nobody passes the second


def test_the_first_gets_a_token_even_over_the_quota() -> None:
    assert filled(8 + 1, (5, 2), (0, 1)) == [1]
    assert filled(0.5, (5, 2)) == [1]


def test_what_is_left_goes_on_with_those_tokens_cached() -> None:
    left = request("r", 90, 10).after(4)
    assert (left.cached_tokens, left.new_tokens, left.read_bytes) == (94, 6, 0)
    with pytest.raises(InvalidRequest, match="new_tokens of request r is 0"):
        left.after(6)


def test_a_profile_gives_the_times_back() -> None:
    truth = LayerTime(3e-13, 4096.0, 1e6, base_s=0.002)
    batches = [[(1000 * n, 64 * n)] for n in range(1, 8)] + [[(0, 2000), (30_000, 128)]]
    profile = [(batch, truth.seconds(batch)) for batch in batches]
    fitted = LayerTime.fitted(profile, flop_per_pair=4096.0, flop_per_token=1e6)
    assert fitted.s_per_flop == pytest.approx(truth.s_per_flop)
    assert fitted.base_s == pytest.approx(truth.base_s)


def test_a_profile_that_says_nothing_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least two batches"):
        LayerTime.fitted([([(0, 5)], 1.0), ([(0, 5)], 1.1)], flop_per_pair=1.0)
    with pytest.raises(InvalidRequest, match="do not grow"):
        LayerTime.fitted([([(0, 5)], 2.0), ([(0, 9)], 1.0)], flop_per_pair=1.0)


@given(
    pairs=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)), min_size=1, max_size=6),
    quota=st.integers(1, 5000),
)
def test_a_batch_takes_what_fits_and_not_a_token_less(
    pairs: list[tuple[int, int]], quota: int
) -> None:
    batch = filled(quota, *pairs)
    taken = [(cached, bsz) for (cached, _), bsz in zip(pairs, batch, strict=False)]
    assert SECONDS.seconds(taken) <= quota or batch == [1]
    assert batch[:-1] == [new for _, new in pairs[: len(batch) - 1]]
    more = [*taken[:-1], (taken[-1][0], taken[-1][1] + 1)]
    if batch[-1] == pairs[len(batch) - 1][1]:
        more = [*taken, (pairs[len(batch)][0], 1)] if len(batch) < len(pairs) else []
    assert not more or SECONDS.seconds(more) > quota
