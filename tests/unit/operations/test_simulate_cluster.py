"""`objectcache simulate-cluster`, on clusters that take no time."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from objectcache_operations.console.app import app

RUNNER = CliRunner()
SMALL = ["simulate-cluster", "--nodes", "1P1D", "--model", "ds27b", "--trace", "32K"]


def test_a_run_is_printed_and_written_in_all_three_forms(tmp_path: Path) -> None:
    files = {flag: tmp_path / f"runs.{flag}" for flag in ("json", "csv", "svg")}
    given = [part for flag, file in files.items() for part in (f"--{flag}", str(file))]
    result = RUNNER.invoke(
        app,
        [*SMALL, "--agents", "2", "--routes", "single,oracle", *given],
        env={"COLUMNS": "80"},
    )
    assert result.exit_code == 0, result.output
    assert "\u2026" not in result.stdout  # of what is no terminal nothing is cut
    assert "1P1D, DS 27B" in result.stdout
    assert "single path" in result.stdout
    document = json.loads(files["json"].read_bytes())
    assert [run["routes"] for run in document["runs"]] == ["single", "oracle"]
    assert document["options"]["nodes"] == "1P1D"
    rows = list(csv.DictReader(files["csv"].read_text().splitlines()))
    assert [float(row["jct_s"]) for row in rows] == [run["jct_s"] for run in document["runs"]]
    assert float(rows[0]["ttft_s_mean"]) == document["runs"][0]["ttft_s"]["mean"]
    assert files["svg"].read_text().count("<title>") == 2


def test_a_trace_file_is_replayed_and_its_agents_repeat(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    row = {"session_id": 1, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}
    file.write_text(json.dumps(row) + "\n" + json.dumps(row | {"delay": 10}) + "\n")
    out = tmp_path / "runs.csv"
    arguments = ["--trace", str(file), "--agents", "3", "--routes", "paper", "--csv", str(out)]
    assert RUNNER.invoke(app, ["simulate-cluster", *arguments]).exit_code == 0
    (found,) = csv.DictReader(out.read_text().splitlines())
    assert found["requests"] == "6"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nodes", "2P"], "--nodes '2P' must be such as 2P4D"),
        (["--nodes", "0P1D"], "--nodes '0P1D'"),
        (["--nodes", "4000P97D"], "at most 4096"),
        (["--model", "gpt5"], "--model 'gpt5' is not known; one of ds660b"),
        (["--trace", "16K"], "--trace '16K' is none of 32K, 48K, 64K"),
        (["--agents", "0"], "--agents is 0"),
        (["--aps", "0"], "--aps is 0.0"),
        (["--duration", "60"], "--duration is of use with --aps alone"),
        (["--routes", "paper,best"], "--routes 'best' are not known"),
        (["--reads", "some"], "--reads is 'some'; one of layerwise, whole"),
        (["--order", "any"], "--order is 'any'; one of first_come, due_time"),
        (["--gpus", "65"], "--gpus is 65"),
        (["--snic-gbps", "nan"], "--snic-gbps is nan"),
        (["--cnic-gbps", "-1"], "--cnic-gbps is -1.0"),
        (["--memory-gbytes-s", "0"], "--memory-gbytes-s is 0.0"),
        (["--prefill-tflops", "inf"], "--prefill-tflops is inf"),
        (["--append-scale", "0"], "--append-scale is 0.0"),
        (["--generate-scale", "-2"], "--generate-scale is -2.0"),
        (["--seed", "-1"], "--seed is -1"),
        (["--json", "/no/such/folder/x"], "--json /no/such/folder/x: it is a directory, or"),
    ],
)
def test_wrong_flags_are_named_before_anything_is_simulated(
    arguments: list[str], words: str
) -> None:
    result = RUNNER.invoke(app, ["simulate-cluster", *arguments])
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())
    assert result.stdout == ""
