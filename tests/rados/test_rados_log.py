"""The log in RADOS becomes segments, whoever dies or sleeps in between."""

from __future__ import annotations

import pytest

from objectcache_schemas.errors import DamagedData, Unavailable
from objectcache_storage_server.engines.stores.rados.librados import WriteOperation
from objectcache_storage_server.engines.stores.rados.log_objects import LogObjects, segment_name
from objectcache_storage_server.engines.stores.rados.rados_store import RadosStore
from objectcache_storage_server.engines.stores.shared_store import TrimmedLog
from tests.contract.engine_suite import content
from tests.rados.conftest import Open, within

MIB = 1 << 20
STEPS = (1, 2, 3, 4)  # the writes by which the head becomes a segment
RECORDS = [content(number, MIB) for number in range(4)]  # which fill it


class Died(BaseException):
    """The server that was appending is no more."""


def objects_of(store: RadosStore) -> LogObjects:
    return store._log._objects


def fill(store: RadosStore) -> None:
    for number, record in enumerate(RECORDS):
        assert store.append(number, record, within())


@pytest.mark.parametrize("step", STEPS)
def test_another_goes_on_where_a_server_died(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    dying, other = open_store(), open_store()
    fill(dying)
    write, done = LogObjects.write, []

    def write_and_die(
        self: LogObjects, name: str, steps: WriteOperation, deadline_s: float, *expected: int
    ) -> int:
        code = write(self, name, steps, deadline_s, *expected)
        if self is objects_of(dying):
            done.append(name)
            if len(done) == step:
                raise Died
        return code

    monkeypatch.setattr(LogObjects, "write", write_and_die)
    with pytest.raises(Died):
        dying.append(4, b"never", within())
    assert other.append(4, b"other", within())
    assert open_store().read_log(0, 1 << 30, within()) == [*RECORDS, b"other"]
    assert not dying.append(4, b"late", within())


@pytest.mark.parametrize("step", STEPS)
def test_a_server_that_slept_between_two_steps_changes_nothing(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    sleeping, other = open_store(), open_store()
    fill(sleeping)
    write, begun = LogObjects.write, []

    def sleep_and_write(
        self: LogObjects, name: str, steps: WriteOperation, deadline_s: float, *expected: int
    ) -> int:
        if self is objects_of(sleeping):
            begun.append(name)
            if len(begun) == step:
                go_far_ahead(other)
        return write(self, name, steps, deadline_s, *expected)

    monkeypatch.setattr(LogObjects, "write", sleep_and_write)
    assert not sleeping.append(4, b"late", within())
    assert len(begun) >= step
    for store in (sleeping, other, open_store()):
        assert store.log_end(0, within()) == 13
        assert store.read_log(12, 1 << 30, within()) == [b"12"]
        with pytest.raises(TrimmedLog):
            store.read_log(0, 1, within())
    assert sleeping.append(13, b"13", within())


def go_far_ahead(store: RadosStore) -> None:
    """Two segments more, and all but the head is trimmed."""
    for number in range(4, 12):
        assert store.append(number, content(number, MIB), within())
    assert store.append(12, b"12", within())
    store.trim_log(12, within())


def test_a_server_that_slept_before_its_append_fails_whatever_became_of_the_log(
    open_store: Open,
) -> None:
    sleeping, other = open_store(), open_store()
    fill(sleeping)  # so it knows where record 4 would begin
    go_far_ahead(other)
    assert not sleeping.append(4, b"late", within())
    assert other.read_log(12, 1 << 30, within()) == [b"12"]


def test_records_are_found_in_every_segment(open_store: Open) -> None:
    writer, reader = open_store(), open_store()
    records = [content(number, MIB) for number in range(21)]
    for number, record in enumerate(records):
        assert writer.append(number, record, within())
    for number in (20, 0, 11, 4, 3, 8, 19):
        assert reader.read_log(number, 1, within()) == [records[number]], number
    assert reader.read_log(6, 1 << 30, within()) == records[6:]
    writer.trim_log(9, within())  # the segment with records 8 to 11 is kept
    assert reader.read_log(8, 1, within()) == [records[8]]
    with pytest.raises(TrimmedLog) as caught:
        reader.read_log(7, 1, within())
    assert caught.value.first == 8


def test_damage_in_the_log_is_told_with_the_record(open_store: Open) -> None:
    store, other = open_store(), open_store()
    fill(store)
    assert store.append(4, b"four", within())
    objects = objects_of(store)
    with WriteOperation(objects.pool.calls) as steps:
        steps.write(b"rot", 2 * MIB)
        objects.write(segment_name(0), steps, within())
    assert other.read_log(0, 1, within()) == RECORDS[:1]
    with pytest.raises(DamagedData, match="record 1 "):
        other.read_log(1, 1, within())
    assert other.read_log(4, 1, within()) == [b"four"]


def test_a_log_that_is_gone_is_not_an_empty_one(open_store: Open) -> None:
    store = open_store()
    assert store.append(0, b"first", within())
    objects = objects_of(store)
    with WriteOperation(objects.pool.calls) as steps:
        steps.remove()
        objects.write("log", steps, within())
    for call in (
        lambda: store.append(1, b"second", within()),
        lambda: store.read_log(0, 1, within()),
        lambda: store.log_end(0, within()),
        lambda: store.trim_log(1, within()),
    ):
        with pytest.raises(Unavailable, match="is gone"):
            call()
