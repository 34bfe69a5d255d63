"""The arithmetic of the benchmark's results; nothing is timed here."""

import subprocess
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from benchmarks.__main__ import QUESTIONS, parse
from benchmarks.buffered_reads import BufferedReads
from benchmarks.device import DeviceLimit, Shape, has_fio
from benchmarks.measure import Row, Samples, rates
from benchmarks.memory_group import MemoryGroup
from benchmarks.memory_pressure import in_proportion_s
from benchmarks.page_cache_copy import FileRun
from benchmarks.prefix import MLA_TOKEN_BYTES, Geometry
from benchmarks.report import results_tables
from benchmarks.scale import FULL, QUICK, scale_that_fits
from benchmarks.store import opened_store
from objectcache_schemas.limits import GIB, KIB, MIB


def row(unit: str, samples: tuple[float, ...], group: str = "group") -> Row:
    return Row(group, "name", unit, samples, ratio=0.5, ratio_of="limit", goal="", by_hand="1")


def test_the_slow_end_of_a_rate_is_its_lowest_and_of_a_time_its_highest() -> None:
    samples = tuple(float(n) for n in range(1, 101))
    rate, time = row("GiB/s", samples), row("ms", samples)
    assert (rate.best, rate.worst) == (100.0, 1.0)
    assert (time.best, time.worst) == (1.0, 100.0)
    assert rate.p99 == pytest.approx(1.99)
    assert time.p99 == pytest.approx(99.01)
    assert rate.median == time.median == 50.5


def test_a_rate_is_bytes_by_seconds() -> None:
    assert rates([0.5, 2.0], GIB) == (2.0, 0.5)


def test_every_granularity_holds_the_same_bytes() -> None:
    small = Geometry(16, FULL.chunk_count)
    geometries = [small.in_chunks_of(tokens) for tokens in (16, 64, 256)]
    assert [geometry.chunk_count for geometry in geometries] == [448, 112, 28]
    assert {geometry.payload_bytes for geometry in geometries} == {896 * MIB}
    assert small.slice_bytes == 64 * KIB
    assert Geometry(16, 1, MLA_TOKEN_BYTES).slice_bytes == 18 * KIB


def test_prefixes_shrink_to_memory_and_stay_whole_chunks_of_every_granularity() -> None:
    assert scale_that_fits(FULL, 1000 * GIB) == FULL
    small = scale_that_fits(FULL, 2 * GIB)
    assert small.chunk_count == 128
    assert Geometry(16, small.chunk_count).in_chunks_of(256).chunk_count == 8
    assert scale_that_fits(QUICK, 0).chunk_count == 16


def test_rows_of_a_group_stand_in_one_table() -> None:
    rows = [row("ms", (1.0,), "a"), row("ms", (2.0, 3.0), "a"), row("GiB/s", (1.0,), "b")]
    tables = list(results_tables(rows))
    assert [(table.title, table.row_count) for table in tables] == [("a", 2), ("b", 1)]


def test_hits_are_better_the_more_there_are() -> None:
    assert row("%", (10.0, 90.0)).best == 90.0


def test_the_limit_of_a_device_is_the_shape_with_the_shortest_median() -> None:
    shapes = (Shape(1, 8), Shape(4, 8))
    seconds = {shapes[0]: 2.0, shapes[1]: 1.0, None: 3.0}
    limit, samples = DeviceLimit("limit", shapes, seconds.__getitem__), Samples()
    limit.take(samples)
    best = limit.best(samples)
    assert samples.median_s(best) == min(map(samples.median_s, samples.seconds))
    if has_fio():
        assert limit.best_of_fio(samples) == f"limit, {shapes[1]}"


def test_without_fio_there_is_no_best_of_it() -> None:
    limit = DeviceLimit("limit", (), lambda _: 3.0)
    assert limit.best_of_fio(Samples()) is None


def test_a_round_in_proportion_takes_each_part_at_its_own_rate() -> None:
    assert in_proportion_s(8 * GIB, 2 * GIB, 4 * GIB, 1 * GIB) == 4.0


def test_buffered_reads_take_the_bytes_of_a_layerwise_delivery_in_its_order(
    tmp_path: Path,
) -> None:
    geometry = Geometry(16, 37, num_layers=3)  # extents of 16 slots, and one of 5
    payload = np.arange(geometry.payload_bytes // 8, dtype=np.uint64).view(np.uint8)
    with opened_store(tmp_path / "store", data_file_bytes=64 * MIB) as store:
        store.put(geometry, geometry.keys(), payload.data)
        runs = store.layer_runs()
    found = b"".join(
        run.file.read_bytes()[run.offset_bytes : run.offset_bytes + run.length_bytes]
        for run in runs
    )
    layerwise = payload.reshape(37, 3, -1).swapaxes(0, 1)
    assert found == layerwise.tobytes()
    with ExitStack() as stack:
        assert BufferedReads(runs, 2, stack).read() == geometry.payload_bytes


def test_pieces_of_a_file_leave_nothing_out() -> None:
    run = FileRun(Path("data"), 5, 25)
    assert run.pieces(10) == [run._replace(length_bytes=10), (run.file, 15, 10), (run.file, 25, 5)]


def test_a_command_joins_its_memory_group_before_it_begins(tmp_path: Path) -> None:
    words = MemoryGroup(tmp_path, 1).command(["echo", "two words"])
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == "two words\n"
    assert int((tmp_path / "cgroup.procs").read_text()) > 0


def test_single_questions_can_be_chosen() -> None:
    assert parse(["--only", "cold", "--only", "puts"]).only == ["cold", "puts"]
    assert parse([]).only is None
    assert set(QUESTIONS) > {"cold", "puts"}
