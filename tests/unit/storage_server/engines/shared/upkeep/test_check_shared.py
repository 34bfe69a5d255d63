"""The check of a store that is in use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from objectcache_storage_server.engines.shared.index.extent_rows import raw_extent
from objectcache_storage_server.engines.shared.log.log_records import pack_record, unpack_record
from objectcache_storage_server.engines.shared.operations import join_operations
from objectcache_storage_server.engines.shared.upkeep.object_names import data_object
from objectcache_storage_server.engines.shared.versions import ExtentName
from objectcache_storage_server.engines.stores.memory_store import MemoryStoreState
from objectcache_storage_server.engines.stores.shared_store import StoredObject
from tests.contract.engine_suite import BUCKET, content, put
from tests.unit.storage_server.engines.shared.upkeep.upkept_servers import (
    CHUNK_BYTES,
    GRACE_S,
    KV,
    UpkeptServer,
    chunk,
    object_names,
    soon,
    until,
)

Start = Callable[..., UpkeptServer]


def filled(start: Start) -> UpkeptServer:
    server = start()
    server.engine.create_bucket(KV)
    server.engine.create_bucket(BUCKET)
    server.put([f"{number:02}" for number in range(40)])
    put(server.engine, "plain", content("plain", 150_001))
    put(server.engine, "empty", b"")
    return server


def test_a_whole_store_is_clean(start: Start) -> None:
    report = filled(start).check()
    assert (report.objects, report.bytes) == (42, 40 * CHUNK_BYTES + 150_001)
    assert (report.damaged, report.misplaced, report.leaked_bytes) == (0, 0, 0)


def test_damage_is_found_and_dropped_only_with_repair(
    state: MemoryStoreState, start: Start
) -> None:
    server = filled(start)
    name = max(object_names(state), key=lambda name: len(state.objects[name]))
    server.store.flip(name, 5)
    report = server.check()
    assert (report.damaged, report.dropped) == (1, 0)
    assert len(report.examples) == 1
    assert server.engine.damaged_count == 0
    report = server.check(repair=True)
    assert (report.damaged, report.dropped) == (1, 1)
    assert server.check().damaged == 0


def test_every_object_in_a_lost_one_of_the_store_is_found(
    state: MemoryStoreState, start: Start
) -> None:
    server = filled(start)
    server.put(["lost-1", "lost-2"])
    server.put(["kept"])
    with server.engine.catalog.reading() as view:
        found = view.versions(view.bucket(KV.name).number, ["lost-1"])
    server.store.lose(found["lost-1"].extents[0].object_name(0))
    report = server.check(repair=True)
    assert (report.damaged, report.dropped) == (2, 2)
    assert all("lost-" in example for example in report.examples)
    assert "kept" in server.stored_keys()
    assert not any(key.startswith("lost") for key in server.stored_keys())


def test_an_object_of_the_wrong_size_is_misplaced(state: MemoryStoreState, start: Start) -> None:
    server = filled(start)
    name = min(object_names(state))
    with state.changed:
        state.objects[name] += b"more"
    assert server.check().misplaced == 1


def test_what_is_too_much_of_an_object_goes_with_repair(
    state: MemoryStoreState, start: Start
) -> None:
    server = filled(start)
    names = sorted(object_names(state))
    before = dict(state.objects)
    with state.changed:
        for name in names[:3]:
            state.objects[name] += b"more"
        past_end = ExtentName.object_name(data_extent(names[0]), 1 << 20)
        state.objects[past_end] = b"more"
    assert server.check().misplaced == 4
    assert len(state.objects[names[0]]) > len(before[names[0]])  # only with repair
    report = server.check(repair=True)
    assert (report.misplaced, report.damaged, report.dropped) == (4, 0, 0)
    assert state.objects == before
    report = server.check()
    assert (report.objects, report.misplaced, report.damaged) == (42, 0, 0)


def test_what_two_reads_disagree_on_is_not_stored_again(
    state: MemoryStoreState, start: Start
) -> None:
    server = filled(start)
    name = min(object_names(state))
    with state.changed:
        state.objects[name] += b"more"
    there = state.objects[name]
    server.store.flip(name, 5, read_count=1)
    server.check(repair=True)
    assert state.objects[name] == there
    server.check(repair=True)
    assert state.objects[name] == there.removesuffix(b"more")


def data_extent(name: str) -> ExtentName:
    found = data_object(StoredObject(name, 0))
    assert found is not None
    return found.extent


def test_puts_of_living_servers_are_left_alone_and_of_forgotten_ones_removed(
    state: MemoryStoreState, start: Start
) -> None:
    server, living, dead, newcomer = filled(start), start(), start(), start()
    staged = living.staged(["staged"])
    dead.writer()
    server.fence(dead)
    for rounds in range(4):
        server.round(rounds * GRACE_S)
    late = f"data/{(1 << 62) + 1:016x}/1.0"  # of somebody who is not in the log any more
    with state.changed:
        state.objects[late] = b"x" * 100
    of_newcomer = newcomer.staged(["newcomer's"])
    report = server.check()
    assert report.leaked_bytes == 100
    assert late in object_names(state)
    assert server.check(repair=True).leaked_bytes == 100
    assert late not in object_names(state)
    living.commit(staged)
    newcomer.commit(of_newcomer)
    server.engine.catalog.follow(soon())
    assert server.read("staged") == chunk("staged")
    assert server.read("newcomer's") == chunk("newcomer's")
    assert server.check().leaked_bytes == 0


def test_leftovers_of_checkpoints_are_counted_and_removed(
    state: MemoryStoreState, start: Start
) -> None:
    server = filled(start)
    server.engine.take_checkpoint()
    old, begun = f"checkpoint/{1:016x}-{7:016x}/0", f"checkpoint/{1 << 40:016x}-{7:016x}/0"
    with state.changed:
        state.objects[old], state.objects[begun] = b"x" * 100, b"x"
    report = server.check()
    assert report.leaked_bytes == 100
    assert any(old in example for example in report.examples)
    assert old in state.objects
    assert server.check(repair=True).leaked_bytes == 100
    assert old not in state.objects
    assert begun in state.objects  # another server may be writing it
    assert server.check().leaked_bytes == 0


def test_a_check_ends_early_when_it_is_told_to(start: Start) -> None:
    server = filled(start)
    reports: list[int] = []

    def ended(report: object) -> bool:
        reports.append(1)
        return False

    report = server.engine.check(False, ended)
    assert len(reports) == 1
    assert report.objects < 42


def test_deletions_beside_a_check_are_no_finding(start: Start) -> None:
    server = filled(start)

    def meanwhile(report: object) -> bool:
        server.engine.delete(KV.name, [f"{number:02}" for number in range(20)])
        server.round(0.0)
        server.round(GRACE_S)
        return True

    report = server.engine.check(True, meanwhile)
    assert (report.damaged, report.misplaced, report.leaked_bytes) == (0, 0, 0)


def test_status_says_what_the_store_holds(start: Start) -> None:
    server = filled(start)
    server.engine.delete(BUCKET.name, ["plain"])
    server.round(0.0)
    status = server.engine.status()
    assert (status.objects, status.live_bytes) == (41, 40 * CHUNK_BYTES)
    assert status.allocated_bytes == 40 * CHUNK_BYTES + 150_001
    assert status.shared is not None
    assert (status.shared.buried_extents, status.shared.buried_bytes) == (1, 150_001)
    assert status.shared.leads_upkeep
    assert (status.shared.writers, status.shared.fenced_writers) == (1, 0)
    assert status.shared.log_end == server.state().end


def test_a_record_of_another_past_is_found(state: MemoryStoreState, start: Start) -> None:
    server = filled(start)
    with state.changed:
        before = unpack_record(state.records[2], 2)
        state.records[2] = pack_record(replace(before, body=join_operations([])))
    report = server.check()
    assert (report.log_records, report.bad_log_records) == (state.end, 1)
    assert report.examples == ("record 3 of the log does not follow the record before it",)


def test_another_newest_record_than_the_one_that_was_replayed_is_found(
    state: MemoryStoreState, start: Start
) -> None:
    server = filled(start)
    with state.changed:
        newest = unpack_record(state.records[-1], state.end - 1)
        state.records[-1] = pack_record(replace(newest, body=join_operations([])))
    report = server.check()
    assert report.bad_log_records == 1
    assert "is not the one that this server has replayed" in report.examples[0]


def test_a_record_that_nobody_can_follow_is_found_though_objects_cannot_be_checked(
    state: MemoryStoreState, start: Start
) -> None:
    server = filled(start)
    with state.changed:
        end = state.end
        state.records += [b"damaged", b"damaged, too"]
        state.changed.notify_all()
    until(lambda: server.engine.catalog._follower.failure != "")
    report = server.check()
    assert (report.log_records, report.bad_log_records, report.objects) == (end + 2, 2, 0)
    assert report.examples[-1].startswith("objects were not checked: ")


def test_a_trimmed_log_without_a_whole_checkpoint_is_found(
    state: MemoryStoreState, start: Start
) -> None:
    server = filled(start)
    server.store.trim_log(3, soon())
    report = server.check()
    assert (report.log_records, report.bad_log_records) == (state.end - 3, 1)
    assert report.examples == (
        "the log begins with record 3, and no whole checkpoint comes so far: "
        "no server can be added",
    )


def test_an_object_in_an_extent_that_the_index_lacks_is_found(start: Start) -> None:
    server = filled(start)
    catalog = server.engine.catalog
    with catalog.reading() as view:
        version = view.versions(view.bucket(BUCKET.name).number, ["plain"])["plain"]
    index = catalog._replay.index
    with index.writing(0) as txn:
        assert txn.delete(raw_extent(version.extents[0]), db=index.databases.extents)
        txn.commit()
    report = server.check()
    assert report.damaged == 1
    assert report.examples == (
        f"bucket {BUCKET.name!r}, key 'plain': the index lacks an extent that it is in",
    )
