"""Authorization of requests: what `permissions` decides, with the buckets' owners looked up."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from objectcache_gateway.access import acl
from objectcache_gateway.access.bucket_cache import BucketCache
from objectcache_gateway.access.operation_access import NEEDED, Applies, Needed
from objectcache_gateway.access.permissions import Caller, Permission, denied
from objectcache_gateway.request.addressing import Address
from objectcache_gateway.request.routes import Operation, s3_name
from objectcache_schemas.accounts import Access
from objectcache_schemas.errors import AccessDenied, NotFound
from objectcache_schemas.messages.reads import Object, StatObject
from objectcache_schemas.records import AclPermission, BucketInfo, ObjectAttributes


@dataclass(frozen=True, slots=True)
class RequestAccess:
    """What one request may do, for its handler."""

    authorizer: Authorizer
    caller: Caller
    bucket: BucketInfo | None = None  # of an operation on one that exists
    permission: Permission | None = None  # the same

    @property
    def here(self) -> Permission:
        """What the caller may do with the request's bucket."""
        assert self.permission is not None
        return self.permission

    def sees(self, bucket: BucketInfo) -> bool:
        """Whether the caller's list of buckets holds this one."""
        return Permission(self.caller, bucket.name, bucket.owner, bucket.created_s).allows_some(
            None
        )

    async def check_elsewhere(self, access: Access, bucket: str, key: str) -> None:
        """Raise `AccessDenied` unless this key of another bucket may be accessed so."""
        needed = Needed(access, Applies.KEY)
        await self.authorizer.permit_elsewhere(self.caller, needed, Address(bucket, key))


class Authorizer:
    """Decides for every request, before anything of the bucket's keys is looked at."""

    def __init__(
        self,
        buckets: BucketCache,
        stat: Callable[[StatObject], Awaitable[Object]] | None = None,
    ) -> None:
        """With `stat`, which asks the storage server, access control lists are honoured, for what
        nothing else allows.
        """
        self._buckets = buckets
        self._stat = stat

    async def authorize(
        self, caller: Caller, operation: Operation, address: Address, query: Mapping[str, str]
    ) -> RequestAccess:
        """What the request may do. Raises `AccessDenied`, and `NotFound` (NoSuchBucket) where the
        caller may know that there is none.
        """
        needed = NEEDED.get(operation)
        if needed is None:
            if not caller.is_root:
                raise AccessDenied("only the root key may do this")
            needed = Needed(None, Applies.SERVICE)
        if needed.applies is Applies.SERVICE:
            if caller.is_anonymous and operation is not Operation.LIST_BUCKETS:  # it has none
                raise AccessDenied("the request is not signed, and this needs to know who asks")
            return RequestAccess(self, caller)
        assert address.bucket is not None
        if needed.applies is Applies.NEW_BUCKET:
            if not caller.may_create(address.bucket):
                raise AccessDenied("this access key may not make this bucket")
            return RequestAccess(self, caller)
        try:
            bucket = await self.permit(caller, needed, address, query)
        except AccessDenied:
            bucket = await self._listed(caller, operation, address, query)
        permission = Permission(caller, bucket.name, bucket.owner, bucket.created_s)
        return RequestAccess(self, caller, bucket, permission)

    async def permit_elsewhere(self, caller: Caller, needed: Needed, address: Address) -> None:
        """Raise `AccessDenied` unless the caller may access a key besides the request's own."""
        try:
            await self.permit(caller, needed, address, {})
        except AccessDenied:
            if needed.access is not Access.READ:
                raise
            await self._listed(caller, Operation.GET_OBJECT, address, {})

    async def _listed(
        self, caller: Caller, operation: Operation, address: Address, query: Mapping[str, str]
    ) -> BucketInfo:
        """The bucket, if an access control list allows the operation; raises `AccessDenied`.

        Lists open a bucket beyond those who own it, so everybody may know that there is none.
        """
        refusal = AccessDenied(f"nothing allows {s3_name(operation, query)} here")
        need = acl.NEEDED.get(operation)
        if self._stat is None or need is None or caller.scope:
            raise refusal
        assert address.bucket is not None
        bucket = await self._buckets.ask(address.bucket)
        grants = bucket.configuration.acl
        if need.of_object:
            assert address.key is not None
            listed = acl.allows(grants, caller.identity, AclPermission.READ)
            attributes = await _attributes(self._stat, address.bucket, address.key)
            if attributes is None:
                # Who may list the bucket may know that the key is not stored.
                if listed:
                    return bucket
                raise refusal
            if attributes.owner and attributes.owner == caller.identity:
                return bucket
            grants = attributes.acl
        if not acl.allows(grants, caller.identity, need.permission):
            raise refusal
        return bucket

    async def permit(
        self, caller: Caller, needed: Needed, address: Address, query: Mapping[str, str]
    ) -> BucketInfo:
        """The bucket, if the caller may do this to it. Raises as `authorize` does."""
        name = address.bucket
        assert name is not None
        if not caller.reaches(name):
            raise denied(needed.access)
        known = self._buckets.known(name)
        if known is not None and _allows(caller, known, needed, address, query):
            return known
        # Nobody is refused by what may be outdated, and a refusal takes as long as a bucket that
        # does not exist.
        try:
            asked = await self._buckets.ask(name)
        except NotFound:
            if caller.may_know(name):
                raise
            raise denied(needed.access) from None
        if not _allows(caller, asked, needed, address, query):
            raise denied(needed.access)
        return asked


async def _attributes(
    stat: Callable[[StatObject], Awaitable[Object]], bucket: str, key: str
) -> ObjectAttributes | None:
    try:
        return (await stat(StatObject(bucket=bucket, key=key))).info.attributes
    except NotFound:
        return None


def _allows(
    caller: Caller, bucket: BucketInfo, needed: Needed, address: Address, query: Mapping[str, str]
) -> bool:
    permission = Permission(caller, bucket.name, bucket.owner, bucket.created_s)
    access = needed.access
    if access is None or needed.applies in (Applies.SOME_OF_BUCKET, Applies.KEYS_OF_BODY):
        return permission.allows_some(access)
    if needed.applies is Applies.KEY:
        return permission.allows(access, address.key or "")
    if needed.applies is Applies.LISTED:
        return permission.allows(access, query.get("prefix", ""))
    return permission.allows(access, "")
