"""Every error that crosses a wire, and the one table that says what each means.

A class exists where a caller would react differently; a code says what happened. The table maps a
code to its class, HTTP status, who is at fault and whether to try again. docs/errors.md is written
from it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec


class Retry(enum.Enum):
    """What a caller may do after an error."""

    NEVER = "never"  # the same request fails the same way
    SAME = "same"  # the same request may succeed later
    ELSEWHERE = "elsewhere"  # recompute, or ask another server


class Fault(enum.Enum):
    """Who has to change something for the request to succeed."""

    CALLER = "caller"
    SERVER = "server"
    NOBODY = "nobody"  # an ordinary outcome, such as a cache miss


class ErrorDetails(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Facts that a program may act on, beside the message for people."""

    missing_index: int | None = None  # first chunk of a descriptor that is not stored
    key: str | None = None
    layer: int | None = None  # first layer that did not arrive
    retry_after_s: float | None = None
    quota: str | None = None  # the field of `records.Quota` that refused


class WireError(msgspec.Struct, frozen=True, tag_field="op", tag="error"):
    """An error as it travels between processes."""

    code: str
    message: str
    details: ErrorDetails = ErrorDetails()


class ObjectCacheError(Exception):
    """Base of all errors that ObjectCache raises.

    `code` is a row of `ERRORS`; `str(error)` names the field, the limit or the remedy.
    """

    default_code: ClassVar[str] = "InternalError"

    def __init__(self, message: str, *, code: str | None = None, **details: Any) -> None:
        super().__init__(message)
        self.code = code or self.default_code
        self.message = message
        self.details = ErrorDetails(**details)
        assert isinstance(self, ERRORS[self.code].error_class), (type(self), self.code)

    @property
    def row(self) -> ErrorRow:
        """The table's row for this error."""
        return ERRORS[self.code]

    def to_wire(self) -> WireError:
        """The error as a message between processes."""
        return WireError(self.code, self.message, self.details)

    @staticmethod
    def from_wire(wire: WireError) -> ObjectCacheError:
        """Rebuild the error; a code this version does not know becomes an `InternalError`."""
        row = ERRORS.get(wire.code)
        if row is None:
            return ObjectCacheError(f"{wire.code}: {wire.message}")
        error = row.error_class(wire.message, code=wire.code)
        error.details = wire.details
        return error

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.code}: {self.message}>"


class InvalidRequest(ObjectCacheError):
    """The request is malformed or over a limit; sending it again cannot help."""

    default_code = "InvalidArgument"


class AccessDenied(ObjectCacheError):
    """Who you are could not be established, or you may not do this."""

    default_code = "AccessDenied"


class NotFound(ObjectCacheError):
    """What the request names is not stored. A cache miss is this."""

    default_code = "NoSuchKey"


class Conflict(ObjectCacheError):
    """The request contradicts what is stored; nothing was changed."""

    default_code = "ContentConflict"


class PreconditionFailed(ObjectCacheError):
    """A condition that the request carried does not hold."""

    default_code = "PreconditionFailed"


class Busy(ObjectCacheError):
    """The server is at a limit; the same request may succeed after `details.retry_after_s`."""

    default_code = "SlowDown"


class Unavailable(ObjectCacheError):
    """The server, or a part of it, cannot be reached."""

    default_code = "ServiceUnavailable"


class StorageFull(ObjectCacheError):
    """There is no room for the bytes; reads keep working."""

    default_code = "StorageFull"


class DamagedData(ObjectCacheError):
    """Stored bytes failed their checksum. The object is dropped and reads as missing from now on."""

    default_code = "DamagedData"


class DeliveryFailed(ObjectCacheError):
    """A delivery ended before its last layer; `details.layer` is the first that is not complete."""

    default_code = "DeliveryFailed"


class Unsupported(ObjectCacheError):
    """The server does not implement this."""

    default_code = "NotImplemented"


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """What one error code means."""

    code: str  # the code on the wire, an S3 code where S3 has one
    error_class: type[ObjectCacheError]
    http_status: int
    fault: Fault
    retry: Retry
    meaning: str


def _table(
    *rows: tuple[str, type[ObjectCacheError], int, Fault, Retry, str],
) -> dict[str, ErrorRow]:
    return {row[0]: ErrorRow(*row) for row in rows}


_C, _S, _N = Fault.CALLER, Fault.SERVER, Fault.NOBODY
_NEVER, _SAME, _ELSEWHERE = Retry.NEVER, Retry.SAME, Retry.ELSEWHERE

# fmt: off
ERRORS: dict[str, ErrorRow] = _table(
    ("InvalidArgument", InvalidRequest, 400, _C, _NEVER, "a field has a value that is not allowed; the message names it"),
    ("InvalidRequest", InvalidRequest, 400, _C, _NEVER, "the parts of the request do not go together"),
    ("InvalidDescriptor", InvalidRequest, 400, _C, _NEVER, "a descriptor field is missing, has the wrong type or is over its limit; the message names it"),
    ("DescriptorMismatch", InvalidRequest, 400, _C, _NEVER, "a stored object's size is not num_layers x per_layer_chunk_bytes, or the bucket's layout differs"),
    ("DescriptorTooLarge", InvalidRequest, 413, _C, _NEVER, "the descriptor is over limits.descriptor_bytes_max or limits.chunks_per_descriptor_max"),
    ("InvalidBucketName", InvalidRequest, 400, _C, _NEVER, "the bucket name breaks S3's naming rules"),
    ("InvalidDigest", InvalidRequest, 400, _C, _NEVER, "a checksum header is not valid"),
    ("BadDigest", InvalidRequest, 400, _C, _NEVER, "the body does not match the checksum that was sent with it"),
    ("XAmzContentSHA256Mismatch", InvalidRequest, 400, _C, _NEVER, "the body does not match x-amz-content-sha256"),
    ("InvalidPart", InvalidRequest, 400, _C, _NEVER, "a listed part is not stored, or its ETag differs"),
    ("InvalidRDMAToken", InvalidRequest, 400, _C, _NEVER, "x-amz-rdma-token is not a descriptor of cuObject or hipObject, or names no memory"),
    ("InvalidTag", InvalidRequest, 400, _C, _NEVER, "a tag is over a limit, named twice, or holds a character that S3 does not allow"),
    ("InvalidPartOrder", InvalidRequest, 400, _C, _NEVER, "the parts are not in ascending order"),
    ("EntityTooSmall", InvalidRequest, 400, _C, _NEVER, "a part other than the last is below 5 MiB"),
    ("EntityTooLarge", InvalidRequest, 400, _C, _NEVER, "the body is over limits.object_bytes_max, or over what its path takes"),
    ("KeyTooLongError", InvalidRequest, 400, _C, _NEVER, "the key is over 1,024 bytes of UTF-8"),
    ("MetadataTooLarge", InvalidRequest, 400, _C, _NEVER, "the user metadata is over 2 KiB"),
    ("MalformedXML", InvalidRequest, 400, _C, _NEVER, "the XML body is not what the operation takes"),
    ("IncompleteBody", InvalidRequest, 400, _C, _NEVER, "the body ended before its announced length"),
    ("MalformedTrailerError", InvalidRequest, 400, _C, _NEVER, "the trailers of an aws-chunked body are not those that x-amz-trailer announced"),
    ("InvalidChunkSizeError", InvalidRequest, 403, _C, _NEVER, "a chunk of an aws-chunked body other than the last is below 8 KiB"),
    ("InvalidRange", InvalidRequest, 416, _C, _NEVER, "the range lies outside the object"),
    ("InvalidStorageClass", InvalidRequest, 400, _C, _NEVER, "only STANDARD is stored"),
    ("IllegalLocationConstraintException", InvalidRequest, 400, _C, _NEVER, "the location constraint is not this server's region"),
    ("MissingContentLength", InvalidRequest, 411, _C, _NEVER, "a body needs Content-Length, or chunked transfer with x-amz-decoded-content-length"),
    ("MethodNotAllowed", InvalidRequest, 405, _C, _NEVER, "the resource does not take this method"),
    ("RequestTimeout", InvalidRequest, 400, _C, _SAME, "the body stopped arriving"),
    ("AuthorizationHeaderMalformed", InvalidRequest, 400, _C, _NEVER, "the Authorization header cannot be read"),
    ("AuthorizationQueryParametersError", InvalidRequest, 400, _C, _NEVER, "the presigned query cannot be read"),
    ("AccessDenied", AccessDenied, 403, _C, _NEVER, "the request is anonymous, expired, or not allowed"),
    ("InvalidAccessKeyId", AccessDenied, 403, _C, _NEVER, "the access key is not known, or not in force: the message says why to whoever has its secret"),
    ("InvalidToken", AccessDenied, 400, _C, _NEVER, "the request carries a session token, and temporary credentials are not supported"),
    ("SignatureDoesNotMatch", AccessDenied, 403, _C, _NEVER, "the signature is not that of this request under this secret"),
    ("RequestTimeTooSkewed", AccessDenied, 403, _C, _NEVER, "the clocks differ by more than 15 minutes"),
    ("Unauthorized", AccessDenied, 401, _C, _NEVER, "the admin API needs a token, or a request that the root key signed; the dispatch service needs its token"),
    ("NoSuchBucket", NotFound, 404, _C, _NEVER, "the bucket does not exist"),
    ("NoSuchKey", NotFound, 404, _N, _ELSEWHERE, "the object, or a chunk of the descriptor, is not stored"),
    ("NoSuchUpload", NotFound, 404, _C, _NEVER, "the multipart upload is not open"),
    ("NoSuchEntity", NotFound, 404, _C, _NEVER, "there is no user, access key, token, node, reservation or path of this name"),
    ("NoSuchKvLayout", NotFound, 404, _C, _NEVER, "the bucket has no KV layout"),
    ("NoSuchComputeProfile", NotFound, 404, _C, _NEVER, "the descriptor's model has no compute profile on the storage server; the message says how to add one"),
    ("NoSuchTarget", NotFound, 404, _C, _NEVER, "the target is not registered by this identity, or its session has ended"),
    ("NoSuchBucketPolicy", NotFound, 404, _N, _NEVER, "the bucket has no policy configuration; this server keeps none"),
    ("NoSuchCORSConfiguration", NotFound, 404, _N, _NEVER, "the bucket has no CORS configuration; this server keeps none"),
    ("NoSuchLifecycleConfiguration", NotFound, 404, _N, _NEVER, "the bucket has no lifecycle rules"),
    ("NoSuchTagSet", NotFound, 404, _N, _NEVER, "the bucket has no tags"),
    ("ServerSideEncryptionConfigurationNotFoundError", NotFound, 404, _N, _NEVER, "the bucket has no encryption configuration; this server keeps none"),
    ("ObjectLockConfigurationNotFoundError", NotFound, 404, _N, _NEVER, "the bucket has no object lock configuration; this server keeps none"),
    ("NoSuchWebsiteConfiguration", NotFound, 404, _N, _NEVER, "the bucket has no website configuration; this server keeps none"),
    ("ReplicationConfigurationNotFoundError", NotFound, 404, _N, _NEVER, "the bucket has no replication configuration; this server keeps none"),
    ("OwnershipControlsNotFoundError", NotFound, 404, _N, _NEVER, "the bucket has no ownership controls configuration; this server keeps none"),
    ("NoSuchPublicAccessBlockConfiguration", NotFound, 404, _N, _NEVER, "the bucket has no public access block configuration; this server keeps none"),
    ("BucketAlreadyOwnedByYou", Conflict, 409, _C, _NEVER, "the bucket exists already, and is yours"),
    ("BucketAlreadyExists", Conflict, 409, _C, _NEVER, "the bucket exists already, and is another's"),
    ("EntityAlreadyExists", Conflict, 409, _C, _NEVER, "a user, access key, token, node or reservation of that name exists already"),
    ("DeleteConflict", Conflict, 409, _C, _NEVER, "the user still owns buckets; the message names them"),
    ("LimitExceeded", Conflict, 409, _C, _NEVER, "there may be no more of these; the message names the limit"),
    ("TooManyBuckets", InvalidRequest, 400, _C, _NEVER, "the user owns storage.buckets_per_user_max buckets; delete one, or raise it"),
    ("OperationAborted", Conflict, 409, _C, _SAME, "somebody else is changing the same thing; try again"),
    ("BucketNotEmpty", Conflict, 409, _C, _NEVER, "the bucket still holds objects or open uploads"),
    ("ContentConflict", Conflict, 409, _C, _NEVER, "other bytes are stored under an immutable key"),
    ("KvLayoutConflict", Conflict, 409, _C, _NEVER, "the bucket has another KV layout, or holds objects that do not fit it"),
    ("PreconditionFailed", PreconditionFailed, 412, _C, _NEVER, "a condition of the request does not hold"),
    ("SlowDown", Busy, 503, _S, _SAME, "the server is at one of its limits; wait for Retry-After"),
    ("ServiceUnavailable", Unavailable, 503, _S, _ELSEWHERE, "the storage server cannot be reached, or the server is draining"),
    ("Draining", Unavailable, 503, _S, _ELSEWHERE, "the storage server takes no more work, because it stops or its operator drains it; nothing was done"),
    ("StorageFull", StorageFull, 507, _S, _ELSEWHERE, "the device has no room left"),
    ("QuotaExceeded", StorageFull, 403, _C, _NEVER, "the quota of the bucket or of its owner leaves no room; delete objects or raise it"),
    ("DamagedData", DamagedData, 500, _S, _ELSEWHERE, "stored bytes failed their checksum; the object now reads as missing"),
    ("DeliveryFailed", DeliveryFailed, 500, _S, _ELSEWHERE, "the delivery ended before its last layer"),
    ("RDMANotSupported", Unsupported, 501, _N, _NEVER, "no transfer by the RDMA that the request asks for; send the bytes in its body. A PUT with x-amz-rdma-token gets this with status 200 and x-amz-rdma-reply: 501, and nothing is stored"),
    ("NotImplemented", Unsupported, 501, _C, _NEVER, "the operation or a header of it is not implemented"),
    ("InternalError", ObjectCacheError, 500, _S, _SAME, "a defect; the log line with the same request id says more"),
)
# fmt: on
