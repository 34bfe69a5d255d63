"""From the bytes of a request's body on the wire to a payload that is known to be right.

One decoder for each body: it undoes aws-chunked framing, hashes the payload once for each thing
that somebody wants to know, and compares at the end. Nothing may be made visible before `finish`.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from objectcache_gateway.bodies.aws_chunked import AwsChunkedDecoder
from objectcache_gateway.bodies.checksums import (
    ALGORITHMS,
    Checksum,
    algorithm_named,
    decode_base64,
    is_value,
)
from objectcache_gateway.request.request_head import RequestHead
from objectcache_gateway.signing.sigv4 import Authenticated, Payload
from objectcache_schemas.errors import InvalidRequest, Unsupported

MD5_BYTES = 16
_LENGTH = re.compile(r"[0-9]{1,19}")
_CHECKSUM_PREFIX = "x-amz-checksum-"
# Say something about checksums, but are none.
_NO_CHECKSUMS = frozenset(
    {"x-amz-checksum-mode", "x-amz-checksum-algorithm", "x-amz-checksum-type"}
)
_TRAILER_PAYLOADS = (Payload.STREAMING_SIGNED_TRAILER, Payload.STREAMING_UNSIGNED_TRAILER)


@dataclass(frozen=True, slots=True)
class BodyResult:
    """A body that arrived whole and matches everything its request said about it."""

    size_bytes: int
    etag_md5_hex: str  # empty where no ETag was asked for
    checksums: dict[str, str]  # lowercase algorithm to base64 value


@dataclass(frozen=True, slots=True)
class _ChecksumClaim:
    """The one x-amz-checksum-* of a request; `value` None comes in a trailer."""

    algorithm: str
    value: str | None

    @property
    def name(self) -> str:
        return _CHECKSUM_PREFIX + self.algorithm


class BodyDecoder:
    """The body of one request.

    `object_bytes_max` bounds the payload. `etag` asks for the MD5. `compute_checksum` names an
    algorithm to compute where the client sent none. `checksum_headers` is false for
    CompleteMultipartUpload, whose x-amz-checksum-* headers speak of the object instead of the body.
    Not for several threads at once, but each call may be in another one.

    Raises `InvalidRequest`: MissingContentLength, EntityTooLarge, InvalidDigest, or InvalidRequest
    for headers that do not go together; `Unsupported` for a transfer encoding other than chunked.
    """

    def __init__(
        self,
        head: RequestHead,
        authenticated: Authenticated,
        object_bytes_max: int,
        etag: bool = True,
        *,
        compute_checksum: str | None = None,
        checksum_headers: bool = True,
    ) -> None:
        self._bytes_max = object_bytes_max
        self._expected_bytes = _expected_bytes(head, authenticated.payload)
        self._check_size(self._expected_bytes or 0)
        self._size_bytes = 0
        self._sha256_hex = authenticated.payload_sha256
        self._md5_claim = _content_md5(head)
        self._claim = _checksum_claim(head, authenticated.payload, checksum_headers)
        self._is_chunk_signed = authenticated.chunk_signing is not None
        self._framing = _framing(authenticated, self._claim, self._expected_bytes)
        self._wants_etag = etag
        self._md5 = (
            hashlib.md5(usedforsecurity=False) if etag or self._md5_claim is not None else None
        )
        self._checksum_algorithm = self._claim.algorithm if self._claim else compute_checksum
        self._checksums = _started(self._checksum_algorithm, self._sha256_hex is not None)

    @property
    def expected_bytes(self) -> int | None:
        """Bytes of the payload, without framing; None where the client did not say."""
        return self._expected_bytes

    @property
    def checksum_algorithm(self) -> str | None:
        """The algorithm of the checksum that `finish` gives, in lowercase."""
        return self._checksum_algorithm

    @property
    def is_checked(self) -> bool:
        """Whether the client sent anything that the body is compared with."""
        claims = (self._sha256_hex, self._md5_claim, self._claim)
        return self._is_chunk_signed or any(claim is not None for claim in claims)

    def feed(self, data: bytes | memoryview) -> list[bytes | memoryview]:
        """Payload that `data` holds, as views of it, hashed.

        Raises `InvalidRequest` (EntityTooLarge, IncompleteBody, broken framing) and `AccessDenied`
        for a chunk whose signature is wrong.
        """
        pieces = self._framing.feed(data) if self._framing else [data] if len(data) else []
        for piece in pieces:
            self._take(piece)
        return pieces

    def finish(self) -> BodyResult:
        """Compare the body with all that the request said about it.

        Raises `InvalidRequest`: IncompleteBody, XAmzContentSHA256Mismatch, BadDigest, or
        MalformedTrailerError.
        """
        trailers = self._framing.finish() if self._framing else {}
        if self._expected_bytes not in (None, self._size_bytes):
            raise self._length_error()
        self._check_sha256()
        self._check_md5()
        self._check_checksum(trailers)
        return BodyResult(
            self._size_bytes,
            self._md5.hexdigest() if self._md5 is not None and self._wants_etag else "",
            self._wanted_checksums(),
        )

    def _take(self, piece: bytes | memoryview) -> None:
        self._size_bytes += len(piece)
        self._check_size(self._size_bytes)
        if self._expected_bytes is not None and self._size_bytes > self._expected_bytes:
            raise self._length_error()
        for checksum in self._checksums.values():
            checksum.update(piece)
        if self._md5 is not None:
            self._md5.update(piece)

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes > self._bytes_max:
            raise InvalidRequest(f"the body is over {self._bytes_max} bytes", code="EntityTooLarge")

    def _length_error(self) -> InvalidRequest:
        return InvalidRequest(
            f"the body has {self._size_bytes} bytes, {self._expected_bytes} were announced",
            code="IncompleteBody",
        )

    def _check_sha256(self) -> None:
        if self._sha256_hex is None:
            return
        if self._checksums["sha256"].digest().hex() != self._sha256_hex:
            raise InvalidRequest(
                "the body does not match x-amz-content-sha256", code="XAmzContentSHA256Mismatch"
            )

    def _check_md5(self) -> None:
        if self._md5_claim is None:
            return
        assert self._md5 is not None
        if self._md5.digest() != self._md5_claim:
            raise InvalidRequest("the body does not match Content-MD5", code="BadDigest")

    def _check_checksum(self, trailers: dict[str, str]) -> None:
        claim = self._claim
        if claim is None:
            return
        value = trailers[claim.name] if claim.value is None else claim.value
        _check_value(claim, value)
        if self._checksums[claim.algorithm].value() != value:
            raise InvalidRequest(f"the body does not match {claim.name}", code="BadDigest")

    def _wanted_checksums(self) -> dict[str, str]:
        algorithm = self._checksum_algorithm
        return {} if algorithm is None else {algorithm: self._checksums[algorithm].value()}

    def __repr__(self) -> str:
        return f"<BodyDecoder {self._size_bytes} of {self._expected_bytes} bytes>"


def stored_content_encoding(head: RequestHead) -> str | None:
    """Content-Encoding to store: without aws-chunked, which is undone on the way in."""
    value = head.header("content-encoding")
    if value is None:
        return None
    codings = [coding.strip() for coding in value.split(",")]
    return ", ".join([c for c in codings if c and c.lower() != "aws-chunked"]) or None


def _started(algorithm: str | None, sha256: bool) -> dict[str, Checksum]:
    names = {algorithm} if algorithm is not None else set[str]()
    if sha256:
        names.add("sha256")
    return {name: Checksum(name) for name in names}


def _framing(
    authenticated: Authenticated, claim: _ChecksumClaim | None, decoded_length: int | None
) -> AwsChunkedDecoder | None:
    if not authenticated.payload.is_aws_chunked:
        return None
    trailer_names = (claim.name,) if claim is not None and claim.value is None else ()
    if authenticated.payload is Payload.STREAMING_SIGNED_TRAILER and not trailer_names:
        raise _mismatched(f"{authenticated.payload.value} needs x-amz-trailer")
    return AwsChunkedDecoder(authenticated.chunk_signing, trailer_names, decoded_length)


# --- lengths -------------------------------------------------------------------------------------


def _expected_bytes(head: RequestHead, payload: Payload) -> int | None:
    transfer_encoding = head.header("transfer-encoding")
    if transfer_encoding is not None and transfer_encoding.strip().lower() != "chunked":
        raise Unsupported("the only transfer encoding that is supported is chunked")
    if payload.is_aws_chunked:
        return _length(head, "x-amz-decoded-content-length")
    return None if transfer_encoding is not None else _length(head, "content-length")


def _length(head: RequestHead, name: str) -> int:
    text = head.header(name)
    if text is None:
        raise InvalidRequest(f"the header {name} is missing", code="MissingContentLength")
    if not _LENGTH.fullmatch(text.strip()):
        raise InvalidRequest(f"the header {name} must be a number of bytes")
    return int(text)


# --- what the request says about its body --------------------------------------------------------


def _content_md5(head: RequestHead) -> bytes | None:
    text = head.header("content-md5")
    if text is None:
        return None
    digest = decode_base64(text.strip(), MD5_BYTES)
    if digest is None:
        raise InvalidRequest("Content-MD5 must be 16 bytes in base64", code="InvalidDigest")
    return digest


def _checksum_claim(
    head: RequestHead, payload: Payload, checksum_headers: bool
) -> _ChecksumClaim | None:
    claims = _trailer_claims(head, payload)
    if not checksum_headers:
        return _single(claims)
    claim = _single([*_header_claims(head), *claims])
    named = head.header("x-amz-sdk-checksum-algorithm")
    if named is not None and (claim is None or claim.algorithm != algorithm_named(named)):
        raise _mismatched(
            f"x-amz-sdk-checksum-algorithm is {named}, but no x-amz-checksum-* header or trailer is"
        )
    return claim


def _single(claims: list[_ChecksumClaim]) -> _ChecksumClaim | None:
    if len(claims) > 1:
        raise _mismatched("send one x-amz-checksum-* header or trailer, not several")
    return claims[0] if claims else None


def _header_claims(head: RequestHead) -> list[_ChecksumClaim]:
    names = dict.fromkeys(name for name, _ in head.headers if name.startswith(_CHECKSUM_PREFIX))
    return [_header_claim(head, name) for name in names if name not in _NO_CHECKSUMS]


def _header_claim(head: RequestHead, name: str) -> _ChecksumClaim:
    value = head.header(name)
    assert value is not None
    claim = _ChecksumClaim(_algorithm_of(name), value.strip())
    _check_value(claim, value.strip())
    return claim


def _trailer_claims(head: RequestHead, payload: Payload) -> list[_ChecksumClaim]:
    announced = head.header("x-amz-trailer")
    if announced is None:
        return []
    if payload not in _TRAILER_PAYLOADS:
        raise _mismatched("x-amz-trailer needs a STREAMING-...-TRAILER x-amz-content-sha256")
    names = [name.strip().lower() for name in announced.split(",")]
    return [_ChecksumClaim(_algorithm_of(name), None) for name in names if name]


def _algorithm_of(name: str) -> str:
    algorithm = name.removeprefix(_CHECKSUM_PREFIX)
    if not name.startswith(_CHECKSUM_PREFIX) or algorithm not in ALGORITHMS:
        raise _mismatched(f"{name} is not one of {_CHECKSUM_PREFIX}{', '.join(ALGORITHMS)}")
    return algorithm


def _check_value(claim: _ChecksumClaim, value: str) -> None:
    if not is_value(claim.algorithm, value):
        # No body has such a checksum; Ceph's tests of S3 want the code of one that differs.
        raise InvalidRequest(
            f"{claim.name} is not a {claim.algorithm.upper()} in base64", code="BadDigest"
        )


def _mismatched(message: str) -> InvalidRequest:
    return InvalidRequest(message, code="InvalidRequest")
