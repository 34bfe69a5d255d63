"""Checksums of a multipart upload: what it was created with, and what follows from its parts. Pure.

No part is read again: a COMPOSITE value is over the parts' values, and the CRC of the whole object
follows from those of its parts and their sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from objectcache_gateway.bodies.checksums import (
    ALGORITHMS,
    algorithm_named,
    check_type,
    composite_value,
    default_type,
    full_object_value,
)
from objectcache_gateway.request.request_head import RequestHead
from objectcache_gateway.xml.xml_parse import CompletedPart
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.records import COMPOSITE, ObjectAttributes, PartInfo

_TYPE_HEADER = "x-amz-checksum-type"


@dataclass(frozen=True, slots=True)
class UploadChecksum:
    """The algorithm and type that an upload was created with."""

    algorithm: str
    checksum_type: str

    @staticmethod
    def of(attributes: ObjectAttributes) -> UploadChecksum | None:
        """That of an upload, whose attributes name the algorithm without a value."""
        algorithm = next(iter(attributes.checksums), None)
        if algorithm is None:
            return None
        return UploadChecksum(algorithm, attributes.checksum_type or default_type(algorithm))

    def value(self, parts: Sequence[PartInfo]) -> str | None:
        """The object's, from its parts in order; None where one has none of this algorithm."""
        values = [part.checksums.get(self.algorithm) for part in parts]
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            return None
        if self.checksum_type == COMPOSITE:
            return composite_value(self.algorithm, known)
        sizes_bytes = [part.size_bytes for part in parts]
        return full_object_value(self.algorithm, list(zip(known, sizes_bytes, strict=True)))


def asked_checksum(head: RequestHead) -> UploadChecksum | None:
    """What CreateMultipartUpload asks for; raises `InvalidRequest` for what S3 does not have."""
    named = head.header("x-amz-checksum-algorithm")
    asked_type = head.header(_TYPE_HEADER)
    if named is None:
        if asked_type is not None:
            raise _mismatched(f"{_TYPE_HEADER} needs x-amz-checksum-algorithm")
        return None
    algorithm = algorithm_named(named)
    checksum_type = default_type(algorithm) if asked_type is None else asked_type.upper()
    check_type(algorithm, checksum_type)
    return UploadChecksum(algorithm, checksum_type)


def check_part_algorithm(checksum: UploadChecksum | None, sent: str | None) -> None:
    """Raise `InvalidRequest` where a part comes with a checksum that its upload has no use for."""
    if checksum is not None and sent not in (None, checksum.algorithm):
        raise _mismatched(
            f"the part comes with a {str(sent).upper()}, its upload was created with "
            f"{checksum.algorithm.upper()}"
        )


def listed_parts(completed: Sequence[CompletedPart], stored: dict[int, PartInfo]) -> list[PartInfo]:
    """The stored parts that a completion lists; raises `InvalidRequest` (InvalidPart)."""
    found: list[PartInfo] = []
    for part in completed:
        known = stored.get(part.part_number)
        if known is None:
            raise _invalid_part(f"part {part.part_number} is not stored")
        for name, value in part.checksums.items():
            if known.checksums.get(name, value) != value:
                raise _invalid_part(f"part {part.part_number} has another {name.upper()}")
        found.append(known)
    return found


def check_claims(
    head: RequestHead,
    checksum: UploadChecksum | None,
    value: str | None,
    parts: Sequence[PartInfo],
) -> None:
    """Compare what CompleteMultipartUpload says of the object with what follows from its parts.

    Raises `InvalidRequest`: BadDigest for another checksum, else InvalidRequest.
    """
    size_bytes = sum(part.size_bytes for part in parts)
    size_text = head.header("x-amz-mp-object-size")
    if size_text is not None and size_text.strip() != str(size_bytes):
        raise _mismatched(f"the parts hold {size_bytes} bytes, x-amz-mp-object-size differs")
    asked_type = head.header(_TYPE_HEADER)
    created_type = checksum.checksum_type if checksum is not None else None
    if asked_type is not None and created_type not in (None, asked_type.upper()):
        raise _mismatched(f"the upload was created with {_TYPE_HEADER} {created_type}")
    for algorithm in ALGORITHMS:
        claim = head.header(f"x-amz-checksum-{algorithm}")
        if claim is None:
            continue
        if checksum is None or algorithm != checksum.algorithm:
            raise _mismatched(f"the upload was not created with {algorithm.upper()}")
        # A composite value is sent with the count of parts behind it, or without.
        if value is None or claim.strip() not in (value, value.partition("-")[0]):
            raise InvalidRequest(
                f"the object does not match x-amz-checksum-{algorithm}", code="BadDigest"
            )


def _invalid_part(message: str) -> InvalidRequest:
    return InvalidRequest(message, code="InvalidPart")


def _mismatched(message: str) -> InvalidRequest:
    return InvalidRequest(message, code="InvalidRequest")
