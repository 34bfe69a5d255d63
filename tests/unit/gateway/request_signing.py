"""Requests signed by botocore, and aws-chunked bodies, for the tests of the gateway's core."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from botocore.auth import S3SigV4Auth, S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from objectcache_gateway.request.request_head import RequestHead
from objectcache_gateway.signing.signature_claim import unix_time
from objectcache_gateway.signing.sigv4 import (
    Authenticated,
    ChunkSigning,
    Payload,
    derive_signing_key,
)

ACCESS_KEY = "AKIAIOSFODNN7EXAMPLE"
SECRET_KEY = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
EXAMPLE_DATE = "20130524T000000Z"
EXAMPLE_NOW_S = unix_time(EXAMPLE_DATE)
EXAMPLE_SCOPE = "20130524/us-east-1/s3/aws4_request"
SEED = "4f232c4386841ef735655705268965c44a0e4690baa4adea153f7db9fa80a0a9"
EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()


def secret_for(access_key: str) -> str | None:
    return SECRET_KEY if access_key == ACCESS_KEY else None


def make_head(
    method: str, target: str, headers: Mapping[str, str] | Sequence[tuple[str, str]] = ()
) -> RequestHead:
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    path, _, query = target.partition("?")
    return RequestHead(method, path, query, tuple((name.lower(), value) for name, value in pairs))


def sign(
    method: str,
    url: str,
    headers: Sequence[tuple[str, str]] = (),
    body: bytes = b"",
    *,
    access_key: str = ACCESS_KEY,
    secret_key: str = SECRET_KEY,
    region: str = "us-east-1",
    service: str = "s3",
) -> RequestHead:
    """The head of a request that botocore signed in its Authorization header, now."""
    request = _request(method, url, headers, body)
    S3SigV4Auth(Credentials(access_key, secret_key), service, region).add_auth(request)
    return _head_of(request)


def presign(
    method: str,
    url: str,
    headers: Sequence[tuple[str, str]] = (),
    expires_s: int = 3600,
    region: str = "us-east-1",
) -> RequestHead:
    """The head of a request that botocore signed in its query, now."""
    request = _request(method, url, headers, b"")
    credentials = Credentials(ACCESS_KEY, SECRET_KEY)
    S3SigV4QueryAuth(credentials, "s3", region, expires_s).add_auth(request)
    return _head_of(request)


def _request(method: str, url: str, headers: Sequence[tuple[str, str]], body: bytes) -> AWSRequest:
    request = AWSRequest(method=method, url=url, data=body)
    for name, value in headers:
        request.headers.add_header(name, value)
    return request


def _head_of(request: AWSRequest) -> RequestHead:
    assert request.url is not None
    assert request.method is not None
    parts = urlsplit(str(request.url))
    headers = [("host", parts.netloc)]
    headers += [(name, str(value)) for name, value in request.headers.items()]
    return make_head(request.method, f"{parts.path}?{parts.query}", headers)


def signed_at_s(head: RequestHead) -> float:
    """Unix time at which the head says it was signed."""
    return unix_time(head.header("x-amz-date") or dict(head.query).get("X-Amz-Date") or "")


def chunk_signing(seed: str = SEED) -> ChunkSigning:
    key = derive_signing_key(SECRET_KEY, "20130524", "us-east-1")
    return ChunkSigning(seed, key, EXAMPLE_DATE, EXAMPLE_SCOPE)


def authenticated(
    payload: Payload, sha256: str | None = None, signing: ChunkSigning | None = None
) -> Authenticated:
    return Authenticated(ACCESS_KEY, payload, sha256, signing, False)


def encode_chunked(
    chunks: Sequence[bytes],
    trailers: Mapping[str, str] | None = None,
    *,
    signed: bool = False,
    minio_trailers: bool = False,
) -> bytes:
    """An aws-chunked stream, written from Amazon's description and not with the code under test."""
    stream = bytearray()
    previous = SEED
    for chunk in [*chunks, b""]:
        extension = ""
        if signed:
            hashes = f"{EMPTY_SHA256}\n{hashlib.sha256(chunk).hexdigest()}"
            previous = _chunk_signature("PAYLOAD", previous, hashes)
            extension = f";chunk-signature={previous}"
        stream += f"{len(chunk):x}{extension}\r\n".encode() + chunk
        stream += b"\r\n" if chunk else b""
    lines = "".join(f"{name}:{value}\n" for name, value in (trailers or {}).items())
    stream += (lines + "\r\n" if minio_trailers else lines.replace("\n", "\r\n")).encode()
    if signed and trailers:
        digest = hashlib.sha256(lines.encode()).hexdigest()
        signature = _chunk_signature("TRAILER", previous, digest)
        stream += f"x-amz-trailer-signature:{signature}\r\n".encode()
    return bytes(stream + b"\r\n")


def _chunk_signature(kind: str, previous: str, hashes: str) -> str:
    key = derive_signing_key(SECRET_KEY, "20130524", "us-east-1")
    text = f"AWS4-HMAC-SHA256-{kind}\n{EXAMPLE_DATE}\n{EXAMPLE_SCOPE}\n{previous}\n{hashes}"
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
