"""Raw requests for the gateway: signed, changed after they were signed, broken in framing."""

from __future__ import annotations

import hashlib
import hmac
import random
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from urllib.parse import quote

from tests.fuzz.heads import BUCKET
from tests.fuzz.mutation import mutated
from tests.fuzz.parsers import DESCRIPTOR_SEEDS, XML_SEEDS

_KEYS = ("k", "k", "fuzz/a", "a//b", "\u00e9\u65e5 +%", "x" * 1024, "/lead", "..", "%2F", "~!*'()")
_VALUES: dict[str, tuple[str, ...]] = {
    "range": (
        "bytes=0-9",
        "bytes=-1",
        "bytes=9999999-",
        "bytes=5-2",
        "bytes=0-0,2-3",
        "x",
        "bytes=-",
    ),
    "if-match": ('"x"', "*", 'W/"x"', ""),
    "if-none-match": ("*", '"x"', "x, y"),
    "if-modified-since": ("Sat, 29 Oct 1994 19:43:31 GMT", "0", "Sat, 29 Oct 99999 19:43:31 GMT"),
    "if-range": ('"x"', "Sat, 29 Oct 2094 19:43:31 GMT"),
    "content-md5": ("1B2M2Y8AsgTpgAmY7PhCfg==", "AAAA", "!"),
    "x-amz-meta-a": ("v", "\u00e9", "x" * 3000, ""),
    "x-amz-tagging": ("a=b", "a=b&a=c", "%ff=x", "=", "aws:x=y"),
    "x-amz-copy-source": (
        f"/{BUCKET}/k",
        f"{BUCKET}/none",
        "//",
        "%ff",
        f"{BUCKET}/k?versionId=x",
        f"{BUCKET}/k?versionId=null",
    ),
    "x-amz-copy-source-range": ("bytes=0-9", "bytes=9-0", "bytes=0-99999999999999999999"),
    "x-amz-metadata-directive": ("COPY", "REPLACE", "x"),
    "x-amz-checksum-crc32": ("AAAAAA==", "x", ""),
    "x-amz-checksum-sha256": ("AAAA",),
    "x-amz-checksum-algorithm": ("CRC32", "CRC64NVME", "SHA256", "MD5", "x"),
    "x-amz-checksum-type": ("FULL_OBJECT", "COMPOSITE", "x"),
    "x-amz-sdk-checksum-algorithm": ("CRC32", "x"),
    "x-amz-object-attributes": ("ETag,ObjectSize,ObjectParts,Checksum,StorageClass", "x", ""),
    "x-amz-max-parts": ("1", "-1", "x"),
    "x-amz-acl": ("private", "public-read"),
    "x-amz-storage-class": ("STANDARD", "GLACIER"),
    "x-amz-server-side-encryption": ("AES256",),
    "x-amz-decoded-content-length": ("10", "-1", "99999999999999999999", "x"),
    "x-amz-trailer": ("x-amz-checksum-crc32", "x-amz-checksum-crc32,x-amz-checksum-sha1", "x"),
    "x-amz-mp-object-size": ("10", "-1", "x"),
    "x-amz-expected-bucket-owner": ("root", "123456789012", "x"),
    "x-amz-bucket-object-lock-enabled": ("true", "false"),
    "content-encoding": ("gzip", "aws-chunked", "aws-chunked,gzip", "a\u00e9"),
    "content-type": ("text/plain", "\u00e9", "x" * 500),
    "expect": ("100-continue", "100-Continue", "200-ok"),
    "transfer-encoding": ("chunked", "gzip, chunked", "identity", "chunked, chunked"),
    "x-objectcache-descriptor": ("gqF2AapjaHVua19rZXlzkA", "!", "A" * 9000),
    "x-objectcache-path": ("s3tcp", "agg", "direct", "x"),
    "x-objectcache-client-seconds": ("0.1", "nan", "-1", "1e999"),
    "traceparent": ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "x"),
}
_QUERY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            *("uploads", "acl", "tagging", "lifecycle", "location", "versioning", "versions"),
            *("policy", "cors", "delete", "attributes", "kv-get", "kv-match", "kv-put"),
            *("kv-layout", "kv-session", "encryption", "torrent", "restore", "select", "x"),
        ),
        ("", "", "1"),
    ),
    "uploadId": ("none", "", "\u00e9", "../..", "x" * 300),
    "partNumber": ("1", "0", "-1", "10001", "x", "1" * 30),
    "list-type": ("2", "1", "3"),
    "prefix": ("f", "", "\u00e9", "a" * 1100),
    "delimiter": ("/", "", "//", "\u00e9"),
    "max-keys": ("0", "1", "1000", "-1", "99999999999", "x"),
    "continuation-token": ("YWJj", "!", "", "w6k="),
    "start-after": ("a", ""),
    "marker": ("a", "\U0001f511"),
    "key-marker": ("k", ""),
    "upload-id-marker": ("x",),
    "version-id-marker": ("null", "x"),
    "encoding-type": ("url", "x"),
    "max-uploads": ("1", "x"),
    "max-parts": ("1", "0", "x"),
    "part-number-marker": ("0", "x"),
    "versionId": ("null", "x"),
    "response-content-type": ("text/plain", "a\r\nb: c", "\u00e9"),
    "response-expires": ("x",),
    "fetch-owner": ("true",),
}
_METHODS = (
    "GET",
    "GET",
    "PUT",
    "PUT",
    "POST",
    "POST",
    "HEAD",
    "DELETE",
    "OPTIONS",
    "PATCH",
    "BREW",
)
_PAYLOADS = (
    "UNSIGNED-PAYLOAD",
    "STREAMING-UNSIGNED-PAYLOAD-TRAILER",
    "STREAMING-AWS4-HMAC-SHA256-PAYLOAD",
    "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER",
    "STREAMING-AWS4-ECDSA-P256-SHA256-PAYLOAD",
    "x",
)
_CHUNKED_BODIES = (
    b"a\r\n0123456789\r\n0\r\n\r\n",
    b"a\r\n0123456789\r\n0\r\nx-amz-checksum-crc32:ppZjdw==\r\n\r\n",
    b"a;chunk-signature=" + b"0" * 64 + b"\r\n0123456789\r\n0;chunk-signature=" + b"0" * 64,
)


class RequestMaker:
    """Makes the bytes of requests for one server. Each is made from a `Random` alone."""

    def __init__(self, host: str, access_key: str, secret_key: str) -> None:
        self._host = host
        self._access_key = access_key
        self._secret_key = secret_key
        self._day = datetime.now(UTC).strftime("%Y%m%d")
        self._signing_key = _signing_key(secret_key, self._day)

    def sequence(self, rng: random.Random) -> list[bytes]:
        """What is sent on one connection, each with as many bytes as go at once."""
        kind = rng.random()
        if kind < 0.55:
            return [*self._several(rng, (0, 0, 1, 2, 5)), self.signed(rng, last=True)]
        if kind < 0.85:
            requests = [*self._several(rng, (0, 0, 1, 3)), self.signed(rng, last=True)]
            requests = [mutated(rng, [request]) for request in requests]
            return [b"".join(requests)] if rng.random() < 0.5 else requests
        return [rng.choice(_FRAMINGS)(rng, self.signed(rng, body_of=_small_body, last=True))]

    def _several(self, rng: random.Random, counts: Sequence[int]) -> list[bytes]:
        return [self.signed(rng) for _ in range(rng.choice(counts))]

    def signed(
        self,
        rng: random.Random,
        body_of: Callable[[random.Random], bytes] | None = None,
        *,
        last: bool = False,
    ) -> bytes:
        """A request with a true signature: what it asks for is wild."""
        method = rng.choice(_METHODS)
        path = _path(rng)
        query = _query(rng)
        body = (body_of or _body)(rng) if method in ("PUT", "POST") or rng.random() < 0.05 else b""
        named = {
            name: rng.choice(_VALUES[name])
            for name in rng.sample(tuple(_VALUES), rng.choice((0, 0, 0, 1, 1, 2, 4)))
        }
        named["x-amz-content-sha256"] = (
            rng.choice(_PAYLOADS) if rng.random() < 0.3 else hashlib.sha256(body).hexdigest()
        )
        if named.get("transfer-encoding") == "chunked":
            body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n"
        elif body or method in ("PUT", "POST"):
            named["content-length"] = str(len(body))
        if last or rng.random() < 0.02:
            named["connection"] = "close"
        return self._head(method, path, query, named) + body

    def _head(self, method: str, path: str, query: str, named: dict[str, str]) -> bytes:
        date = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
        named |= {"host": self._host, "x-amz-date": date}
        signed = sorted(name for name in named if name == "host" or name.startswith("x-amz-"))
        canonical = "".join(f"{name}:{' '.join(named[name].split())}\n" for name in signed)
        pairs = "&".join(sorted(part if "=" in part else part + "=" for part in query.split("&")))
        request = "\n".join((method, path, pairs if query else "", canonical, ";".join(signed)))
        digest = hashlib.sha256(f"{request}\n{named['x-amz-content-sha256']}".encode()).hexdigest()
        scope = f"{self._day}/us-east-1/s3/aws4_request"
        text = f"AWS4-HMAC-SHA256\n{date}\n{scope}\n{digest}"
        signature = hmac.digest(self._signing_key, text.encode(), "sha256").hex()
        named["authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={self._access_key}/{scope}, "
            f"SignedHeaders={';'.join(signed)}, Signature={signature}"
        )
        lines = "".join(f"{name}: {value}\r\n" for name, value in named.items())
        return f"{method} {path}{'?' if query else ''}{query} HTTP/1.1\r\n{lines}\r\n".encode()


def _signing_key(secret_key: str, day: str) -> bytes:
    key = f"AWS4{secret_key}".encode()
    for text in (day, "us-east-1", "s3", "aws4_request"):
        key = hmac.digest(key, text.encode(), "sha256")
    return key


def _path(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.05:
        return "/"
    bucket = BUCKET if rng.random() < 0.9 else rng.choice(("other", "A", "x" * 70, "a..b", "%ff"))
    if kind < 0.35:
        return f"/{bucket}"
    return f"/{bucket}/{quote(rng.choice(_KEYS), safe='/~')}"


def _query(rng: random.Random) -> str:
    names = rng.sample(tuple(_QUERY), rng.choice((0, 0, 0, 1, 1, 1, 2, 3)))
    pairs = [(name, rng.choice(_QUERY[name])) for name in names]
    return "&".join(f"{name}={quote(text, safe='~')}" if text else name for name, text in pairs)


def _small_body(rng: random.Random) -> bytes:
    return rng.choice((b"", b"0123456789", *_CHUNKED_BODIES))


def _body(rng: random.Random) -> bytes:
    kind = rng.random()
    if kind < 0.3:
        return rng.choice((b"", b"0123456789", rng.randbytes(3000)))
    if kind < 0.6:
        return mutated(rng, XML_SEEDS)
    if kind < 0.85:
        descriptor = mutated(rng, DESCRIPTOR_SEEDS)
        return rng.choice(
            (descriptor, len(descriptor).to_bytes(4, "big") + descriptor + b"01234567")
        )
    return mutated(rng, _CHUNKED_BODIES)


# --- framing --------------------------------------------------------------------------------------


def _replaced(name: bytes) -> Callable[[random.Random, bytes], bytes]:
    """A header, instead of or beside the one that is there."""

    def change(rng: random.Random, request: bytes) -> bytes:
        head, _, body = request.partition(b"\r\n\r\n")
        values = (b"0", b"-1", b"+3", b"5, 5", b"1e3", b"chunked", b"0x10", b" ", b"9" * 25, b"3\0")
        return head + b"\r\n" + name + b": " + rng.choice(values) + b"\r\n\r\n" + body

    return change


def _huge_header(rng: random.Random, request: bytes) -> bytes:
    line, _, rest = request.partition(b"\r\n")
    size = rng.choice((8_000, 16_500, 40_000))
    many = b"".join(b"x-h%d: v\r\n" % number for number in range(rng.choice((50, 127, 200))))
    return line + b"\r\nx-big: " + b"a" * size + b"\r\n" + many + rest


def _long_target(rng: random.Random, request: bytes) -> bytes:
    method, _, rest = request.partition(b" /")
    return method + b" /" + b"%41" * rng.choice((500, 3000, 20_000)) + rest


def _cut_short(rng: random.Random, request: bytes) -> bytes:
    return request[: rng.randrange(len(request) + 1)]


def _smuggled(rng: random.Random, request: bytes) -> bytes:
    head, _, body = request.partition(b"\r\n\r\n")
    both = (b"transfer-encoding: chunked", b"Transfer-Encoding : chunked", b"te: x\r\n chunked")
    inside = b"GET /fuzz-bucket/k HTTP/1.1\r\nHost: x\r\n\r\n"
    return head + b"\r\n" + rng.choice(both) + b"\r\n\r\n0\r\n\r\n" + inside + body


def _absolute(rng: random.Random, request: bytes) -> bytes:
    method, _, rest = request.partition(b" ")
    places = (b"http://127.0.0.1:1", b"http://", b"https://u:p@h", b"ftp://x", b"//x", b"*", b"x:1")
    return method + b" " + rng.choice(places) + rest


def _line_ends(rng: random.Random, request: bytes) -> bytes:
    return request.replace(b"\r\n", rng.choice((b"\n", b"\r", b"\r\r\n", b"\r\n \r\n")))


def _other_version(rng: random.Random, request: bytes) -> bytes:
    versions = (b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9.9", b"HTTP/1.1 x", b"", b"RTSP/1.0")
    return request.replace(b"HTTP/1.1", rng.choice(versions), 1)


def _garbage(rng: random.Random, _: bytes) -> bytes:
    starts = (
        b"",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"SSH-2.0-x\r\n",
    )
    return rng.choice(starts) + rng.randbytes(rng.choice((1, 30, 3000)))


_FRAMINGS: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    _replaced(b"content-length"),
    _replaced(b"transfer-encoding"),
    _replaced(b"host"),
    _replaced(b"expect"),
    *(_huge_header, _long_target, _cut_short, _smuggled, _absolute, _line_ends),
    *(_other_version, _garbage),
)
