"""Requests a second: the storage server's tokens, and what a gateway takes of them at a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache_gateway.access.allowances import KEPT_S, WANTED_MAX, RequestAllowances
from objectcache_gateway.access.permissions import Caller
from objectcache_schemas.errors import Busy
from objectcache_schemas.messages.quotas import RequestsTaken, TakeRequests
from objectcache_schemas.records import BucketConfiguration, BucketInfo, Quota
from objectcache_storage_server.quotas.request_tokens import RequestTokens

# --- the storage server's side ---


def test_a_second_of_the_rate_may_come_at_once_and_then_the_rate() -> None:
    tokens = RequestTokens()
    assert tokens.take({"user alice": 10.0}, 100, 0.0) == (10, 0.0)
    granted, wait_s = tokens.take({"user alice": 10.0}, 1, 0.0)
    assert granted == 0
    assert wait_s == pytest.approx(0.1)
    assert tokens.take({"user alice": 10.0}, 100, 0.35) == (3, 0.0)
    assert tokens.take({"user alice": 10.0}, 100, 1000.0) == (10, 0.0)


def test_a_rate_below_one_lets_one_through_and_then_asks_for_patience() -> None:
    tokens = RequestTokens()
    assert tokens.take({"user alice": 0.1}, 5, 0.0) == (1, 0.0)
    granted, wait_s = tokens.take({"user alice": 0.1}, 5, 4.0)
    assert granted == 0
    assert wait_s == pytest.approx(6.0)
    assert tokens.take({"user alice": 0.1}, 5, 10.0) == (1, 0.0)


def test_the_smaller_of_two_quotas_decides_and_neither_pays_for_a_refusal() -> None:
    tokens = RequestTokens()
    both = {"user alice": 10.0, "bucket logs": 2.0}
    assert tokens.take(both, 100, 0.0) == (2, 0.0)
    granted, wait_s = tokens.take(both, 1, 0.0)
    assert granted == 0
    assert wait_s == pytest.approx(0.5)
    assert tokens.take({"user alice": 10.0}, 100, 0.0) == (8, 0.0)


def test_a_user_and_a_bucket_of_one_name_are_two() -> None:
    tokens = RequestTokens()
    assert tokens.take({"user logs": 1.0}, 1, 0.0)[0] == 1
    assert tokens.take({"bucket logs": 1.0}, 1, 0.0)[0] == 1


def test_a_clock_that_stands_or_steps_back_grants_nothing() -> None:
    tokens = RequestTokens()
    assert tokens.take({"user alice": 1.0}, 1, 10.0)[0] == 1
    assert tokens.take({"user alice": 1.0}, 1, 5.0)[0] == 0
    assert tokens.take({"user alice": 1.0}, 1, 10.5)[0] == 0


def test_what_is_remembered_is_bounded() -> None:
    tokens = RequestTokens(states_max=3)
    for index in range(10):
        tokens.take({f"user {index}": 1.0}, 1, 0.0)
    assert repr(tokens) == "<RequestTokens 3/3>"


@given(
    st.floats(0.1, 50.0),
    st.lists(st.tuples(st.floats(0.0, 2.0), st.integers(1, 100)), max_size=40),
)
def test_no_more_is_granted_than_the_rate_and_one_burst(
    rate_per_s: float, asked: list[tuple[float, int]]
) -> None:
    tokens = RequestTokens()
    now_s = granted = 0.0
    for pause_s, wanted in asked:
        now_s += pause_s
        granted += tokens.take({"user alice": rate_per_s}, wanted, now_s)[0]
        assert granted <= max(1.0, rate_per_s) + rate_per_s * now_s + 1e-6


# --- the gateway's side ---


class Server:
    """What the storage server would answer, and the clock."""

    def __init__(self, rate_per_s: float) -> None:
        self.tokens = RequestTokens()
        self.rate_per_s = rate_per_s
        self.now_s = 0.0
        self.asked: list[TakeRequests] = []

    async def take(self, request: TakeRequests) -> RequestsTaken:
        self.asked.append(request)
        rates = {"user alice": self.rate_per_s}
        granted, wait_s = self.tokens.take(rates, request.wanted, self.now_s)
        return RequestsTaken(granted=granted, retry_after_s=wait_s)

    def allowances(self) -> RequestAllowances:
        return RequestAllowances(self.take, lambda: self.now_s)


def bucket(quota: Quota = Quota()) -> BucketInfo:  # noqa: B008
    return BucketInfo(
        name="logs",
        owner="alice",
        region="",
        created_s=1.0,
        configuration=BucketConfiguration(quota=quota),
    )


LIMITED = Caller("alice", requests_per_s=1000.0)


@pytest.mark.asyncio
async def test_without_a_quota_nobody_is_asked() -> None:
    server = Server(1.0)
    allowances = server.allowances()
    for _ in range(10):
        await allowances.spend_of_caller(Caller("alice"))
        await allowances.spend_of_bucket(bucket())
        await allowances.spend_of_bucket(None)
    assert not server.asked


@pytest.mark.asyncio
async def test_a_bucket_with_a_quota_is_asked_for() -> None:
    server = Server(10.0)
    allowances = server.allowances()
    await allowances.spend_of_bucket(bucket(Quota(requests_per_s=1.0)))
    await allowances.spend_of_caller(LIMITED)
    assert server.asked == [
        TakeRequests(identity="", bucket="logs", wanted=1),
        TakeRequests(identity="alice", bucket="", wanted=1),
    ]


@pytest.mark.asyncio
async def test_a_busy_tenant_takes_more_at_a_time_so_few_requests_ask() -> None:
    server = Server(1000.0)
    allowances = server.allowances()
    for _ in range(500):
        await allowances.spend_of_caller(LIMITED)
    wanted = [request.wanted for request in server.asked]
    assert wanted[:4] == [1, 2, 4, 8]
    assert max(wanted) == WANTED_MAX
    assert len(wanted) < 15


@pytest.mark.asyncio
async def test_what_was_taken_and_not_used_lapses() -> None:
    server = Server(1000.0)
    allowances = server.allowances()
    for _ in range(4):
        await allowances.spend_of_caller(LIMITED)
    asked = len(server.asked)
    server.now_s += KEPT_S
    await allowances.spend_of_caller(LIMITED)
    assert len(server.asked) == asked + 1
    assert server.asked[-1].wanted == 1


@pytest.mark.asyncio
async def test_a_refusal_says_when_to_come_back_and_is_not_asked_again_before() -> None:
    server = Server(0.5)
    allowances = server.allowances()
    await allowances.spend_of_caller(LIMITED)
    with pytest.raises(Busy, match="requests a second") as caught:
        await allowances.spend_of_caller(LIMITED)
    assert caught.value.code == "SlowDown"
    assert caught.value.details.retry_after_s == pytest.approx(2.0)
    asked = len(server.asked)
    server.now_s = 1.9
    with pytest.raises(Busy) as again:
        await allowances.spend_of_caller(LIMITED)
    assert again.value.details.retry_after_s == pytest.approx(0.1)
    assert len(server.asked) == asked
    server.now_s = 2.0
    await allowances.spend_of_caller(LIMITED)
