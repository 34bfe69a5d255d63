from __future__ import annotations

import base64
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache_gateway.bodies.checksums import (
    ALGORITHMS,
    Checksum,
    algorithm_named,
    check_type,
    composite_value,
    default_type,
    full_object_value,
    is_value,
)
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.records import COMPOSITE, FULL_OBJECT

CRCS = ("crc32", "crc32c", "crc64nvme")


def value_of(algorithm: str, data: bytes) -> str:
    checksum = Checksum(algorithm)
    checksum.update(data)
    return checksum.value()


@pytest.mark.parametrize(
    ("algorithm", "hex_value"),
    [
        ("crc32", "cbf43926"),
        ("crc32c", "e3069283"),
        ("crc64nvme", "ae8b14860a799888"),
        ("sha1", hashlib.sha1(b"123456789").hexdigest()),
        ("sha256", hashlib.sha256(b"123456789").hexdigest()),
    ],
)
def test_values_are_those_of_the_published_check_string(algorithm: str, hex_value: str) -> None:
    expected = base64.b64encode(bytes.fromhex(hex_value)).decode()
    assert value_of(algorithm, b"123456789") == expected
    assert is_value(algorithm, expected)


@given(st.sampled_from(ALGORITHMS), st.lists(st.binary(max_size=50), max_size=6))
def test_pieces_give_the_value_of_the_whole(algorithm: str, pieces: list[bytes]) -> None:
    checksum = Checksum(algorithm)
    for piece in pieces:
        checksum.update(memoryview(piece))
    assert checksum.value() == value_of(algorithm, b"".join(pieces))


@given(st.sampled_from(CRCS), st.lists(st.binary(max_size=50), max_size=6))
def test_crcs_of_parts_join_to_the_crc_of_the_object(algorithm: str, parts: list[bytes]) -> None:
    known = [(value_of(algorithm, part), len(part)) for part in parts]
    assert full_object_value(algorithm, known) == value_of(algorithm, b"".join(parts))


def test_a_composite_value_is_that_of_the_parts_values_and_their_count() -> None:
    parts = [b"one", b"two", b"three"]
    digests = b"".join(hashlib.sha256(part).digest() for part in parts)
    expected = base64.b64encode(hashlib.sha256(digests).digest()).decode() + "-3"
    assert composite_value("sha256", [value_of("sha256", part) for part in parts]) == expected


@pytest.mark.parametrize("value", ["", "bad", "AAAA", "AAAAAA==\n", "AAAAAA", "é", "AAAAAAA="])
def test_text_that_is_no_crc32_in_base64_is_told(value: str) -> None:
    assert not is_value("crc32", value)


def test_names_of_algorithms_have_any_case_and_others_are_refused() -> None:
    assert algorithm_named("CRC64NVME") == "crc64nvme"
    with pytest.raises(InvalidRequest, match="MD5"):
        algorithm_named("MD5")


def test_each_algorithm_has_the_types_that_s3_gives_it() -> None:
    assert default_type("crc64nvme") == FULL_OBJECT
    assert default_type("crc32") == default_type("sha256") == COMPOSITE
    for algorithm in CRCS:
        check_type(algorithm, FULL_OBJECT)
    for algorithm in ("crc32", "crc32c", "sha1", "sha256"):
        check_type(algorithm, COMPOSITE)
    for algorithm, wrong in (("crc64nvme", COMPOSITE), ("sha1", FULL_OBJECT), ("crc32", "OTHER")):
        with pytest.raises(InvalidRequest):
            check_type(algorithm, wrong)


def test_the_value_shows_in_the_repr() -> None:
    assert repr(Checksum("crc32")) == "<Checksum crc32 AAAAAA==>"
