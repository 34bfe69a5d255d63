"""Puts are encoded where that holds their caller up for less time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from objectcache.encoding_choice.encoding_account import REST_FIRST
from objectcache.encoding_choice.put_account import PutAccount, PutAccounts
from objectcache_schemas.limits import MIB

PUT_BYTES = 64 << 20
RATIO = 1.45
ENCODE_BYTES_PER_S = 0.75e9


def run(
    accounts: PutAccounts,
    sizes: Sequence[int],
    link_bytes_per_s: float,
    encode_bytes_per_s: float = ENCODE_BYTES_PER_S,
    each_s: float = 0.0,
) -> tuple[float, int]:
    """Seconds of puts of so many bytes, over those of plain ones, and how many were encoded."""
    spent_s, all_plain_s, encoded = 0.0, 0.0, 0
    for size in sizes:
        is_encoded = accounts.encodes("a", size)
        plain_s = each_s + size / link_bytes_per_s
        seconds = plain_s
        if is_encoded:
            encode_s, link_s = size / encode_bytes_per_s, size / link_bytes_per_s
            seconds = each_s + encode_s + link_s / RATIO
        accounts.ended("a", size, seconds, is_encoded=is_encoded)
        spent_s, all_plain_s = spent_s + seconds, all_plain_s + plain_s
        encoded += is_encoded
    return spent_s / all_plain_s, encoded


def test_over_a_slow_link_puts_are_encoded_after_the_first() -> None:
    spent, encoded = run(PutAccounts(), [PUT_BYTES] * 500, 50e6)
    assert spent < 0.77  # 0.75 would be every one
    assert encoded > 480


@pytest.mark.parametrize("encode_bytes_per_s", [0.1e9, 0.8e9])
@pytest.mark.parametrize("link_bytes_per_s", [150e6, 0.3e9, 1e9])
def test_where_it_does_not_pay_it_costs_next_to_nothing(
    link_bytes_per_s: float, encode_bytes_per_s: float
) -> None:
    spent, _ = run(PutAccounts(), [PUT_BYTES] * 2000, link_bytes_per_s, encode_bytes_per_s)
    assert spent < 1.03


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("link_bytes_per_s", [0.5e9, 5e9])
@pytest.mark.parametrize("small_share", [0.1, 0.5, 0.9])
def test_small_puts_make_no_large_ones_encoded(
    small_share: float, link_bytes_per_s: float, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    sizes = np.where(generator.random(1000) < small_share, MIB, 512 * MIB).tolist()
    spent, _ = run(PutAccounts(), sizes, link_bytes_per_s, each_s=0.02)
    assert spent < 1.02


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("link_bytes_per_s", "most"), [(20e6, 0.85), (1e9, 1.03), (5e9, 1.03)])
def test_puts_of_any_sizes_are_encoded_where_it_pays(
    link_bytes_per_s: float, most: float, seed: int
) -> None:
    sizes = (MIB * 2 ** np.random.default_rng(seed).uniform(0, 9, 3000)).astype(int).tolist()
    spent, _ = run(PutAccounts(), sizes, link_bytes_per_s, each_s=0.02)
    assert spent < most


def test_a_trial_that_is_no_better_is_followed_by_rest_whatever_plain_ones_take() -> None:
    account = PutAccount()
    account.ended(PUT_BYTES, 1.0, is_encoded=False)
    assert account.encodes()
    account.ended(PUT_BYTES, 1.0, is_encoded=True)
    for _ in range(200):
        account.ended(PUT_BYTES, 50.0, is_encoded=False)
        assert not account.encodes()


def test_puts_that_do_not_get_shorter_are_tried_less_and_less() -> None:
    accounts = PutAccounts()
    tried: list[int] = []
    for number in range(2000):
        if accounts.encodes("a", PUT_BYTES):
            tried.append(number)
            accounts.not_shorter("a", PUT_BYTES)
        else:
            accounts.ended("a", PUT_BYTES, 10.0, is_encoded=False)
    pauses = np.diff(tried)
    assert tried[0] == 1
    assert len(tried) >= 3
    assert pauses[0] == REST_FIRST + 1
    assert all(later == 2 * before - 1 for before, later in pairwise(pauses))
    account = PutAccount()  # in the middle of a good run one does not count
    account.ended(PUT_BYTES, 10.0, is_encoded=False)
    for _ in range(2):
        account.ended(PUT_BYTES, 7.0, is_encoded=True)
        account.not_shorter()
        assert account.encodes()
    account.not_shorter()
    assert not account.encodes()


def test_one_bad_put_ends_no_good_run_and_two_do() -> None:
    account = PutAccount()
    account.ended(PUT_BYTES, 1.0, is_encoded=False)
    for seconds in (0.7, 5.0, 0.7, 5.0):
        assert account.encodes()
        account.ended(PUT_BYTES, seconds, is_encoded=True)
    account.ended(PUT_BYTES, 5.0, is_encoded=True)
    assert not account.encodes()


def test_a_link_that_changes_is_noticed() -> None:
    accounts = PutAccounts()
    run(accounts, [PUT_BYTES] * 300, 1e9)
    _, encoded = run(accounts, [PUT_BYTES] * 1000, 20e6)
    assert encoded > 600
    spent, _ = run(accounts, [PUT_BYTES] * 2000, 1e9)
    assert spent < 1.1


def test_small_puts_teach_nothing_and_buckets_are_apart() -> None:
    accounts = PutAccounts()
    accounts.ended("a", 1000, 1.0, is_encoded=False)
    assert not accounts.encodes("a", 1000)
    accounts.ended("a", PUT_BYTES, 10.0, is_encoded=False)
    assert accounts.encodes("a", PUT_BYTES)
    assert not accounts.encodes("b", PUT_BYTES)
    for number in range(2000):
        accounts.ended(f"other {number}", PUT_BYTES, 10.0, is_encoded=False)
    assert not accounts.encodes("a", PUT_BYTES)  # forgotten


def test_puts_that_were_encoded_before_any_was_plain_are_compared_with_none() -> None:
    account = PutAccount()
    account.ended(PUT_BYTES, 10.0, is_encoded=True)
    assert not account.encodes()
    account.ended(PUT_BYTES, 10.0, is_encoded=False)
    assert account.encodes()
