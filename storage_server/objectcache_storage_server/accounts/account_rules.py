"""What a change makes of the accounts, and which changes are refused. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from objectcache_schemas.accounts import (
    ACCESS_KEY_PATTERN,
    ANY_BUCKET,
    GRANTS_PER_USER_MAX,
    KEYS_PER_USER_MAX,
    ROOT_USER,
    SECRET_KEY_PATTERN,
    TOKENS_MAX,
    USER_NAME_PATTERN,
    USERS_MAX,
    AccessKey,
    AccountChange,
    AdminToken,
    DeleteKey,
    DeleteToken,
    DeleteUser,
    Grant,
    PutKey,
    PutToken,
    PutUser,
    RebindGrants,
    RotateKey,
    User,
    check_user_name,
)
from objectcache_schemas.errors import Conflict, InvalidRequest, NotFound
from objectcache_schemas.limits import KEY_BYTES_MAX
from objectcache_storage_server.accounts.bucket_grants import CreatedSOf, bound, rebound

R = TypeVar("R")

EXPIRED_KEPT_S = 86400.0  # an expired key or token is listed for another day
NAMED_BUCKETS_MAX = 10
NOTE_CHARS_MAX = 256
TOKEN_ID_CHARS_MAX = 128
TOKEN_SCOPES_MAX = 64
_BUCKET_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_SHA256_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Accounts:
    """All there are, by name. Never changed in place."""

    users: Mapping[str, User] = field(default_factory=dict[str, User])
    keys: Mapping[str, AccessKey] = field(default_factory=dict[str, AccessKey])
    tokens: Mapping[str, AdminToken] = field(default_factory=dict[str, AdminToken])

    def keys_of(self, user: str) -> list[AccessKey]:
        """The keys of one user."""
        return [key for key in self.keys.values() if key.user == user]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a change is judged by beside the accounts."""

    root_access_key: str | None  # where it is known; no other key may have its name
    buckets_of: Callable[[str], list[str]]  # names of the buckets that a user owns
    created_s_of: CreatedSOf = lambda _: None


def changed(accounts: Accounts, change: AccountChange, around: Surroundings) -> Accounts:
    """The accounts after a change.

    Raises `InvalidRequest` for a record that cannot be, `NotFound` (NoSuchEntity, NoSuchBucket),
    and `Conflict`: EntityAlreadyExists, DeleteConflict naming the buckets, LimitExceeded.
    """
    match change:
        case PutUser():
            return _put_user(accounts, change, around)
        case DeleteUser():
            return _delete_user(accounts, change, around)
        case RebindGrants():
            return _rebind_grants(accounts, change, around)
        case PutKey():
            return _put_key(accounts, change, around)
        case RotateKey():
            return _rotate_key(accounts, change, around)
        case PutToken():
            return _put_token(accounts, change)
        case DeleteKey():
            _require(change.access_key in accounts.keys, "access key", change.access_key)
            return replaced(accounts, keys=_without(accounts.keys, change.access_key))
        case DeleteToken():
            _require(change.token_id in accounts.tokens, "token", change.token_id)
            return replaced(accounts, tokens=_without(accounts.tokens, change.token_id))


def purged(accounts: Accounts, now_s: float) -> Accounts:
    """Without the keys and tokens that expired a while ago; the same object where there is none."""
    limit_s = now_s - EXPIRED_KEPT_S
    keys = {name: key for name, key in accounts.keys.items() if not _is_before(key, limit_s)}
    tokens = {name: one for name, one in accounts.tokens.items() if not _is_before(one, limit_s)}
    if len(keys) == len(accounts.keys) and len(tokens) == len(accounts.tokens):
        return accounts
    return replaced(accounts, keys=keys, tokens=tokens)


def checked(accounts: Accounts, around: Surroundings) -> Accounts:
    """The accounts, if each could have been put one after the other. Raises as `changed` does."""
    if len(accounts.users) > USERS_MAX or len(accounts.tokens) > TOKENS_MAX:
        raise _limit(f"there may be {USERS_MAX} users and {TOKENS_MAX} tokens")
    for user in accounts.users.values():
        _check_user(user)
    counts: dict[str, int] = {}
    for key in accounts.keys.values():
        _check_key(key, accounts.users, around)
        counts[key.user] = counts.get(key.user, 0) + 1
        if counts[key.user] > KEYS_PER_USER_MAX:
            raise _limit(f"user {key.user} may have {KEYS_PER_USER_MAX} access keys")
    for token in accounts.tokens.values():
        _check_token(token)
    return accounts


def replaced(
    accounts: Accounts,
    *,
    users: Mapping[str, User] | None = None,
    keys: Mapping[str, AccessKey] | None = None,
    tokens: Mapping[str, AdminToken] | None = None,
) -> Accounts:
    """The accounts with other maps."""
    return Accounts(
        accounts.users if users is None else users,
        accounts.keys if keys is None else keys,
        accounts.tokens if tokens is None else tokens,
    )


# --- users ---


def _put_user(accounts: Accounts, change: PutUser, around: Surroundings) -> Accounts:
    _check_user(change.user)
    if change.create:
        _check_new_name(change.user.name)
    grants = bound(change.user.grants, around.created_s_of)
    user = msgspec.structs.replace(change.user, grants=grants)
    if change.create and user.name in accounts.users:
        raise Conflict(f"user {user.name} exists already", code="EntityAlreadyExists")
    if user.name not in accounts.users and len(accounts.users) >= USERS_MAX:
        raise _limit(f"there may be {USERS_MAX} users")
    return replaced(accounts, users={**accounts.users, user.name: user})


def _check_new_name(name: str) -> None:
    try:
        check_user_name(name)
    except ValueError as error:
        raise InvalidRequest(str(error)) from error


def _check_user(user: User) -> None:
    if not re.fullmatch(USER_NAME_PATTERN, user.name):
        raise InvalidRequest("a user's name has 1 to 64 of A-Z a-z 0-9 _+=,.@-")
    if user.name == ROOT_USER:
        raise InvalidRequest(f"no user can be called {ROOT_USER}: the root key's is")
    _check_grants(user.grants, f"user {user.name}: grants")


def _rebind_grants(accounts: Accounts, change: RebindGrants, around: Surroundings) -> Accounts:
    users: dict[str, User] = {}
    for name, user in accounts.users.items():
        grants = rebound(user.grants, change.created_s, around.created_s_of)
        users[name] = msgspec.structs.replace(user, grants=grants)
    return replaced(accounts, users=users)


def _delete_user(accounts: Accounts, change: DeleteUser, around: Surroundings) -> Accounts:
    _require(change.name in accounts.users, "user", change.name)
    owned = around.buckets_of(change.name)
    if owned:
        more = f" and {len(owned) - NAMED_BUCKETS_MAX} more" * (len(owned) > NAMED_BUCKETS_MAX)
        raise Conflict(
            f"user {change.name} owns buckets: {', '.join(owned[:NAMED_BUCKETS_MAX])}{more}; "
            "delete them first",
            code="DeleteConflict",
        )
    keys = {name: key for name, key in accounts.keys.items() if key.user != change.name}
    return replaced(accounts, users=_without(accounts.users, change.name), keys=keys)


# --- keys and tokens ---


def _put_key(accounts: Accounts, change: PutKey, around: Surroundings) -> Accounts:
    key = change.key
    _check_key(key, accounts.users, around)
    known = accounts.keys.get(key.access_key)
    if known is not None and (change.create or known.user != key.user):
        raise Conflict(f"access key {key.access_key} exists already", code="EntityAlreadyExists")
    if known is None and len(accounts.keys_of(key.user)) >= KEYS_PER_USER_MAX:
        raise _limit(f"user {key.user} may have {KEYS_PER_USER_MAX} access keys")
    return replaced(accounts, keys={**accounts.keys, key.access_key: key})


def _rotate_key(accounts: Accounts, change: RotateKey, around: Surroundings) -> Accounts:
    old = change.old
    _require(old.access_key in accounts.keys, "access key", old.access_key)
    if change.key.user != old.user:
        raise InvalidRequest(f"user {old.user} has the old key, so it must have the new one")
    ended = _put_key(accounts, PutKey(key=old, create=False), around)
    return _put_key(ended, PutKey(key=change.key, create=True), around)


def _check_key(key: AccessKey, users: Mapping[str, User], around: Surroundings) -> None:
    if not re.fullmatch(ACCESS_KEY_PATTERN, key.access_key):
        raise InvalidRequest("an access key has 3 to 128 of A-Z a-z 0-9 _+=,.@-")
    if not re.fullmatch(SECRET_KEY_PATTERN, key.secret_key):
        raise InvalidRequest("a secret key has 8 to 1024 printable ASCII characters, no spaces")
    _require(key.user in users, "user", key.user)
    if key.access_key == around.root_access_key:
        raise Conflict("the access key is the root key's", code="EntityAlreadyExists")
    if len(key.note) > NOTE_CHARS_MAX:
        raise InvalidRequest(f"note has {len(key.note)} characters, {NOTE_CHARS_MAX} may be")
    _check_grants(key.scope, f"access key {key.access_key}: scope")
    if any(grant.bucket_created_s is not None for grant in key.scope):
        raise InvalidRequest(
            f"access key {key.access_key}: scope: bucket_created_s is of a user's grants alone"
        )


def _put_token(accounts: Accounts, change: PutToken) -> Accounts:
    token = change.token
    _check_token(token)
    if token.token_id in accounts.tokens:
        raise Conflict(f"token {token.token_id} exists already", code="EntityAlreadyExists")
    if len(accounts.tokens) >= TOKENS_MAX:
        raise _limit(f"there may be {TOKENS_MAX} tokens")
    return replaced(accounts, tokens={**accounts.tokens, token.token_id: token})


def _check_token(token: AdminToken) -> None:
    for name, text in (("token_id", token.token_id), ("name", token.name)):
        if not 1 <= len(text) <= TOKEN_ID_CHARS_MAX:
            raise InvalidRequest(f"{name} has 1 to {TOKEN_ID_CHARS_MAX} characters")
    if not _SHA256_HEX.fullmatch(token.token_sha256):
        raise InvalidRequest("token_sha256 is 64 lowercase hex digits")
    if not 1 <= len(token.scopes) <= TOKEN_SCOPES_MAX:
        raise InvalidRequest(f"scopes has 1 to {TOKEN_SCOPES_MAX} entries")
    if any(not 1 <= len(scope) <= TOKEN_ID_CHARS_MAX for scope in token.scopes):
        raise InvalidRequest(f"a scope has 1 to {TOKEN_ID_CHARS_MAX} characters")


def _is_before(record: AccessKey | AdminToken, limit_s: float) -> bool:
    return record.expires_s is not None and record.expires_s < limit_s


# --- what all have ---


def _check_grants(grants: tuple[Grant, ...], where: str) -> None:
    if len(grants) > GRANTS_PER_USER_MAX:
        raise _limit(f"{where}: there may be {GRANTS_PER_USER_MAX}")
    for grant in grants:
        if grant.bucket != ANY_BUCKET and not _BUCKET_NAME.fullmatch(grant.bucket):
            raise InvalidRequest(f"{where}: {grant.bucket!r} is no bucket's name, nor *")
        if not grant.access:
            raise InvalidRequest(f"{where}: a grant needs read, write or admin")
        if len(grant.prefix.encode()) > KEY_BYTES_MAX:
            raise InvalidRequest(f"{where}: a prefix has at most {KEY_BYTES_MAX} bytes")


def _require(is_there: bool, what: str, name: str) -> None:
    if not is_there:
        raise NotFound(f"there is no {what} {name}", code="NoSuchEntity")


def _limit(message: str) -> Conflict:
    return Conflict(message, code="LimitExceeded")


def _without(records: Mapping[str, R], name: str) -> dict[str, R]:
    return {known: record for known, record in records.items() if known != name}
