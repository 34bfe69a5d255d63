"""Access control lists of S3: what a bucket's or an object's list adds to what grants allow. Pure.

They count only where gateway.acls is on. The owner may do everything, whatever the list says, so
only what others may is kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from objectcache_gateway.request.routes import Operation
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.records import AclGrant, AclPermission

ALL_USERS = "http://acs.amazonaws.com/groups/global/AllUsers"
AUTHENTICATED_USERS = "http://acs.amazonaws.com/groups/global/AuthenticatedUsers"
GROUPS = (ALL_USERS, AUTHENTICATED_USERS)
ANONYMOUS = ""  # the identity of a request without a signature

_O, _P = Operation, AclPermission
_READ_ALL = AclGrant(ALL_USERS, _P.READ)
_WRITE_ALL = AclGrant(ALL_USERS, _P.WRITE)

# Names of S3's canned lists, and what they let everybody do.
CANNED: dict[str, tuple[AclGrant, ...]] = {
    "private": (),
    "public-read": (_READ_ALL,),
    "public-read-write": (_READ_ALL, _WRITE_ALL),
    "authenticated-read": (AclGrant(AUTHENTICATED_USERS, _P.READ),),
    "bucket-owner-read": (),
    "bucket-owner-full-control": (),
}
# What the bucket's owner is let do with an object of somebody else.
_BUCKET_OWNERS = {
    "bucket-owner-read": _P.READ,
    "bucket-owner-full-control": _P.FULL_CONTROL,
}


@dataclass(frozen=True, slots=True)
class AclNeed:
    """The permission of a list that an operation needs."""

    of_object: bool  # the object's list, else the bucket's
    permission: AclPermission


_BUCKET_READ, _BUCKET_WRITE = AclNeed(False, _P.READ), AclNeed(False, _P.WRITE)

# What is not here, no list allows.
NEEDED: dict[Operation, AclNeed] = {
    **dict.fromkeys(
        (
            _O.HEAD_BUCKET,
            _O.GET_BUCKET_LOCATION,
            _O.LIST_OBJECTS_V1,
            _O.LIST_OBJECTS_V2,
            _O.LIST_OBJECT_VERSIONS,
            _O.LIST_UPLOADS,
        ),
        _BUCKET_READ,
    ),
    **dict.fromkeys(
        (
            _O.PUT_OBJECT,
            _O.COPY_OBJECT,
            _O.DELETE_OBJECT,
            _O.CREATE_UPLOAD,
            _O.UPLOAD_PART,
            _O.UPLOAD_PART_COPY,
            _O.LIST_PARTS,
            _O.COMPLETE_UPLOAD,
            _O.ABORT_UPLOAD,
        ),
        _BUCKET_WRITE,
    ),
    _O.GET_BUCKET_ACL: AclNeed(False, _P.READ_ACP),
    _O.PUT_BUCKET_ACL: AclNeed(False, _P.WRITE_ACP),
    _O.GET_OBJECT: AclNeed(True, _P.READ),
    _O.HEAD_OBJECT: AclNeed(True, _P.READ),
    _O.GET_OBJECT_ACL: AclNeed(True, _P.READ_ACP),
    _O.PUT_OBJECT_ACL: AclNeed(True, _P.WRITE_ACP),
}


def allows(grants: Iterable[AclGrant], identity: str, permission: AclPermission) -> bool:
    """Whether a list lets this identity do this."""
    grantees = {ALL_USERS} if identity == ANONYMOUS else {ALL_USERS, AUTHENTICATED_USERS, identity}
    return any(
        grant.grantee in grantees and grant.permission in (permission, _P.FULL_CONTROL)
        for grant in grants
    )


def canned(name: str, owner: str, bucket_owner: str) -> tuple[AclGrant, ...]:
    """The list behind a canned name, without what the owner may anyway.

    Raises `InvalidRequest` for a name that S3 does not have.
    """
    grants = CANNED.get(name)
    if grants is None:
        raise InvalidRequest(f"x-amz-acl can only be {', '.join(CANNED)}")
    permission = _BUCKET_OWNERS.get(name)
    if permission is not None and owner != bucket_owner:
        return (*grants, AclGrant(bucket_owner, permission))
    return grants
