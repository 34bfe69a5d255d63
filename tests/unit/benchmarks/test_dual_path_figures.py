"""DualPath's figures in a quick run: a row for each of them, whatever its figure is."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks.figures.__main__ import EXPERIMENTS, is_wanted, main
from benchmarks.figures.dual_path.online import capacity_of
from benchmarks.figures.dual_path.rows import BASIC, NOT_SIMULATED, SGLANG, OnlineRow
from benchmarks.figures.dual_path.tables import ratio_rows, trace_rows

NAMES = [one.name for one in EXPERIMENTS if one.name.startswith("dual_path")]


def rows_of(file: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(file.read_text().splitlines()))


@pytest.mark.timeout(600)
def test_a_quick_run_has_a_row_for_each_figure_beside_the_papers_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    results = tmp_path / "results"
    flags = ["--quick", "--only", "dual_path", "--data-dir", str(tmp_path / "data")]
    assert main([*flags, "--results", str(results)]) == 0
    kinds = ("csv", "svg", "png")
    assert {file.name for file in results.iterdir()} == {
        f"{name}.{kind}" for name in NAMES for kind in kinds
    }
    found = {name: rows_of(results / f"{name}.csv") for name in NAMES if "tables" not in name}
    rows = [row for each in found.values() for row in each]
    figures = {figure for row in rows for figure in row["figure"].split(", ")}
    assert figures == {"7", "8", "9", "10", "11", "12", "13", "Table 3"}
    for row in rows:
        time_s = row["jct_s"] if "jct_s" in row else row["ttft_s"]
        assert bool(time_s) is not row["remark"].startswith("not simulated"), row
    left_out = {row["system"]: row["remark"] for row in rows if row["system"] in NOT_SIMULATED}
    assert left_out == {name: NOT_SIMULATED[name] for name in (BASIC, SGLANG)}
    assert any("1.52" in row["paper"] for row in found["dual_path_ablation"])
    assert "A quick run" in capsys.readouterr().out


def test_tables_are_as_near_to_the_papers_as_is_said() -> None:
    assert max(abs(row.off_percent) for row in ratio_rows()) <= 15
    assert max(abs(row.off_percent) for row in trace_rows()) <= 3
    assert (len(list(ratio_rows())), len(list(trace_rows()))) == (10, 15)


def test_one_word_runs_all_of_a_papers_figures_and_a_name_runs_itself() -> None:
    assert is_wanted("dual_path_scale", ["dual_path"])
    assert not is_wanted("overhead", ["dual_path"])
    assert not is_wanted("dual_path_scale", ["dual_path_tables"])
    assert is_wanted("overhead", None)


def test_capacity_ends_where_the_slo_is_first_missed() -> None:
    def row(rate: float, is_within: bool) -> OnlineRow:
        return OnlineRow("10", "1P1D", "ds27b", rate, "single path", is_within_slo=is_within)

    assert capacity_of([row(0.2, True), row(0.4, True), row(0.6, False), row(0.8, True)]) == 0.4
    assert capacity_of([row(0.2, False)]) == 0
