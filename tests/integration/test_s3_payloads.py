"""Every way in which clients send a body: five payload modes, with a length or in chunks, over HTTP
and HTTPS. Each arrives whole, and one changed byte is refused.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import re
import secrets
import ssl
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.s3_clients import Answer, read_answer, signed_headers
from tests.s3_tests.certificate import make_certificate
from tests.servers import RunningServer, start_server

CHUNK_BYTES = 65_536
BODY = bytes(range(256)) * 600  # three chunks, the last one smaller
CRC32 = base64.b64encode(zlib.crc32(BODY).to_bytes(4, "big")).decode()
CRC_HEADER = "x-amz-checksum-crc32"
EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server and how to speak to it."""

    server: RunningServer
    trust: ssl.SSLContext | None = field(repr=False)

    def connect(self) -> http.client.HTTPConnection:
        host, port = self.server.host, self.server.port
        if self.trust is None:
            return http.client.HTTPConnection(host, port, timeout=20)
        return http.client.HTTPSConnection(host, port, timeout=20, context=self.trust)

    def send(
        self, method: str, path: str, headers: dict[str, str], body: bytes, *, chunked: bool
    ) -> Answer:
        connection = self.connect()
        try:
            if chunked:
                pieces = iter([body[:70_000], body[70_000:]])
                connection.request(method, path, pieces, headers, encode_chunked=True)
            else:
                connection.request(method, path, body, headers)
            return read_answer(connection.getresponse())
        finally:
            connection.close()

    def get(self, path: str) -> Answer:
        return self.send("GET", path, signed_headers(self.server, "GET", path), b"", chunked=False)


@pytest.fixture(scope="module")
def endpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Endpoint]]:
    folder: Path = tmp_path_factory.mktemp("payloads")
    pair = make_certificate(folder)
    tls = (f"gateway.tls_certificate={pair.certificate_file}", f"gateway.tls_key={pair.key_file}")
    trust = ssl.create_default_context(cafile=str(pair.certificate_file))
    memory = "storage.engine=memory"
    with (
        start_server(folder / "plain", memory) as plain,
        start_server(folder / "secure", memory, *tls) as secure,
    ):
        yield {"http": Endpoint(plain, None), "https": Endpoint(secure, trust)}


@pytest.fixture(params=["http", "https"])
def endpoint(request: pytest.FixtureRequest, endpoints: dict[str, Endpoint]) -> Endpoint:
    return endpoints[request.param]


@pytest.fixture
def path(endpoint: Endpoint) -> str:
    bucket = f"/payloads-{secrets.token_hex(6)}"
    headers = signed_headers(endpoint.server, "PUT", bucket)
    assert endpoint.send("PUT", bucket, headers, b"", chunked=False).status == 200
    return f"{bucket}/key"


class ChunkSigner:
    """Signatures of chunks and trailers, from Amazon's description."""

    def __init__(self, secret_key: str, headers: dict[str, str]) -> None:
        claim = re.search(
            r"Credential=[^/]+/(\d+)/([^/]+)/s3/aws4_request.*Signature=(\w+)",
            headers["Authorization"],
        )
        assert claim is not None
        day, region, self._previous = claim.groups()
        self._key = b"AWS4" + secret_key.encode()
        for part in (day, region, "s3", "aws4_request"):
            self._key = hmac.digest(self._key, part.encode(), "sha256")
        self._head = f"{headers['X-Amz-Date']}\n{day}/{region}/s3/aws4_request"

    def chunk(self, data: bytes) -> str:
        return self._sign("PAYLOAD", f"{EMPTY_SHA256}\n{hashlib.sha256(data).hexdigest()}")

    def trailer(self, line: bytes) -> str:
        return self._sign("TRAILER", hashlib.sha256(line).hexdigest())

    def _sign(self, kind: str, hashes: str) -> str:
        text = f"AWS4-HMAC-SHA256-{kind}\n{self._head}\n{self._previous}\n{hashes}"
        self._previous = hmac.digest(self._key, text.encode(), "sha256").hex()
        return self._previous


def upload(endpoint: Endpoint, path: str, mode: str) -> tuple[dict[str, str], bytes]:
    """Headers and wire bytes of a PUT of `BODY`."""
    if mode == "SIGNED":
        return signed_headers(endpoint.server, "PUT", path, BODY), BODY
    if mode == "UNSIGNED-PAYLOAD":
        named = {CRC_HEADER: CRC32}
        return signed_headers(endpoint.server, "PUT", path, headers=named, payload_hash=mode), BODY
    named = {"Content-Encoding": "aws-chunked", "x-amz-decoded-content-length": str(len(BODY))}
    has_trailer = mode.endswith("TRAILER")
    if has_trailer:
        named["x-amz-trailer"] = CRC_HEADER
    headers = signed_headers(endpoint.server, "PUT", path, headers=named, payload_hash=mode)
    is_signed = "HMAC" in mode
    signer = ChunkSigner(endpoint.server.credentials.secret_key, headers)
    wire = bytearray()
    for start in [*range(0, len(BODY), CHUNK_BYTES), len(BODY)]:
        data = BODY[start : start + CHUNK_BYTES]
        signature = f";chunk-signature={signer.chunk(data)}" if is_signed else ""
        wire += f"{len(data):x}{signature}\r\n".encode() + data + (b"\r\n" if data else b"")
    if has_trailer:
        line = f"{CRC_HEADER}:{CRC32}".encode()
        wire += line + b"\r\n"
        if is_signed:
            signature = signer.trailer(line + b"\n")
            wire += f"x-amz-trailer-signature:{signature}\r\n".encode()
    return headers, bytes(wire + b"\r\n")


MODES = {
    "SIGNED": "XAmzContentSHA256Mismatch",
    "UNSIGNED-PAYLOAD": "BadDigest",
    "STREAMING-UNSIGNED-PAYLOAD-TRAILER": "BadDigest",
    "STREAMING-AWS4-HMAC-SHA256-PAYLOAD": "SignatureDoesNotMatch",
    "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER": "SignatureDoesNotMatch",
}


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_body_arrives_in_every_mode_and_a_changed_one_does_not(
    endpoint: Endpoint, path: str, mode: str, chunked: bool
) -> None:
    headers, wire = upload(endpoint, path, mode)
    changed = wire.replace(BODY[-300:], BODY[-300:-1] + b"\x00", 1)
    assert changed != wire
    refused = endpoint.send("PUT", path, headers, changed, chunked=chunked)
    assert refused.code == MODES[mode]
    assert endpoint.get(path).status == 404
    assert endpoint.send("PUT", path, headers, wire, chunked=chunked).status == 200
    stored = endpoint.get(path)
    assert stored.body == BODY
    assert stored.headers["Content-Encoding"] is None


def test_chunks_without_the_length_of_the_payload_are_refused(
    endpoint: Endpoint, path: str
) -> None:
    mode = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"
    _, wire = upload(endpoint, path, mode)
    headers = signed_headers(
        endpoint.server,
        "PUT",
        path,
        headers={"Content-Encoding": "aws-chunked", "x-amz-trailer": CRC_HEADER},
        payload_hash=mode,
    )
    answer = endpoint.send("PUT", path, headers, wire, chunked=True)
    assert (answer.status, answer.code) == (411, "MissingContentLength")
