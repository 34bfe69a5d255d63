"""Encodings are asked for where they have layers there sooner, and not where they have not."""

from __future__ import annotations

from itertools import pairwise

import pytest

from objectcache.encoding_choice.encoding_account import (
    BUCKETS_MAX,
    ENCODED_IN_A_ROW,
    REST_FIRST,
    EncodingAccount,
    EncodingAccounts,
    EndedDelivery,
)
from objectcache.encoding_choice.encoding_gain import DeliveryRates

GB = 1e9
BYTES = 64 << 20
RATIO = 1.45


def test_a_slow_link_gains_the_ratio() -> None:
    rates = DeliveryRates(0.1 * GB, 1 * GB, RATIO)
    assert rates.gain == pytest.approx(RATIO)
    assert rates.pays


def test_where_decoding_is_slower_than_the_link_it_does_not_pay() -> None:
    rates = DeliveryRates(1.5 * GB, 1 * GB, RATIO)
    assert rates.gain == pytest.approx(1 / 1.5)
    assert not rates.pays


def test_decoding_bounds_the_gain_before_the_ratio_does() -> None:
    assert DeliveryRates(0.8 * GB, 1 * GB, RATIO).gain == pytest.approx(1.25)
    assert not DeliveryRates(0.95 * GB, 1 * GB, RATIO).pays, "a gain of 5 % is none"


def test_what_the_engine_hides_needs_no_encoding() -> None:
    compute = 1 / (0.3 * GB)  # slower than the link
    assert not DeliveryRates(0.4 * GB, 5 * GB, RATIO, compute).pays


class Link:
    """What deliveries over a link come to, under virtual time: an engine that only waits."""

    def __init__(self, link: float, decode: float, ratio: float = RATIO) -> None:
        self.link, self.decode, self.ratio = link, decode, ratio
        self.waited_s = 0.0
        self.encoded = 0

    def deliver(self, account: EncodingAccount, compute_s_per_byte: float = 0.0) -> bool:
        is_encoded = account.asks(compute_s_per_byte)
        wire_bytes = BYTES / self.ratio if is_encoded else BYTES
        decode_s = BYTES / self.decode if is_encoded else 0.0
        link_s = wire_bytes / self.link
        waited_s = max(link_s, decode_s)
        self.waited_s += waited_s
        self.encoded += is_encoded
        account.ended(
            EndedDelivery(
                BYTES, int(wire_bytes), int(wire_bytes), link_s, waited_s, decode_s, is_encoded
            )
        )
        return is_encoded

    def plain_s(self, count: int) -> float:
        return count * BYTES / self.link


def test_the_first_delivery_is_plain_and_a_slow_link_is_known_by_it() -> None:
    account, link = EncodingAccount(), Link(0.1 * GB, 1 * GB)
    assert [link.deliver(account) for _ in range(3)] == [False, True, True]


def test_a_slow_link_keeps_nearly_all_of_the_gain() -> None:
    account, link = EncodingAccount(), Link(0.1 * GB, 1 * GB)
    count = 10 * ENCODED_IN_A_ROW
    for _ in range(count):
        link.deliver(account)
    assert link.plain_s(count) / link.waited_s > 0.98 * RATIO
    assert link.encoded < count, "nobody would see a link that is fast now"


@pytest.mark.parametrize("decode", [0.3 * GB, 1 * GB, 2 * GB])
@pytest.mark.parametrize("link_rate", [0.3 * GB, 0.45 * GB, 1 * GB, 2 * GB, 10 * GB])
def test_it_is_never_slower_than_plain_by_more_than_3_percent(
    link_rate: float, decode: float
) -> None:
    account, link = EncodingAccount(), Link(link_rate, decode)
    count = 40 * REST_FIRST
    for _ in range(count):
        link.deliver(account)
    assert link.waited_s <= 1.03 * link.plain_s(count)


def test_a_machine_that_decodes_fast_is_found_out_by_a_trial() -> None:
    account, link = EncodingAccount(), Link(1 * GB, 3 * GB)
    for _ in range(REST_FIRST):
        assert not link.deliver(account), "half a GB/s is what is assumed"
    assert link.deliver(account)
    assert link.deliver(account)


def test_a_link_that_becomes_fast_is_noticed() -> None:
    account, link = EncodingAccount(), Link(0.1 * GB, 1 * GB)
    for _ in range(4):
        link.deliver(account)
    link.link = 5 * GB
    taken = [link.deliver(account) for _ in range(2 * ENCODED_IN_A_ROW)]
    assert sum(taken[8:]) == 0


def test_a_link_that_becomes_slow_is_noticed() -> None:
    account, link = EncodingAccount(), Link(5 * GB, 1 * GB)
    for _ in range(8):
        assert not link.deliver(account)
    link.link = 0.1 * GB
    taken = [link.deliver(account) for _ in range(16)]
    assert all(taken[8:])


def test_what_makes_the_engine_wait_longer_rests_and_rests_longer_each_time() -> None:
    account = EncodingAccount()

    def deliver() -> bool:
        is_encoded = account.asks()
        waited_s = 3.0 if is_encoded else 1.0  # whatever the rates say
        wire_bytes = int(BYTES / RATIO) if is_encoded else BYTES
        account.ended(EndedDelivery(BYTES, wire_bytes, BYTES, 1.0, waited_s, 0.001, is_encoded))
        return is_encoded

    taken = [deliver() for _ in range(16 * REST_FIRST)]
    trials = [number for number, is_encoded in enumerate(taken) if is_encoded]
    rests = [later - earlier for earlier, later in pairwise(trials)]
    assert len(rests) >= 3
    assert all(later > 1.5 * earlier for earlier, later in pairwise(rests[1:]))
    assert rests[0] > REST_FIRST / 2


def test_chunks_that_come_plain_although_encoded_ones_were_asked_for_do_no_harm() -> None:
    account = EncodingAccount()
    seen = EndedDelivery(BYTES, BYTES, BYTES, 0.5, 0.5)
    for _ in range(2 * REST_FIRST):
        account.ended(seen)
    assert account.asks()


def test_buckets_are_known_apart_and_the_oldest_are_forgotten() -> None:
    accounts = EncodingAccounts()
    slow = EndedDelivery(BYTES, BYTES, BYTES, 10.0, 10.0)
    accounts.ended("slow", slow)
    assert accounts.asks("slow")
    assert not accounts.asks("other")
    for number in range(BUCKETS_MAX):
        accounts.asks(f"bucket-{number}")
    assert not accounts.asks("slow")
