"""The requests that the client makes, as values: what is asked, before signing and sending."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from urllib.parse import quote
from xml.sax.saxutils import escape

import msgspec

from objectcache_schemas import headers
from objectcache_schemas.delivery_paths import DeliveryPath
from objectcache_schemas.descriptor import DESCRIPTOR_VERSION, Descriptor, MatchRequest
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.layout import KvLayout
from objectcache_schemas.messages.frames import LENGTH

# Longer descriptors travel as a POST body. Far below the server's own limit, so that proxies with
# the usual 8 KiB header lines pass it.
DESCRIPTOR_HEADER_BYTES_MAX = 4096
_DEFAULT_REGION = "us-east-1"  # S3 takes no location constraint for this one
_MSGPACK_BODY = {"content-type": headers.MSGPACK}


@dataclass(frozen=True, slots=True)
class GatewayRequest:
    """One request. `path` and `query` are percent-encoded; `body` is sent part after part.

    `sign_body` says that the body's digest is signed whatever the link; otherwise only where the
    link does not protect bodies. `repeatable` requests may reach the server twice. `begun_s`, by
    time.monotonic, is when the caller asked; the request then says how long it took to be sent.
    """

    method: str
    path: str
    query: str = ""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    body: Sequence[bytes | memoryview] = ()
    sign_body: bool = True
    repeatable: bool = True
    begun_s: float | None = None

    def sent_at(self, now_s: float) -> GatewayRequest:
        """The request as it is sent now."""
        if self.begun_s is None:
            return self
        seconds = f"{max(0.0, now_s - self.begun_s):.6f}"
        return replace(self, headers={**self.headers, headers.CLIENT_SECONDS: seconds})

    @property
    def target(self) -> str:
        """The request target of the HTTP request line."""
        return f"{self.path}?{self.query}" if self.query else self.path

    @property
    def body_bytes(self) -> int:
        """Length of the whole body."""
        return sum([len(part) for part in self.body])


def create_bucket(bucket: str, region: str) -> GatewayRequest:
    """CreateBucket. Not repeatable: the second answer would be a conflict."""
    body: tuple[bytes, ...] = ()
    if region != _DEFAULT_REGION:
        xml = (
            '<CreateBucketConfiguration xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<LocationConstraint>{escape(region)}</LocationConstraint>"
            "</CreateBucketConfiguration>"
        )
        body = (xml.encode(),)
    return GatewayRequest("PUT", _path(bucket), body=body, repeatable=False)


def delete_bucket(bucket: str) -> GatewayRequest:
    """DeleteBucket."""
    return GatewayRequest("DELETE", _path(bucket), repeatable=False)


def put_layout(bucket: str, layout: KvLayout) -> GatewayRequest:
    """Give a bucket its KV layout."""
    return GatewayRequest(
        "PUT", _path(bucket), headers.KV_LAYOUT, _MSGPACK_BODY, (layout.to_bytes(),)
    )


def get_layout(bucket: str) -> GatewayRequest:
    """Ask for a bucket's KV layout."""
    return GatewayRequest("GET", _path(bucket), headers.KV_LAYOUT)


def match(bucket: str, chunk_keys: Sequence[str]) -> GatewayRequest:
    """Ask how long a prefix is stored."""
    wire = MatchRequest(v=DESCRIPTOR_VERSION, chunk_keys=tuple(chunk_keys))
    body = _encoded(wire, chunk_keys)
    return GatewayRequest("POST", _path(bucket), headers.KV_MATCH, _MSGPACK_BODY, (body,))


def get(
    bucket: str,
    descriptor: Descriptor,
    asked: Mapping[str, str] | None = None,
    begun_s: float | None = None,
) -> GatewayRequest:
    """Begin a delivery: in the header form where the descriptor is short, else by POST.

    `asked` are more headers (`get_headers`). With a target it is not repeatable: two deliveries
    would write to the same memory.
    """
    repeatable = descriptor.rdma_target is None
    data = descriptor_bytes(descriptor)
    if len(data) * 4 <= DESCRIPTOR_HEADER_BYTES_MAX * 3:
        extra = {headers.DESCRIPTOR: descriptor.to_header(), **(asked or {})}
        path = _path(bucket, descriptor.chunk_keys[-1])
        return GatewayRequest("GET", path, "", extra, repeatable=repeatable, begun_s=begun_s)
    extra = {**_MSGPACK_BODY, **(asked or {})}
    return GatewayRequest(
        "POST",
        _path(bucket),
        headers.KV_GET,
        extra,
        (data,),
        repeatable=repeatable,
        begun_s=begun_s,
    )


def get_headers(
    request_id: str, path: DeliveryPath | None, traceparent: str | None, dequantise: str = ""
) -> dict[str, str]:
    """What a get says of itself beside its descriptor."""
    values = {
        headers.REQUEST_ID: request_id,
        headers.PATH: path.value if path else None,
        headers.TRACEPARENT: traceparent,
        headers.DEQUANTISE: dequantise or None,
    }
    return {name: value for name, value in values.items() if value is not None}


def put(bucket: str, descriptor: Descriptor, payload: Sequence[memoryview]) -> GatewayRequest:
    """Store chunks; the payload's parts are in the order of `descriptor.delivery`.

    With a target there is no payload, and it is not repeatable: the memory would be free for other
    use when the second put had ended, whatever became of the first.
    """
    body: list[bytes | memoryview] = [_put_preamble(descriptor), *payload]
    has_target = descriptor.rdma_target is not None
    return GatewayRequest(
        "POST",
        _path(bucket),
        headers.KV_PUT,
        body=body,
        sign_body=has_target,
        repeatable=not has_target,
    )


def put_head(bucket: str, descriptor: Descriptor) -> GatewayRequest:
    """A put whose payload follows piece by piece; it announces the whole length."""
    preamble = _put_preamble(descriptor)
    extra = {"content-length": str(len(preamble) + descriptor.put_bytes)}
    return GatewayRequest(
        "POST", _path(bucket), headers.KV_PUT, extra, (preamble,), sign_body=False, repeatable=False
    )


def delete_object(bucket: str, key: str) -> GatewayRequest:
    """DeleteObject."""
    return GatewayRequest("DELETE", _path(bucket, key))


def open_session(host_id: str, server_id: bytes | None = None) -> GatewayRequest:
    """Ask for a ticket to the target socket of this storage server, by default of one on this host
    where it has one.
    """
    extra = {headers.HOST_ID: host_id, **_of_server(server_id)}
    return GatewayRequest("POST", "/", headers.KV_SESSION, extra)


def join_session(server_id: bytes | None = None) -> GatewayRequest:
    """Begin a session through the gateway, over a WebSocket, with this storage server or any."""
    return GatewayRequest("GET", "/", headers.KV_SESSION, _of_server(server_id))


def list_servers() -> GatewayRequest:
    """Ask which storage servers there are."""
    return GatewayRequest("GET", "/", headers.KV_SERVERS)


def _of_server(server_id: bytes | None) -> dict[str, str]:
    return {} if server_id is None else {headers.SERVER_ID: server_id.hex()}


def _path(bucket: str, key: str | None = None) -> str:
    if not isinstance(bucket, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidRequest(f"bucket must be a string, got {type(bucket).__name__}")
    if not bucket or "/" in bucket:
        raise InvalidRequest(f"bucket {bucket!r} is no bucket name", code="InvalidBucketName")
    try:
        name = quote(bucket, safe="")
        return f"/{name}" if key is None else f"/{name}/{quote(key, safe='/~')}"
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"bucket or key is no valid Unicode: {error}") from error


def _put_preamble(descriptor: Descriptor) -> bytes:
    data = descriptor_bytes(descriptor)
    return LENGTH.pack(len(data)) + data


def descriptor_bytes(descriptor: Descriptor) -> bytes:
    """The descriptor as it is sent. Raises `InvalidRequest` for what cannot be."""
    try:
        return descriptor.to_bytes()
    except (UnicodeEncodeError, TypeError, msgspec.MsgspecError) as error:
        raise InvalidRequest(f"descriptor: {error}", code="InvalidDescriptor") from error


def _encoded(wire: msgspec.Struct, chunk_keys: Sequence[str]) -> bytes:
    try:
        return msgspec.msgpack.encode(wire)
    except (UnicodeEncodeError, TypeError, msgspec.MsgspecError) as error:
        raise InvalidRequest(
            f"chunk_keys ({len(chunk_keys)} of them) must be strings: {error}",
            code="InvalidDescriptor",
        ) from error
