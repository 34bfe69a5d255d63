"""`objectcache schedule` as a process, on the paper's workloads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from objectcache_storage_server.what_if.__main__ import main
from tests.integration.served import BOUND_S, own_environment
from tests.unit.storage_server.scheduling.paper_tables import MARGIN_GBPS, POLICIES, WORKLOADS

COLUMNS = "name,bytes_per_layer,compute_window_s,num_layers"


def schedule(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "objectcache_operations", "schedule", *arguments],
        capture_output=True,
        text=True,
        env=own_environment(),
        timeout=BOUND_S,
        check=False,
    )


def requests_file(tmp_path: Path, workload: str) -> Path:
    shared = WORKLOADS[workload]
    rows = [
        f'"{name}",{demand.layer_bytes},{demand.compute_window_s},{demand.num_layers}'
        for name, demand in zip(shared.allocations_gbps, shared.demands, strict=True)
    ]
    file = tmp_path / f"{workload}.csv"
    file.write_text("\n".join([COLUMNS, *rows, ""]))
    return file


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_command_prints_the_allocations_of_table_a9(
    tmp_path: Path, workload: str, policy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program that the command becomes; that it does is for the other tests to see."""
    shared = WORKLOADS[workload]
    flags = ["--policy", policy, "--rates", "for_life", "--json"]
    flags += ["--cap-gbps", f"{shared.cap_gbps:g}"]
    flags += ["--margin-gbps", f"{MARGIN_GBPS:g}"]
    assert main([*flags, str(requests_file(tmp_path, workload))]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    rates = {row["name"]: row["rate_gbps"] for row in json.loads(printed.out)["requests"]}
    column = POLICIES.index(policy)
    expected = {name: row[column] for name, row in shared.allocations_gbps.items()}
    assert rates == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_comparison_finds_stall_dynamic_near_the_least_possible(
    tmp_path: Path, workload: str
) -> None:
    flags = ["--all", "--json", "--cap-gbps", f"{WORKLOADS[workload].cap_gbps:g}"]
    done = schedule(*flags, str(requests_file(tmp_path, workload)))
    assert (done.returncode, done.stderr) == (0, "")
    by_policy = {prediction["policy"]: prediction for prediction in json.loads(done.stdout)}
    dynamic = by_policy["stall_dynamic"]
    assert dynamic["lower_bound_s"] <= dynamic["added_ttft_s"] <= 1.1 * dynamic["lower_bound_s"]
    assert all(dynamic["added_ttft_s"] <= other["added_ttft_s"] for other in by_policy.values())


def test_the_table_is_for_people(tmp_path: Path) -> None:
    flags = ["--policy", "calibrated_stall_opt", "--rates", "for_life", "--cap-gbps", "80"]
    done = schedule(*flags, str(requests_file(tmp_path, "A")))
    assert done.returncode == 0
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["16K,", "87.5%", "27.25", "560.5", "278.9"] in rows


def test_a_wrong_file_is_one_line_and_status_2(tmp_path: Path) -> None:
    file = tmp_path / "requests.csv"
    file.write_text(f"{COLUMNS}\na,1,1,0\n")
    done = schedule("--policy", "equal", "--cap-gbps", "80", str(file))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"objectcache schedule: {file}, line 2: num_layers must be a whole number from 1 to 4096, "
        "got '0'\n"
    )
