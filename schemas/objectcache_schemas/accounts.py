"""Who may ask for what: users, their access keys and grants, and the tokens of the admin API.

A request is allowed where its user owns the bucket or holds a grant that covers it, and where the
access key's scope, if it has one, covers it too. What is not granted is denied; there are no rules
that deny. Storage servers keep the accounts, gateways follow them with `WatchDirectory`.
"""

from __future__ import annotations

import enum
import re
from typing import Annotated

import msgspec

from objectcache_schemas.records import Quota

ROOT_USER = "root"  # owns what the root key creates, and may do everything
ANY_BUCKET = "*"
# The root key's, and what logs and metrics say of requests that are no user's.
RESERVED_NAMES = frozenset({ROOT_USER, "anonymous", "nobody", "none", "other"})
# They end with \Z, because $ also matches before a last newline.
USER_NAME_PATTERN = r"^[A-Za-z0-9_+=,.@-]{1,64}\Z"
ACCESS_KEY_PATTERN = r"^[A-Za-z0-9_+=,.@-]{3,128}\Z"
SECRET_KEY_PATTERN = r"^[\x21-\x7e]{8,1024}\Z"  # noqa: S105 - the form of one
USERS_MAX = 10_000
KEYS_PER_USER_MAX = 64
GRANTS_PER_USER_MAX = 256
TOKENS_MAX = 1024

UserName = Annotated[str, msgspec.Meta(pattern=USER_NAME_PATTERN)]
AccessKeyId = Annotated[str, msgspec.Meta(pattern=ACCESS_KEY_PATTERN)]


def check_name(whose: str, name: str) -> None:
    """Raise `ValueError` unless `name` can be a user's or a token's; `whose` is "a user"."""
    if not re.fullmatch(USER_NAME_PATTERN, name):
        raise ValueError(
            f"{whose}'s name has 1 to 64 letters, digits and characters of _ + = , . @ -, and no "
            f"spaces; {name[:64]!a} does not"
        )


def check_user_name(name: str) -> None:
    """Raise `ValueError` unless a user that is made can be called `name`."""
    check_name("a user", name)
    if not name[0].isalnum():
        raise ValueError(f"a user's name begins with a letter or a digit; {name!r} does not")
    if name.lower() in RESERVED_NAMES:
        raise ValueError(f"no user can be called {name!r}: the word means something else already")


class _Record(
    msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True
):
    pass


class Access(enum.Enum):
    """What a grant or a scope lets one do; each stands for itself alone."""

    READ = "read"  # get, head, list, match, deliver
    WRITE = "write"  # put, copy to, delete, multipart
    ADMIN = "admin"  # delete and configure the bucket


class Grant(_Record, frozen=True):
    """Access to a bucket, or to the keys in it that begin with `prefix`.

    A user's grant on a bucket ends with that bucket: another one of the same name was made at
    another time. A key's scope only narrows, so it goes by the name alone.
    """

    bucket: str  # a name, or "*" for every bucket
    access: tuple[Access, ...]
    prefix: str = ""
    bucket_created_s: float | None = None  # of the bucket that is meant; in a change, None is now's


class User(_Record, frozen=True):
    """A tenant: the owner of buckets, and of what it delivers."""

    name: UserName
    created_s: float  # Unix time
    enabled: bool = True
    may_create_buckets: bool = True
    grants: Annotated[tuple[Grant, ...], msgspec.Meta(max_length=GRANTS_PER_USER_MAX)] = ()
    quota: Quota = Quota()


class AccessKey(_Record, frozen=True):
    """One of a user's key pairs. Several may be in force, so that a secret can be rotated."""

    access_key: AccessKeyId
    secret_key: Annotated[str, msgspec.Meta(pattern=SECRET_KEY_PATTERN)]
    user: UserName
    created_s: float
    expires_s: float | None = None  # Unix time
    enabled: bool = True
    scope: tuple[Grant, ...] = ()  # narrows what the user may do; empty does not
    note: str = ""

    def __repr__(self) -> str:
        return f"<AccessKey {self.access_key} of {self.user}>"


class AdminToken(_Record, frozen=True):
    """A bearer token of the admin API; only its SHA-256 is kept."""

    token_id: str
    name: str
    token_sha256: str  # hex
    scopes: tuple[str, ...]  # such as "users:read", "metrics:read", "admin"
    created_s: float
    expires_s: float | None = None

    def __repr__(self) -> str:
        return f"<AdminToken {self.token_id} {self.name!r}>"


# --- changes --------------------------------------------------------------------------------------


class _Change(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag=True, tag_field="op"
):
    pass


class PutUser(_Change, frozen=True):
    """Make a user, or replace one. `create` refuses an existing one.

    Its grants are bound to the buckets there are, and those on buckets that are gone are left out.
    NotFound (NoSuchBucket) where one is to be bound and there is no such bucket.
    """

    user: User
    create: bool


class DeleteUser(_Change, frozen=True):
    """Delete a user with its keys. Conflict where it owns buckets."""

    name: str


class RebindGrants(_Change, frozen=True):
    """Bind all users' grants, which came with a backup, to the buckets there are now.

    Kept are the grants that held when the backup was made, on buckets that are here.
    """

    created_s: dict[str, float]  # when each bucket of the backup was made, by name


class PutKey(_Change, frozen=True):
    """Make an access key, or replace one of the same user. `create` refuses an existing one."""

    key: AccessKey
    create: bool


class RotateKey(_Change, frozen=True):
    """Make a key that takes over, and replace the one of the same user that it takes over from.

    Both or neither, so that no crash leaves the old one without its end.
    """

    key: AccessKey
    old: AccessKey


class DeleteKey(_Change, frozen=True):
    """Delete an access key."""

    access_key: str


class PutToken(_Change, frozen=True):
    """Make an admin token."""

    token: AdminToken


class DeleteToken(_Change, frozen=True):
    """Delete an admin token."""

    token_id: str


AccountChange = (
    PutUser | DeleteUser | RebindGrants | PutKey | RotateKey | DeleteKey | PutToken | DeleteToken
)
