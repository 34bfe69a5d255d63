"""Which path a new extent is written by, and that neighbours go out in one call on either."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from objectcache_schemas.limits import GIB, MIB
from objectcache_schemas.records import Condition
from objectcache_storage_server.engines.base import PrefixShape, StagedPut
from objectcache_storage_server.engines.local.engine import LocalEngine
from objectcache_storage_server.engines.local.puts.write_paths import WritePaths
from objectcache_storage_server.engines.local.residency.choose_write_path import (
    KNOWN_BYTES,
    TRIAL_PART,
    WritePathChooser,
)
from objectcache_storage_server.engines.local.volumes.data_files import DataFiles
from objectcache_storage_server.engines.local.volumes.volume import BLOCK_BYTES, IoPath, Transfer
from tests.contract.engine_suite import BUCKET, content
from tests.contract.opened_engines.local_engines import small_local_engine

EXTENT_BYTES = 32 * MIB


class Machine:
    """Writes extents by the path that a chooser says, at rates of its own."""

    def __init__(self, cached_bytes_per_s: float, direct_bytes_per_s: float) -> None:
        self.rates = {IoPath.PAGE_CACHE: cached_bytes_per_s, IoPath.DIRECT: direct_bytes_per_s}
        self.chooser = WritePathChooser()

    def put(self, count: int) -> list[IoPath]:
        paths: list[IoPath] = []
        for _ in range(count):
            path = self.chooser.choose(EXTENT_BYTES)
            self.chooser.wrote(path, EXTENT_BYTES, EXTENT_BYTES / self.rates[path])
            paths.append(path)
        return paths


def test_past_a_page_cache_that_takes_a_gigabyte_a_second_nothing_is_tried() -> None:
    assert set(Machine(1.1 * GIB, 50 * GIB).put(1000)) == {IoPath.PAGE_CACHE}


@pytest.mark.parametrize(("ratio", "wins"), [(0.4, IoPath.DIRECT), (0.6, IoPath.PAGE_CACHE)])
def test_the_page_cache_is_worth_half_of_the_direct_path_s_rate(ratio: float, wins: IoPath) -> None:
    paths = Machine(ratio * 0.5 * GIB, 0.5 * GIB).put(1000)
    assert paths[:2] == [IoPath.PAGE_CACHE, IoPath.DIRECT]  # nothing is known of either
    assert paths.count(wins) > 900


def test_trials_of_the_slower_path_take_a_small_part_of_the_time() -> None:
    machine = Machine(0.1 * GIB, 2 * GIB)
    machine.put(2)
    paths = machine.put(5000)
    seconds = {path: paths.count(path) * EXTENT_BYTES / machine.rates[path] for path in IoPath}
    assert 0 < seconds[IoPath.PAGE_CACHE] <= TRIAL_PART * sum(seconds.values())


def test_a_page_cache_that_becomes_fast_is_used_again() -> None:
    machine = Machine(0.1 * GIB, 2 * GIB)
    assert machine.put(100)[-1] is IoPath.DIRECT
    machine.rates[IoPath.PAGE_CACHE] = 4 * GIB
    assert machine.put(2000)[-1] is IoPath.PAGE_CACHE


def test_extents_that_are_begun_at_once_are_not_all_on_trial() -> None:
    machine = Machine(0.1 * GIB, 2 * GIB)
    machine.put(2000)
    chosen = [machine.chooser.choose(EXTENT_BYTES) for _ in range(100)]
    assert chosen.count(IoPath.PAGE_CACHE) <= 1


# --- a real store ---


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[LocalEngine]:
    made = small_local_engine(
        tmp_path / "data", page_cache_bytes=-1, extent_row_bytes=MIB, extent_bytes_max=4 * MIB
    )
    made.upkeep.close()
    made.create_bucket(BUCKET)
    if made.volume.paths != frozenset(IoPath):
        pytest.skip("the file system has no direct path")
    put_large(made, "first")  # makes a data file, of which the rest was never written
    made.delete(BUCKET.name, [f"first-{number}" for number in range(4)])
    yield made
    made.close()


def make_slow(engine: LocalEngine) -> None:
    """As if the page cache had been measured to be a tenth as fast as the device."""
    chooser = engine._space._write_paths._chooser
    chooser.wrote(IoPath.PAGE_CACHE, KNOWN_BYTES, 1.0)
    chooser.wrote(IoPath.DIRECT, KNOWN_BYTES, 0.1)


def put_large(engine: LocalEngine, name: str) -> tuple[list[str], bytes]:
    """A prefix whose one extent is long enough to be judged."""
    keys = [f"{name}-{number}" for number in range(4)]
    payload = b"".join(content(key, 4 * 128 * 1024) for key in keys)
    prefix = engine.stage_prefix(BUCKET.name, PrefixShape(keys, 4, 128 * 1024, False))
    memory = mmap.mmap(-1, len(payload))  # begins at a block, as targets do
    memory[:] = payload
    prefix.write(0, memoryview(memory))
    engine.commit([StagedPut(staged, "") for staged in prefix.staged], Condition(immutable=True))
    return keys, payload


def paths_of(engine: LocalEngine) -> set[int]:
    _, extents = engine.holdings.snapshot()
    return set(extents["path"][extents["is_used"] & ~extents["is_freed"]].tolist())


def read_all(engine: LocalEngine, keys: Sequence[str], size_bytes: int) -> bytes:
    memory = memoryview(bytearray(size_bytes))
    each = size_bytes // len(keys)
    with engine.open_many(BUCKET.name, keys, are_prefix=True) as opened:
        for index in range(len(keys)):
            opened.read_into(index, 0, memory[index * each : (index + 1) * each])
    return bytes(memory)


def test_what_is_new_to_a_slow_page_cache_is_written_past_it_and_what_is_there_is_not(
    engine: LocalEngine,
) -> None:
    if engine.volume.cached_bytes(0, BLOCK_BYTES) is None:
        pytest.skip("this kernel does not say what the page cache has (Linux 6.5)")
    make_slow(engine)
    put_large(engine, "first")  # where something lay before, which is in memory
    assert paths_of(engine) == {IoPath.PAGE_CACHE}
    keys, payload = put_large(engine, "new")
    assert paths_of(engine) == set(IoPath)
    assert read_all(engine, keys, len(payload)) == payload


def test_an_operator_s_own_number_of_bytes_is_taken_at_its_word(tmp_path: Path) -> None:
    engine = small_local_engine(
        tmp_path / "data", page_cache_bytes=64 * MIB, extent_row_bytes=MIB, extent_bytes_max=4 * MIB
    )
    try:
        engine.upkeep.close()
        engine.create_bucket(BUCKET)
        make_slow(engine)
        keys, payload = put_large(engine, "new")
        assert paths_of(engine) == {IoPath.PAGE_CACHE}
        assert read_all(engine, keys, len(payload)) == payload
    finally:
        engine.close()


def test_only_what_is_new_to_the_page_cache_counts_for_its_rate(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_paths = WritePaths(engine.volume, may_leave_out=True)
    noted: list[tuple[IoPath, int]] = []
    monkeypatch.setattr(
        write_paths._chooser, "wrote", lambda path, length, _: noted.append((path, length))
    )
    monkeypatch.setattr(engine.volume, "cached_bytes", cached_from(2 * MIB))
    memory = memoryview(mmap.mmap(-1, 2 * MIB))
    write_paths.write([Transfer(0, memory)], IoPath.PAGE_CACHE)
    write_paths.write([Transfer(2 * MIB, memory)], IoPath.PAGE_CACHE)
    write_paths.write([Transfer(2 * MIB, memory[:BLOCK_BYTES])], IoPath.PAGE_CACHE)
    write_paths.write([Transfer(2 * MIB, memory)], IoPath.DIRECT)
    assert noted == [(IoPath.PAGE_CACHE, 2 * MIB), (IoPath.DIRECT, 2 * MIB)]


def cached_from(begin_bytes: int) -> Callable[[int, int], int]:
    """`Volume.cached_bytes` of a volume of which what lies behind `begin_bytes` is in memory."""
    return lambda offset_bytes, length_bytes: length_bytes * (offset_bytes >= begin_bytes)


# --- one call for neighbours ---


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[DataFiles]:
    made = DataFiles(tmp_path / "data", 4 * MIB, 0, 0)
    if IoPath.DIRECT not in made.paths:
        made.close()
        pytest.skip("the file system has no direct path")
    made.extend()
    made.extend()
    yield made
    made.close()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many memories each call wrote; one of several is cut short within its first."""
    counts: list[int] = []
    pwritev = os.pwritev

    def cut_short(file_descriptor: int, memories: Sequence[memoryview], offset: int) -> int:
        counts.append(len(memories))
        if len(memories) == 1:
            return pwritev(file_descriptor, memories, offset)
        half_bytes = len(memories[0]) // 2
        return pwritev(file_descriptor, [memories[0][:half_bytes]], offset)

    monkeypatch.setattr(os, "pwritev", cut_short)
    return counts


@pytest.mark.parametrize("path", list(IoPath))
@pytest.mark.parametrize("skew_bytes", [0, 1])
def test_neighbours_in_memory_apart_are_one_call_and_a_rest_is_written_behind_it(
    volume: DataFiles, calls: list[int], path: IoPath, skew_bytes: int
) -> None:
    piece_bytes, count = 4 * BLOCK_BYTES, 40
    data = random.Random(3).randbytes(piece_bytes * count)
    memory = mmap.mmap(-1, 2 * len(data))
    transfers = []
    for number in range(count):
        begin = 2 * number * piece_bytes + skew_bytes
        memory[begin : begin + piece_bytes] = data[number * piece_bytes :][:piece_bytes]
        view = memoryview(memory)[begin : begin + piece_bytes]
        transfers.append(Transfer(number * piece_bytes, view))
    begin_bytes = volume.segment_bytes - 20 * piece_bytes  # half of them in the second file
    transfers = [Transfer(begin_bytes + offset, view) for offset, view in transfers]
    volume.write(transfers, path)
    scatters = path is IoPath.PAGE_CACHE or not skew_bytes  # else memory begins inside of a block
    # A rest is written by `write_whole`, memory by memory.
    assert [count for count in calls if count > 1] == ([20, 20] if scatters else [])
    for read_path in IoPath:
        found = memoryview(bytearray(len(data)))
        volume.read([Transfer(begin_bytes, found)], read_path)
        assert found == data
