"""Grants are bound to the buckets there are, and none reaches a later bucket."""

from __future__ import annotations

import pytest

from objectcache_schemas.accounts import (
    Access,
    AccessKey,
    Grant,
    PutKey,
    PutUser,
    RebindGrants,
    User,
)
from objectcache_schemas.errors import InvalidRequest, NotFound
from objectcache_storage_server.accounts.account_rules import Accounts, Surroundings, changed
from objectcache_storage_server.accounts.bucket_grants import bound, rebound

READ, WRITE = Access.READ, Access.WRITE
BUCKETS = {"logs": 2.0, "models": 3.0}
AROUND = Surroundings(None, lambda user: [], BUCKETS.get)


def grant(bucket: str, *access: Access, prefix: str = "", created_s: float | None = None) -> Grant:
    return Grant(bucket=bucket, access=access, prefix=prefix, bucket_created_s=created_s)


def test_a_grant_is_bound_to_the_bucket_there_is() -> None:
    assert bound((grant("logs", READ),), BUCKETS.get) == (grant("logs", READ, created_s=2.0),)
    assert bound((grant("*", READ),), BUCKETS.get) == (grant("*", READ),)
    kept = (grant("logs", READ, created_s=2.0),)
    assert bound(kept, BUCKETS.get) == kept


def test_a_grant_on_no_bucket_is_refused_and_one_on_a_bucket_that_went_is_left_out() -> None:
    with pytest.raises(NotFound, match="there is no bucket 'gone'") as caught:
        bound((grant("gone", READ),), BUCKETS.get)
    assert caught.value.code == "NoSuchBucket"
    earlier = grant("logs", WRITE, created_s=1.0)
    assert bound((earlier, grant("gone", READ, created_s=1.0)), BUCKETS.get) == ()
    # What was given on the earlier bucket is not added to what is given on this one.
    assert bound((earlier, grant("logs", READ)), BUCKETS.get) == (
        grant("logs", READ, created_s=2.0),
    )


def test_grants_on_one_bucket_and_prefix_become_one() -> None:
    given = (
        grant("logs", WRITE, created_s=2.0),
        grant("logs", READ),
        grant("logs", READ, prefix="a"),
    )
    assert bound(given, BUCKETS.get) == (
        grant("logs", READ, WRITE, created_s=2.0),
        grant("logs", READ, prefix="a", created_s=2.0),
    )


def test_a_backups_grants_follow_the_names_of_the_buckets_that_it_holds() -> None:
    before = {"logs": 1.0, "models": 1.5, "gone": 1.0}
    given = (
        grant("logs", READ, created_s=1.0),
        grant("models", READ, created_s=1.0),  # worth nothing already when the backup was made
        grant("gone", READ, created_s=1.0),
        grant("*", WRITE),
    )
    assert rebound(given, before, BUCKETS.get) == (
        grant("logs", READ, created_s=2.0),
        grant("*", WRITE),
    )
    assert rebound(given, {}, BUCKETS.get) == (grant("*", WRITE),)


def test_a_change_binds_users_and_a_rebinding_all_of_them() -> None:
    accounts = Accounts()
    for name in ("alice", "bob"):
        user = User(name=name, created_s=1.0, grants=(grant("logs", READ),))
        accounts = changed(accounts, PutUser(user=user, create=True), AROUND)
        assert accounts.users[name].grants == (grant("logs", READ, created_s=2.0),)
    later = Surroundings(None, lambda user: [], {"logs": 9.0}.get)
    moved = changed(accounts, RebindGrants(created_s={"logs": 2.0}), later)
    expected = (grant("logs", READ, created_s=9.0),)
    assert [user.grants for user in moved.users.values()] == [expected] * 2
    lost = changed(accounts, RebindGrants(created_s={}), later)
    assert [user.grants for user in lost.users.values()] == [(), ()]


def test_a_scope_goes_by_the_name_alone() -> None:
    user = PutUser(user=User(name="alice", created_s=1.0), create=True)
    accounts = changed(Accounts(), user, AROUND)

    def key(scope: Grant) -> PutKey:
        made = AccessKey(
            access_key="alice-1", secret_key="x" * 8, user="alice", created_s=1.0, scope=(scope,)
        )
        return PutKey(key=made, create=True)

    scope = grant("not-made-yet", READ)
    assert changed(accounts, key(scope), AROUND).keys["alice-1"].scope == (scope,)
    with pytest.raises(InvalidRequest, match="bucket_created_s"):
        changed(accounts, key(grant("logs", READ, created_s=2.0)), AROUND)
