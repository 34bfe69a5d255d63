"""Rows of versions: what is packed is unpacked, and rot is found."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache_schemas.records import ObjectAttributes, ObjectInfo
from objectcache_storage_server.engines.shared.index.index_tables import IndexDamage
from objectcache_storage_server.engines.shared.index.version_rows import (
    extents_of,
    heads_of,
    is_pinned,
    name_of,
    names_of,
    new_rows,
    sealed_row,
    size_of,
    unpack_version,
    with_attributes,
    with_pin,
)
from objectcache_storage_server.engines.shared.versions import ExtentName, SharedVersion

U32, U63, U64 = (st.integers(0, 2**bits - 1) for bits in (32, 63, 64))
KEYS = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)
ATTRIBUTES = st.builds(ObjectAttributes, content_type=st.none() | st.text(max_size=20))
VERSIONS = st.builds(
    SharedVersion,
    U32,
    st.builds(
        ObjectInfo,
        key=KEYS,
        size_bytes=U63,
        etag=st.text("0123456789abcdef-", max_size=40),
        modified_s=st.floats(0, 1e11),
        attributes=ATTRIBUTES,
    ),
    U63,
    U32,
    st.lists(U64, max_size=40).map(lambda numbers: array("Q", numbers)),
    st.lists(st.builds(ExtentName, U63, U63), max_size=4).map(tuple),
    U32,
    st.booleans(),
    U64,
)


def packed(version: SharedVersion) -> bytes:
    [row] = new_rows([version])
    assert row.extents == version.extents
    return sealed_row(row.body, version.serial)


@given(VERSIONS)
def test_a_version_is_unpacked_as_it_was_packed(version: SharedVersion) -> None:
    row = packed(version)
    assert unpack_version(row, version.serial) == version
    assert name_of(row) == version.bucket_number.to_bytes(4, "big") + version.info.key.encode()
    assert extents_of(row) == list(version.extents)
    assert size_of(row) == version.info.size_bytes
    assert not is_pinned(row)
    heads = heads_of([row, row])
    assert names_of([row, row], heads) == [name_of(row)] * 2
    assert heads["size_bytes"].tolist() == [version.info.size_bytes] * 2


@given(VERSIONS, ATTRIBUTES, st.booleans())
def test_a_row_is_changed_in_one_respect(
    version: SharedVersion, attributes: ObjectAttributes, pinned: bool
) -> None:
    row = with_pin(packed(version), version.serial, pinned)
    assert is_pinned(row) == pinned
    assert unpack_version(row, version.serial) == version
    changed = with_attributes(row, version.serial, attributes)
    assert is_pinned(changed) == pinned
    assert unpack_version(changed, version.serial).info.attributes == attributes
    back = with_attributes(changed, version.serial, version.info.attributes)
    assert back == row
    assert with_pin(row, version.serial, False) == packed(version)


def test_rot_in_a_row_is_found_at_every_byte() -> None:
    info = ObjectInfo(key="key", size_bytes=16, etag="etag", modified_s=1.0)
    version = SharedVersion(1, info, 5, 8, array("Q", [1, 2]), (ExtentName(1, 2),), 3, True, 4)
    row = packed(version)
    for place in range(len(row)):
        flipped = bytearray(row)
        flipped[place] ^= 1
        with pytest.raises(IndexDamage):
            unpack_version(bytes(flipped), 5)
    with pytest.raises(IndexDamage):
        unpack_version(row, 6)
