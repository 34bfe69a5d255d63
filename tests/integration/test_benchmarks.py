"""The benchmark runs and reports every figure; what the figures are is not judged."""

import json
import subprocess
import sys
from pathlib import Path

from tests.integration.served import own_environment

REPOSITORY = Path(__file__).parents[2]


def test_a_quick_run_reports_every_question_beside_its_limit(tmp_path: Path) -> None:
    results = tmp_path / "results"
    flags = ["--quick", "--results", str(results), "--data-parent", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *flags],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env=own_environment(),
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (file,) = results.iterdir()
    run = json.loads(file.read_text())
    rows = run["rows"]
    groups = {row["group"].split(" of ")[0] for row in rows}
    assert {"Warm deliveries", "Memory", "Planning"} <= groups
    assert len({row["group"] for row in rows}) == 7
    assert all(row["samples"] and row["p50"] > 0 and row["by_hand"] for row in rows)
    judged = [row for row in rows if row["goal"]]
    assert all(row["ratio"] is not None and row["ratio_of"] for row in judged)
    assert {"commit", "machine", "volume", "time"} <= set(run)
    assert [path.name for path in tmp_path.iterdir()] == ["results"]  # its data is gone
