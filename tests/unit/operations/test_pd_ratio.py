"""`objectcache pd-ratio`, without servers."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from objectcache_operations.console.app import app

RUNNER = CliRunner()


def test_the_papers_node_has_the_papers_range_and_says_what_binds() -> None:
    result = RUNNER.invoke(app, ["pd-ratio", "--memory-gbytes-s", "500"])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    at = lines.index("copies over the compute NIC: P/D from 0.143 to 3.5")
    assert lines[at + 1] == "  less than 0.143: compute NICs into prefill nodes, (3)"
    assert "  more than 6: compute NICs out of decode nodes, (5)" in lines[at:]
    assert lines[0] == "copies over PCIe: P/D from 0.125 to 3.5"
    assert lines[2] == "  more than 3.5: memory of decode nodes, (8)"


def test_without_memory_and_with_copies_over_pcie_only_transfers_bind() -> None:
    result = RUNNER.invoke(app, ["pd-ratio", "--gpus", "4", "--snic-gbps", "200", "--json"])
    ways = json.loads(result.stdout)
    found = ways["copies_over_PCIe"]
    assert (found["least"]["ratio"], found["largest"]["ratio"]) == (1 / 8, 8)
    assert ways["copies_over_the_compute_NIC"]["largest"]["ratio"] == 3.5
    assert not found["is_empty"]


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (["--memory-gbytes-s", "1"], ["at any ratio: memory of decode nodes, (8)"] * 2),
        (
            ["--gpus", "1", "--snic-gbps", "10000"],
            [
                "at any ratio: compute NICs out of prefill nodes, (1)",
                "at any ratio: compute NICs out of prefill nodes, (1)",
                "at any ratio: compute NICs out of decode nodes, (5)",
                "at any ratio: compute NICs into decode nodes, (7)",
            ],
        ),
        (["--memory-gbytes-s", "1e9", "--snic-gbps", "1e-6", "--gpus", "1000000"], []),
    ],
)
def test_a_bound_that_admits_no_ratio_says_so(arguments: list[str], lines: list[str]) -> None:
    text = RUNNER.invoke(app, ["pd-ratio", *arguments]).stdout
    assert [line.strip() for line in text.splitlines() if "any ratio" in line] == lines
    assert "inf" not in text
    assert "-" not in text.replace("e-", "")
    ways = json.loads(RUNNER.invoke(app, ["pd-ratio", *arguments, "--json"]).stdout)
    ratios = [bound["ratio"] for way in ways.values() for bound in way["bounds"]]
    assert all(ratio is None or ratio >= 0 for ratio in ratios)


def test_nics_that_no_ratio_keeps_busy() -> None:
    arguments = ["pd-ratio", "--gpus", "1", "--snic-gbps", "800"]
    text = RUNNER.invoke(app, arguments)
    assert text.stdout.count("no P/D ratio can keep all storage NICs busy") == 2
    document = json.loads(RUNNER.invoke(app, [*arguments, "--json"]).stdout)
    assert document["copies_over_PCIe"]["least"]["ratio"] is None  # no ratio is large enough


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpus", "0"], "--gpus is 0; it must be from 1e-06 to 1e+09"),
        (["--snic-gbps", "-1"], "--snic-gbps is -1.0"),
        (["--cnic-gbps", "nan"], "--cnic-gbps is nan"),
        (["--memory-gbytes-s", "inf"], "--memory-gbytes-s is inf"),
        (["--gpus", "many"], "--gpus"),
        (["--snic-gbps", "1e308"], "--snic-gbps is 1e+308"),
        (["--snic-gbps", "1e-320"], "--snic-gbps is 1e-320"),
    ],
)
def test_wrong_figures_name_their_flag(arguments: list[str], words: str) -> None:
    result = RUNNER.invoke(app, ["pd-ratio", *arguments])
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stdout == ""
