"""What is not what was written: records stop their reader, and an index is made again."""

from __future__ import annotations

import msgspec
import pytest

from objectcache_schemas.errors import Unavailable
from objectcache_storage_server.engines.shared import operations as op
from objectcache_storage_server.engines.shared.log.log_records import (
    LogRecord,
    pack_record,
    record_checksum,
    unpack_record,
)
from objectcache_storage_server.engines.stores.memory_store import MemoryStore, MemoryStoreState
from tests.unit.storage_server.engines.shared.catalogs import Server, soon, until
from tests.unit.storage_server.engines.shared.log.conftest import Opened
from tests.unit.storage_server.engines.shared.log.test_racing_changes import count_up


def append(state: MemoryStoreState, body: bytes, **changes: object) -> int:
    """Append a record that no server made; returns its number."""
    number = state.end
    last = unpack_record(state.records[-1], number - 1)
    fields = {
        "store_id": last.store_id,
        "number": number,
        "writer": last.writer,
        "sequence": last.sequence + 1,
        "previous": record_checksum(state.records[-1]),
        "body": body,
    }
    record = LogRecord(**{**fields, **changes})  # type: ignore[arg-type]
    assert MemoryStore(state).append(number, pack_record(record), soon())
    return number


def check_stopped(server: Server, match: str) -> None:
    """Every use says why it stopped."""
    with pytest.raises(Unavailable, match=match):
        server.catalog.follow(soon())
    with pytest.raises(Unavailable, match=match), server.catalog.reading():
        pass
    with pytest.raises(Unavailable, match=match):
        server.change(count_up)


def test_a_damaged_record_stops_the_server_that_reads_it(one: Server, other: Server) -> None:
    one.store.hold()
    number = other.state.end
    one.store.flip_record(number)
    other.change(count_up)
    other.change(count_up)
    one.store.release()
    check_stopped(
        one, f"record {number} of the store's log does not match its checksum; take a checkpoint"
    )
    assert other.change(count_up) == 3  # it never reads it


def test_a_damaged_record_is_found_when_a_server_starts(one: Server, opened: Opened) -> None:
    one.change(count_up)
    record = bytearray(one.state.records[-1])
    record[60] ^= 1
    one.state.records[-1] = bytes(record)
    with pytest.raises(Unavailable, match="does not match its checksum"):
        opened("fresh")


def test_a_server_that_damage_stopped_goes_on_with_a_checkpoint_beyond_it(
    one: Server, other: Server
) -> None:
    bucket = one.make_bucket()
    other.keys(bucket)
    other.store.hold()
    for number, key in enumerate("abc"):
        if not number:
            other.store.flip_record(one.state.end)
        one.put(bucket, [key])
    other.store.release()
    until(lambda: not other.is_followed)
    check_stopped(other, "does not match its checksum")
    one.catalog.take_checkpoint()
    one.put(bucket, ["d"])
    until(lambda: _has_all(other, bucket, list("abcd")))
    other.put(bucket, ["e"])
    assert one.keys(bucket) == list("abcde")
    assert other.contents() == one.contents()


def _has_all(server: Server, bucket: int, keys: list[str]) -> bool:
    try:
        return server.keys(bucket) == keys
    except Unavailable:
        return False


def test_a_server_whose_index_is_behind_the_damage_starts_with_a_checkpoint_beyond_it(
    one: Server, other: Server
) -> None:
    bucket = one.make_bucket()
    other.keys(bucket)
    other.close()
    for key in "abc":
        one.put(bucket, [key])
    one.state.records[-3] = one.state.records[-3][:20]
    with pytest.raises(Unavailable, match=r"none of ObjectCache's.*objectcache admin checkpoint"):
        other.open()
    one.catalog.take_checkpoint()
    other.open()
    assert other.contents() == one.contents()


def test_a_first_record_that_is_damaged_shuts_out_nobody_who_has_a_checkpoint(
    one: Server, opened: Opened
) -> None:
    one.change(count_up)
    one.state.records[0] = b""
    one.catalog.take_checkpoint()
    assert opened("fresh").contents() == one.contents()


def test_another_damaged_record_beyond_the_checkpoint_stops_it_again(
    one: Server, other: Server
) -> None:
    bucket = one.make_bucket()
    other.keys(bucket)
    other.close()
    for key in "ab":
        one.put(bucket, [key])
    one.state.records[-1] = b""
    one.catalog.take_checkpoint()
    number = one.state.end
    one.put(bucket, ["c"])
    one.state.records[-1] = b""
    with pytest.raises(Unavailable, match=f"record {number} "):
        other.open()
    one.catalog.take_checkpoint()
    other.open()
    assert other.contents() == one.contents()


NOTHING = op.join_operations([])


@pytest.mark.parametrize(
    ("body", "changes", "match"),
    [
        (NOTHING, {"store_id": b"another store..."}, "two stores were mixed up"),
        (NOTHING, {"previous": 7}, "does not follow the record before it"),
        (msgspec.msgpack.encode([[99, 1]]), {}, "a newer server writes to the store"),
        (b"\xc1", {}, "a newer server writes to the store"),
    ],
)
def test_a_record_that_cannot_be_followed_stops_every_server(
    one: Server, body: bytes, changes: dict[str, object], match: str
) -> None:
    number = append(one.state, body, **changes)
    check_stopped(one, match)
    check_stopped(one, f"record {number} ")


def test_a_record_that_contradicts_the_index_is_tried_on_a_new_one_once(
    one: Server, other: Server
) -> None:
    bucket = one.make_bucket()
    one.put(bucket, ["a"])
    other.keys(bucket)
    body = op.join_operations([op.encode_operation(op.DeleteVersions([12345]))])
    number = append(one.state, body)
    until(lambda: _stops(one, f"record {number} of the store's log contradicts"))


def _stops(server: Server, reason: str) -> bool:
    try:
        server.catalog.follow(soon())
    except Unavailable as error:
        return reason in str(error)
    return False


def flip_in_index(server: Server, needle: bytes) -> None:
    """Flip a bit of a closed index, wherever these bytes are."""
    (path,) = server.folder.glob("*/data.mdb")
    size_bytes = 1 << 20
    with path.open("r+b") as file:
        data = bytearray(file.read(size_bytes))
        place = data.find(needle)
        assert place >= 0
        while place >= 0:
            data[place] ^= 1
            place = data.find(needle)
        file.seek(0)
        file.write(data)


@pytest.mark.parametrize("what", ["version", "extent", "bucket", "document", "writer", "state"])
def test_a_damaged_index_is_made_again_from_the_log(one: Server, other: Server, what: str) -> None:
    bucket = one.make_bucket()
    one.put(bucket, ["a", "b"])
    one.change(lambda change: change.put_document("name", b"some document"))
    before = other.contents()
    writer = one.catalog.writer.to_bytes(8, "big")
    one.close()
    needles = {
        "version": b"etag-0",
        "extent": (4).to_bytes(4, "little") + (2).to_bytes(4, "little") + (8).to_bytes(8, "little"),
        "bucket": b"owner\xa6",
        "document": b"some document",
        "writer": writer,
        "state": before[0].store_id,  # type: ignore[attr-defined]
    }
    flip_in_index(one, needles[what])
    one.open()

    def is_whole() -> bool:
        try:
            return bool(one.contents()[1:7] == before[1:7])
        except Unavailable as error:
            assert "made again from the store" in str(error)  # noqa: PT017
            return False

    until(is_whole)
    one.put(bucket, ["c"])
    assert other.keys(bucket) == ["a", "b", "c"]


def test_an_index_of_another_boot_is_made_again(one: Server) -> None:
    one.change(count_up)
    one.close()
    (path,) = one.folder.glob("*/whole")
    path.write_text("1 another boot")
    left = path.with_name("left")
    left.touch()
    one.open()
    assert not left.exists()
    assert one.change(count_up) == 2


def test_a_store_that_was_set_back_is_refused(one: Server) -> None:
    one.change(count_up)
    one.change(count_up)
    one.close()
    one.state.records.pop()
    one.state.records.pop()
    with pytest.raises(Unavailable, match="set back to an earlier state"):
        one.open()
