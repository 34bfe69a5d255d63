"""All that is pure and reads what comes from outside: bytes in, a value or an error of ours out."""

from __future__ import annotations

import base64
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from objectcache_gateway import refused_headers
from objectcache_gateway.bodies.aws_chunked import AwsChunkedDecoder
from objectcache_gateway.bodies.body import BodyDecoder
from objectcache_gateway.handlers.objects import object_headers
from objectcache_gateway.request import (
    addressing,
    conditions,
    delivery_headers,
    listing_params,
    ranges,
    tags,
)
from objectcache_gateway.request.request_head import RequestHead
from objectcache_gateway.request.routes import route
from objectcache_gateway.signing import sigv4
from objectcache_gateway.xml import lifecycle_xml, xml_parse, xml_render
from objectcache_runtime.networking.listening import HostPort
from objectcache_runtime.settings import SECTIONS, load_settings
from objectcache_schemas.accounts import AccountChange
from objectcache_schemas.conversations import GatewayRequest, StorageReply
from objectcache_schemas.descriptor import (
    DeliveryMode,
    Descriptor,
    MatchRequest,
    descriptor_header_bytes,
)
from objectcache_schemas.errors import ObjectCacheError
from objectcache_schemas.layout import KvLayout
from objectcache_schemas.limits import BUCKET_TAGS_MAX, Limits
from objectcache_schemas.messages.frames import FrameError, frame_length
from objectcache_schemas.messages.handshake import Hello
from objectcache_schemas.messages.request_labels import adopted_request_id
from objectcache_schemas.messages.sessions import TargetEvent, TargetRequest
from tests.fuzz.frame_seeds import GATEWAY_KINDS, REPLY_KINDS, TARGET_KINDS, frames
from tests.fuzz.heads import ACCESS_KEY, NOW_S, SECRET_KEY, head_seeds

LIMITS = Limits()
DOMAINS = ("localhost", "s3.example.org")

# What a parser may raise: an error with a status, a frame that is none, a message that is none.
REFUSALS = (ObjectCacheError, FrameError, msgspec.MsgspecError)


@dataclass(frozen=True, slots=True)
class Parser:
    """One entrance, and inputs that it takes."""

    name: str
    read: Callable[[bytes], object]
    seeds: tuple[bytes, ...]


# --- HTTP heads -----------------------------------------------------------------------------------


def head_of(data: bytes) -> RequestHead:
    """A head as aiohttp would hand it over; more is let through than aiohttp does."""
    lines = data.decode("utf-8", "surrogateescape").split("\r\n")
    method, _, rest = lines[0].partition(" ")
    target = rest.rpartition(" ")[0] or rest
    pairs = [line.partition(":") for line in lines[1:] if ":" in line]
    named = tuple((name.strip().lower(), value.strip()) for name, _, value in pairs)
    path, query = "/", ""
    with suppress(ObjectCacheError):
        split = addressing.split_target(target)
        path, query = split.raw_path, split.raw_query
    return RequestHead(method, path, query, named)


def read_head(data: bytes) -> None:
    """Every decision that is made about a head, each for itself."""
    head = head_of(data)
    host = head.header("host") or ""
    address = addressing.Address()
    query: dict[str, str] = {}
    with suppress(ObjectCacheError):
        addressing.check_authority(addressing.split_target(head.raw_path), host)
    with suppress(ObjectCacheError):
        query = dict(reversed(head.query))
    with suppress(ObjectCacheError):
        address = addressing.resolve_address(head.raw_path, host, DOMAINS)
    with suppress(ObjectCacheError):
        operation = route(head.method, address, query, frozenset(name for name, _ in head.headers))
        refused_headers.check_headers(head, operation)
    _read_payload(head)
    _read_conditions(head)
    _read_attributes(head, query)
    _read_listing(query)


def _read_payload(head: RequestHead) -> None:
    secrets = {ACCESS_KEY: SECRET_KEY}
    with suppress(ObjectCacheError):
        authenticated = sigv4.authenticate(head, secrets.get, NOW_S, 900.0)
        decoder = BodyDecoder(head, authenticated, 1 << 30)
        decoder.feed(b"0123456789")
        decoder.finish()


def _read_conditions(head: RequestHead) -> None:
    for size_bytes in (0, 1000):
        with suppress(ObjectCacheError):
            ranges.resolve_range(head.header("range"), size_bytes)
        with suppress(ObjectCacheError):
            ranges.resolve_copy_range(head.header("x-amz-copy-source-range") or "", size_bytes)
    conditions.evaluate_read(head, "etag", NOW_S)
    conditions.range_applies(head, "etag", NOW_S)
    with suppress(ObjectCacheError):
        conditions.check_copy_source(head, "etag", NOW_S)
    with suppress(ObjectCacheError):
        conditions.write_condition(head)


def _read_attributes(head: RequestHead, query: dict[str, str]) -> None:
    steps: tuple[Callable[[], object], ...] = (
        lambda: msgspec.msgpack.encode(object_headers.attributes_of(head)),
        lambda: object_headers.overrides(query),
        lambda: tags.tags_of_header(head),
        lambda: delivery_headers.client_seconds(head),
        lambda: delivery_headers.traceparent(head),
        lambda: delivery_headers.forced_path(head),
        lambda: delivery_headers.check_plain_get(head),
        lambda: adopted_request_id(head.header("x-objectcache-request-id")),
        lambda: descriptor_header_bytes(head.header("x-objectcache-descriptor") or "", LIMITS),
    )
    for step in steps:
        with suppress(ObjectCacheError):
            step()


def _read_listing(query: dict[str, str]) -> None:
    with suppress(ObjectCacheError):
        params = listing_params.listing_params(query, listing_params.v2_start_after(query))
        params.encoded(params.prefix)
    for name in ("max-uploads", "max-parts", "part-number-marker", "max-buckets"):
        with suppress(ObjectCacheError):
            listing_params.page_size(query, name)
    for text in query.values():
        xml_render.element("Text", text)


# --- bodies ---------------------------------------------------------------------------------------

_SIGNING = sigv4.ChunkSigning("0" * 64, b"k" * 32, "20261121T180000Z", "20261121/r/s3/aws4_request")
_TRAILERS = ("x-amz-checksum-crc32",)


def read_aws_chunked(data: bytes) -> None:
    """The framing of a streamed body, in pieces whose size the first byte says."""
    step = 1 + (data[0] if data else 0)
    for signing, trailers, length in (
        (None, (), None),
        (None, _TRAILERS, 10),
        (_SIGNING, (), 10),
        (_SIGNING, _TRAILERS, None),
    ):
        decoder = AwsChunkedDecoder(signing, trailers, length, chunk_bytes_min=1)
        with suppress(ObjectCacheError):
            for start in range(0, len(data), step):
                decoder.feed(data[start : start + step])
            decoder.finish()


def _chunked_seeds() -> tuple[bytes, ...]:
    data_hash = "0" * 64
    signed = _SIGNING.chunk_signature("0" * 64, data_hash)
    return (
        b"a\r\n0123456789\r\n0\r\n\r\n",
        b"5\r\n01234\r\n5\r\n56789\r\n0\r\nx-amz-checksum-crc32:AAAAAA==\r\n\r\n",
        b"0\r\nx-amz-checksum-crc32:AAAAAA==\n\r\n\r\n",
        f"a;chunk-signature={signed}\r\n0123456789\r\n0;chunk-signature={signed}\r\n\r\n".encode(),
        b"ffffffffffffffff\r\n",
    )


XML_SEEDS = (
    b"<Delete><Quiet>true</Quiet><Object><Key>a&amp;b</Key><VersionId>null</VersionId></Object>"
    b"<Object><Key>c</Key></Object></Delete>",
    b'<?xml version="1.0" encoding="UTF-8"?><CompleteMultipartUpload xmlns="http://s3.amazonaws.'
    b'com/doc/2006-03-01/"><Part><PartNumber>1</PartNumber><ETag>"abc"</ETag><ChecksumCRC32>AAAAAA=='
    b"</ChecksumCRC32></Part><Part><PartNumber>2</PartNumber><ETag>d</ETag></Part>"
    b"</CompleteMultipartUpload>",
    b"<CreateBucketConfiguration><LocationConstraint>EU</LocationConstraint>"
    b"</CreateBucketConfiguration>",
    b"<Tagging><TagSet><Tag><Key>k</Key><Value>v</Value></Tag></TagSet></Tagging>",
    b"<LifecycleConfiguration><Rule><ID>r</ID><Status>Enabled</Status><Filter><Prefix>a/</Prefix>"
    b"</Filter><Expiration><Days>3</Days></Expiration><AbortIncompleteMultipartUpload>"
    b"<DaysAfterInitiation>1</DaysAfterInitiation></AbortIncompleteMultipartUpload></Rule>"
    b"</LifecycleConfiguration>",
    b"<LifecycleConfiguration><Rule><Status>Enabled</Status><Filter><And><Prefix>a</Prefix><Tag>"
    b"<Key>k</Key><Value>v</Value></Tag></And></Filter><Expiration><Date>2026-01-01T00:00:00Z</Date>"
    b"</Expiration></Rule></LifecycleConfiguration>",
    b'<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;&a;">]><Delete>&b;</Delete>',
    b'<!DOCTYPE x SYSTEM "file:///etc/passwd"><Delete/>',
    "<?xml version='1.0' encoding='utf-16'?><Delete/>".encode("utf-16"),
    b"<?xml version='1.0' encoding='cp037'?><Delete/>",
    b"<a>" * 300,
)


def read_xml(data: bytes) -> None:
    """Every kind of document, whatever it is."""
    documents: tuple[Callable[[bytes], object], ...] = (
        xml_parse.parse_delete,
        xml_parse.parse_complete,
        xml_parse.parse_location,
        lambda body: tags.parse_tagging(body, BUCKET_TAGS_MAX),
        lambda body: lifecycle_xml.lifecycle_document(lifecycle_xml.parse_lifecycle(body)),
    )
    for parse in documents:
        with suppress(ObjectCacheError):
            parse(data)


# --- msgpack --------------------------------------------------------------------------------------

_DESCRIPTOR = Descriptor(
    chunk_keys=("aa" * 32, "model/1@2"), num_layers=32, chunk_tokens=16, per_layer_chunk_bytes=4096
)
_PUT = Descriptor(
    chunk_keys=("k",),
    num_layers=2,
    chunk_tokens=1,
    per_layer_chunk_bytes=8,
    delivery=DeliveryMode.LAYERWISE,
    parent_key="p",
)
_TARGETED = {
    **msgspec.msgpack.decode(_DESCRIPTOR.to_bytes()),
    "rdma_target": {
        "transport": "shm",
        "target_id": b"0" * 16,
        "offset_bytes": 0,
        "length_bytes": 10,
        "tag": 1,
    },
    "compute_window_s": 0.01,
    "layers": [0, 4],
}
DESCRIPTOR_SEEDS = (
    _DESCRIPTOR.to_bytes(),
    _PUT.to_bytes(),
    msgspec.msgpack.encode(_TARGETED),
    msgspec.msgpack.encode({"v": 1, "chunk_keys": [b"\x01" * 32, "k"]}),
)
_LAYOUT = KvLayout(
    num_layers=32, chunk_tokens=16, per_layer_chunk_bytes=4096, dtype="bfloat16", fingerprint="f"
)


def read_descriptor(data: bytes) -> None:
    """As a get's, a put's, a match's, and in its header form."""
    header = base64.urlsafe_b64encode(data).rstrip(b"=").decode()
    forms: tuple[Callable[[], object], ...] = (
        lambda: Descriptor.from_bytes(data, LIMITS),
        lambda: Descriptor.from_bytes(data, LIMITS, of_put=True).to_bytes(),
        lambda: MatchRequest.keys_from_bytes(data, LIMITS),
        lambda: Descriptor.from_header(header, LIMITS),
        lambda: KvLayout.from_bytes(data).to_bytes(),
    )
    for form in forms:
        with suppress(ObjectCacheError):
            form()


_DECODERS = tuple(
    msgspec.msgpack.Decoder(kind)
    for kind in (GatewayRequest, StorageReply, Hello, TargetRequest, TargetEvent, AccountChange)
)


def read_frame(data: bytes) -> None:
    """A frame's length, and its message as every side would decode it."""
    frame_length(data[:4].ljust(4, b"\0"), 1 << 20)
    for decoder in _DECODERS:
        with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            decoder.decode(data[4:])


# --- settings -------------------------------------------------------------------------------------


def read_settings(data: bytes) -> None:
    """As a flag and as an environment variable, and as an address."""
    text = data.decode("utf-8", "surrogateescape")
    name, _, value = text.partition("=")
    section = name.partition(".")[0]
    variable = f"OBJECTCACHE_{name.replace('.', '_').upper()}"
    environment = {variable: value} if section in SECTIONS else {}  # others are warned of
    steps: tuple[Callable[[], object], ...] = (
        lambda: load_settings(None, {}, [text]),
        lambda: load_settings(None, environment),
        lambda: HostPort.parse("gateway.listen", value),
    )
    for step in steps:
        with suppress(ObjectCacheError):
            step()


_SETTINGS_SEEDS = (
    b"gateway.listen=127.0.0.1:9000",
    b"gateway.listen=[::1]:0",
    b"gateway.virtual_host_domains=a,b",
    b"storage.engine=local",
    b"storage.high_watermark=0.9",
    b"storage.target_socket_mode=660",
    b"scheduler.cap_gbps=12.5",
    b"limits.put_chunks_max=4096",
    b"gateway.body_handover=false",
)

PARSERS = (
    Parser("head", read_head, head_seeds()),
    Parser("aws_chunked", read_aws_chunked, _chunked_seeds()),
    Parser("xml", read_xml, XML_SEEDS),
    Parser("descriptor", read_descriptor, (*DESCRIPTOR_SEEDS, _LAYOUT.to_bytes())),
    Parser(
        "frame",
        read_frame,
        (*frames(GATEWAY_KINDS, 120), *frames(TARGET_KINDS, 10), *frames(REPLY_KINDS, 60)),
    ),
    Parser("settings", read_settings, _SETTINGS_SEEDS),
)
