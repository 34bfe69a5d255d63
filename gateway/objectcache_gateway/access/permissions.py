"""What a caller may do with a bucket and its keys. Pure.

Allowed is what the bucket's owner does and what a grant covers, and of that what the access key's
scope covers, if it has one. Each access stands for itself: write does not include read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from objectcache_schemas.accounts import ANY_BUCKET, ROOT_USER, Access, AccessKey, Grant, User
from objectcache_schemas.errors import AccessDenied


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, with what it was granted and what its key narrows that to."""

    identity: str
    is_root: bool = False
    may_create_buckets: bool = False
    grants: tuple[Grant, ...] = ()
    scope: tuple[Grant, ...] = ()  # empty narrows nothing
    requests_per_s: float | None = None  # its quota
    expires_s: float | None = None  # Unix time from which its key is not in force

    @property
    def is_anonymous(self) -> bool:
        """Whether nobody has signed."""
        return not self.identity

    @classmethod
    def of(cls, user: User, key: AccessKey) -> Caller:
        """A user who signs with one of its keys."""
        return cls(
            user.name,
            may_create_buckets=user.may_create_buckets,
            grants=user.grants,
            scope=key.scope,
            requests_per_s=user.quota.requests_per_s,
            expires_s=key.expires_s,
        )

    def may_create(self, bucket: str) -> bool:
        """Whether it may make a bucket of this name: of its own, so no grant is needed."""
        if not self.is_root and not self.may_create_buckets:
            return False
        return not self.scope or _covers(self.scope, bucket, Access.ADMIN, "")

    def may_know(self, bucket: str) -> bool:
        """Whether it may be told that there is no bucket of this name."""
        if self.is_root or self.may_create(bucket):
            return True
        return _names(self.grants, bucket) and self.reaches(bucket)

    def reaches(self, bucket: str) -> bool:
        """Whether its key's scope has anything to do with a bucket."""
        return not self.scope or _names(self.scope, bucket)

    def grants_on(self, bucket: str, created_s: float) -> tuple[Grant, ...]:
        """Its grants on every bucket and on this one; not those on an earlier one of its name."""
        return tuple(
            grant
            for grant in self.grants
            if grant.bucket == ANY_BUCKET
            or (grant.bucket == bucket and grant.bucket_created_s == created_s)
        )


ROOT = Caller(ROOT_USER, is_root=True)
NOBODY = Caller("")  # a request without a signature


@dataclass(frozen=True, slots=True)
class Permission:
    """What one caller may do with one bucket."""

    caller: Caller
    bucket: str
    owner: str
    created_s: float  # of the bucket

    def allows(self, access: Access, key: str) -> bool:
        """Whether this access to a key is allowed; or to all keys that begin with `key`, which is
        what a listing asks for. The empty text is the whole bucket.
        """
        caller = self.caller
        if not self._is_owner and not _covers(self._grants, self.bucket, access, key):
            return False
        return not caller.scope or _covers(caller.scope, self.bucket, access, key)

    def allows_some(self, access: Access | None) -> bool:
        """Whether this access, or any, is allowed to some key."""
        caller = self.caller
        if not self._is_owner and not _names(self._grants, self.bucket, access):
            return False
        return not caller.scope or _names(caller.scope, self.bucket, access)

    def check_all(self, access: Access, keys: Iterable[str]) -> None:
        """Raise `AccessDenied` for the first key that may not be accessed so.

        Nothing was looked up for it: the answer is the same whether it is stored or not.
        """
        if self.allows(access, ""):
            return
        for key in keys:
            if not self.allows(access, key):
                raise denied(access, key)

    @property
    def _grants(self) -> tuple[Grant, ...]:
        return self.caller.grants_on(self.bucket, self.created_s)

    @property
    def _is_owner(self) -> bool:
        return self.caller.is_root or self.owner == self.caller.identity


def denied(access: Access | None, key: str | None = None) -> AccessDenied:
    """The error for what was not granted."""
    what = "use" if access is None else access.value
    if key is None:
        return AccessDenied(f"this access key may not {what} this bucket, or not all of it")
    return AccessDenied(f"this access key may not {what} {key!r}", key=key)


def _covers(grants: tuple[Grant, ...], bucket: str, access: Access, key: str) -> bool:
    return any(
        grant.bucket in (ANY_BUCKET, bucket)
        and access in grant.access
        and key.startswith(grant.prefix)
        for grant in grants
    )


def _names(grants: tuple[Grant, ...], bucket: str, access: Access | None = None) -> bool:
    return any(
        grant.bucket in (ANY_BUCKET, bucket) and (access is None or access in grant.access)
        for grant in grants
    )
