"""Figures 8, 12, A4 and A7 and table A7: their arithmetic, and by which names series go."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.basis.prefix import Geometry
from benchmarks.figures.__main__ import EXPERIMENTS
from benchmarks.figures.carriers import CARRIERS
from benchmarks.figures.experiments import aggregation, one_object, overhead
from benchmarks.figures.experiments.bare_store import (
    DEVICE,
    ENGINE,
    BareStoreExperiment,
    bare_row,
    objects_of,
)
from benchmarks.figures.experiments.elements import ElementsExperiment, elements_rows, placements
from benchmarks.figures.experiments.overlap import (
    OverlapExperiment,
    overlap_rows,
    required_gbytes_per_s,
)
from benchmarks.figures.paper_gpus import LLAMA, PREFILLS
from benchmarks.figures.plots import save, state_conditions
from objectcache_runtime.settings import StorageSettings
from objectcache_schemas.limits import GIB, KIB

NETWORKS = re.compile(r"\b(s3\w*|rdma|verbs|roce\w*)\b")


def test_no_series_goes_by_the_name_of_a_network_that_carried_none_of_it() -> None:
    names = [
        one_object.TCP,
        aggregation.TCP,
        *overhead.PATHS,
        overhead.OPTIMAL,
        *(aggregation.of_one_request(each, mode) for each in CARRIERS for mode in ("layerwise",)),
        ENGINE,
        DEVICE,
    ]
    carried = [name.partition(" (paper: ")[0].lower() for name in names]
    assert not [name for name in carried if NETWORKS.search(name)]


def test_every_experiment_says_what_is_scaled_and_what_carried_the_bytes() -> None:
    assert all(experiment.conditions.endswith(".") for experiment in EXPERIMENTS)


@pytest.mark.parametrize(
    ("context_tokens", "hit_rate", "required"),
    [(16384, 0.5, 1.12), (16384, 0.875, 6.67), (32768, 0.5, 0.83), (32768, 0.875, 4.92)],
)
def test_what_hides_a_prefix_is_what_table_a8_says(
    context_tokens: int, hit_rate: float, required: float
) -> None:
    (prefill,) = [
        one
        for one in PREFILLS
        if (one.model, one.context_tokens, one.hit_rate) == (LLAMA, context_tokens, hit_rate)
    ]
    assert required_gbytes_per_s(prefill) == pytest.approx(required, abs=0.005)


def test_a_rate_hides_the_prefills_that_ask_for_no_more() -> None:
    rows = list(overlap_rows(14.0, 1.0, 0.04))
    notes = OverlapExperiment().notes(rows)
    assert f"14.00 GB/s hide {len(rows)} of {len(rows)} prefills" in notes[0]
    assert "0.04 GB/s hide 0 of" in notes[2]
    assert max(row.cached_gib for row in rows) == 7.0  # paper: 7 GB of 64K tokens at 87.5 %


def test_elements_are_counted_as_in_table_a7() -> None:
    rows = list(elements_rows())
    assert [row.original_elements for row in rows] == [7168, 1792, 448, 114688, 28672, 7168]
    assert [row.paper_reduction for row in rows] == [16, 8, 2, 16, 8, 2]
    assert all(row.reads >= row.elements >= row.told_layers for row in rows)


def test_planned_chunks_lie_beside_each_other_and_nowhere_twice() -> None:
    geometry = Geometry(16, 37)
    places = placements(geometry, StorageSettings())
    runs = sorted(run for place in places for run in place.runs(0, geometry.chunk_bytes))
    ends = [begin + length_bytes for begin, length_bytes in runs]
    assert len(places) == 37
    assert all(end <= begin for end, (begin, _) in zip(ends, runs[1:], strict=False))


def test_bare_reads_are_told_by_their_median_with_the_least_and_the_most() -> None:
    row = bare_row(ENGINE, 64, 8, [3e9, 1e9, 2e9])
    assert (row.gbytes_per_s, row.least_gbytes_per_s, row.most_gbytes_per_s) == (2.0, 1.0, 3.0)
    assert row.reads_per_s == 2e9 / 65536
    device = bare_row(DEVICE, 64, 8, [4e9])
    assert "64 KiB, C=8: 0.50" in BareStoreExperiment().notes([row, device])[0]


@pytest.mark.parametrize("object_kib", [64, 256, 1024, 4096])
def test_objects_of_every_size_fill_the_same_store(object_kib: int) -> None:
    geometry = objects_of(object_kib, is_quick=False)
    assert geometry.payload_bytes == GIB // 2
    assert geometry.chunk_bytes == object_kib * KIB


def test_what_was_scaled_stands_below_the_drawing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    bare = [
        bare_row(path, object_kib, in_flight, [1e9])
        for path in (ENGINE, DEVICE)
        for object_kib in (64, 4096)
        for in_flight in (8, 32)
    ]
    figures = {
        "bare_store": BareStoreExperiment().plot(bare),
        "overlap": OverlapExperiment().plot(list(overlap_rows(4.0, 2.0, 1.0))),
        "elements": ElementsExperiment().plot(list(elements_rows())),
    }
    for name, figure in figures.items():
        state_conditions(figure, "Nothing is scaled.")
        files = save(figure, tmp_path, name)
        assert files[0].stat().st_size > 0
        assert figure.get_supxlabel() == "Nothing is scaled."
