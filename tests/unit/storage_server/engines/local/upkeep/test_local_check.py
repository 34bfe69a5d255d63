"""The check of a local store: what it finds, what it repairs, and whom it lets alone."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache_schemas.errors import NotFound
from objectcache_schemas.limits import KIB, MIB
from objectcache_schemas.operators.engine_status import CheckReport
from objectcache_schemas.records import Condition
from objectcache_storage_server.engines.base import PrefixShape, StagedPut
from objectcache_storage_server.engines.local.engine import LocalEngine
from objectcache_storage_server.engines.local.index.index_view import raw_number
from objectcache_storage_server.engines.local.records import Version
from objectcache_storage_server.engines.local.space.dense_tables import EXTENT_COLUMNS
from objectcache_storage_server.engines.local.upkeep import check_store
from objectcache_storage_server.engines.local.upkeep.check_store import check_objects
from objectcache_storage_server.engines.local.upkeep.find_misplaced import (
    Claims,
    outside_extents,
    overlapping_extents,
    unnamed_extents,
)
from objectcache_storage_server.engines.local.volumes.volume import IoPath
from tests.contract.engine_suite import BUCKET, content, put, read
from tests.contract.opened_engines.local_engines import SMALL, small_local_engine

LAYERS, SLICE_BYTES = 4, 4 * KIB
CHUNK_BYTES = LAYERS * SLICE_BYTES
Open = Callable[[], LocalEngine]


@pytest.fixture
def open_engine(tmp_path: Path) -> Iterator[Open]:
    """Opens the same store again and again; what is open at the end is closed."""
    engines: list[LocalEngine] = []

    def reopen() -> LocalEngine:
        if engines:
            engines[-1].close()
        engines.append(small_local_engine(tmp_path / "data"))
        if not engines[-1].buckets():
            engines[-1].create_bucket(BUCKET)
        return engines[-1]

    yield reopen
    engines[-1].close()


def put_prefix(engine: LocalEngine, name: str, count: int) -> list[str]:
    """Store chunks whose content follows from their keys, which are returned."""
    keys = [f"{name}-{index:03}" for index in range(count)]
    shape = PrefixShape(keys, LAYERS, SLICE_BYTES, layerwise=False)
    prefix = engine.stage_prefix(BUCKET.name, shape)
    prefix.write(0, memoryview(b"".join(content(key, CHUNK_BYTES) for key in keys)))
    engine.commit([StagedPut(staged, "") for staged in prefix.staged], Condition(immutable=True))
    return keys


def assert_whole(engine: LocalEngine, keys: Sequence[str]) -> None:
    for key in keys:
        assert read(engine, key) == content(key, CHUNK_BYTES), key


def version_of(engine: LocalEngine, key: str) -> Version:
    with engine.index.reading() as view:
        return view.versions(view.bucket(BUCKET.name).number, [key])[key]


def rewrite(engine: LocalEngine, key: str, extents: tuple[int, ...], slot: int) -> None:
    """Have the index say that an object lies elsewhere, in the record and in the row."""
    version = version_of(engine, key)
    wrong = msgspec.structs.replace(version, extents=extents, slot=slot)
    row = engine.holdings.objects.rows[[version.number]]
    row["extent"], row["slot"] = extents[0], slot
    with engine.index.writing() as change:
        assert change.move(version.name, wrong, row)


def flip_byte(engine: LocalEngine, folder: Path, key: str) -> None:
    """Change a byte of an object that lies in the first data file."""
    version = version_of(engine, key)
    row = engine.holdings.extents.rows[version.extents[0]]
    offset_bytes = int(row["offset_bytes"]) + version.slot * int(row["slice_bytes"]) + 17
    assert offset_bytes < SMALL.data_file_bytes
    with (folder / "data" / "data" / "000000").open("r+b") as file:
        file.seek(offset_bytes)
        byte = file.read(1)[0]
        file.seek(offset_bytes)
        file.write(bytes([byte ^ 1]))


def run_check(engine: LocalEngine, *, repair: bool = False) -> CheckReport:
    return engine.check(repair, lambda _: True)


def assert_sound(engine: LocalEngine, objects: int) -> None:
    report = run_check(engine)
    assert report == CheckReport(objects=objects, bytes=report.bytes)


def assert_gone(engine: LocalEngine, key: str) -> None:
    with pytest.raises(NotFound):
        engine.stat(BUCKET.name, key)


@pytest.mark.parametrize("repair", [False, True])
def test_a_sound_store_is_read_whole_and_nothing_is_found(open_engine: Open, repair: bool) -> None:
    engine = open_engine()
    keys = put_prefix(engine, "a", 70)
    put(engine, "plain", content("plain", 3 * MIB + 5))
    put(engine, "empty", b"")
    for _ in range(2):
        report = run_check(engine, repair=repair)
        assert report == CheckReport(objects=72, bytes=70 * CHUNK_BYTES + 3 * MIB + 5)
        engine = open_engine()
    assert_whole(engine, keys)


def test_a_flipped_byte_is_found_and_dropped_only_by_a_repair(
    open_engine: Open, tmp_path: Path
) -> None:
    engine = open_engine()
    keys = put_prefix(engine, "a", 6)
    flip_byte(engine, tmp_path, keys[2])
    report = run_check(engine)
    assert (report.damaged, report.misplaced, report.leaked_bytes, report.dropped) == (1, 0, 0, 0)
    assert f"key {keys[2]!r}" in report.examples[0]
    assert engine.stat(BUCKET.name, keys[2])
    report = run_check(engine, repair=True)
    assert (report.damaged, report.dropped) == (1, 1)
    assert_gone(engine, keys[2])
    assert_sound(engine, objects=5)
    assert_whole(engine, keys[:2] + keys[3:])


@pytest.mark.parametrize("has_restarted", [False, True])
@pytest.mark.parametrize("slots", [4, 1])
def test_of_two_records_on_one_slot_the_one_whose_bytes_lie_there_stays(
    open_engine: Open, has_restarted: bool, slots: int
) -> None:
    engine = open_engine()
    wrong, right = put_prefix(engine, "a", slots), put_prefix(engine, "b", slots)
    target = version_of(engine, right[0])
    rewrite(engine, wrong[0], target.extents, target.slot)
    if has_restarted:
        engine = open_engine()
    report = run_check(engine)
    assert (report.damaged, report.misplaced, report.dropped) == (1, 1, 0)
    assert report.leaked_bytes == (CHUNK_BYTES if slots == 1 else 0)
    assert "claims the place of" in report.examples[0]
    report = run_check(engine, repair=True)
    assert (report.misplaced, report.dropped) == (1, 1)
    assert_gone(engine, wrong[0])
    for _ in range(2):
        assert_sound(engine, objects=2 * slots - 1)
        assert_whole(engine, wrong[1:] + right)
        engine = open_engine()
    engine.delete(BUCKET.name, wrong)
    assert_whole(engine, right)
    engine.delete(BUCKET.name, right)
    assert engine.holdings.allocated_bytes == 0


@pytest.mark.parametrize(
    ("extent", "slot", "reason"),
    [(0, 4, "slot 4 of an extent of 4"), (70_000, 0, "extent 70000, which does not exist")],
)
def test_a_record_that_points_to_no_place_is_found_and_dropped(
    open_engine: Open, extent: int, slot: int, reason: str
) -> None:
    engine = open_engine()
    keys = put_prefix(engine, "a", 4)
    assert version_of(engine, keys[0]).extents == (0,)
    rewrite(engine, keys[3], (extent,), slot)
    report = run_check(engine)
    assert (report.objects, report.damaged, report.misplaced, report.dropped) == (3, 0, 1, 0)
    assert reason in report.examples[0]
    report = run_check(engine, repair=True)
    assert (report.misplaced, report.dropped) == (1, 1)
    assert_sound(engine, objects=3)
    assert_whole(engine, keys[:3])
    engine.delete(BUCKET.name, keys[:3])
    assert engine.holdings.allocated_bytes == 0


def test_a_record_that_points_to_another_free_slot_is_damaged(open_engine: Open) -> None:
    engine = open_engine()
    keys, others = put_prefix(engine, "a", 4), put_prefix(engine, "b", 4)
    place = version_of(engine, others[0])
    engine.delete(BUCKET.name, others[:1])
    rewrite(engine, keys[0], place.extents, place.slot)
    assert run_check(engine).damaged == 1
    report = run_check(engine, repair=True)
    assert (report.damaged, report.dropped) == (1, 1)
    assert_sound(engine, objects=6)
    assert_whole(engine, keys[1:] + others[1:])
    engine.delete(BUCKET.name, keys + others)
    assert engine.holdings.allocated_bytes == 0


@pytest.mark.parametrize("has_restarted", [False, True])
def test_an_extent_that_no_object_names_is_leaked_until_a_repair_frees_it(
    open_engine: Open, has_restarted: bool
) -> None:
    engine = open_engine()
    put(engine, "lost", content("lost", 64 * KIB))
    put(engine, "kept", content("kept", 10))
    with engine.index.writing() as change:
        change.delete([version_of(engine, "lost").name])
    if has_restarted:
        engine = open_engine()
    report = run_check(engine)
    assert (report.leaked_bytes, report.misplaced, report.damaged) == (64 * KIB, 0, 0)
    run_check(engine, repair=True)
    assert engine.holdings.allocated_bytes == 4 * KIB
    assert_sound(engine, objects=1)
    assert read(engine, "kept") == content("kept", 10)


def test_an_extent_whose_row_is_damaged_is_written_down_again(open_engine: Open) -> None:
    engine = open_engine()
    keys = put_prefix(engine, "a", 4)
    with engine.index.writing() as change:
        change._txn.put(raw_number(0), b"rotten rotten", db=change._databases.extents)
    for repair in (False, True):
        report = run_check(engine, repair=repair)
        assert (report.misplaced, report.dropped, report.leaked_bytes) == (1, 0, 0)
    assert_sound(engine, objects=4)
    assert_whole(open_engine(), keys)


def test_a_version_that_was_replaced_meanwhile_is_no_finding(
    open_engine: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_store, "PROGRESS_BYTES", 1)
    engine = open_engine()
    put(engine, "a", content("a", 8 * KIB))
    put(engine, "b", content("b", 8 * KIB))
    seen: list[int] = []

    def between(report: CheckReport) -> bool:
        if report.objects == 1 and not seen:  # "b" is held, and not read yet
            seen.append(report.objects)
            flip_byte(engine, tmp_path, "b")
            put(engine, "b", content("other", 8 * KIB))
        return True

    report = engine.check(True, between)
    assert seen
    assert (report.damaged, report.dropped) == (0, 0)
    assert read(engine, "b") == content("other", 8 * KIB)


def test_puts_reads_and_deletes_go_on_between_any_two_steps(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_store, "PROGRESS_BYTES", 1)
    engine = open_engine()
    put_prefix(engine, "m", 8)
    done: list[str] = []

    def work(report: CheckReport) -> bool:
        key = f"{'az'[len(done) % 2]}{len(done):03}"  # before and behind what is being checked
        put(engine, key, content(key, 5000))
        assert read(engine, key) == content(key, 5000)
        if len(done) % 3 == 0:
            engine.delete(BUCKET.name, [key])
        done.append(key)
        return len(done) < 40

    report = engine.check(True, work)
    assert (report.damaged, report.misplaced, report.leaked_bytes, report.dropped) == (0, 0, 0, 0)
    assert len(done) > 8


@pytest.mark.parametrize("seed", [1, 2])
def test_repairs_of_a_sound_store_in_use_find_nothing(tmp_path: Path, seed: int) -> None:
    engine = small_local_engine(
        tmp_path / "data",
        capacity_bytes=16 * MIB,
        compaction_bytes_per_s=64 * MIB,
        compaction_idle_s=0.0,
    )
    engine.create_bucket(BUCKET)
    has_ended = threading.Event()

    def churn(number: int) -> None:
        draw = random.Random(seed * 10 + number)
        while not has_ended.is_set():
            name = f"p{draw.randrange(20)}"
            if draw.random() < 0.6:
                put_prefix(engine, name, draw.randrange(1, 9))
            else:
                engine.delete(BUCKET.name, [f"{name}-{index:03}" for index in range(3)])

    with closing(engine), ThreadPoolExecutor(2) as pool:
        churning = [pool.submit(churn, number) for number in range(2)]
        try:
            reports = [run_check(engine, repair=True) for _ in range(12)]
        finally:
            has_ended.set()
        for future in churning:
            future.result()
        for report in [*reports, run_check(engine)]:
            assert (report.damaged, report.misplaced, report.leaked_bytes) == (0, 0, 0), (
                seed,
                report,
            )


def test_a_check_ends_when_progress_is_answered_by_false(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_store, "PROGRESS_BYTES", 1)
    engine = open_engine()
    keys = put_prefix(engine, "a", 20)
    report = engine.check(False, lambda report: report.objects < 3)
    assert report.objects == 3
    engine.delete(BUCKET.name, keys)
    assert engine.holdings.allocated_bytes == 0  # nothing stayed held


def test_the_check_pauses_only_while_others_read(open_engine: Open) -> None:
    engine = open_engine()
    put(engine, "a", content("a", 3 * MIB))
    pauses_s: list[float] = []
    check_objects(engine.stored, False, lambda _: True, pauses_s.append)
    assert pauses_s == []
    with engine.path_use.fragment(1, IoPath.PAGE_CACHE):
        check_objects(engine.stored, False, lambda _: True, pauses_s.append)
    assert len(pauses_s) == 3
    assert all(pause_s >= 0 for pause_s in pauses_s)


def test_examples_are_bounded(open_engine: Open, tmp_path: Path) -> None:
    engine = open_engine()
    for key in put_prefix(engine, "a", 30):
        flip_byte(engine, tmp_path, key)
    report = run_check(engine)
    assert (report.damaged, len(report.examples)) == (30, check_store.EXAMPLES_MAX)


# --- faults of places, as arithmetic --------------------------------------------------------------


ranges = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 8), st.booleans()), max_size=12)


def extents_of(drawn: list[tuple[int, int, bool]]) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    extents = np.zeros(len(drawn), EXTENT_COLUMNS)
    for number, (begin, blocks, is_used) in enumerate(drawn):
        extents["offset_bytes"][number] = begin * 4096
        extents["length_bytes"][number] = blocks * 4096
        extents["is_used"][number] = is_used
    return extents


@given(ranges)
def test_extents_overlap_where_a_block_is_in_two(drawn: list[tuple[int, int, bool]]) -> None:
    blocks = [
        block
        for begin, length, is_used in drawn
        if is_used
        for block in range(begin, begin + length)
    ]
    assert bool(len(overlapping_extents(extents_of(drawn)))) == (len(blocks) != len(set(blocks)))


@given(ranges, st.sets(st.integers(0, 5)))
def test_extents_lie_outside_where_a_block_is_in_no_segment_or_two(
    drawn: list[tuple[int, int, bool]], segments: set[int]
) -> None:
    outside = {
        number
        for number, (begin, blocks, is_used) in enumerate(drawn)
        if is_used and (begin // 10 not in segments or begin // 10 != (begin + blocks - 1) // 10)
    }
    found = outside_extents(extents_of(drawn), sorted(segments), 10 * 4096)
    assert set(found.tolist()) == outside


def test_claims_count_extents_and_find_shared_places(open_engine: Open) -> None:
    engine = open_engine()
    key = put_prefix(engine, "a", 1)[0]
    version = version_of(engine, key)
    claims = Claims()
    for extents, slot in [((1,), 0), ((1,), 1), ((3, 4), 0), ((4,), 0), ((1,), 1)]:
        claims.add(msgspec.structs.replace(version, extents=extents, slot=slot))
    assert claims.per_extent(6).tolist() == [0, 3, 0, 1, 2, 0]
    assert claims.shared() == [(1, 1), (4, 0)]
    extents_drawn = extents_of([(0, 1, number != 2) for number in range(6)])
    assert unnamed_extents(extents_drawn, claims).tolist() == [0, 5]
