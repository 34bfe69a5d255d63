"""Passes: when a session may get from a bucket by itself, and when not any more."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from objectcache_gateway.access.permissions import ROOT, Caller, Permission
from objectcache_gateway.handlers.kv.read_passes import read_pass
from objectcache_gateway.signing.sigv4 import Authenticated, Payload
from objectcache_schemas.accounts import Access, AccessKey, Grant, User
from objectcache_schemas.errors import AccessDenied
from objectcache_schemas.messages.kv import ReadPass
from objectcache_schemas.records import BucketConfiguration, BucketInfo, Quota
from objectcache_storage_server.accounts.read_passes import PASSES_MAX, PassBook, Versions

NOW_S = 1000.0
SIGNED = Authenticated("KEY", Payload.UNSIGNED, None, None, presigned=False)
BUCKET = BucketInfo(name="kv", created_s=5.0, owner="alice", region="us-east-1")
ALICE = Caller("alice")
VERSIONS = (7, 9)


def given(
    caller: Caller,
    *,
    signed: Authenticated = SIGNED,
    bucket: BucketInfo = BUCKET,
    versions: tuple[int, int] | None = VERSIONS,
) -> ReadPass | None:
    permission = Permission(caller, bucket.name, bucket.owner, bucket.created_s)
    return read_pass(signed, permission, bucket, versions, NOW_S)


def reading(prefix: str = "") -> tuple[Grant, ...]:
    return (Grant(bucket="kv", access=(Access.READ,), prefix=prefix, bucket_created_s=5.0),)


@pytest.mark.parametrize("caller", [ALICE, ROOT, Caller("bob", grants=reading())])
def test_whoever_may_read_all_of_the_bucket_is_given_a_pass(caller: Caller) -> None:
    assert given(caller) == ReadPass("KEY", 7, 9)


@pytest.mark.parametrize(
    "caller",
    [
        Caller("bob"),
        Caller("bob", grants=reading("a/")),
        replace(ALICE, scope=reading("a/")),
        Caller("bob", grants=(msgspec.structs.replace(reading()[0], access=(Access.WRITE,)),)),
        replace(ALICE, requests_per_s=100.0),
    ],
    ids=["stranger", "a prefix", "a scope of a prefix", "write alone", "requests are counted"],
)
def test_whoever_may_not_or_is_counted_is_given_none(caller: Caller) -> None:
    assert given(caller) is None


def test_a_bucket_that_counts_requests_gives_none() -> None:
    configuration = BucketConfiguration(quota=Quota(requests_per_s=5.0))
    counting = msgspec.structs.replace(BUCKET, configuration=configuration)
    assert given(ALICE, bucket=counting) is None


def test_a_presigned_url_gives_none() -> None:
    assert given(ALICE, signed=replace(SIGNED, presigned=True)) is None


def test_accounts_that_are_not_followed_give_none() -> None:
    assert given(ALICE, versions=None) is None


def test_a_pass_lives_no_longer_than_the_key() -> None:
    user = User(name="alice", created_s=1.0)
    key = AccessKey("KEY", "secret-secret", "alice", 1.0, expires_s=NOW_S + 12)
    assert given(Caller.of(user, key)) == ReadPass("KEY", 7, 9, 12.0)


NOW = Versions(7, 9)
GIVEN = ReadPass("KEY", 7, 9)


def held(given: ReadPass = GIVEN, lives_s_max: float = 60.0) -> tuple[PassBook, float]:
    book = PassBook("KEY")
    return book, book.give("kv", given, NOW, NOW_S, lives_s_max)


def test_a_pass_is_for_its_bucket_until_it_expires() -> None:
    book, lives_s = held()
    assert lives_s == 60.0
    book.check("kv", NOW, NOW_S + 59.9)
    with pytest.raises(AccessDenied):
        book.check("other", NOW, NOW_S)
    with pytest.raises(AccessDenied):
        book.check("kv", NOW, NOW_S + 60)


def test_a_pass_of_a_key_that_expires_ends_with_the_key() -> None:
    book, lives_s = held(ReadPass("KEY", 7, 9, 2.0))
    assert lives_s == 2.0
    with pytest.raises(AccessDenied):
        book.check("kv", NOW, NOW_S + 2)
    assert held(ReadPass("KEY", 7, 9, -1.0))[1] == 0


@pytest.mark.parametrize("changed", [Versions(8, 9), Versions(7, 10)])
def test_any_change_of_accounts_or_buckets_voids_a_pass_for_good(changed: Versions) -> None:
    book, _ = held()
    with pytest.raises(AccessDenied):
        book.check("kv", changed, NOW_S)
    with pytest.raises(AccessDenied):
        book.check("kv", NOW, NOW_S)


@pytest.mark.parametrize("outdated", [ReadPass("KEY", 6, 9), ReadPass("KEY", 7, 8)])
def test_a_pass_that_rests_on_what_has_changed_since_is_none(outdated: ReadPass) -> None:
    book, lives_s = held(outdated)
    assert lives_s == 0
    with pytest.raises(AccessDenied):
        book.check("kv", NOW, NOW_S)


def test_a_pass_is_for_a_session_that_the_same_key_opened() -> None:
    for opened_with in ("OTHER", ""):
        book = PassBook(opened_with)
        assert book.give("kv", GIVEN, NOW, NOW_S, 60.0) == 0
        with pytest.raises(AccessDenied):
            book.check("kv", NOW, NOW_S)
    nobody = PassBook("")
    assert nobody.give("kv", ReadPass("", 7, 9), NOW, NOW_S, 60.0) == 0


def test_no_pass_is_given_where_the_setting_is_0() -> None:
    assert held(lives_s_max=0.0)[1] == 0


def test_a_session_holds_a_bounded_number_of_passes_and_the_oldest_goes_first() -> None:
    book = PassBook("KEY")
    for number in range(PASSES_MAX + 1):
        book.give(f"kv-{number}", GIVEN, NOW, NOW_S, 60.0)
    with pytest.raises(AccessDenied):
        book.check("kv-0", NOW, NOW_S)
    for number in range(1, PASSES_MAX + 1):
        book.check(f"kv-{number}", NOW, NOW_S)
