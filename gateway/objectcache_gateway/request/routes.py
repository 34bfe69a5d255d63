"""Which operation a request asks for. What is not listed here answers NotImplemented."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NoReturn

from objectcache_gateway.request.addressing import Address
from objectcache_schemas import headers
from objectcache_schemas.errors import InvalidRequest, NotFound, Unsupported


class Operation(enum.Enum):
    """S3's names for what is served, and the extension's."""

    LIST_BUCKETS = "ListBuckets"
    CREATE_BUCKET = "CreateBucket"
    HEAD_BUCKET = "HeadBucket"
    DELETE_BUCKET = "DeleteBucket"
    GET_BUCKET_LOCATION = "GetBucketLocation"
    GET_BUCKET_VERSIONING = "GetBucketVersioning"
    GET_BUCKET_ACL = "GetBucketAcl"
    PUT_BUCKET_ACL = "PutBucketAcl"
    GET_BUCKET_REQUEST_PAYMENT = "GetBucketRequestPayment"
    GET_BUCKET_TAGGING = "GetBucketTagging"
    PUT_BUCKET_TAGGING = "PutBucketTagging"
    DELETE_BUCKET_TAGGING = "DeleteBucketTagging"
    GET_BUCKET_LIFECYCLE = "GetBucketLifecycleConfiguration"
    PUT_BUCKET_LIFECYCLE = "PutBucketLifecycleConfiguration"
    DELETE_BUCKET_LIFECYCLE = "DeleteBucketLifecycle"
    GET_UNCONFIGURED = "GetUnconfigured"
    LIST_OBJECTS_V1 = "ListObjects"
    LIST_OBJECTS_V2 = "ListObjectsV2"
    LIST_OBJECT_VERSIONS = "ListObjectVersions"
    DELETE_OBJECTS = "DeleteObjects"
    PUT_OBJECT = "PutObject"
    COPY_OBJECT = "CopyObject"
    GET_OBJECT = "GetObject"
    HEAD_OBJECT = "HeadObject"
    DELETE_OBJECT = "DeleteObject"
    GET_OBJECT_ACL = "GetObjectAcl"
    PUT_OBJECT_ACL = "PutObjectAcl"
    GET_OBJECT_ATTRIBUTES = "GetObjectAttributes"
    GET_OBJECT_TAGGING = "GetObjectTagging"
    PUT_OBJECT_TAGGING = "PutObjectTagging"
    DELETE_OBJECT_TAGGING = "DeleteObjectTagging"
    CREATE_UPLOAD = "CreateMultipartUpload"
    UPLOAD_PART = "UploadPart"
    UPLOAD_PART_COPY = "UploadPartCopy"
    LIST_PARTS = "ListParts"
    LIST_UPLOADS = "ListMultipartUploads"
    COMPLETE_UPLOAD = "CompleteMultipartUpload"
    ABORT_UPLOAD = "AbortMultipartUpload"
    KV_GET = "KvGet"
    KV_GET_BY_KEY = "KvGetByKey"
    KV_MATCH = "KvMatch"
    KV_PUT = "KvPut"
    PUT_KV_LAYOUT = "PutKvLayout"
    GET_KV_LAYOUT = "GetKvLayout"
    CREATE_SESSION = "KvSession"
    JOIN_SESSION = "JoinKvSession"
    LIST_KV_SERVERS = "KvServers"


# What S3 answers to a GET of a configuration that a bucket or object does not have.
UNCONFIGURED: dict[str, str] = {
    "policy": "NoSuchBucketPolicy",
    "cors": "NoSuchCORSConfiguration",
    "encryption": "ServerSideEncryptionConfigurationNotFoundError",
    "object-lock": "ObjectLockConfigurationNotFoundError",
    "website": "NoSuchWebsiteConfiguration",
    "replication": "ReplicationConfigurationNotFoundError",
    "ownershipControls": "OwnershipControlsNotFoundError",
    "publicAccessBlock": "NoSuchPublicAccessBlockConfiguration",
}
_UNCONFIGURED_NAMES = {
    "policy": "GetBucketPolicy",
    "cors": "GetBucketCors",
    "encryption": "GetBucketEncryption",
    "object-lock": "GetObjectLockConfiguration",
    "website": "GetBucketWebsite",
    "replication": "GetBucketReplication",
    "ownershipControls": "GetBucketOwnershipControls",
    "publicAccessBlock": "GetPublicAccessBlock",
}

_O = Operation
_SERVICE: dict[tuple[str, str], Operation] = {
    ("GET", ""): _O.LIST_BUCKETS,
    ("POST", headers.KV_SESSION): _O.CREATE_SESSION,
    ("GET", headers.KV_SESSION): _O.JOIN_SESSION,
    ("GET", headers.KV_SERVERS): _O.LIST_KV_SERVERS,
}
_BUCKET: dict[tuple[str, str], Operation] = {
    ("PUT", ""): _O.CREATE_BUCKET,
    ("HEAD", ""): _O.HEAD_BUCKET,
    ("DELETE", ""): _O.DELETE_BUCKET,
    ("GET", ""): _O.LIST_OBJECTS_V1,
    ("GET", "list-type"): _O.LIST_OBJECTS_V2,
    ("GET", "versions"): _O.LIST_OBJECT_VERSIONS,
    ("GET", "uploads"): _O.LIST_UPLOADS,
    ("GET", "location"): _O.GET_BUCKET_LOCATION,
    ("GET", "versioning"): _O.GET_BUCKET_VERSIONING,
    ("GET", "acl"): _O.GET_BUCKET_ACL,
    ("PUT", "acl"): _O.PUT_BUCKET_ACL,
    ("GET", "requestPayment"): _O.GET_BUCKET_REQUEST_PAYMENT,
    ("GET", "tagging"): _O.GET_BUCKET_TAGGING,
    ("PUT", "tagging"): _O.PUT_BUCKET_TAGGING,
    ("DELETE", "tagging"): _O.DELETE_BUCKET_TAGGING,
    ("GET", "lifecycle"): _O.GET_BUCKET_LIFECYCLE,
    ("PUT", "lifecycle"): _O.PUT_BUCKET_LIFECYCLE,
    ("DELETE", "lifecycle"): _O.DELETE_BUCKET_LIFECYCLE,
    ("POST", "delete"): _O.DELETE_OBJECTS,
    ("POST", headers.KV_GET): _O.KV_GET,
    ("POST", headers.KV_MATCH): _O.KV_MATCH,
    ("POST", headers.KV_PUT): _O.KV_PUT,
    ("PUT", headers.KV_LAYOUT): _O.PUT_KV_LAYOUT,
    ("GET", headers.KV_LAYOUT): _O.GET_KV_LAYOUT,
} | {("GET", name): _O.GET_UNCONFIGURED for name in UNCONFIGURED}
_OBJECT: dict[tuple[str, str], Operation] = {
    ("PUT", ""): _O.PUT_OBJECT,
    ("PUT", "uploadId"): _O.UPLOAD_PART,
    ("GET", ""): _O.GET_OBJECT,
    ("GET", "uploadId"): _O.LIST_PARTS,
    ("GET", "acl"): _O.GET_OBJECT_ACL,
    ("PUT", "acl"): _O.PUT_OBJECT_ACL,
    ("GET", "attributes"): _O.GET_OBJECT_ATTRIBUTES,
    ("GET", "tagging"): _O.GET_OBJECT_TAGGING,
    ("PUT", "tagging"): _O.PUT_OBJECT_TAGGING,
    ("DELETE", "tagging"): _O.DELETE_OBJECT_TAGGING,
    ("HEAD", ""): _O.HEAD_OBJECT,
    ("DELETE", ""): _O.DELETE_OBJECT,
    ("DELETE", "uploadId"): _O.ABORT_UPLOAD,
    ("POST", "uploads"): _O.CREATE_UPLOAD,
    ("POST", "uploadId"): _O.COMPLETE_UPLOAD,
}

_RESPONSE_OVERRIDES = frozenset(
    f"response-{name}"
    for name in (
        "cache-control",
        "content-disposition",
        "content-encoding",
        "content-language",
        "content-type",
        "expires",
    )
)
_SIGNATURE = frozenset(
    f"x-amz-{name}"
    for name in (
        "algorithm",
        "content-sha256",
        "credential",
        "date",
        "expires",
        "security-token",
        "signature",
        "signedheaders",
        "user-agent",
    )
)
# Query names that modify an operation; a name that is neither here nor the operation's own
# subresource could change what the client means, so it is refused.
_ANYWHERE = _SIGNATURE | {"x-id", "x-amz-sdk-checksum-algorithm"}
_LISTING = {"prefix", "delimiter", "encoding-type", "max-keys", "allow-unordered"}
_MODIFIERS: dict[Operation, frozenset[str]] = {
    _O.LIST_BUCKETS: frozenset({"prefix", "max-buckets", "continuation-token", "bucket-region"}),
    _O.LIST_OBJECTS_V1: frozenset(_LISTING | {"marker"}),
    _O.LIST_OBJECTS_V2: frozenset(
        _LISTING | {"list-type", "continuation-token", "start-after", "fetch-owner"}
    ),
    _O.LIST_OBJECT_VERSIONS: frozenset(_LISTING | {"key-marker", "version-id-marker"}),
    _O.LIST_UPLOADS: frozenset(
        {"prefix", "delimiter", "encoding-type", "key-marker", "upload-id-marker", "max-uploads"}
    ),
    _O.GET_OBJECT: _RESPONSE_OVERRIDES | {"partNumber", "versionId", "x-amz-checksum-mode"},
    _O.HEAD_OBJECT: _RESPONSE_OVERRIDES | {"partNumber", "versionId", "x-amz-checksum-mode"},
    _O.GET_OBJECT_ACL: frozenset({"versionId"}),
    _O.PUT_OBJECT_ACL: frozenset({"versionId"}),
    _O.GET_OBJECT_ATTRIBUTES: frozenset({"versionId"}),
    _O.GET_OBJECT_TAGGING: frozenset({"versionId"}),
    _O.PUT_OBJECT_TAGGING: frozenset({"versionId"}),
    _O.DELETE_OBJECT_TAGGING: frozenset({"versionId"}),
    _O.DELETE_OBJECT: frozenset({"versionId"}),
    _O.UPLOAD_PART: frozenset({"partNumber"}),
    _O.UPLOAD_PART_COPY: frozenset({"partNumber"}),
    _O.LIST_PARTS: frozenset({"max-parts", "part-number-marker", "encoding-type"}),
}
_METHODS = frozenset({"GET", "HEAD", "PUT", "POST", "DELETE", "OPTIONS"})


def route(
    method: str, address: Address, query: Mapping[str, str], header_names: frozenset[str]
) -> Operation:
    """The operation of a request.

    `query` holds the decoded query, `header_names` the lowercase names of the headers. Raises
    `Unsupported` for what S3 has and this server does not, `InvalidRequest` (MethodNotAllowed) for
    a method that S3 does not have.
    """
    table = _SERVICE if address.bucket is None else _OBJECT if address.key else _BUCKET
    subresources = [name for name in query if (method, name) in table]
    if len(subresources) > 1:
        _refuse(f"the query names {' and '.join(sorted(subresources))}")
    subresource = subresources[0] if subresources else ""
    operation = table.get((method, subresource))
    if operation is None:
        _refuse_method(method)
    operation = _by_headers(operation, header_names)
    allowed = _MODIFIERS.get(operation, frozenset[str]())
    for name in query:
        if name != subresource and name not in allowed and name.lower() not in _ANYWHERE:
            _refuse(f"{method} with the query {name!r}")
    return operation


def s3_name(operation: Operation, query: Mapping[str, str]) -> str:
    """What S3 calls the operation."""
    if operation is not _O.GET_UNCONFIGURED:
        return str(operation.value)
    return next(_UNCONFIGURED_NAMES[name] for name in query if name in UNCONFIGURED)


def raise_unconfigured(query: Mapping[str, str]) -> NoReturn:
    """Raise the `NotFound` of the configuration that the query asks for."""
    name = next(name for name in query if name in UNCONFIGURED)
    raise NotFound(f"the bucket has no {name} configuration", code=UNCONFIGURED[name])


def _by_headers(operation: Operation, header_names: frozenset[str]) -> Operation:
    if operation is _O.PUT_OBJECT and "x-amz-copy-source" in header_names:
        return _O.COPY_OBJECT
    if operation is _O.UPLOAD_PART and "x-amz-copy-source" in header_names:
        return _O.UPLOAD_PART_COPY
    if operation is _O.GET_OBJECT and headers.DESCRIPTOR in header_names:
        return _O.KV_GET_BY_KEY
    return operation


def _refuse_method(method: str) -> NoReturn:
    if method not in _METHODS:
        raise InvalidRequest("the resource does not take this method", code="MethodNotAllowed")
    _refuse(f"this {method} request")


def _refuse(what: str) -> NoReturn:
    raise Unsupported(f"{what} is not implemented")
