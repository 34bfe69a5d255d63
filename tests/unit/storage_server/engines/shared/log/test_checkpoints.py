"""Checkpoints: who takes them, what they replace, and what is done with those that are damaged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NoReturn

import pytest

from objectcache_schemas.errors import Busy, Conflict, StorageFull, Unavailable
from objectcache_storage_server.engines.shared.log.keep_checkpoints import CheckpointRule
from objectcache_storage_server.engines.shared.shared_catalog import UnknownOutcome
from objectcache_storage_server.engines.stores.memory_store import MemoryStoreState
from objectcache_storage_server.engines.stores.shared_store import StoreTimeout
from objectcache_storage_server.testing import FaultyStore
from tests.unit.storage_server.engines.shared.catalogs import Server, soon, until
from tests.unit.storage_server.engines.shared.log.conftest import Opened

LATER_S = 3600.0  # when a checkpoint that failed is tried again
ALWAYS = CheckpointRule(records=2, records_kept=0)


@pytest.fixture
def one(opened: Opened) -> Server:
    """A server that holds the upkeep lease and takes a checkpoint when it is asked to."""
    server = opened("one", checkpoint_rule=ALWAYS)
    server.change(lambda change: change.take_upkeep())
    return server


def taken(server: Server, bucket: int, *keys: str) -> None:
    """Store keys, and take a checkpoint."""
    for key in keys:
        server.put(bucket, [key])
    assert server.catalog.keep_checkpoint(0.0)


def checkpoints(state: MemoryStoreState) -> list[str]:
    """The manifests that are there, oldest first."""
    return sorted(name for name in state.objects if name.endswith("/manifest"))


def test_only_the_holder_of_the_lease_takes_one_and_only_when_it_is_due(
    one: Server, opened: Opened, state: MemoryStoreState
) -> None:
    other = opened("other", checkpoint_rule=ALWAYS)
    bucket = one.make_bucket()
    other.catalog.follow(soon())
    other.put(bucket, ["a", "b"])
    assert not other.catalog.keep_checkpoint(0.0)
    assert one.keys(bucket) == ["a", "b"]
    assert one.catalog.keep_checkpoint(0.0)
    assert len(checkpoints(state)) == 1
    assert not one.catalog.keep_checkpoint(0.0)  # one record since then names it
    assert len(checkpoints(state)) == 1


def test_a_new_server_begins_with_the_newest_one(
    one: Server, opened: Opened, state: MemoryStoreState
) -> None:
    bucket = one.make_bucket()
    taken(one, bucket, "a", "b")
    taken(one, bucket, "c", "d")
    taken(one, bucket, "e", "f")
    one.put(bucket, ["g"])
    assert len(checkpoints(state)) == 2  # and nothing is left of the first
    assert {name.rsplit("/", 1)[0] for name in state.objects} == {
        name.rsplit("/", 1)[0] for name in checkpoints(state)
    }
    assert 0 < state.first_record < state.end
    fresh = opened("fresh")
    assert fresh.contents() == one.contents()
    assert fresh.keys(bucket) == list("abcdefg")
    fresh.put(bucket, ["h"])
    assert one.keys(bucket) == list("abcdefgh")


def damage_piece(state: MemoryStoreState, manifest: str) -> None:
    piece = manifest.replace("manifest", "0")
    state.objects[piece] = state.objects[piece][:-1] + b"x"


def cut_piece(state: MemoryStoreState, manifest: str) -> None:
    piece = manifest.replace("manifest", "0")
    state.objects[piece] = state.objects[piece][:-100]


def lose_piece(state: MemoryStoreState, manifest: str) -> None:
    del state.objects[manifest.replace("manifest", "0")]


def damage_manifest(state: MemoryStoreState, manifest: str) -> None:
    state.objects[manifest] = state.objects[manifest][:-1] + b"\0"


def lose_manifest(state: MemoryStoreState, manifest: str) -> None:
    del state.objects[manifest]


@pytest.mark.parametrize(
    "damage", [damage_piece, cut_piece, lose_piece, damage_manifest, lose_manifest]
)
def test_a_damaged_one_falls_back_to_the_one_before_it_or_to_the_log(
    one: Server,
    opened: Opened,
    state: MemoryStoreState,
    damage: Callable[[MemoryStoreState, str], None],
) -> None:
    bucket = one.make_bucket()
    taken(one, bucket, "a", "b")
    first = checkpoints(state)[0]
    damage(state, first)
    assert opened("first").contents() == one.contents()  # the log is whole
    taken(one, bucket, "c", "d")
    taken(one, bucket, "e", "f")
    newest = checkpoints(state)[-1]
    damage(state, newest)
    assert opened("second").contents() == one.contents()
    for name, data in state.objects.items():
        state.objects[name] = data[:-1] + bytes([data[-1] ^ 1])
    with pytest.raises(Unavailable, match="checkpoints none can be read"):
        opened("third")


def test_a_stopped_server_whose_log_was_trimmed_loads_one(one: Server, opened: Opened) -> None:
    bucket = one.make_bucket()
    other = opened("other")
    other.keys(bucket)
    other.close()
    for keys in ("ab", "cd", "ef"):
        taken(one, bucket, *keys)
    other.open()
    assert other.contents() == one.contents()
    assert other.keys(bucket) == list("abcdef")


def test_a_server_that_was_cut_off_loads_one_while_others_read_on(
    one: Server, opened: Opened
) -> None:
    bucket = one.make_bucket()
    other = opened("other")
    other.put(bucket, ["0"])
    other.store.hold()
    for keys in ("ab", "cd", "ef"):
        taken(one, bucket, *keys)
    with other.catalog.reading() as view:
        assert view.match(bucket, ["0"]) == 1
        other.store.release()
        until(lambda: _has(other, bucket, "f"))
        assert view.match(bucket, ["0", "a"]) == 1  # of its moment, as long as it lasts
    assert other.contents() == one.contents()
    other.put(bucket, ["z"])
    assert one.keys(bucket) == list("0abcdefz")


def _has(server: Server, bucket: int, key: str) -> bool:
    try:
        with server.catalog.reading() as view:
            return view.match(bucket, [key]) == 1
    except Unavailable:
        return False


def test_leftovers_of_one_that_could_not_be_written_go(
    one: Server, state: MemoryStoreState
) -> None:
    bucket = one.make_bucket()
    one.put(bucket, ["a"])
    one.store.time_out("put", is_carried_out=True)
    one.store.time_out("delete", is_carried_out=False)
    with pytest.raises(Unavailable):
        one.catalog.keep_checkpoint(0.0)
    assert state.objects
    assert checkpoints(state) == []
    state.capacity_bytes = state.object_bytes + state.record_bytes
    with pytest.raises(StorageFull):
        one.catalog.keep_checkpoint(LATER_S)
    one.put(bucket, ["b"])  # from the reserve
    state.capacity_bytes = None
    assert one.catalog.keep_checkpoint(2 * LATER_S)
    (manifest,) = checkpoints(state)
    assert {name.rsplit("/", 1)[0] for name in state.objects} == {manifest.rsplit("/", 1)[0]}


def fail_at_a_piece(store: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.time_out("put", is_carried_out=True)


def fail_at_the_record(store: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def append(number: int, record: bytes, deadline_s: float) -> NoReturn:
        raise StorageFull("no record fits")

    monkeypatch.setattr(store.inner, "append", append)


@pytest.mark.parametrize("fail", [fail_at_a_piece, fail_at_the_record])
def test_one_that_failed_leaves_nothing_and_is_tried_again_after_a_while(
    one: Server,
    state: MemoryStoreState,
    fail: Callable[[FaultyStore, pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one.put(one.make_bucket(), ["a"])
    fail(one.store, monkeypatch)
    with pytest.raises((StorageFull, StoreTimeout)):
        one.catalog.keep_checkpoint(0.0)
    monkeypatch.undo()
    assert not state.objects
    puts = one.store.calls["put"]
    assert not one.catalog.keep_checkpoint(59.0)
    assert one.store.calls["put"] == puts
    assert one.catalog.keep_checkpoint(LATER_S)


def test_one_whose_record_may_have_been_stored_stays(one: Server, state: MemoryStoreState) -> None:
    one.put(one.make_bucket(), ["a"])
    one.catalog.change = refused_unknown  # type: ignore[method-assign]
    with pytest.raises(UnknownOutcome):
        one.catalog.keep_checkpoint(0.0)
    assert len(checkpoints(state)) == 1


def refused_unknown(act: object, deadline_s: float) -> NoReturn:
    raise UnknownOutcome("it may be stored")


def test_one_that_the_next_holder_is_writing_is_no_leftover(
    one: Server, state: MemoryStoreState
) -> None:
    bucket = one.make_bucket()
    old, begun = f"checkpoint/{1:016x}-{7:016x}/0", f"checkpoint/{1 << 40:016x}-{7:016x}/0"
    with state.changed:
        state.objects[old] = state.objects[begun] = b"piece"
    taken(one, bucket, "a", "b")
    assert begun in state.objects
    assert old not in state.objects


def test_a_server_that_lost_the_lease_meanwhile_names_none(
    one: Server, opened: Opened, state: MemoryStoreState
) -> None:
    other = opened("other", checkpoint_rule=ALWAYS)
    bucket = one.make_bucket()
    one.put(bucket, ["a"])
    writer = one.catalog.writer

    def fence_once() -> None:
        if not checkpoints(state):
            other.change(lambda change: change.fence(writer))
            other.change(lambda change: change.take_upkeep())

    inner = one.store.inner.put

    def put(name: str, parts: list[memoryview], deadline_s: float) -> None:
        if name.endswith("/manifest"):
            fence_once()
        inner(name, parts, deadline_s)

    one.store.inner.put = put  # type: ignore[method-assign,assignment]
    assert not one.catalog.keep_checkpoint(0.0)
    with other.catalog.reading() as view:
        assert view.state.checkpoint is None
        assert view.state.upkeep_holder == other.catalog.writer
    assert other.catalog.keep_checkpoint(0.0)
    other.catalog.follow(soon())
    assert opened("fresh").contents() == other.contents()


def test_one_that_is_ahead_of_the_log_is_refused(
    one: Server, opened: Opened, state: MemoryStoreState
) -> None:
    bucket = one.make_bucket()
    taken(one, bucket, "a", "b", "c")
    one.close()
    with state.changed:
        del state.records[3:]  # an earlier state of the log, beside the store's objects as they are
    with pytest.raises(Unavailable, match=r"the checkpoint .* knew record"):
        opened("fresh")
    assert state.end == 3


def test_any_server_takes_one_when_it_is_told_to(
    one: Server, opened: Opened, state: MemoryStoreState
) -> None:
    other = opened("other", checkpoint_rule=ALWAYS)
    bucket = one.make_bucket()
    for key in ("a", "b"):
        one.put(bucket, [key])
        end = state.end
        taken_by_other = other.catalog.take_checkpoint()
        assert taken_by_other.number == end
        pieces = [data for name, data in state.objects.items() if f"{end:016x}-" in name]
        assert taken_by_other.size_bytes == sum(map(len, pieces)) - len(min(pieces, key=len))
        assert taken_by_other.taken_s > 0
    assert 0 < state.first_record < end  # behind the one before
    assert opened("fresh").contents() == one.contents()


def test_one_that_another_server_was_quicker_than_does_not_count(
    one: Server, opened: Opened, state: MemoryStoreState, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = opened("other", checkpoint_rule=ALWAYS)
    put = other.store.put
    quicker: list[int] = []

    def put_late(name: str, parts: Sequence[memoryview], deadline_s: float) -> None:
        if name.endswith("/manifest"):
            with pytest.raises(Busy):
                other.catalog.take_checkpoint()
            quicker.append(one.catalog.take_checkpoint().number)
        put(name, parts, deadline_s)

    monkeypatch.setattr(other.store, "put", put_late)
    with pytest.raises(Conflict, match="another server took a checkpoint"):
        other.catalog.take_checkpoint()
    monkeypatch.undo()
    assert len(checkpoints(state)) == 1  # nothing is left of the one that does not count
    with one.catalog.reading() as view:
        assert [view.state.checkpoint] == quicker
    assert other.catalog.take_checkpoint().number > quicker[0]


@pytest.fixture
def short(opened: Opened, state: MemoryStoreState) -> Server:
    """A server that has taken two, and whose store has no space left but a little for records."""
    rule = CheckpointRule(records=2, records_kept=1000, records_when_short=1, reserved_bytes_max=0)
    server = opened("short", checkpoint_rule=rule)
    server.change(lambda change: change.take_upkeep())
    bucket = server.make_bucket()
    taken(server, bucket, "a", "b")
    taken(server, bucket, "c", "d")
    state.capacity_bytes, state.reserve_bytes = state.object_bytes + state.record_bytes, 8 << 10
    server.put(bucket, ["e"])  # from the reserve
    return server


def test_one_takes_the_place_of_an_older_one_where_there_is_no_space(
    short: Server, opened: Opened, state: MemoryStoreState
) -> None:
    older, newest = checkpoints(state)
    assert short.catalog.keep_checkpoint(0.0)
    assert checkpoints(state)[0] == newest
    assert len(checkpoints(state)) == 2
    assert state.first_record == int(newest.split("/")[1].split("-")[0], 16)  # none is spared
    assert not any(name.startswith(older.removesuffix("manifest")) for name in state.objects)
    assert opened("fresh").contents() == short.contents()


def test_the_older_one_stays_where_the_newest_cannot_be_read(
    short: Server, state: MemoryStoreState
) -> None:
    names = checkpoints(state)
    damage_piece(state, names[1])
    there = set(state.objects)
    with pytest.raises(StorageFull):
        short.catalog.keep_checkpoint(0.0)
    assert set(state.objects) == there  # nothing is left of the try, either


def test_the_copy_of_a_small_index_may_take_of_what_is_held_back(
    short: Server, state: MemoryStoreState
) -> None:
    names = checkpoints(state)
    damage_piece(state, names[1])
    state.reserve_bytes = 2 << 20
    with pytest.raises(StorageFull):
        short.catalog.keep_checkpoint(0.0)
    short.catalog._checkpoint_rule = replace(short.checkpoint_rule, reserved_bytes_max=64 << 20)
    assert short.catalog.keep_checkpoint(LATER_S)
    assert checkpoints(state)[0] == names[1]
