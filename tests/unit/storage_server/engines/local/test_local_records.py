"""Records of the local engine's index: they come back as they were, or count as damaged."""

from __future__ import annotations

import random
from array import array

import msgspec
import numpy as np
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from objectcache_schemas.layout import KvLayout
from objectcache_schemas.records import BucketInfo, ObjectAttributes, ObjectInfo
from objectcache_storage_server.engines.catalog import BucketRow
from objectcache_storage_server.engines.key_order import key_hash
from objectcache_storage_server.engines.lmdb_spaces.bucket_rows import seal_bucket, unseal_bucket
from objectcache_storage_server.engines.lmdb_spaces.seals import seal, unseal
from objectcache_storage_server.engines.local.index.index_rows import (
    STORED_EXTENT,
    STORED_OBJECT,
    USES_ROWS,
    fill_table,
    overlay_uses,
    row_bodies,
    rows_of_bodies,
    uses_of,
)
from objectcache_storage_server.engines.local.records import (
    Version,
    seal_version,
    unseal_record,
    version_of,
)
from objectcache_storage_server.engines.local.space.dense_tables import (
    EXTENT_COLUMNS,
    OBJECT_COLUMNS,
    DenseTable,
)

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
ATTRIBUTES = st.builds(
    ObjectAttributes,
    content_type=st.none() | st.text(max_size=5),
    user_metadata=st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
)
INFOS = st.builds(
    ObjectInfo,
    key=st.text(min_size=1, max_size=20),
    size_bytes=st.integers(0, 2**50),
    etag=st.text(max_size=40),
    modified_s=st.floats(0, 2**32),
    attributes=ATTRIBUTES,
)
VERSIONS = st.builds(
    Version,
    bucket_number=U32,
    info=INFOS,
    number=U32,
    serial=st.just(9),
    block_bytes=st.integers(1, 2**30),
    checksums=st.lists(U64, max_size=5).map(lambda values: array("Q", values)),
    extents=st.lists(U32, max_size=3).map(tuple),
    slot=st.integers(0, 255),
    is_evictable=st.booleans(),
    parent_hash=U64,
    frame_checksums=st.none() | st.lists(U64, max_size=5).map(lambda values: array("Q", values)),
)


@given(VERSIONS)
def test_a_version_comes_back_as_it_was_stored(version: Version) -> None:
    key = version.info.key
    own_hash = key_hash(version.bucket_number, key)
    record = unseal_record(seal_version(version, 9, own_hash), own_hash)
    assert record is not None
    assert version_of(record, version.bucket_number, key) == version


@given(VERSIONS)
def test_a_record_from_before_there_were_frames_is_one_without_them(version: Version) -> None:
    body = unseal(seal_version(version, 9, 5), 5)
    assert body is not None
    fields = msgspec.msgpack.decode(body)
    record = unseal_record(seal(msgspec.msgpack.encode(fields[:-1]), 5), 5)
    assert record is not None
    plain = msgspec.structs.replace(version, frame_checksums=None)
    assert version_of(record, version.bucket_number, version.info.key) == plain


@given(VERSIONS, st.data())
def test_any_changed_bit_is_noticed(version: Version, data: st.DataObject) -> None:
    stored = bytearray(seal_version(version, 9, 5))
    position = data.draw(st.integers(0, len(stored) - 1))
    stored[position] ^= 1 << data.draw(st.integers(0, 7))
    assert unseal_record(bytes(stored), 5) is None


@given(VERSIONS, st.integers(0, 40))
def test_a_record_that_lost_its_end_is_noticed(version: Version, kept_bytes: int) -> None:
    assert unseal_record(seal_version(version, 9, 5)[:kept_bytes], 5) is None


def test_a_seal_holds_only_for_its_owner() -> None:
    assert unseal(seal(b"body", 1), 1) == b"body"
    assert unseal(seal(b"body", 1), 2) is None


@given(st.integers(0, 2**31), st.text())
def test_the_hash_of_a_key_covers_its_bucket_and_is_never_zero(bucket: int, key: str) -> None:
    raw = bucket.to_bytes(4, "big") + key.encode()
    assert key_hash(bucket, key) == xxhash.xxh3_64_intdigest(raw) > 0
    assert key_hash(bucket, key) != key_hash(bucket + 1, key)


def test_a_bucket_comes_back_only_under_its_name() -> None:
    layout = KvLayout(
        num_layers=2, chunk_tokens=16, per_layer_chunk_bytes=64, dtype="bf16", fingerprint="m"
    )
    info = BucketInfo(name="one", owner="o", region="r", created_s=1.5, layout=layout)
    row = BucketRow(3, info)
    assert unseal_bucket(b"one", seal_bucket(row)) == row
    assert unseal_bucket(b"two", seal_bucket(row)) is None


def random_rows(
    columns: np.dtype[np.void], count: int, seed: int
) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    raw = random.Random(seed).randbytes(count * columns.itemsize)
    rows = np.frombuffer(raw, columns).copy()
    for name in columns.names or ():
        if columns[name] == np.bool_:
            rows[name] = rows[name].view("u1") % 2 == 1
        if columns[name].kind == "f":
            rows[name] = np.arange(count)
    return rows


def test_rows_keep_the_columns_that_are_stored() -> None:
    for columns, stored in ((OBJECT_COLUMNS, STORED_OBJECT), (EXTENT_COLUMNS, STORED_EXTENT)):
        rows = random_rows(columns, 50, seed=1)
        bodies = row_bodies(rows, stored)
        assert {len(body) for body in bodies} == {stored.itemsize}
        found = rows_of_bodies(bodies, stored)
        for name in stored.names or ():
            assert columns[name] == stored[name], name
            np.testing.assert_array_equal(found[name], rows[name])


def test_a_filled_table_gives_out_the_numbers_between() -> None:
    table = DenseTable(OBJECT_COLUMNS)
    rows = rows_of_bodies(
        row_bodies(random_rows(OBJECT_COLUMNS, 3, 2), STORED_OBJECT), STORED_OBJECT
    )
    fill_table(table, np.array([5000, 1, 3]), rows)
    assert len(table) == 3
    assert table.rows["serial"][[5000, 1, 3]].tolist() == rows["serial"].tolist()
    assert [table.add() for _ in range(3)] == [0, 2, 4]


def test_uses_reach_only_the_objects_that_they_were_stored_of() -> None:
    table = DenseTable(OBJECT_COLUMNS)
    for number in range(USES_ROWS + 5):
        table.add()
        table.rows["own_hash"][number] = number + 1
    table.rows["last_used"][: USES_ROWS + 5] = 10
    table.rows["parent_hash"][: USES_ROWS + 5] = 77
    table.remove(2)
    blocks = [uses_of(table, block) for block in range(2)]

    again = DenseTable(OBJECT_COLUMNS)
    for number in range(USES_ROWS + 5):
        again.add()
        again.rows["own_hash"][number] = number + 1
    again.rows["own_hash"][3] = 999  # another object under the same number
    again.rows["last_used"][4] = 11  # stored again after its use was
    for block, stored in enumerate(blocks):
        overlay_uses(again, block, stored)
    last_used = again.rows["last_used"]
    assert last_used[:6].tolist() == [10, 10, 0, 0, 11, 10]
    assert last_used[USES_ROWS : USES_ROWS + 6].tolist() == [10] * 5 + [0]
    assert again.rows["parent_hash"][:6].tolist() == [77, 77, 0, 0, 0, 77]


def test_a_damaged_or_misplaced_block_of_uses_is_passed_over() -> None:
    table = DenseTable(OBJECT_COLUMNS)
    table.rows["own_hash"][table.add()] = 1
    table.rows["last_used"][0] = 5
    stored = uses_of(table, 0)
    table.rows["last_used"][0] = 3
    overlay_uses(table, 1, stored)
    overlay_uses(table, 0, stored[:-1] + b"!")
    assert table.rows["last_used"][0] == 3
    overlay_uses(table, 0, stored)
    assert table.rows["last_used"][0] == 5
