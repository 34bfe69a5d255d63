"""Who is taken for dead, who does the upkeep, and what becomes of what the dead left behind."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from objectcache_schemas.errors import Unavailable
from objectcache_storage_server.engines.shared.log.writers import writer_watch
from objectcache_storage_server.engines.shared.upkeep.lead_upkeep import NotLeading
from objectcache_storage_server.engines.shared.upkeep.upkeep_rules import UpkeepRules
from objectcache_storage_server.engines.stores.memory_store import MemoryStoreState
from tests.unit.storage_server.engines.shared.upkeep.upkept_servers import (
    GRACE_S,
    KV,
    UpkeptServer,
    chunk,
    object_names,
    soon,
    until,
)

Start = Callable[..., UpkeptServer]
SHORT_LEASE = UpkeepRules(grace_s=GRACE_S, writer_lease_s=2.0)


def test_leftovers_of_a_dead_writer_go_after_the_grace_and_it_is_forgotten(
    state: MemoryStoreState, start: Start
) -> None:
    server, dead = start(), start()
    server.engine.create_bucket(KV)
    dead.put(["kept"])
    kept = object_names(state)
    dead.staged(["lost"])
    writer = dead.writer()
    dead.store.hold()  # it says nothing any more
    server.fence(dead)
    server.round(0.0)
    server.round(GRACE_S - 100)
    assert len(object_names(state)) == 2
    server.round(GRACE_S)
    assert object_names(state) == kept
    server.round(GRACE_S + 100)
    with server.engine.catalog.reading() as view:
        assert view.writer_row(writer) is None
    assert server.read("kept") == chunk("kept")


def test_what_a_living_writer_has_staged_is_never_swept(
    state: MemoryStoreState, start: Start
) -> None:
    server, living, dead = start(), start(), start()
    server.engine.create_bucket(KV)
    dead.writer()
    prefix = living.staged(["late"])
    server.fence(dead)
    for rounds in range(4):
        server.round(rounds * GRACE_S)
    living.commit(prefix)
    server.engine.catalog.follow(soon())
    assert server.read("late") == chunk("late")


def test_a_fenced_writer_that_wakes_up_is_refused_and_loses_nothing_acknowledged(
    state: MemoryStoreState, start: Start
) -> None:
    server, sleeper = start(), start()
    server.engine.create_bucket(KV)
    sleeper.put(["acknowledged"])
    prefix = sleeper.staged(["staged"])
    server.fence(sleeper)
    for rounds in range(3):
        server.round(rounds * GRACE_S)
    with pytest.raises(Unavailable, match="took it for dead"):
        sleeper.commit(prefix)
    assert server.stored_keys() == ["acknowledged"]
    assert sleeper.read("acknowledged") == chunk("acknowledged")
    sleeper.put(["again"])  # under another number
    server.engine.catalog.follow(soon())
    assert server.read("again") == chunk("again")
    until(lambda: len(object_names(state)) == 2)


def test_a_silent_server_is_fenced_and_one_that_speaks_is_not(
    state: MemoryStoreState, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that servers which stand still together take nobody for dead.
    monkeypatch.setattr(writer_watch, "STEP_S_MAX", 0.2)
    server = start(rules=SHORT_LEASE, heartbeat_s=0.1)
    speaking, silent = start(heartbeat_s=0.1), start(heartbeat_s=0.1)
    server.engine.create_bucket(KV)
    spoken_for, dead = speaking.writer(), silent.writer()
    silent.store.hold()

    def is_fenced(writer: int) -> bool:
        with server.engine.catalog.reading() as view:
            row = view.writer_row(writer)
        return row is not None and row.fenced_by is not None

    def looked_again() -> bool:
        server.round()
        return is_fenced(dead)

    until(looked_again)
    assert not is_fenced(spoken_for)
    silent.store.release()
    until(lambda: silent.writer() != dead)


def test_one_server_has_the_lease_and_another_takes_it_when_that_is_dead(start: Start) -> None:
    first, second = start(), start()
    first.engine.create_bucket(KV)
    first.round()
    second.round()
    first_writer, second_writer = first.writer(), second.writer()
    assert first.state().upkeep_holder == first_writer
    second.fence(first)
    second.round()
    assert second.state().upkeep_holder == second_writer
    first.round()  # which finds itself fenced, and is another writer by now
    assert first.state().upkeep_holder == second_writer


def test_two_servers_that_both_believe_to_hold_the_lease(start: Start) -> None:
    old, new = start(), start()
    old.engine.create_bucket(KV)
    old.round()
    writer = old.writer()
    old.store.hold()
    new.fence(old)
    new.round()
    old.store.hold()
    assert old.engine.upkeep.lead.is_ours  # as far as it knows
    assert new.engine.upkeep.lead.is_ours
    old.store.release()
    with pytest.raises(NotLeading):
        old.engine.upkeep.lead.change(lambda change: change.put_document("x", b"old"), soon())
    new.engine.upkeep.lead.change(lambda change: change.put_document("x", b"new"), soon())
    old.engine.catalog.follow(soon())
    with old.engine.catalog.reading() as view:
        assert view.document("x") == b"new"
    assert old.writer() != writer
