"""Headers that ask for what this server does not do. Ignoring one would be a silent lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from objectcache_gateway.access.acl import CANNED
from objectcache_gateway.request.request_head import RequestHead
from objectcache_gateway.request.routes import Operation
from objectcache_schemas.errors import AccessDenied, InvalidRequest, Unsupported

_REFUSED_PREFIXES = (
    "x-amz-server-side-encryption",
    "x-amz-copy-source-server-side-encryption",
    "x-amz-object-lock-",
    "x-amz-grant-",
    "x-amz-if-match-",  # conditional deletes by date and size
)
_REFUSED = frozenset(
    {
        "x-amz-website-redirect-location",
        "x-amz-write-offset-bytes",
        "x-amz-rename-source",
        "x-amz-mfa",
    }
)
# Headers whose named values change nothing here; any other value is refused.
_HARMLESS_VALUES: dict[str, frozenset[str]] = {
    "x-amz-object-ownership": frozenset({"bucketownerenforced"}),
    "x-amz-bucket-object-lock-enabled": frozenset({"false"}),
}
# These canned lists say what holds anyway: what a grant lets one store is the bucket's owner's.
_OWNERS_ALONE = frozenset({"private", "bucket-owner-full-control"})
_WITH_ACL = frozenset(
    {
        Operation.CREATE_BUCKET,
        Operation.PUT_BUCKET_ACL,
        Operation.PUT_OBJECT_ACL,
        Operation.PUT_OBJECT,
        Operation.COPY_OBJECT,
        Operation.CREATE_UPLOAD,
    }
)
_CONDITIONAL_DELETES = frozenset(
    {Operation.DELETE_OBJECT, Operation.DELETE_OBJECTS, Operation.DELETE_BUCKET}
)


def refuse_preflight(header: Callable[[str], str | None]) -> NoReturn:
    """Answer an OPTIONS request, which browsers send unsigned: no bucket allows other origins.

    Raises `InvalidRequest` for one that is no such question, else `AccessDenied`.
    """
    for name in ("origin", "access-control-request-method"):
        if header(name) is None:
            raise InvalidRequest(f"an OPTIONS request needs {name}", code="InvalidRequest")
    raise AccessDenied("no bucket has a CORS configuration here")


def check_headers(head: RequestHead, operation: Operation, *, acls: bool = False) -> None:
    """Raise `Unsupported` or `InvalidRequest` (InvalidStorageClass) naming the first of them.

    `acls` tells whether access control lists are honoured.
    """
    for name, value in head.headers:
        if name.startswith("x-amz-"):
            _check(name, value.strip())
        if name == "x-amz-acl":
            _check_acl(value.strip(), operation, acls=acls)
    if operation in _CONDITIONAL_DELETES:
        for name in ("if-match", "if-none-match", "if-unmodified-since"):
            if head.header(name) is not None:
                raise Unsupported(f"{name} on a delete is not implemented")


def _check_acl(value: str, operation: Operation, *, acls: bool) -> None:
    if value not in CANNED:
        raise InvalidRequest(f"x-amz-acl can only be {', '.join(CANNED)}")
    if value not in _OWNERS_ALONE and not (acls and operation in _WITH_ACL):
        raise Unsupported(f"x-amz-acl: {value} is not honoured here; see gateway.acls")


def _check(name: str, value: str) -> None:
    if name in _REFUSED or name.startswith(_REFUSED_PREFIXES):
        raise Unsupported(f"{name} is not implemented")
    if name == "x-amz-storage-class" and value != "STANDARD":
        raise InvalidRequest("x-amz-storage-class can only be STANDARD", code="InvalidStorageClass")
    harmless = _HARMLESS_VALUES.get(name)
    if harmless is not None and value.lower() not in harmless:
        raise Unsupported(f"{name} can only be {' or '.join(sorted(harmless))}")
