"""The arithmetic of the benchmark's results; nothing is timed here."""

import pytest

from benchmarks.__main__ import FULL, QUICK, volume_that_fits
from benchmarks.measure import Row, rates
from benchmarks.prefix import Geometry
from benchmarks.report import results_tables
from objectcache_schemas.limits import GIB, MIB


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
    geometries = [Geometry(tokens, FULL.payload_bytes) for tokens in (16, 64, 256)]
    assert [geometry.chunk_count for geometry in geometries] == [448, 112, 28]
    assert {g.chunk_count * g.chunk_bytes for g in geometries} == {896 * MIB}
    assert geometries[0].slice_bytes == 64 << 10


def test_the_volume_shrinks_to_memory_and_stays_whole_chunks_of_every_granularity() -> None:
    assert volume_that_fits(FULL, 1000 * GIB) == FULL
    small = volume_that_fits(FULL, 2 * GIB)
    assert small.payload_bytes == 192 * MIB
    assert small.payload_bytes % Geometry(256, 0).chunk_bytes == 0
    assert volume_that_fits(QUICK, 0).payload_bytes == 32 * MIB


def test_rows_of_a_group_stand_in_one_table() -> None:
    rows = [row("ms", (1.0,), "a"), row("ms", (2.0, 3.0), "a"), row("GiB/s", (1.0,), "b")]
    tables = list(results_tables(rows))
    assert [(table.title, table.row_count) for table in tables] == [("a", 2), ("b", 1)]
