"""What responses mean: replies as values, errors as the project's classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from objectcache.channel.error_xml import parse_error_fields
from objectcache.payload import PayloadShape
from objectcache_schemas import headers
from objectcache_schemas.compute_windows import WindowSource
from objectcache_schemas.descriptor import DeliveryMode, DeliveryOutcome, Descriptor, MatchReply
from objectcache_schemas.errors import (
    ERRORS,
    DeliveryFailed,
    ErrorDetails,
    InvalidRequest,
    ObjectCacheError,
)
from objectcache_schemas.messages.sessions import GetBegun
from objectcache_schemas.operators.admin_api import Problem

T = TypeVar("T")
HeaderLookup = Callable[[str], str | None]

SERVER_NAME = "ObjectCache"  # a gateway's
NAME_CHARS_MAX = 64
ADMIN_API_TOLD = (
    "answered, but not as S3: it is ObjectCache's admin API; the S3 port is the one that "
    "`objectcache serve` prints first, by default one below this"
)
REPLY_BYTES_MAX = 1 << 20  # of everything that is not a payload
_CODE_BY_STATUS = {
    403: "AccessDenied",
    404: "NoSuchKey",
    409: "ContentConflict",
    412: "PreconditionFailed",
    501: "NotImplemented",
    503: "ServiceUnavailable",
    507: "StorageFull",
}


class PutResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a put did: chunks that are new, and chunks that were stored already."""

    stored: int
    existing: int


class SessionReply(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a session request: a ticket, good once, and where to present it."""

    v: int
    ticket: bytes
    socket_path: str
    host_id: str  # boot id of the storage server's host
    expires_s: float


class ListedServer(msgspec.Struct, frozen=True, kw_only=True):
    """One storage server. Its id begins the ids of its targets."""

    server_id: bytes
    host_id: str  # boot id of its host


class KvServersReply(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to the question which storage servers there are."""

    v: int
    servers: list[ListedServer]


@dataclass(frozen=True, slots=True)
class DeliveryHead:
    """Response headers of an accepted get."""

    mode: DeliveryMode  # never AUTO
    chunk_count: int
    request_id: str
    rate_bytes_per_s: int | None = None
    path: str | None = None  # None, here and below: the server does not say
    window_source: str | None = None
    content: str | None = None  # a digest of its objects' ETags
    directory_bytes: int = 0  # before the first layer of an encoded payload; 0: it is plain

    def shape(self, descriptor: Descriptor) -> PayloadShape:
        """Where each layer's bytes are in the payload."""
        return PayloadShape(
            descriptor.first_layer,
            descriptor.end_layer,
            self.chunk_count,
            descriptor.per_layer_chunk_bytes,
            self.mode,
        )


def parse_error(
    status: int, header: HeaderLookup, body: bytes, url: str = "the endpoint"
) -> ObjectCacheError:
    """The error that an answer with a status of 300 or more stands for; `url` is whom it is from.

    A code that this version does not know, and an answer without an S3 error in it (a proxy's page,
    say), become the class that fits the status.
    """
    fields = parse_error_fields(body)
    if not fields and header(headers.ADMIN_API) is None:
        fields = _problem_fields(body)
    code, message = fields.get("Code", ""), fields.get("Message", "")
    if code not in ERRORS:
        told = ": ".join(part for part in (code, message) if part)
        if not told and header(headers.ADMIN_API) is not None:
            return InvalidRequest(f"{url} {ADMIN_API_TOLD}")
        message = f"HTTP status {status}"
        message += f", {told}" if told else f" without an S3 error: {_who_answered(header, url)}"
        code = _code_by_status(status)
    error = ERRORS[code].error_class(message, code=code)
    error.details = ErrorDetails(
        missing_index=_whole_number(fields.get("MissingIndex")),
        key=fields.get("Key"),
        layer=_whole_number(fields.get("Layer")),
        retry_after_s=_number(header("retry-after")),
    )
    return error


def _problem_fields(body: bytes) -> dict[str, str]:
    """The same of an answer in JSON, as the dispatch service's are."""
    try:
        problem = msgspec.json.decode(body, type=Problem)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}
    return {"Code": problem.code, "Message": problem.message}


def _who_answered(header: HeaderLookup, url: str) -> str:
    """What is known of whoever sends no S3 errors: a proxy, or a server of another kind."""
    server = (header("server") or "").strip()[:NAME_CHARS_MAX]
    if server == SERVER_NAME:
        return f"{url} is a gateway of ObjectCache, and answers so where no body may follow"
    kind = (header("content-type") or "nothing").strip()[:NAME_CHARS_MAX]
    named = f"a server that calls itself {server!r}" if server else "a server that has no name"
    return f"{url} answered, but not as S3: {named} sent {kind}; is the endpoint right?"


def parse_reply(body: bytes, kind: type[T], what: str) -> T:
    """Decode a msgpack reply; raises `ObjectCacheError` where it is none."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ObjectCacheError(f"the server's answer to {what} makes no sense: {error}") from error


def parse_match(body: bytes, chunk_count: int) -> int:
    """Number of leading chunks that are stored."""
    matched = parse_reply(body, MatchReply, "a match").matched
    if not 0 <= matched <= chunk_count:
        raise ObjectCacheError(f"the server matched {matched} of {chunk_count} chunks")
    return matched


def parse_delivery_head(
    header: HeaderLookup, descriptor: Descriptor, slice_bytes: int | None = None
) -> DeliveryHead:
    """Headers of an accepted get; raises `ObjectCacheError` where they contradict the request.

    Slices land in `slice_bytes`, which are the descriptor's where nobody dequantises on the way.
    """
    chunk_count = _whole_number(header(headers.CHUNK_COUNT))
    layer_bytes = _whole_number(header(headers.LAYER_BYTES))
    directory_bytes = _whole_number(header(headers.DIRECTORY_BYTES)) or 0
    mode, chunk_count = _agreed(header(headers.DELIVERY), chunk_count, descriptor)
    _check_directory(directory_bytes, mode, chunk_count, descriptor)
    slices_bytes = chunk_count * (slice_bytes or descriptor.per_layer_chunk_bytes)
    if not directory_bytes and layer_bytes not in (None, slices_bytes):
        raise ObjectCacheError(
            f"the server sent {headers.LAYER_BYTES}: {layer_bytes} for {chunk_count} chunks"
        )
    request_id = header(headers.REQUEST_ID) or ""
    return DeliveryHead(
        mode,
        chunk_count,
        request_id,
        _whole_number(header(headers.RATE)),
        header(headers.PATH),
        header(headers.WINDOW_SOURCE),
        header(headers.CONTENT),
        directory_bytes,
    )


def head_of_session_get(begun: GetBegun, descriptor: Descriptor, request_id: str) -> DeliveryHead:
    """The same of a get that a session has asked for."""
    mode, chunk_count = _agreed(begun.delivery, begun.chunk_count, descriptor)
    _check_directory(begun.directory_bytes, mode, chunk_count, descriptor)
    source = begun.window_source
    return DeliveryHead(
        mode,
        chunk_count,
        request_id,
        begun.rate_bytes_per_s,
        begun.path or None,
        None if source == WindowSource.NONE.value else source,
        begun.content or None,
        begun.directory_bytes,
    )


def _check_directory(
    directory_bytes: int, mode: DeliveryMode, chunk_count: int, descriptor: Descriptor
) -> None:
    """An encoded payload is one that was asked for, and is shorter than the plain one."""
    if directory_bytes == 0:
        return
    is_asked = bool(descriptor.encodings) and mode is DeliveryMode.LAYERWISE
    if not is_asked or not 0 < directory_bytes < descriptor.payload_bytes(chunk_count):
        raise ObjectCacheError(f"the server sent {headers.DIRECTORY_BYTES}: {directory_bytes}")


def _agreed(
    mode: str | None, chunk_count: int | None, descriptor: Descriptor
) -> tuple[DeliveryMode, int]:
    """Mode and chunks, where they do not contradict what was asked."""
    if mode not in ("layerwise", "chunkwise"):
        raise ObjectCacheError(f"the server sent {headers.DELIVERY}: {mode}")
    if chunk_count is None or not 0 <= chunk_count <= len(descriptor.chunk_keys):
        raise ObjectCacheError(f"the server sent {headers.CHUNK_COUNT}: {chunk_count}")
    return DeliveryMode(mode), chunk_count


def parse_outcome(body: bytes) -> DeliveryFailed | None:
    """How a delivery into a target ended; None is success."""
    outcome = parse_reply(body, DeliveryOutcome, "a delivery")
    if outcome.error_code is None:
        return None
    return DeliveryFailed(
        f"{outcome.error_code}: {outcome.error_message or 'no message'}",
        layer=outcome.failed_layer,
    )


def _code_by_status(status: int) -> str:
    if status in _CODE_BY_STATUS:
        return _CODE_BY_STATUS[status]
    return "InvalidRequest" if status < 500 else "InternalError"


def _whole_number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text is not None else None
    except ValueError:  # Retry-After may be a date, which no server of ours sends
        return None
