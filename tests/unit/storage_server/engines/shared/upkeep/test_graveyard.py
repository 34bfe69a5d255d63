"""Deleted bytes stay for the grace, and are gone after it, whatever fails in between."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from objectcache_schemas.errors import NotFound
from objectcache_storage_server.engines.shared.index.replayed_change import ReplayedChange
from objectcache_storage_server.engines.stores.memory_store import MemoryStoreState
from tests.unit.storage_server.engines.shared.upkeep.upkept_servers import (
    GRACE_S,
    KV,
    UpkeptServer,
    chunk,
    object_names,
    soon,
)

Start = Callable[..., UpkeptServer]


def test_objects_go_when_the_grace_has_passed_since_this_server_saw_the_deletion(
    state: MemoryStoreState, start: Start
) -> None:
    server = start()
    server.engine.create_bucket(KV)
    server.put(["a", "b"])
    with server.engine.open_many(KV.name, ["a"]) as opened:
        server.engine.delete(KV.name, ["a", "b"])
        server.round(10.0)
        server.round(10.0 + GRACE_S - 100)
        memory = memoryview(bytearray(len(chunk("a"))))
        opened.read_into(0, 0, memory)
        assert bytes(memory) == chunk("a")
    assert object_names(state)
    assert server.state().buried_count == 1
    server.round(10.0 + GRACE_S)
    assert not object_names(state)
    after = server.state()
    assert (after.buried_count, after.buried_bytes, after.extent_bytes) == (0, 0, 0)


def test_a_server_that_has_just_started_waits_for_a_grace_of_its_own(
    state: MemoryStoreState, start: Start
) -> None:
    first = start()
    first.engine.create_bucket(KV)
    first.put(["a"])
    first.engine.delete(KV.name, ["a"])
    first.round(0.0)
    second = start()
    second.fence(first)
    second.round(0.0)
    assert second.engine.upkeep.lead.is_ours
    second.round(GRACE_S - 100)
    assert object_names(state)
    second.round(GRACE_S)
    assert not object_names(state)


def test_what_a_crash_leaves_undone_is_done_again(state: MemoryStoreState, start: Start) -> None:
    server = start()
    server.engine.create_bucket(KV)
    server.put(["a"])
    server.put(["b"])
    server.engine.delete(KV.name, ["a", "b"])
    server.round(0.0)
    server.store.time_out("delete", is_carried_out=False)
    server.round(GRACE_S)
    assert len(object_names(state)) == 2
    server.store.time_out("delete", is_carried_out=True)
    server.round(2 * GRACE_S)
    assert not object_names(state)
    assert server.state().buried_count == 2
    server.close()
    other = start()  # nobody knows any more what was deleted
    other.engine.catalog.change(_fence_the_holder, soon())
    other.round(0.0)
    other.round(GRACE_S)
    assert other.state().buried_count == 0


def _fence_the_holder(change: ReplayedChange) -> None:
    assert change.state.upkeep_holder is not None
    change.fence(change.state.upkeep_holder)


def test_a_server_that_lost_the_lease_says_nothing_more_of_the_graveyard(
    state: MemoryStoreState, start: Start
) -> None:
    old, new = start(), start()
    old.engine.create_bucket(KV)
    old.put(["a"])
    old.engine.delete(KV.name, ["a"])
    old.round(0.0)
    old.store.hold()
    new.fence(old)
    new.round(0.0)
    old.engine.upkeep.ages.saw(new.state().end, old.begun_s)
    old.store.release()
    old.engine.upkeep.round(old.begun_s + GRACE_S)  # it may believe that the lease is its own
    old.round(GRACE_S)
    assert new.state().buried_count == 1
    assert not old.engine.upkeep.lead.is_ours
    new.round(GRACE_S)
    assert new.state().buried_count == 0
    assert not object_names(state)


def test_a_reader_that_comes_too_late_is_told_that_it_is_gone(
    state: MemoryStoreState, start: Start
) -> None:
    server, reader = start(), start()
    server.engine.create_bucket(KV)
    server.put(["a"])
    reader.engine.catalog.follow(soon())
    with reader.engine.open_many(KV.name, ["a"]) as opened:
        server.engine.delete(KV.name, ["a"])
        server.round(0.0)
        server.round(GRACE_S)
        assert not object_names(state)
        memory = memoryview(bytearray(len(chunk("a"))))
        with pytest.raises(NotFound):
            opened.read_into(0, 0, memory)
    assert reader.engine.damaged_count == 0
