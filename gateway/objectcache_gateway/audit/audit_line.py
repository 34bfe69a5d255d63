"""A request as a line of S3's server access log format: 26 fields, as AWS documents them.

Fields are separated by spaces and the line ends with a newline. Three fields are quoted and escaped
so that neither they nor the line end early; a value that is not there is `-`. What proves who asked
is left out of the Request-URI: signature, credential and session token of a presigned query.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import quote, unquote

from objectcache_gateway.request.routes import Operation

NONE = "-"
FIELD_COUNT = 26
QUOTED_LENGTH_MAX = 4096  # of the Request-URI and the two headers; what is longer is cut
URI_LENGTH_MAX = 8192
SECRET_QUERY_NAMES = frozenset(
    {
        *("x-amz-signature", "x-amz-credential", "x-amz-security-token"),
        *("x-amz-rdma-token", "signature", "awsaccesskeyid"),
    }
)

_SAFE = "/:;,.?@&=+$!~*'()<>|^`{}#%-_"  # in a field that is not quoted; brackets begin a time

_O = Operation
# The resource in REST.<method>.<resource>; AWS's words where it has the operation.
RESOURCES: dict[Operation, str] = {
    _O.LIST_BUCKETS: "SERVICE",
    _O.CREATE_BUCKET: "BUCKET",
    _O.HEAD_BUCKET: "BUCKET",
    _O.DELETE_BUCKET: "BUCKET",
    _O.GET_BUCKET_LOCATION: "LOCATION",
    _O.GET_BUCKET_VERSIONING: "VERSIONING",
    _O.GET_BUCKET_ACL: "ACL",
    _O.GET_BUCKET_REQUEST_PAYMENT: "REQUEST_PAYMENT",
    _O.GET_UNCONFIGURED: "BUCKETCONFIGURATION",
    _O.LIST_OBJECTS_V1: "BUCKET",
    _O.LIST_OBJECTS_V2: "BUCKET",
    _O.LIST_OBJECT_VERSIONS: "BUCKETVERSIONS",
    _O.DELETE_OBJECTS: "MULTI_OBJECT_DELETE",
    _O.PUT_OBJECT: "OBJECT",
    _O.GET_OBJECT: "OBJECT",
    _O.HEAD_OBJECT: "OBJECT",
    _O.DELETE_OBJECT: "OBJECT",
    _O.GET_OBJECT_ACL: "ACL",
    _O.GET_OBJECT_TAGGING: "OBJECT_TAGGING",
    _O.CREATE_UPLOAD: "UPLOADS",
    _O.UPLOAD_PART: "PART",
    _O.LIST_PARTS: "UPLOAD",
    _O.LIST_UPLOADS: "UPLOADS",
    _O.COMPLETE_UPLOAD: "UPLOAD",
    _O.ABORT_UPLOAD: "UPLOAD",
}
# AWS gives a copy a method of its own.
WHOLE_NAMES: dict[Operation, str] = {
    _O.COPY_OBJECT: "REST.COPY.OBJECT",
    _O.UPLOAD_PART_COPY: "REST.COPY.PART",
}


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """What the log says of one request; None and empty texts are written as `-`."""

    bucket_owner: str
    bucket: str
    time_unix_s: float  # when the request arrived
    remote_ip: str
    requester: str
    request_id: str
    operation: Operation | None
    method: str
    key: str
    raw_path: str  # the request's target, with its query
    http_version: str
    status: int | None
    error_code: str
    bytes_sent: int
    object_bytes: int | None
    total_s: float
    turnaround_s: float | None  # until the response's first byte
    referer: str
    user_agent: str
    version_id: str
    host_id: str
    is_signed: bool
    is_presigned: bool
    cipher_suite: str
    host: str
    tls_version: str


def audit_line(entry: AuditEntry) -> bytes:
    """The line, with its newline."""
    auth_type = NONE
    if entry.is_signed:
        auth_type = "QueryString" if entry.is_presigned else "AuthHeader"
    fields = (
        _word(entry.bucket_owner),
        _word(entry.bucket),
        log_time(entry.time_unix_s),
        _word(entry.remote_ip),
        _word(entry.requester),
        _word(entry.request_id),
        operation_name(entry.operation, entry.method),
        encoded_key(entry.key),
        request_uri(entry.method, entry.raw_path, entry.http_version),
        NONE if entry.status is None else str(entry.status),
        _word(entry.error_code),
        str(entry.bytes_sent) if entry.bytes_sent else NONE,
        NONE if entry.object_bytes is None else str(entry.object_bytes),
        _milliseconds(entry.total_s),
        NONE if entry.turnaround_s is None else _milliseconds(entry.turnaround_s),
        _quoted(without_secrets(entry.referer)),
        _quoted(without_secrets(entry.user_agent)),
        _word(entry.version_id),
        _word(entry.host_id),
        "SigV4" if entry.is_signed else NONE,
        _word(entry.cipher_suite),
        auth_type,
        _word(entry.host),
        _word(entry.tls_version),
        NONE,  # there are no access points
        NONE,  # no request needs an ACL
    )
    return " ".join(fields).encode() + b"\n"


def operation_name(operation: Operation | None, method: str) -> str:
    """AWS's name: REST.GET.OBJECT."""
    if operation is None:
        return NONE
    whole = WHOLE_NAMES.get(operation)
    return whole or f"REST.{_word(method)}.{RESOURCES.get(operation, operation.name)}"


def encoded_key(key: str) -> str:
    """The key, URL-encoded twice, as AWS does."""
    return quote(quote(key, safe="/"), safe="/") if key else NONE


def request_uri(method: str, raw_path: str, http_version: str) -> str:
    """The request's first line in quotes, without what proves who asked."""
    return _quoted(f"{method} {without_secrets(raw_path)} {http_version}", URI_LENGTH_MAX)


def without_secrets(url: str) -> str:
    """A URL without the parts of its query that prove who asks."""
    path, question_mark, query = url.partition("?")
    if not question_mark:
        return path
    kept = [part for part in query.split("&") if _query_name(part) not in SECRET_QUERY_NAMES]
    return f"{path}?{'&'.join(kept)}" if kept else path


def log_time(unix_s: float) -> str:
    """[06/Feb/2019:00:00:38 +0000]."""
    return _log_second(int(unix_s))


@lru_cache(maxsize=8)
def _log_second(unix_s: int) -> str:
    moment = time.gmtime(unix_s)
    month = "JanFebMarAprMayJunJulAugSepOctNovDec"[3 * moment.tm_mon - 3 : 3 * moment.tm_mon]
    return time.strftime(f"[%d/{month}/%Y:%H:%M:%S +0000]", moment)


def _query_name(part: str) -> str:
    """The name of a part of a query, however it is written."""
    name = part.partition("=")[0]
    return unquote(name).lower() if "%" in name else name.lower()


def _milliseconds(seconds: float) -> str:
    return str(round(max(0.0, seconds) * 1000))


def _word(text: str) -> str:
    """A field that is not quoted: no space, quote or control character."""
    return quote(text[:QUOTED_LENGTH_MAX], _SAFE, errors="surrogateescape") if text else NONE


def _quoted(text: str, length_max: int = QUOTED_LENGTH_MAX) -> str:
    """A field in quotes; quotes, backslashes and what is not printable in it are escaped."""
    if not text:
        return f'"{NONE}"'
    text = text[:length_max]
    if not (text.isascii() and text.isprintable() and '"' not in text and "\\" not in text):
        text = "".join(map(_escape, text))
    return f'"{text}"'


def _escape(character: str) -> str:
    if character in '"\\' or not (character.isascii() and character.isprintable()):
        return "".join(f"\\x{byte:02X}" for byte in character.encode("utf-8", "surrogateescape"))
    return character
