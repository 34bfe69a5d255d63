"""Records of the log: what is packed is unpacked, and nothing else is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache_schemas.records import ObjectAttributes
from objectcache_storage_server.engines.shared import operations as op
from objectcache_storage_server.engines.shared.log.log_records import (
    FORMAT_VERSION,
    LogRecord,
    UnreadableRecord,
    pack_record,
    unpack_record,
)
from tests.unit.storage_server.engines.shared.catalogs import BUCKET

U64 = st.integers(0, 2**64 - 1)
RECORDS = st.builds(
    LogRecord,
    st.binary(min_size=16, max_size=16),
    U64,
    U64,
    U64,
    U64,
    st.binary(max_size=200),
)
NUMBERS = st.integers(0, 2**63 - 1)
TEXT = st.text(max_size=20)
OPERATIONS = st.one_of(
    st.builds(op.PutBucket, NUMBERS, st.just(BUCKET)),
    st.builds(op.RemoveBucket, NUMBERS, TEXT),
    st.builds(
        op.AddVersions,
        NUMBERS,
        NUMBERS,
        st.lists(st.binary(max_size=50), max_size=5),
        st.lists(st.tuples(*[NUMBERS] * 6), max_size=3),
    ),
    st.builds(op.DeleteVersions, st.lists(NUMBERS, max_size=5)),
    st.builds(op.SetPinned, st.lists(NUMBERS, max_size=5), st.booleans()),
    st.builds(op.PutDocument, TEXT, st.none() | st.binary(max_size=50)),
    st.builds(op.Heartbeat, st.none() | st.binary(max_size=50), st.binary(max_size=64)),
    st.builds(op.FenceWriter, NUMBERS),
    st.builds(op.ForgetWriter, NUMBERS),
    st.just(op.TakeUpkeep()),
    st.builds(op.Bury, st.binary(max_size=64)),
    st.builds(op.NameCheckpoint, NUMBERS),
    st.builds(op.AskForTurn, NUMBERS),
    st.builds(op.ChangeAttributes, NUMBERS, st.builds(ObjectAttributes, content_type=TEXT)),
)


@given(RECORDS)
def test_a_record_is_unpacked_as_it_was_packed(record: LogRecord) -> None:
    assert unpack_record(pack_record(record), record.number) == record


@given(st.lists(OPERATIONS, max_size=6))
def test_operations_are_split_as_they_were_joined(operations: list[op.Operation]) -> None:
    body = op.join_operations([op.encode_operation(each) for each in operations])
    assert op.split_operations(body) == operations


def test_a_flipped_bit_is_found_at_every_byte() -> None:
    packed = pack_record(LogRecord(b"store" + bytes(11), 7, 8, 9, 10, b"body" * 5))
    for place in range(len(packed)):
        for bit in range(8):
            flipped = bytearray(packed)
            flipped[place] ^= 1 << bit
            with pytest.raises(UnreadableRecord, match="record 7"):
                unpack_record(bytes(flipped), 7)


def test_a_record_that_ends_early_is_found_at_every_length() -> None:
    packed = pack_record(LogRecord(bytes(16), 7, 8, 9, 10, b"body"))
    for length in range(len(packed)):
        with pytest.raises(UnreadableRecord, match="record 7"):
            unpack_record(packed[:length], 7)


def test_a_record_is_of_its_number_alone() -> None:
    packed = pack_record(LogRecord(bytes(16), 7, 8, 9, 10, b"body"))
    with pytest.raises(UnreadableRecord, match=r"record 6 .* checksum"):
        unpack_record(packed, 6)


def test_a_newer_format_asks_for_a_newer_server() -> None:
    packed = bytearray(pack_record(LogRecord(bytes(16), 7, 8, 9, 10, b"body")))
    packed[4] = FORMAT_VERSION + 1
    with pytest.raises(UnreadableRecord, match=r"format 2, .* update this one"):
        unpack_record(bytes(packed), 7)
