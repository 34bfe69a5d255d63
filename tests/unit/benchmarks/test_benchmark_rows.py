"""The arithmetic of the benchmark's results; nothing is timed here."""

import subprocess
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.__main__ import QUESTIONS, parse
from benchmarks.basis.measure import Row, Samples, rates
from benchmarks.basis.prefix import MLA_TOKEN_BYTES, Geometry
from benchmarks.basis.report import ratio_text, results_tables, write_markdown
from benchmarks.basis.scale import FULL, QUICK, scale_that_fits
from benchmarks.basis.store import opened_store
from benchmarks.deliveries.stages import FirstLayer, stage_rows
from benchmarks.machine.device import DeviceLimit, Shape, has_fio
from benchmarks.machine.page_cache_copy import FileRun
from benchmarks.memory_pressure.buffered_reads import BufferedReads
from benchmarks.memory_pressure.memory_group import MemoryGroup
from benchmarks.memory_pressure.pressed_reads import Opened, Round
from benchmarks.memory_pressure.pressure_rows import (
    BUDGETED,
    DIRECT_ALONE,
    PEER,
    Cell,
    Share,
    pressure_rows,
)
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


def cell(name: str, seconds: float, before: float = 1.0, after: float = 3.0) -> Cell:
    """8 GiB, of which a quarter was read from the device, between two rates of it in GiB/s."""
    read = Round(seconds, 8 * GIB, 2 * GIB, 0, 0)
    return Cell(name, read, 2.0, before * GIB, after * GIB)


def test_what_fits_is_modelled_warm_and_the_rest_at_the_devices_rate_before_and_after() -> None:
    assert cell(PEER, 8.0).model_s(0.25) == 0.25 * 2.0 + 6 / 2.0
    assert cell(PEER, 8.0).model_s(1.5) == 2.0
    assert cell(PEER, 7.0).of_model(0.25) == 0.5
    assert cell(PEER, 1.0).found == 0.75


def pressed_rows() -> dict[str, Row]:
    opened = {name: Opened(0, "the kernel", {}) for name in (BUDGETED, PEER, DIRECT_ALONE)}
    cells = [
        cell(name, seconds, after=after)
        for after, times in ((3.0, (3.5, 7.0, 14.0)), (1.0, (13.0, 13.0, 13.0)))
        for name, seconds in zip(opened, times, strict=True)
    ]
    rows = pressure_rows(Share(0.25, 8 * GIB, GIB, opened), cells)
    return {row.name.removeprefix("memory for 25%: "): row for row in rows}


def test_a_ratio_is_of_one_round_and_told_with_its_spread() -> None:
    rows = pressed_rows()
    assert rows[BUDGETED].ratios == (1.0, 0.5)
    assert ratio_text(rows[BUDGETED]) == "0.750 (0.50 to 1.00)"
    assert ratio_text(row("ms", (1.0,))) == "0.500"
    assert rows[f"{BUDGETED}, against {PEER}, each of its model"].ratios == (2.0, 1.0)


def test_the_device_against_itself_says_what_a_claim_has_to_exceed() -> None:
    noise = pressed_rows()["the device, after a reader against before it"]
    assert noise.ratios == (3.0, 3.0, 3.0, 1.0, 1.0, 1.0)
    assert noise.samples == (1.0,) * 6


def test_the_stages_of_a_first_layer_add_up_to_the_whole() -> None:
    get = FirstLayer(whole_s=0.009, client_s=0.001, first_read_s=0.002, ready_s=0.005)
    assert get.stages_s() == pytest.approx((0.001, 0.002, 0.003, 0.003))
    rows = list(stage_rows("4 chunks", [get, get]))
    assert [row.ratio for row in rows] == pytest.approx([1, 1 / 9, 2 / 9, 3 / 9, 3 / 9])


def test_tables_are_also_written_as_text_with_the_settings_that_differ(tmp_path: Path) -> None:
    rows = [row("ms", (1.0,)), replace(row("ms", (2.0,)), settings="page_cache_bytes=0")]
    text = write_markdown(tmp_path, {"commit": "abc", "machine": "m"}, rows).read_text()
    assert "| name | 0.500 | limit | 1.00 ms | 1.00 ms |" in text
    assert "| name [page_cache_bytes=0] | 0.500 | limit | 2.00 ms |" in text
    assert "commit abc, m, load after " in text


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
