"""Request heads as clients send them: the seeds of everything that reads HTTP."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime

from botocore.auth import S3SigV4Auth, S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

import objectcache_schemas.headers as extension

ACCESS_KEY, SECRET_KEY = "FUZZACCESSKEY", "fuzz-secret-key"
HOST = "127.0.0.1:9000"
BUCKET = "fuzz-bucket"

_OBJECT = f"/{BUCKET}/model%40rank0/a%2Bb%20c%25.bin"
_REQUESTS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("GET", "/", {}),
    ("PUT", f"/{BUCKET}", {"x-amz-acl": "private"}),
    ("GET", f"/{BUCKET}?list-type=2&prefix=a%2F&delimiter=%2F&max-keys=10&encoding-type=url", {}),
    ("GET", f"/{BUCKET}?marker=x&max-keys=3", {}),
    ("GET", f"/{BUCKET}?list-type=2&continuation-token=YWJj&start-after=b", {}),
    ("GET", f"/{BUCKET}?versions&key-marker=a&version-id-marker=null", {}),
    ("GET", f"/{BUCKET}?uploads&max-uploads=2&key-marker=x", {}),
    *(("GET", f"/{BUCKET}?{name}", {}) for name in ("location", "acl", "tagging", "lifecycle")),
    ("POST", f"/{BUCKET}?delete", {"content-md5": "1B2M2Y8AsgTpgAmY7PhCfg=="}),
    ("GET", _OBJECT, {"range": "bytes=0-99", "if-match": '"etag"', "if-range": 'W/"x"'}),
    ("GET", f"{_OBJECT}?partNumber=1&response-content-type=text%2Fplain", {}),
    ("GET", _OBJECT, {"if-modified-since": "Sat, 29 Oct 1994 19:43:31 GMT", "range": "bytes=-5"}),
    ("HEAD", _OBJECT, {"if-none-match": '"a", W/"b"', "x-amz-checksum-mode": "ENABLED"}),
    (
        "PUT",
        _OBJECT,
        {
            "content-type": "text/plain",
            "x-amz-meta-name": "v\u00e4lue",
            "x-amz-tagging": "a=b&c=d%20e",
            "x-amz-checksum-crc32": "AAAAAA==",
            "if-none-match": "*",
            "cache-control": "max-age=1",
            "expect": "100-continue",
        },
    ),
    (
        "PUT",
        _OBJECT,
        {
            "x-amz-copy-source": f"/{BUCKET}/other%20key?versionId=null",
            "x-amz-metadata-directive": "REPLACE",
            "x-amz-copy-source-if-match": '"e"',
        },
    ),
    ("POST", f"{_OBJECT}?uploads", {"x-amz-checksum-algorithm": "CRC32C"}),
    ("PUT", f"{_OBJECT}?partNumber=3&uploadId=abcdef", {"content-md5": "AAAA"}),
    (
        "PUT",
        f"{_OBJECT}?partNumber=3&uploadId=abcdef",
        {"x-amz-copy-source": f"{BUCKET}/k", "x-amz-copy-source-range": "bytes=0-9"},
    ),
    ("POST", f"{_OBJECT}?uploadId=abcdef", {"x-amz-mp-object-size": "10"}),
    ("GET", f"{_OBJECT}?uploadId=abcdef&max-parts=2&part-number-marker=1", {}),
    ("DELETE", f"{_OBJECT}?uploadId=abcdef", {}),
    ("GET", f"{_OBJECT}?attributes", {"x-amz-object-attributes": "ETag,Checksum,ObjectParts"}),
    ("GET", _OBJECT, {extension.DESCRIPTOR: "gqF2AapjaHVua19rZXlzkA"}),
    *(("POST", f"/{BUCKET}?{name}", {}) for name in ("kv-get", "kv-match", "kv-put")),
    ("PUT", f"/{BUCKET}?kv-layout", {}),
    ("POST", "/?kv-session", {}),
    ("GET", "http://127.0.0.1:9000" + _OBJECT, {}),
    ("OPTIONS", "*", {}),
    ("GET", "/healthz", {}),
)
_STREAMED = {
    "x-amz-decoded-content-length": "10",
    "x-amz-trailer": "x-amz-checksum-crc32",
    "content-encoding": "aws-chunked",
    "transfer-encoding": "chunked",
    "x-amz-content-sha256": "STREAMING-UNSIGNED-PAYLOAD-TRAILER",
}
AMZ_DATE = "20261121T180000Z"
NOW_S = datetime(2026, 11, 21, 18, tzinfo=UTC).timestamp()


def signed_head(
    method: str,
    target: str,
    headers: dict[str, str],
    body: bytes = b"",
    host: str = HOST,
    credentials: Credentials = Credentials(ACCESS_KEY, SECRET_KEY),  # noqa: B008 - frozen
) -> bytes:
    """A request line and headers that botocore's signer signed, with the empty line."""
    path = target.removeprefix(f"http://{host}") or "/"
    request = AWSRequest(
        method, f"http://{host}{path if path.startswith('/') else '/'}", headers=dict(headers)
    )
    request.headers["host"] = host
    if body or method in ("PUT", "POST"):
        request.headers["content-length"] = str(len(body))
    digest = headers.get("x-amz-content-sha256") or hashlib.sha256(body).hexdigest()
    _Signer(credentials, digest).add_auth(request)
    return head_bytes(method, target, dict(request.headers.items()))


def presigned_head(method: str, target: str, host: str = HOST) -> bytes:
    """The same with the signature in the query."""
    request = AWSRequest(method, f"http://{host}{target}")
    S3SigV4QueryAuth(Credentials(ACCESS_KEY, SECRET_KEY), "s3", "us-east-1", expires=60).add_auth(
        request
    )
    assert request.url is not None
    return head_bytes(method, request.url.removeprefix(f"http://{host}"), {"host": host})


def head_bytes(method: str, target: str, headers: dict[str, str]) -> bytes:
    """A head as it goes over the wire."""
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {text}" for name, text in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def head_seeds() -> tuple[bytes, ...]:
    """Signed heads of every operation."""
    signed = [signed_head(method, target, named) for method, target, named in _REQUESTS]
    streamed = signed_head("PUT", _OBJECT, _STREAMED)
    return (*signed, streamed, presigned_head("GET", _OBJECT), presigned_head("PUT", _OBJECT))


class _Signer(S3SigV4Auth):
    """botocore's signer with a payload hash of the caller's choice."""

    def __init__(self, credentials: Credentials, digest: str) -> None:
        super().__init__(credentials, "s3", "us-east-1")
        self._digest = digest

    def payload(self, request: AWSRequest) -> str:
        return self._digest
