"""Checksums of multipart uploads, against those of the whole bytes."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Sequence

import pytest

from objectcache_gateway.bodies.checksums import ALGORITHMS, Checksum
from objectcache_gateway.handlers.uploads.upload_checksums import (
    UploadChecksum,
    asked_checksum,
    check_claims,
    check_part_algorithm,
    listed_parts,
)
from objectcache_gateway.xml.xml_parse import CompletedPart
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.records import ObjectAttributes, PartInfo
from objectcache_storage_server.s3.copied_checksums import CopiedChecksums
from tests.unit.gateway.request_signing import make_head

PIECES = (b"first part", b"", b"the last one" * 1000)


def value_of(algorithm: str, data: bytes) -> str:
    checksum = Checksum(algorithm)
    checksum.update(data)
    return checksum.value()


def parts_of(algorithm: str) -> list[PartInfo]:
    return [
        PartInfo(
            part_number=number,
            size_bytes=len(data),
            etag="e",
            modified_s=0.0,
            checksums={algorithm: value_of(algorithm, data)},
        )
        for number, data in enumerate(PIECES, 1)
    ]


def code_of(**headers: str) -> str:
    with pytest.raises(InvalidRequest) as caught:
        asked(**headers)
    return caught.value.code


def asked(**headers: str) -> UploadChecksum | None:
    named = {f"x-amz-checksum-{name}": text for name, text in headers.items()}
    return asked_checksum(make_head("POST", "/b/k?uploads", named))


@pytest.mark.parametrize("algorithm", ["crc32", "crc32c", "crc64nvme"])
def test_the_full_objects_crc_follows_from_its_parts(algorithm: str) -> None:
    checksum = UploadChecksum(algorithm, "FULL_OBJECT")
    assert checksum.value(parts_of(algorithm)) == value_of(algorithm, b"".join(PIECES))


@pytest.mark.parametrize("algorithm", ["crc32", "crc32c", "sha1", "sha256"])
def test_a_composite_value_is_over_the_parts_values(algorithm: str) -> None:
    parts = parts_of(algorithm)
    binary = b"".join(base64.b64decode(part.checksums[algorithm]) for part in parts)
    value = UploadChecksum(algorithm, "COMPOSITE").value(parts)
    assert value == f"{value_of(algorithm, binary)}-3"


def test_without_every_parts_value_there_is_none_of_the_object() -> None:
    parts = parts_of("crc32")
    parts[1] = PartInfo(part_number=2, size_bytes=0, etag="e", modified_s=0.0)
    assert UploadChecksum("crc32", "FULL_OBJECT").value(parts) is None


def test_an_upload_is_created_with_an_algorithm_and_a_type_that_s3_has() -> None:
    assert asked() is None
    assert asked(algorithm="SHA256") == UploadChecksum("sha256", "COMPOSITE")
    assert asked(algorithm="crc64nvme") == UploadChecksum("crc64nvme", "FULL_OBJECT")
    full = asked(algorithm="CRC32C", type="full_object")
    assert full == UploadChecksum("crc32c", "FULL_OBJECT")
    assert code_of(algorithm="MD4") == "InvalidArgument"
    assert code_of(algorithm="SHA1", type="FULL_OBJECT") == "InvalidRequest"
    assert code_of(algorithm="CRC64NVME", type="COMPOSITE") == "InvalidRequest"
    assert code_of(algorithm="CRC32", type="HALF") == "InvalidRequest"
    assert code_of(type="COMPOSITE") == "InvalidRequest"


def test_an_uploads_attributes_name_its_algorithm_without_a_value() -> None:
    attributes = ObjectAttributes(checksums={"crc32": ""}, checksum_type="COMPOSITE")
    assert UploadChecksum.of(attributes) == UploadChecksum("crc32", "COMPOSITE")
    assert UploadChecksum.of(ObjectAttributes()) is None


def test_a_part_may_bring_no_checksum_or_that_of_its_upload() -> None:
    checksum = UploadChecksum("crc32", "COMPOSITE")
    check_part_algorithm(checksum, None)
    check_part_algorithm(checksum, "crc32")
    check_part_algorithm(None, "sha256")
    with pytest.raises(InvalidRequest):
        check_part_algorithm(checksum, "sha256")


def test_a_listed_part_must_be_stored_with_the_checksum_that_is_listed() -> None:
    parts = parts_of("crc32")
    stored = {part.part_number: part for part in parts}
    right = CompletedPart(3, "e", dict(parts[2].checksums))
    assert listed_parts([right], stored) == [parts[2]]
    assert listed_parts([CompletedPart(1, "e", {})], stored) == [parts[0]]
    wrong = CompletedPart(3, "e", dict(parts[0].checksums))
    for listed in (wrong, CompletedPart(4, "e", {})):
        with pytest.raises(InvalidRequest) as caught:
            listed_parts([listed], stored)
        assert caught.value.code == "InvalidPart"


def claim_code(parts: Sequence[PartInfo], created: UploadChecksum | None, **headers: str) -> str:
    named = {f"x-amz-{name.replace('_', '-')}": text for name, text in headers.items()}
    value = created.value(parts) if created else None
    try:
        check_claims(make_head("POST", "/b/k?uploadId=u", named), created, value, parts)
    except InvalidRequest as error:
        return error.code
    return ""


def test_claims_of_the_object_are_compared_with_its_parts() -> None:
    parts = parts_of("sha256")
    created = UploadChecksum("sha256", "COMPOSITE")
    value = created.value(parts) or ""
    size = str(sum(map(len, PIECES)))
    assert claim_code(parts, created) == ""
    assert claim_code(parts, created, checksum_sha256=value, mp_object_size=size) == ""
    assert claim_code(parts, created, checksum_sha256=value.removesuffix("-3")) == ""
    assert claim_code(parts, created, checksum_type="COMPOSITE") == ""
    assert claim_code(parts, created, checksum_sha256="bad") == "BadDigest"
    assert claim_code(parts, created, checksum_sha256=value[:-1] + "2") == "BadDigest"
    assert claim_code(parts, created, checksum_sha1=value) == "InvalidRequest"
    assert claim_code(parts, created, checksum_type="FULL_OBJECT") == "InvalidRequest"
    assert claim_code(parts, created, mp_object_size=size + "0") == "InvalidRequest"
    assert claim_code(parts, None, checksum_crc32="AAAAAA==") == "InvalidRequest"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_storage_server_computes_what_the_gateway_does(algorithm: str) -> None:
    running = CopiedChecksums(algorithm)
    for piece in PIECES:
        running.update(piece)
    whole = b"".join(PIECES)
    assert running.checksums == {algorithm: value_of(algorithm, whole)}
    assert running.md5_hex == hashlib.md5(whole, usedforsecurity=False).hexdigest()


def test_without_an_algorithm_only_the_md5_is_computed() -> None:
    running = CopiedChecksums(None)
    running.update(b"data")
    assert running.checksums == {}
    assert zlib.crc32(b"123456789") == 0xCBF43926  # the values above are of the usual CRC-32
