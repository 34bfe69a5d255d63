"""The checksums that S3 clients send and ask for, as their headers and XML carry them."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence

from awscrt import checksums as crt

from objectcache_runtime.running_checksums import CHECKSUMS, Bytes
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.records import COMPOSITE, FULL_OBJECT

_DIGEST_BYTES = {name: len(start().digest()) for name, start in CHECKSUMS.items()}
# Value of A+B from the values of A and B and the length of B.
_COMBINE: dict[str, Callable[[int, int, int], int]] = {
    "crc32": crt.combine_crc32,
    "crc32c": crt.combine_crc32c,
    "crc64nvme": crt.combine_crc64nvme,
}

ALGORITHMS = tuple(CHECKSUMS)  # in lowercase, as in x-amz-checksum-NAME


class Checksum:
    """One algorithm over a stream of bytes."""

    __slots__ = ("_running", "algorithm")

    def __init__(self, algorithm: str) -> None:
        """`algorithm` is one of `ALGORITHMS`."""
        self.algorithm = algorithm
        self._running = CHECKSUMS[algorithm]()

    def update(self, data: Bytes) -> None:
        """Take the next bytes."""
        self._running.update(data)

    def digest(self) -> bytes:
        """The value so far; CRCs in big-endian order."""
        return self._running.digest()

    def value(self) -> str:
        """The value so far in base64, as S3's headers carry it."""
        return base64.b64encode(self.digest()).decode("ascii")

    def __repr__(self) -> str:
        return f"<Checksum {self.algorithm} {self.value()}>"


def algorithm_named(name: str) -> str:
    """The algorithm of an S3 name such as CRC32C; raises `InvalidRequest` for others."""
    algorithm = name.lower()
    if algorithm not in CHECKSUMS:
        known = ", ".join(known.upper() for known in ALGORITHMS)
        raise InvalidRequest(f"checksum algorithm {name!r} is not one of {known}")
    return algorithm


def is_value(algorithm: str, value: str) -> bool:
    """Whether `value` is base64 of the right number of bytes for the algorithm."""
    return decode_base64(value, _DIGEST_BYTES[algorithm]) is not None


def decode_base64(value: str, length_bytes: int) -> bytes | None:
    """The bytes behind strict base64, or None where it is not that or has another length."""
    try:
        data = base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        return None
    return data if len(data) == length_bytes else None


def default_type(algorithm: str) -> str:
    """The checksum type of a multipart upload that names only an algorithm, as S3 chooses it."""
    return FULL_OBJECT if algorithm == "crc64nvme" else COMPOSITE


def check_type(algorithm: str, checksum_type: str) -> None:
    """Raise `InvalidRequest` unless S3 knows the algorithm in this type.

    SHA values cannot be joined into one of the full object, and CRC64NVME has no other form.
    """
    allowed = {FULL_OBJECT} if algorithm == "crc64nvme" else {COMPOSITE}
    if algorithm in _COMBINE:
        allowed.add(FULL_OBJECT)
    if checksum_type not in allowed:
        raise InvalidRequest(
            f"x-amz-checksum-type {checksum_type!r} cannot be used with {algorithm.upper()}",
            code="InvalidRequest",
        )


def composite_value(algorithm: str, part_values: Sequence[str]) -> str:
    """COMPOSITE value of a multipart object: over the parts' binary values, "-" and their count.

    `part_values` are base64, in part order.
    """
    checksum = Checksum(algorithm)
    for value in part_values:
        checksum.update(base64.b64decode(value))
    return f"{checksum.value()}-{len(part_values)}"


def full_object_value(algorithm: str, parts: Sequence[tuple[str, int]]) -> str:
    """FULL_OBJECT value of a multipart object, for the CRC algorithms.

    `parts` are base64 values and sizes in bytes, in part order; no part is read again.
    """
    combine = _COMBINE[algorithm]
    total = 0
    for value, size_bytes in parts:
        total = combine(total, int.from_bytes(base64.b64decode(value), "big"), size_bytes)
    return base64.b64encode(total.to_bytes(_DIGEST_BYTES[algorithm], "big")).decode("ascii")
