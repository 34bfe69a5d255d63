"""Grants, quotas, keys and pages as the admin API and its commands handle them. Pure."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import ValidationError, convert

from objectcache_gateway.admin.accounts.keys import changed_key, key_view, make_pair, pair_of
from objectcache_gateway.admin.accounts.usage import bucket_usage, user_usage
from objectcache_gateway.admin.accounts.users import merged, without_access
from objectcache_gateway.admin.serving.routes import changed, page_of
from objectcache_operations.admin.accounts.grants import grant_of, grant_text, grants_text
from objectcache_operations.admin.accounts.quotas import (
    QuotaFlags,
    counted_text,
    quota_change,
    used_text,
)
from objectcache_operations.admin.documents import full_document
from objectcache_operations.admin.status.top_view import achieved_rates
from objectcache_schemas.accounts import ACCESS_KEY_PATTERN, Access, Grant, User
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.limits import GIB, MIB
from objectcache_schemas.messages.quotas import BucketUsage, TenantActivity, Usage
from objectcache_schemas.operators.admin_api import (
    DeliveriesReply,
    KeyChange,
    NewToken,
    NewUser,
    QuotaChange,
    UserChange,
)
from objectcache_schemas.operators.schedule import ScheduledDelivery
from objectcache_schemas.records import BucketConfiguration, BucketInfo, Quota

READ, WRITE, ADMIN = Access.READ, Access.WRITE, Access.ADMIN


def grant(bucket: str, *access: Access, prefix: str = "") -> Grant:
    return Grant(bucket=bucket, access=access, prefix=prefix)


# --- grants ---


def test_grants_on_the_same_bucket_and_prefix_become_one() -> None:
    given_ = [grant("b", WRITE), grant("c", READ), grant("b", READ), grant("b", READ, prefix="p")]
    assert merged(given_) == (
        grant("b", READ, WRITE),
        grant("c", READ),
        grant("b", READ, prefix="p"),
    )


@pytest.mark.parametrize("bad", [grant("b"), grant("", READ)])
def test_a_grant_without_access_or_bucket_is_refused(bad: Grant) -> None:
    with pytest.raises(InvalidRequest, match="a grant needs a bucket and at least one of"):
        merged([bad])


def test_one_access_or_all_of_it_is_taken_away() -> None:
    held = (grant("b", READ, WRITE), grant("b", READ, prefix="p"), grant("c", READ))
    assert without_access(held, "b", "", WRITE) == (grant("b", READ), *held[1:])
    assert without_access(held, "b", "", None) == held[1:]
    assert without_access(held, "b", "p", READ) == (held[0], held[2])
    assert without_access(held, "c", "", READ) == held[:2]
    assert without_access(held, "c", "", ADMIN) == held
    assert without_access(held, "d", "", None) == held


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("models=read", grant("models", READ)),
        ("models=read,write", grant("models", READ, WRITE)),
        ("models/llama/=write", grant("models", WRITE, prefix="llama/")),
        ("*=admin", grant("*", ADMIN)),
        ("b/a=b=read", grant("b", READ, prefix="a=b")),
    ],
)
def test_a_grant_is_read_as_it_is_written(text: str, found: Grant) -> None:
    assert grant_of(text) == found
    assert grant_of(grant_text(found)) == found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("models", "is not BUCKET"),
        ("=read", "is not BUCKET"),
        ("models=", "is not BUCKET"),
        ("models=all", "'all' is no access; give some of read, write, admin"),
    ],
)
def test_a_wrong_grant_is_named(text: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words.replace("'", ".")):
        grant_of(text)


def test_no_grants_are_a_dash() -> None:
    assert grants_text(()) == "-"
    assert grants_text((grant("b", READ), grant("c", WRITE))) == "b=read c=write"


# --- quotas ---


def test_a_quota_changes_what_is_given() -> None:
    change = quota_change(QuotaFlags(stored="10GiB", objects="0", requests="none"))
    assert change == QuotaChange(stored_bytes=10 * GIB, object_count=0, requests_per_s=None)
    before = Quota(requests_per_s=5.0, deliveries=2)
    assert changed(before, change) == Quota(stored_bytes=10 * GIB, object_count=0, deliveries=2)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (QuotaFlags(), "nothing to set"),
        (QuotaFlags(stored="3"), "--stored: '3' has no unit"),
        (QuotaFlags(objects="-1"), "--objects: '-1' is no whole number, or none"),
        (QuotaFlags(objects="9" * 19), "--objects"),
        (QuotaFlags(requests="0"), "--requests: '0' is no number of requests a second"),
        (QuotaFlags(requests="nan"), "--requests"),
        (QuotaFlags(in_flight="x"), "--in-flight"),
        (QuotaFlags(deliveries="2.5"), "--deliveries"),
        (QuotaFlags(deliveries="0"), "--deliveries: 0 would .* give 1 or more"),
    ],
)
def test_a_wrong_quota_names_its_flag(flags: QuotaFlags, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        quota_change(flags)


def test_a_change_of_nothing_is_refused_with_what_can_be_changed() -> None:
    with pytest.raises(InvalidRequest, match="enabled, may_create_buckets"):
        changed(User(name="a", created_s=0.0), UserChange())


def test_use_stands_beside_its_limit() -> None:
    assert used_text(MIB, 2 * MIB) == "1.0 MiB of 2.0 MiB"
    assert used_text(MIB, None) == "1.0 MiB"
    assert counted_text(1200, 0) == "1,200 of 0"


def test_documents_hold_every_field() -> None:
    found = full_document({"quota": Quota(deliveries=1), "keys": (1, 2)})
    assert found["quota"] == {
        "stored_bytes": None,
        "object_count": None,
        "requests_per_s": None,
        "in_flight_bytes": None,
        "deliveries": 1,
    }
    assert found["keys"] == [1, 2]


# --- keys ---


def test_a_pair_that_is_made_up_is_long_and_another_each_time() -> None:
    first, second = make_pair("alice", 5.0), make_pair("alice", 5.0)
    assert first.access_key != second.access_key
    assert first.secret_key != second.secret_key
    assert len(first.secret_key) == 40
    assert first.access_key.startswith("OC")
    assert re.fullmatch(ACCESS_KEY_PATTERN, first.access_key)
    assert first.user == "alice"


def test_a_pair_that_is_given_is_taken() -> None:
    pair = pair_of(make_pair("alice", 5.0, "AKIA", "secret-of-alice"))
    assert (pair.access_key, pair.secret_key) == ("AKIA", "secret-of-alice")
    assert "secret-of-alice" not in repr(pair)


def test_a_view_of_a_key_has_no_secret() -> None:
    key = make_pair("alice", 5.0, "AKIA", "secret-of-alice")
    assert b"secret" not in msgspec.json.encode(key_view(key))


def test_a_key_changes_where_it_is_told() -> None:
    key = make_pair("alice", 5.0)
    ended = changed_key(key, KeyChange(lifetime_s=10.0), 100.0)
    assert (ended.expires_s, ended.enabled) == (110.0, True)
    assert changed_key(ended, KeyChange(lifetime_s=None), 100.0).expires_s is None
    off = changed_key(ended, KeyChange(enabled=False, note="lost"), 100.0)
    assert (off.enabled, off.note, off.expires_s) == (False, "lost", 110.0)
    with pytest.raises(InvalidRequest, match="enabled, lifetime_s, note"):
        changed_key(key, KeyChange(), 100.0)


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "alice\\n"}',
        '{"name": "alice", "secret_key": "long-enough\\n"}',
        '{"name": "alice", "with_key": false, "access_key": "AKIA"}',
        '{"name": "alice", "secret_key": "short"}',
        '{"name": "alice", "admin": true}',
        '{"name": 5}',
        "{}",
    ],
)
def test_a_user_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=NewUser)


def test_an_unknown_scope_is_named_with_those_that_are_known() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"'root' is no scope; known are admin"):
        msgspec.json.decode('{"name": "x", "scopes": ["root"]}', type=NewToken)


# --- pages ---


@given(st.sets(st.text(max_size=3), max_size=30), st.integers(1, 7))
def test_pages_give_every_name_once_in_order(names: set[str], limit: int) -> None:
    names.discard("")
    items = {name: name for name in names}
    seen: list[str] = []
    after: str | None = ""
    while after is not None:
        shown, after = page_of(items, after, limit)
        assert len(shown) <= limit
        seen += shown
    assert seen == sorted(names)


# --- usage ---


def test_usage_adds_up_what_a_users_buckets_hold_beside_its_quota() -> None:
    usage = Usage(
        buckets=(
            BucketUsage(bucket="b", owner="alice", object_count=2, stored_bytes=20),
            BucketUsage(bucket="a", owner="alice", object_count=1, stored_bytes=10),
            BucketUsage(bucket="r", owner="root", object_count=5, stored_bytes=50),
        ),
        tenants=(TenantActivity(identity="bob", in_flight_bytes=7, deliveries=1),),
    )
    infos = {
        "a": BucketInfo(
            name="a", owner="alice", region="r", created_s=0.0,
            configuration=BucketConfiguration(quota=Quota(object_count=9)),
        )
    }  # fmt: skip
    users = {
        name: User(name=name, created_s=0.0, quota=Quota(deliveries=3)) for name in ("alice", "bob")
    }
    buckets = bucket_usage(usage, infos)
    assert [one.bucket for one in buckets] == ["a", "b", "r"]
    assert buckets[0].quota == Quota(object_count=9)
    alice, bob, root = user_usage(buckets, usage.tenants, users)
    assert (alice.user, alice.bucket_count, alice.object_count, alice.stored_bytes) == (
        *("alice", 2, 3), 30
    )  # fmt: skip
    assert (bob.stored_bytes, bob.in_flight_bytes, bob.deliveries) == (0, 7, 1)
    assert (root.user, root.stored_bytes, root.quota) == ("root", 50, Quota())


# --- top ---


def look(at_s: float, **sent_bytes: int) -> DeliveriesReply:
    return DeliveriesReply(
        at_s=at_s,
        deliveries=tuple(
            ScheduledDelivery(
                request_id=name, tenant="t", pooled=True, layer_bytes=1, num_layers=4,
                compute_window_s=None, window_source="none", rate_bytes_per_s=None,
                sent_bytes=sent, payload_bytes=1000, next_layer=1, consumed_layers=0, age_s=2.0,
            )
            for name, sent in sent_bytes.items()
        ),
        delivery_count=len(sent_bytes), waiting=0, rate_bytes_per_s=0.0, tenants=(),
    )  # fmt: skip


def test_rates_are_those_between_two_looks_and_since_the_begin_for_what_is_new() -> None:
    rates = achieved_rates(look(12.0, a=500, b=100, c=40), look(10.0, a=100, c=90))
    assert rates == {"a": 200.0, "b": 50.0, "c": 20.0}


def test_a_quota_of_no_delivery_is_none_that_can_be_set() -> None:
    assert convert({"deliveries": 1}, QuotaChange) == QuotaChange(deliveries=1)
    with pytest.raises(ValidationError, match="deliveries"):
        convert({"deliveries": 0}, QuotaChange)
