"""The benchmark runs and reports every figure; what the figures are is not judged."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import QUESTIONS, main
from benchmarks.memory_pressure.memory_group import V1_ROOT, hierarchy

pytestmark = pytest.mark.timeout(600)  # many servers are started, each as slowly as the machine is
MEMORY_ROW = "memory of an open store"
# A cluster of Ceph's is started for s3, whose load is tested in test_request_load; dual-path has
# nodes in namespaces, and is run in tests/relay.
ELSEWHERE = {"s3", "dual-path"}
# In the table; other questions have one.
GROUPS = {"cold": 2, "warm": 2, "first-read": 2, "codecs": 3}


def quick_run(folder: Path, *flags: str) -> dict[str, Any]:
    results = folder / "results"
    assert main(["--quick", "--results", str(results), "--data-dir", str(folder), *flags]) == 0
    (file,) = results.glob("*.json")
    (table,) = results.glob("*.md")
    assert table.read_text().startswith("**")
    run: dict[str, Any] = json.loads(file.read_text())
    return run


@pytest.mark.parametrize("question", sorted(QUESTIONS.keys() - ELSEWHERE))
def test_a_quick_run_reports_every_question_beside_its_limit(question: str, tmp_path: Path) -> None:
    if question == "memory-pressure" and isinstance(reason := hierarchy(), str):
        pytest.skip(reason)
    if question == "nixl":
        pytest.importorskip("nixl_cu12", reason="NIXL is not installed")
    run = quick_run(tmp_path, "--only", question)
    rows = run["rows"]
    assert len({row["group"] for row in rows}) == GROUPS.get(question, 1)
    assert all(row["samples"] and row["by_hand"] for row in rows)
    # A process may have less memory with a small store open than it had before.
    assert all(row["p50"] >= 0 for row in rows if not row["name"].startswith(MEMORY_ROW))
    judged = [row for row in rows if row["goal"]]
    assert all(row["ratio"] is not None and row["ratio_of"] for row in judged)
    assert {"commit", "machine", "scale", "time"} <= set(run)
    assert [path.name for path in tmp_path.iterdir()] == ["results"]  # its data is gone
    assert not list(V1_ROOT.glob(f"objectcache-bench-{os.getpid()}-*"))


def test_without_fio_our_own_threads_are_the_device_s_limit_and_the_row_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "small-chunks" in QUESTIONS
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    run = quick_run(tmp_path, "--only", "small-chunks")
    limits = {row["ratio_of"] for row in run["rows"] if row["ratio_of"].startswith("limit: write")}
    assert limits
    assert all("own threads" in limit for limit in limits)
