"""Users, their grants and their quotas."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from objectcache_gateway.admin.accounts.keys import make_pair, pair_of
from objectcache_gateway.admin.serving.accounts_view import KnownAccounts
from objectcache_gateway.admin.serving.routes import Call, Nothing, Route, changed, page_of
from objectcache_schemas.accounts import (
    Access,
    DeleteUser,
    Grant,
    PutKey,
    PutUser,
    User,
)
from objectcache_schemas.errors import InvalidRequest, NotFound, ObjectCacheError
from objectcache_schemas.operators.admin_api import (
    GrantChoice,
    GrantList,
    NewGrant,
    NewUser,
    NewUserReply,
    Page,
    QuotaChange,
    UserChange,
    UserList,
    UserView,
)
from objectcache_schemas.records import Quota


def user_view(accounts: KnownAccounts, user: User) -> UserView:
    """A user as the API shows it."""
    return UserView(**msgspec.structs.asdict(user), key_count=len(accounts.keys_of(user.name)))


async def list_users(call: Call[Nothing, Page]) -> UserList:
    """A page of users."""
    accounts = await call.accounts.look()
    users, next_after = page_of(accounts.users, call.query.after, call.query.limit)
    return UserList(users=tuple(user_view(accounts, user) for user in users), next_after=next_after)


async def get_user(call: Call[Nothing, Nothing]) -> UserView:
    """One user."""
    accounts = await call.accounts.look()
    return user_view(accounts, accounts.user(call.names["name"]))


async def add_user(call: Call[NewUser, Nothing]) -> NewUserReply:
    """Make a user and its key pair, or nothing."""
    new = call.body
    user = User(
        name=new.name,
        created_s=call.now_s,
        may_create_buckets=new.may_create_buckets,
        grants=merged(new.grants),
        quota=new.quota,
    )
    async with call.accounts.changing:
        await call.accounts.change(PutUser(user=user, create=True))
        pair = None
        if new.with_key:
            key = make_pair(new.name, call.now_s, new.access_key, new.secret_key)
            try:
                await call.accounts.change(PutKey(key=key, create=True))
            except ObjectCacheError:
                await call.accounts.change(DeleteUser(name=new.name))
                raise
            pair = pair_of(key)
        accounts = await call.accounts.look()
    return NewUserReply(user=user_view(accounts, accounts.user(new.name)), key=pair)


async def change_user(call: Call[UserChange, Nothing]) -> UserView:
    """Enable, disable, or let a user make buckets."""
    return await _put(call, lambda user: changed(user, call.body))


async def delete_user(call: Call[Nothing, Nothing]) -> None:
    """Delete a user that owns no bucket, with its keys."""
    async with call.accounts.changing:
        accounts = await call.accounts.look()
        name = accounts.user(call.names["name"]).name
        await call.accounts.change(DeleteUser(name=name))


async def get_quota(call: Call[Nothing, Nothing]) -> Quota:
    """A user's quota."""
    return (await call.accounts.look()).user(call.names["name"]).quota


async def change_quota(call: Call[QuotaChange, Nothing]) -> Quota:
    """Change a user's quota."""
    view = await _put(
        call, lambda user: msgspec.structs.replace(user, quota=changed(user.quota, call.body))
    )
    return view.quota


async def _put(call: Call[Any, Any], change: Callable[[User], User]) -> UserView:
    """Change a user as it is now."""
    async with call.accounts.changing:
        user = change((await call.accounts.look()).user(call.names["name"]))
        await call.accounts.put_user(user)
        accounts = await call.accounts.look()
    return user_view(accounts, accounts.user(user.name))


# --- grants ---------------------------------------------------------------------------------------


async def list_grants(call: Call[Nothing, Nothing]) -> GrantList:
    """A user's grants."""
    return GrantList(grants=(await call.accounts.look()).user(call.names["name"]).grants)


async def add_grant(call: Call[NewGrant, Nothing]) -> GrantList:
    """Give a user access; what it has already on the same bucket and prefix stays.

    Raises `NotFound` (NoSuchBucket) for a bucket that is not there.
    """
    body = call.body
    grant = Grant(bucket=body.bucket, prefix=body.prefix, access=body.access)
    view = await _put(
        call, lambda user: msgspec.structs.replace(user, grants=merged((*user.grants, grant)))
    )
    return GrantList(grants=view.grants)


async def remove_grant(call: Call[Nothing, GrantChoice]) -> GrantList:
    """Take access away; raises `NotFound` where there is none of that kind."""
    choice = call.query

    def without(user: User) -> User:
        grants = without_access(user.grants, choice.bucket, choice.prefix, choice.access)
        if grants == user.grants:
            raise NotFound(
                f"{user.name!r} has no such grant on {choice.bucket!r}, prefix {choice.prefix!r}",
                code="NoSuchEntity",
            )
        return msgspec.structs.replace(user, grants=grants)

    return GrantList(grants=(await _put(call, without)).grants)


def merged(grants: Iterable[Grant]) -> tuple[Grant, ...]:
    """One grant for each bucket and prefix, with the accesses of all, in the order of `Access`.

    Raises `InvalidRequest` for one without an access or a bucket.
    """
    held: dict[Grant, set[Access]] = {}
    for grant in grants:
        if not grant.access or not grant.bucket:
            raise InvalidRequest("a grant needs a bucket and at least one of read, write, admin")
        place = msgspec.structs.replace(grant, access=())
        held.setdefault(place, set()).update(grant.access)
    return tuple(_with_access(place, access) for place, access in held.items())


def without_access(
    grants: Iterable[Grant], bucket: str, prefix: str, access: Access | None
) -> tuple[Grant, ...]:
    """The grants without this access, or all of it, to the bucket and prefix."""
    kept: list[Grant] = []
    for grant in grants:
        if (grant.bucket, grant.prefix) != (bucket, prefix):
            kept.append(grant)
        elif access is not None and (left := set(grant.access) - {access}):
            kept.append(_with_access(grant, left))
    return tuple(kept)


def _with_access(grant: Grant, access: set[Access]) -> Grant:
    return msgspec.structs.replace(grant, access=tuple(one for one in Access if one in access))


_USER = "/v1/users/{name}"
ROUTES = (
    Route("GET", "/v1/users", "users:read", "List users", list_users, UserList, query=Page),
    Route(
        *("POST", "/v1/users", "users:write", "Add a user, with a key pair", add_user),
        *(NewUserReply, NewUser),
        status=201,
    ),
    Route("GET", _USER, "users:read", "Show a user", get_user, UserView),
    Route("PATCH", _USER, "users:write", "Change a user", change_user, UserView, UserChange),
    Route("DELETE", _USER, "users:write", "Delete a user and its keys", delete_user, status=204),
    Route("GET", f"{_USER}/quota", "users:read", "Show a user's quota", get_quota, Quota),
    Route(
        *("PATCH", f"{_USER}/quota", "users:write", "Change a user's quota", change_quota),
        *(Quota, QuotaChange),
    ),
    Route("GET", f"{_USER}/grants", "users:read", "List a user's grants", list_grants, GrantList),
    Route(
        *("POST", f"{_USER}/grants", "users:write", "Give a user access to a bucket", add_grant),
        *(GrantList, NewGrant),
    ),
    Route(
        *("DELETE", f"{_USER}/grants", "users:write", "Take access to a bucket away"),
        *(remove_grant, GrantList),
        query=GrantChoice,
    ),
)
