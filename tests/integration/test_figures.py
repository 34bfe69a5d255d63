"""The experiments run on a real server; what their figures are is not judged."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks.figures.__main__ import main
from benchmarks.figures.experiments.overhead import AGG, BATCH, OPTIMAL


@pytest.mark.timeout(600)
def test_a_quick_run_writes_rows_and_plots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    results = tmp_path / "results"
    flags = ["--quick", "--scale", "64", "--only", "overhead", "--only", "pacing"]
    assert main([*flags, "--data-dir", str(tmp_path / "data"), "--results", str(results)]) == 0
    written = {file.name for file in results.iterdir()}
    assert written == {
        f"{name}.{kind}" for name in ("overhead", "pacing") for kind in ("csv", "svg", "png")
    }
    rows = list(csv.DictReader((results / "overhead.csv").read_text().splitlines()))
    assert {row["path"] for row in rows} >= {OPTIMAL, AGG, BATCH}
    assert all(float(row["ttft_ms"]) >= float(row["compute_ms"]) for row in rows)
    assert "A quick run" in capsys.readouterr().out
    assert not any((tmp_path / "data").iterdir())
