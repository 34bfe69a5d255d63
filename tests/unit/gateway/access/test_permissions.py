"""What callers may do: every grant for itself, every scope a narrowing, nothing by default."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache_gateway.access.operation_access import NEEDED, Applies
from objectcache_gateway.access.permissions import ROOT, Caller, Permission
from objectcache_gateway.request.routes import Operation
from objectcache_schemas.accounts import Access, AccessKey, Grant, User
from objectcache_schemas.errors import AccessDenied
from objectcache_schemas.records import Quota

READ, WRITE, ADMIN = Access.READ, Access.WRITE, Access.ADMIN


CREATED_S = 5.0


def grant(bucket: str, *access: Access, prefix: str = "") -> Grant:
    created_s = None if bucket == "*" else CREATED_S
    return Grant(bucket=bucket, access=access, prefix=prefix, bucket_created_s=created_s)


def on(
    caller: Caller, bucket: str = "logs", owner: str = "carol", created_s: float = CREATED_S
) -> Permission:
    return Permission(caller, bucket, owner, created_s)


def test_nothing_is_allowed_that_was_not_granted() -> None:
    stranger = on(Caller("alice"))
    for access in Access:
        assert not stranger.allows(access, "")
        assert not stranger.allows(access, "key")
        assert not stranger.allows_some(access)
    assert not stranger.allows_some(None)


def test_root_and_the_owner_may_do_everything() -> None:
    for permission in (on(ROOT), on(Caller("carol"))):
        for access in Access:
            assert permission.allows(access, "")
            assert permission.allows(access, "key")


def test_a_user_who_is_called_like_root_elsewhere_is_not_root() -> None:
    assert not on(Caller("Root")).allows(READ, "")
    assert not on(Caller("root-2")).allows(READ, "")


def test_each_access_stands_for_itself() -> None:
    for granted in Access:
        permission = on(Caller("alice", grants=(grant("logs", granted),)))
        assert [access for access in Access if permission.allows(access, "key")] == [granted]


def test_a_grant_covers_its_bucket_and_a_star_every_one() -> None:
    named = Caller("alice", grants=(grant("logs", READ),))
    assert on(named, "logs").allows(READ, "key")
    assert not on(named, "logs2").allows(READ, "key")
    assert not on(named, "log").allows(READ, "key")
    everywhere = Caller("alice", grants=(grant("*", READ),))
    assert on(everywhere, "other").allows(READ, "key")


def test_a_grant_ends_with_its_bucket_and_a_star_and_a_scope_do_not() -> None:
    caller = Caller("alice", grants=(grant("logs", READ),))
    for later in (on(caller, created_s=CREATED_S + 1), on(caller, created_s=CREATED_S - 1)):
        assert not later.allows(READ, "key")
        assert not later.allows_some(None)
    unbound = Caller("alice", grants=(Grant(bucket="logs", access=(READ,)),))
    assert not on(unbound).allows(READ, "key")
    assert on(Caller("alice", grants=(grant("*", READ),)), created_s=9.0).allows(READ, "key")
    scoped = Caller("carol", scope=(Grant(bucket="logs", access=(READ,)),))
    assert on(scoped, created_s=9.0).allows(READ, "key")


def test_a_prefix_covers_keys_below_it_and_listings_of_them_alone() -> None:
    permission = on(Caller("alice", grants=(grant("logs", READ, prefix="a/"),)))
    assert permission.allows(READ, "a/1")
    assert permission.allows(READ, "a/")
    for asked in ("", "a", "b/1", "A/1"):
        assert not permission.allows(READ, asked)
    assert permission.allows_some(READ)
    assert not permission.allows_some(WRITE)


def test_access_and_prefix_of_two_grants_are_not_mixed() -> None:
    grants = (grant("logs", READ, prefix="a/"), grant("logs", WRITE, prefix="b/"))
    permission = on(Caller("alice", grants=grants))
    assert permission.allows(READ, "a/1")
    assert permission.allows(WRITE, "b/1")
    assert not permission.allows(WRITE, "a/1")
    assert not permission.allows(READ, "b/1")


def test_a_scope_narrows_the_owner_and_the_granted_and_widens_nobody() -> None:
    scope = (grant("logs", READ, prefix="a/"),)
    owner = on(Caller("carol", scope=scope))
    assert owner.allows(READ, "a/1")
    assert not owner.allows(READ, "b/1")
    assert not owner.allows(WRITE, "a/1")
    assert not on(Caller("carol", scope=scope), "logs2", "carol").allows_some(None)
    stranger = on(Caller("alice", scope=scope))
    assert not stranger.allows(READ, "a/1")


def test_a_list_of_keys_is_refused_for_the_first_that_is_not_covered() -> None:
    permission = on(Caller("alice", grants=(grant("logs", READ, prefix="a/"),)))
    permission.check_all(READ, ["a/1", "a/2"])
    with pytest.raises(AccessDenied, match="'b/1'") as caught:
        permission.check_all(READ, ["a/1", "b/1", "b/2"])
    assert caught.value.details.key == "b/1"


def test_buckets_are_made_by_those_who_may_and_whose_key_is_not_narrowed_to_others() -> None:
    assert ROOT.may_create("new")
    assert Caller("alice", may_create_buckets=True).may_create("new")
    assert not Caller("alice", grants=(grant("*", ADMIN),)).may_create("new")
    for scope, expected in (
        ((grant("*", ADMIN),), True),
        ((grant("new", ADMIN),), True),
        ((grant("old", ADMIN),), False),
        ((grant("*", READ, WRITE),), False),
        ((grant("new", ADMIN, prefix="a/"),), False),
    ):
        caller = Caller("alice", may_create_buckets=True, scope=scope)
        assert caller.may_create("new") is expected, scope


def test_that_there_is_no_such_bucket_is_told_to_those_who_could_find_out_anyway() -> None:
    assert Caller("alice", may_create_buckets=True).may_know("gone")
    assert Caller("alice", grants=(grant("gone", READ),)).may_know("gone")
    assert not Caller("alice").may_know("gone")
    narrowed = Caller("alice", grants=(grant("*", READ),), scope=(grant("logs", READ),))
    assert not narrowed.may_know("gone")
    assert not narrowed.reaches("gone")


def test_a_caller_has_its_users_grants_and_its_keys_scope() -> None:
    grants, scope = (grant("logs", READ),), (grant("logs", READ, prefix="a/"),)
    user = User(
        name="alice",
        created_s=1.0,
        grants=grants,
        may_create_buckets=False,
        quota=Quota(requests_per_s=5.0),
    )
    key = AccessKey(
        access_key="alice-1", secret_key="12345678", user="alice", created_s=1.0, scope=scope
    )
    assert Caller.of(user, key) == Caller("alice", False, False, grants, scope, 5.0)


def test_every_operation_says_what_it_needs() -> None:
    assert set(NEEDED) == set(Operation)
    for operation, needed in NEEDED.items():
        needs_none = needed.applies in (Applies.SERVICE, Applies.SOME_OF_BUCKET)
        assert (needed.access is None) == needs_none, operation


def test_what_changes_a_bucket_needs_admin_of_all_of_it() -> None:
    changing = {
        operation
        for operation in Operation
        if operation.name.startswith(("PUT_BUCKET", "DELETE_BUCKET", "PUT_KV_LAYOUT"))
    }
    assert len(changing) >= 6
    for operation in changing:
        assert NEEDED[operation] == (ADMIN, Applies.WHOLE_BUCKET), operation


names = st.sampled_from(["logs", "kv", "*"])
grants = st.lists(
    st.builds(
        grant,
        names,
        *[st.sampled_from(Access)] * 2,
        prefix=st.sampled_from(["", "a", "a/", "b/"]),
    ),
    max_size=3,
).map(tuple)


@given(
    grants,
    grants,
    st.sampled_from(["alice", "carol"]),
    st.sampled_from(Access),
    st.sampled_from(["", "a", "a/x", "b/x"]),
    st.text(max_size=3),
)
def test_whoever_may_list_a_prefix_may_read_all_below_it(
    granted: tuple[Grant, ...],
    scope: tuple[Grant, ...],
    identity: str,
    access: Access,
    prefix: str,
    rest: str,
) -> None:
    permission = on(Caller(identity, grants=granted, scope=scope))
    if permission.allows(access, prefix):
        assert permission.allows(access, prefix + rest)
        assert permission.allows_some(access)
        assert permission.allows_some(None)
    unscoped = on(Caller(identity, grants=granted))
    if permission.allows(access, prefix):
        assert unscoped.allows(access, prefix)  # a scope never adds
