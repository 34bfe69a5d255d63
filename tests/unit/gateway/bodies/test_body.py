from __future__ import annotations

import base64
import hashlib
import io
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
from awscrt import checksums as crt
from botocore.httpchecksum import AwsChunkedWrapper, Crc32Checksum
from hypothesis import given
from hypothesis import strategies as st

from objectcache_gateway.bodies.body import BodyDecoder, BodyResult, stored_content_encoding
from objectcache_gateway.bodies.checksums import Checksum
from objectcache_gateway.request.request_head import RequestHead
from objectcache_gateway.signing.sigv4 import Payload
from objectcache_schemas.errors import AccessDenied, InvalidRequest, ObjectCacheError, Unsupported
from tests.unit.gateway.request_signing import (
    EMPTY_SHA256,
    authenticated,
    chunk_signing,
    encode_chunked,
    make_head,
)

BODY = b"the body of a request"
BYTES_MAX = 1_000_000
UNSIGNED = authenticated(Payload.UNSIGNED)
TRAILER = authenticated(Payload.STREAMING_UNSIGNED_TRAILER)
MD5 = base64.b64encode(hashlib.md5(BODY).digest()).decode()
CRC32 = base64.b64encode(zlib.crc32(BODY).to_bytes(4, "big")).decode()
CRC64 = base64.b64encode(crt.crc64nvme(BODY).to_bytes(8, "big")).decode()
WRONG_CRC32 = "AAAAAA=="


def put(headers: Mapping[str, str], length: int | None = len(BODY)) -> RequestHead:
    lengths = {} if length is None else {"content-length": str(length)}
    return make_head("PUT", "/b/k", {**lengths, **headers})


def streamed(headers: Mapping[str, str], length: int = len(BODY)) -> RequestHead:
    return put(
        {
            "transfer-encoding": "chunked",
            "content-encoding": "aws-chunked",
            "x-amz-decoded-content-length": str(length),
            **headers,
        },
        None,
    )


def read(decoder: BodyDecoder, wire: bytes, piece_bytes: int = 7) -> tuple[bytes, BodyResult]:
    payload = b"".join(
        bytes(piece)
        for start in range(0, len(wire), piece_bytes)
        for piece in decoder.feed(wire[start : start + piece_bytes])
    )
    return payload, decoder.finish()


def refusal(decoder: BodyDecoder, wire: bytes = BODY) -> str:
    with pytest.raises(ObjectCacheError) as refused:
        read(decoder, wire)
    assert isinstance(refused.value, InvalidRequest | AccessDenied)
    return refused.value.code


def test_a_plain_body_gives_its_size_and_md5() -> None:
    decoder = BodyDecoder(put({}), UNSIGNED, BYTES_MAX)
    assert decoder.expected_bytes == len(BODY)
    assert not decoder.is_checked
    assert read(decoder, BODY) == (
        BODY,
        BodyResult(len(BODY), hashlib.md5(BODY).hexdigest(), {}),
    )


def test_without_an_etag_no_md5_is_given() -> None:
    decoder = BodyDecoder(put({"content-md5": MD5}), UNSIGNED, BYTES_MAX, etag=False)
    assert read(decoder, BODY)[1].etag_md5_hex == ""


def test_a_plain_body_is_passed_on_without_a_copy() -> None:
    decoder = BodyDecoder(put({}), UNSIGNED, BYTES_MAX)
    assert decoder.feed(BODY)[0] is BODY
    assert decoder.feed(b"") == []


# --- what the body is compared with ---


def test_a_signed_hash_must_match() -> None:
    right = authenticated(Payload.SIGNED, hashlib.sha256(BODY).hexdigest())
    decoder = BodyDecoder(put({}), right, BYTES_MAX)
    assert decoder.is_checked
    assert read(decoder, BODY)[1].checksums == {}
    wrong = authenticated(Payload.SIGNED, EMPTY_SHA256)
    assert refusal(BodyDecoder(put({}), wrong, BYTES_MAX)) == "XAmzContentSHA256Mismatch"


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (base64.b64encode(hashlib.md5(b"other").digest()).decode(), "BadDigest"),
        ("", "InvalidDigest"),
        ("rL0Y20zC+Fzt72VPzMSk2A", "InvalidDigest"),
        ("AWS4 HAHAHA", "InvalidDigest"),
        (hashlib.md5(BODY).hexdigest(), "InvalidDigest"),
        ("\u00e9", "InvalidDigest"),
    ],
)
def test_a_content_md5_must_be_one_and_match(value: str, code: str) -> None:
    assert read(BodyDecoder(put({"content-md5": MD5}), UNSIGNED, BYTES_MAX), BODY)[0] == BODY
    with pytest.raises(InvalidRequest) as refused:
        read(BodyDecoder(put({"content-md5": value}), UNSIGNED, BYTES_MAX), BODY)
    assert refused.value.code == code


@pytest.mark.parametrize("algorithm", ["crc32", "crc32c", "crc64nvme", "sha1", "sha256"])
def test_each_checksum_header_must_match(algorithm: str) -> None:
    def decoder_for(data: bytes, payload_sha256: str | None) -> BodyDecoder:
        checksum = Checksum(algorithm)
        checksum.update(data)
        payload = Payload.SIGNED if payload_sha256 else Payload.UNSIGNED
        head = put(
            {
                f"x-amz-checksum-{algorithm}": checksum.value(),
                "x-amz-sdk-checksum-algorithm": algorithm.upper(),
            }
        )
        return BodyDecoder(head, authenticated(payload, payload_sha256), BYTES_MAX)

    for payload_sha256 in (None, hashlib.sha256(BODY).hexdigest()):
        decoder = decoder_for(BODY, payload_sha256)
        assert decoder.is_checked
        assert list(read(decoder, BODY)[1].checksums) == [algorithm]
        assert refusal(decoder_for(b"other", payload_sha256)) == "BadDigest"


@pytest.mark.parametrize(
    "headers",
    [
        {"x-amz-checksum-md4": CRC32},
        {"x-amz-checksum-": CRC32},
        {"x-amz-checksum-crc32": CRC32, "x-amz-checksum-crc64nvme": CRC64},
        {"x-amz-checksum-crc32": CRC32, "x-amz-sdk-checksum-algorithm": "CRC32C"},
        {"x-amz-sdk-checksum-algorithm": "CRC32"},
        {"x-amz-trailer": "x-amz-checksum-crc32"},
    ],
)
def test_checksum_headers_that_do_not_go_together_are_refused(headers: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        BodyDecoder(put(headers), UNSIGNED, BYTES_MAX)
    assert refused.value.code == "InvalidRequest"


@pytest.mark.parametrize("value", ["bad", "", CRC64])
def test_a_checksum_that_no_body_has_is_refused_before_the_body(value: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        BodyDecoder(put({"x-amz-checksum-crc32": value}), UNSIGNED, BYTES_MAX)
    assert refused.value.code == "BadDigest"


def test_a_checksum_header_given_twice_is_refused() -> None:
    twice = [("content-length", "3"), *[("x-amz-checksum-crc32", CRC32)] * 2]
    with pytest.raises(InvalidRequest):
        BodyDecoder(make_head("PUT", "/b/k", twice), UNSIGNED, BYTES_MAX)


def test_headers_that_only_speak_of_checksums_are_no_checksums() -> None:
    head = put(
        {
            "x-amz-checksum-mode": "ENABLED",
            "x-amz-checksum-type": "FULL_OBJECT",
            "x-amz-checksum-algorithm": "CRC32",
        }
    )
    assert not BodyDecoder(head, UNSIGNED, BYTES_MAX).is_checked


def test_the_checksum_of_a_completed_upload_is_not_that_of_the_body() -> None:
    head = put({"x-amz-checksum-crc32": WRONG_CRC32})
    decoder = BodyDecoder(head, UNSIGNED, BYTES_MAX, checksum_headers=False)
    assert read(decoder, BODY)[1].checksums == {}


def test_a_checksum_can_be_computed_where_the_client_sent_none() -> None:
    decoder = BodyDecoder(put({}), UNSIGNED, BYTES_MAX, compute_checksum="crc64nvme")
    assert not decoder.is_checked
    assert read(decoder, BODY)[1].checksums == {"crc64nvme": CRC64}
    sent = BodyDecoder(
        put({"x-amz-checksum-crc32": CRC32}), UNSIGNED, BYTES_MAX, compute_checksum="crc64nvme"
    )
    assert read(sent, BODY)[1].checksums == {"crc32": CRC32}


# --- aws-chunked ---


def test_a_checksum_in_a_trailer_must_match() -> None:
    head = streamed({"x-amz-trailer": "x-amz-checksum-crc64nvme"})
    wire = encode_chunked([BODY], {"x-amz-checksum-crc64nvme": CRC64})
    decoder = BodyDecoder(head, TRAILER, BYTES_MAX)
    assert decoder.expected_bytes == len(BODY)
    payload, result = read(decoder, wire)
    assert payload == BODY
    assert result.checksums == {"crc64nvme": CRC64}
    wrong = encode_chunked([BODY], {"x-amz-checksum-crc64nvme": "A" * 11 + "="})
    assert refusal(BodyDecoder(head, TRAILER, BYTES_MAX), wrong) == "BadDigest"
    malformed = encode_chunked([BODY], {"x-amz-checksum-crc64nvme": "bad"})
    assert refusal(BodyDecoder(head, TRAILER, BYTES_MAX), malformed) == "BadDigest"


@given(st.binary(max_size=30_000), st.sampled_from([8192, 10_000, 1 << 20]))
def test_streams_of_botocore_are_read(data: bytes, chunk_bytes: int) -> None:
    wrapper = AwsChunkedWrapper(
        io.BytesIO(data),
        checksum_cls=Crc32Checksum,
        checksum_name="x-amz-checksum-crc32",
        chunk_size=chunk_bytes,
    )
    head = streamed(
        {
            "x-amz-trailer": "x-amz-checksum-crc32",
            "x-amz-sdk-checksum-algorithm": "CRC32",
        },
        len(data),
    )
    wire = wrapper.read()
    payload, result = read(BodyDecoder(head, TRAILER, BYTES_MAX), wire, 4096)
    assert payload == data
    assert result.etag_md5_hex == hashlib.md5(data).hexdigest()


@pytest.mark.parametrize("trailers", [{}, {"x-amz-checksum-crc32": CRC32}])
def test_a_signed_stream_is_checked_by_its_signatures(trailers: dict[str, str]) -> None:
    payload = Payload.STREAMING_SIGNED_TRAILER if trailers else Payload.STREAMING_SIGNED
    signed = authenticated(payload, signing=chunk_signing())
    head = streamed({"x-amz-trailer": ",".join(trailers)} if trailers else {})
    wire = encode_chunked([BODY], trailers, signed=True)
    decoder = BodyDecoder(head, signed, BYTES_MAX)
    assert decoder.is_checked
    assert read(decoder, wire)[0] == BODY
    other = wire.replace(b"body", b"BODY")
    assert refusal(BodyDecoder(head, signed, BYTES_MAX), other) == "SignatureDoesNotMatch"


def test_a_signed_stream_needs_the_trailer_that_its_mode_announces() -> None:
    signed = authenticated(Payload.STREAMING_SIGNED_TRAILER, signing=chunk_signing())
    with pytest.raises(InvalidRequest, match="x-amz-trailer"):
        BodyDecoder(streamed({}), signed, BYTES_MAX)
    unannounced = authenticated(Payload.STREAMING_SIGNED, signing=chunk_signing())
    with pytest.raises(InvalidRequest, match="x-amz-trailer"):
        BodyDecoder(streamed({"x-amz-trailer": "x-amz-checksum-crc32"}), unannounced, BYTES_MAX)


@pytest.mark.parametrize("names", ["x-amz-meta-a", "x-amz-checksum-crc32,x-amz-checksum-sha1"])
def test_only_one_checksum_may_be_announced_as_a_trailer(names: str) -> None:
    with pytest.raises(InvalidRequest):
        BodyDecoder(streamed({"x-amz-trailer": names}), TRAILER, BYTES_MAX)


def test_a_checksum_cannot_be_in_a_header_and_in_a_trailer() -> None:
    head = streamed({"x-amz-trailer": "x-amz-checksum-crc32", "x-amz-checksum-crc32": CRC32})
    with pytest.raises(InvalidRequest, match="not several"):
        BodyDecoder(head, TRAILER, BYTES_MAX)


def test_the_content_encoding_alone_does_not_make_a_body_chunked() -> None:
    head = put({"content-encoding": "aws-chunked"})
    assert read(BodyDecoder(head, UNSIGNED, BYTES_MAX), BODY)[0] == BODY


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (None, None),
        ("gzip", "gzip"),
        ("aws-chunked", None),
        ("gzip, aws-chunked", "gzip"),
        ("AWS-Chunked,gzip", "gzip"),
        ("aws-chunked,gzip,br,aws-chunked", "gzip, br"),
        ("", None),
    ],
)
def test_the_stored_content_encoding_is_without_aws_chunked(
    value: str | None, stored: str | None
) -> None:
    headers = {} if value is None else {"content-encoding": value}
    assert stored_content_encoding(put(headers)) == stored


# --- lengths ---


@pytest.mark.parametrize("wire", [BODY[:-1], BODY + b"x", b""])
def test_a_body_of_another_length_than_announced_is_refused(wire: bytes) -> None:
    assert refusal(BodyDecoder(put({}), UNSIGNED, BYTES_MAX), wire) == "IncompleteBody"


def test_an_aws_chunked_body_that_ends_early_is_refused() -> None:
    wire = encode_chunked([BODY])
    for kept in (0, 5, len(wire) - 1):
        decoder = BodyDecoder(streamed({}), TRAILER, BYTES_MAX)
        assert refusal(decoder, wire[:kept]) == "IncompleteBody"


def test_a_body_without_any_length_is_refused() -> None:
    for head, auth in [
        (put({}, None), UNSIGNED),
        (put({"transfer-encoding": "chunked"}, None), TRAILER),
        (put({}), TRAILER),
    ]:
        with pytest.raises(InvalidRequest) as refused:
            BodyDecoder(head, auth, BYTES_MAX)
        assert refused.value.code == "MissingContentLength"


@pytest.mark.parametrize("length", ["-1", "+1", "1_0", "1.5", "", "\u0661", "9" * 20, "1,1"])
def test_a_length_that_is_no_number_is_refused(length: str) -> None:
    for head, auth in [
        (put({"content-length": length}), UNSIGNED),
        (streamed({"x-amz-decoded-content-length": length}), TRAILER),
    ]:
        with pytest.raises(InvalidRequest) as refused:
            BodyDecoder(head, auth, BYTES_MAX)
        assert refused.value.code == "InvalidArgument"


def test_a_body_over_the_limit_is_refused_before_its_first_byte() -> None:
    for head, auth in [(put({}, 11), UNSIGNED), (streamed({}, 11), TRAILER)]:
        assert BodyDecoder(head, auth, 11).expected_bytes == 11
        with pytest.raises(InvalidRequest) as refused:
            BodyDecoder(head, auth, 10)
        assert refused.value.code == "EntityTooLarge"


def test_a_chunked_body_of_unknown_length_is_cut_off_at_the_limit() -> None:
    head = put({"transfer-encoding": "Chunked"}, None)
    decoder = BodyDecoder(head, UNSIGNED, len(BODY))
    assert decoder.expected_bytes is None
    assert read(decoder, BODY)[1].size_bytes == len(BODY)
    assert refusal(BodyDecoder(head, UNSIGNED, len(BODY) - 1)) == "EntityTooLarge"


@pytest.mark.parametrize("encoding", ["gzip, chunked", "identity", "xchunked", ""])
def test_other_transfer_encodings_are_refused(encoding: str) -> None:
    with pytest.raises(Unsupported):
        BodyDecoder(put({"transfer-encoding": encoding}), UNSIGNED, BYTES_MAX)


def test_a_body_may_be_fed_from_one_thread_after_another() -> None:
    data = bytes(range(256)) * 4096
    head = streamed({"x-amz-trailer": "x-amz-checksum-sha256"}, len(data))
    digest = base64.b64encode(hashlib.sha256(data).digest()).decode()
    wire = encode_chunked([data[:500_000], data[500_000:]], {"x-amz-checksum-sha256": digest})
    decoder = BodyDecoder(head, TRAILER, len(data))
    payload = b""
    with ThreadPoolExecutor(4) as threads:
        for start in range(0, len(wire), 65_536):
            pieces = threads.submit(decoder.feed, memoryview(wire)[start : start + 65_536])
            payload += b"".join(pieces.result())
    assert payload == data
    assert decoder.finish().checksums == {"sha256": digest}


def test_the_progress_shows_in_the_repr() -> None:
    decoder = BodyDecoder(put({}), UNSIGNED, BYTES_MAX)
    decoder.feed(BODY[:4])
    assert repr(decoder) == "<BodyDecoder 4 of 21 bytes>"
