"""Access keys: several a user, so that a secret can be rotated."""

from __future__ import annotations

import msgspec

from objectcache_gateway.admin.serving.routes import Call, Nothing, Route, page_of
from objectcache_gateway.signing.made_up_keys import made_up_access_key, made_up_secret_key
from objectcache_schemas.accounts import AccessKey, DeleteKey, PutKey, RotateKey
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.operators.admin_api import (
    KeyChange,
    KeyChoice,
    KeyList,
    KeyView,
    NewKey,
    NewKeyPair,
    RotatedKey,
    Rotation,
)


def make_pair(
    user: str, now_s: float, access_key: str | None = None, secret_key: str | None = None
) -> AccessKey:
    """A key; what is not given of the pair is made up, the secret of 240 random bits."""
    return AccessKey(
        access_key=access_key or made_up_access_key(),
        secret_key=secret_key or made_up_secret_key(),
        user=user,
        created_s=now_s,
    )


def pair_of(key: AccessKey) -> NewKeyPair:
    """What is said once of a key that was made."""
    return msgspec.convert(key, NewKeyPair, from_attributes=True)


def key_view(key: AccessKey) -> KeyView:
    """A key without its secret."""
    return msgspec.convert(key, KeyView, from_attributes=True)


async def list_keys(call: Call[Nothing, KeyChoice]) -> KeyList:
    """A page of keys, of all users or one."""
    accounts = await call.accounts.look()
    query = call.query
    keys = accounts.keys
    if query.user:
        keys = {key.access_key: key for key in accounts.keys_of(accounts.user(query.user).name)}
    shown, next_after = page_of(keys, query.after, query.limit)
    return KeyList(keys=tuple(map(key_view, shown)), next_after=next_after)


async def get_key(call: Call[Nothing, Nothing]) -> KeyView:
    """One key."""
    return key_view((await call.accounts.look()).key(call.names["access_key"]))


async def add_key(call: Call[NewKey, Nothing]) -> NewKeyPair:
    """Make a key of a user."""
    new = call.body
    (await call.accounts.look()).user(new.user)
    key = msgspec.structs.replace(
        make_pair(new.user, call.now_s, new.access_key, new.secret_key),
        expires_s=None if new.lifetime_s is None else call.now_s + new.lifetime_s,
        scope=new.scope,
        note=new.note,
    )
    await call.accounts.change(PutKey(key=key, create=True))
    return pair_of(key)


async def change_key(call: Call[KeyChange, Nothing]) -> KeyView:
    """Enable, disable, or end a key."""
    async with call.accounts.changing:
        old = (await call.accounts.look()).key(call.names["access_key"])
        key = changed_key(old, call.body, call.now_s)
        await call.accounts.change(PutKey(key=key, create=False))
    return key_view(key)


def changed_key(key: AccessKey, change: KeyChange, now_s: float) -> AccessKey:
    """The key with what a change says; raises `InvalidRequest` where that is nothing."""
    values: dict[str, object] = {}
    if change.enabled is not msgspec.UNSET:
        values["enabled"] = change.enabled
    if change.note is not msgspec.UNSET:
        values["note"] = change.note
    if change.lifetime_s is not msgspec.UNSET:
        lifetime_s = change.lifetime_s
        values["expires_s"] = None if lifetime_s is None else now_s + lifetime_s
    if not values:
        raise InvalidRequest("the body changes nothing; give one of enabled, lifetime_s, note")
    return msgspec.structs.replace(key, **values)


async def rotate_key(call: Call[Rotation, Nothing]) -> RotatedKey:
    """Make the pair that takes over, then let the old one end."""
    async with call.accounts.changing:
        old = (await call.accounts.look()).key(call.names["access_key"])
        ends_s = call.now_s + call.body.overlap_s
        if old.expires_s is not None:
            ends_s = min(ends_s, old.expires_s)
        new = msgspec.structs.replace(
            make_pair(old.user, call.now_s),
            scope=old.scope,
            note=old.note,
            expires_s=rotated_end_s(old, call.body, call.now_s),
        )
        ending = msgspec.structs.replace(old, expires_s=ends_s)
        await call.accounts.change(RotateKey(key=new, old=ending))
    return RotatedKey(key=pair_of(new), old=key_view(ending))


def rotated_end_s(old: AccessKey, rotation: Rotation, now_s: float) -> float | None:
    """When the pair that takes over ends: as it is told, else when the old one would have.

    Raises `InvalidRequest` where that is over already.
    """
    lifetime_s = rotation.lifetime_s
    if lifetime_s is not msgspec.UNSET:
        return None if lifetime_s is None else now_s + lifetime_s
    if old.expires_s is not None and old.expires_s <= now_s:
        raise InvalidRequest(
            f"access key {old.access_key} has expired, and the new one would have with it; "
            "give lifetime_s (--expires)"
        )
    return old.expires_s


async def delete_key(call: Call[Nothing, Nothing]) -> None:
    """Delete a key; what is signed with it is refused from now on."""
    async with call.accounts.changing:
        key = (await call.accounts.look()).key(call.names["access_key"])
        await call.accounts.change(DeleteKey(access_key=key.access_key))


_KEY = "/v1/keys/{access_key}"
ROUTES = (
    Route("GET", "/v1/keys", "keys:read", "List access keys", list_keys, KeyList, query=KeyChoice),
    Route(
        *("POST", "/v1/keys", "keys:write", "Add a key pair of a user", add_key),
        *(NewKeyPair, NewKey),
        status=201,
    ),
    Route("GET", _KEY, "keys:read", "Show an access key", get_key, KeyView),
    Route("PATCH", _KEY, "keys:write", "Change an access key", change_key, KeyView, KeyChange),
    Route("DELETE", _KEY, "keys:write", "Delete an access key", delete_key, status=204),
    Route(
        *("POST", f"{_KEY}/rotation", "keys:write", "Make another pair; let this one end"),
        *(rotate_key, RotatedKey, Rotation),
        status=201,
    ),
)
