"""The sweeps of figures 11 and 15 and the cross-check of the cap run on a real server."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks.figures.__main__ import main
from benchmarks.figures.carriers import transports
from benchmarks.figures.experiments.aggregation import TCP, of_one_request
from benchmarks.figures.experiments.rate_sweep import scaled
from benchmarks.figures.paper_data import NUM_LAYERS, REQUESTS
from benchmarks.figures.scaled import QUICK_LAYERS

EXPERIMENTS = ("aggregation", "rate_sweep", "kernel_cap")
WHO = ("kernel", "scheduler")
SCALE = 256


def rows_of(file: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(file.read_text().splitlines()))


def stalled_ms(num_layers: int) -> float:
    """Between what computing takes and twice that, which half of the zero-stall rate cannot hide:
    no machine is so fast that a cap that is kept lets a prefill be below it.
    """
    return 1.5 * 1000 * scaled(REQUESTS["16K, 87.5%"], SCALE, num_layers).compute_s


@pytest.mark.timeout(600)
def test_quick_sweeps_write_a_row_for_each_path_rate_and_cap(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    results = tmp_path / "results"
    only = [word for name in EXPERIMENTS for word in ("--only", name)]
    flags = ["--quick", "--scale", str(SCALE), "--data-dir", str(tmp_path / "data"), *only]
    assert main([*flags, "--results", str(results)]) == 0
    aggregation = rows_of(results / "aggregation.csv")
    modes = ("layerwise", "chunkwise")
    paths = {TCP, *(of_one_request(each, mode) for each in transports() for mode in modes)}
    assert {row["path"] for row in aggregation} == paths
    assert len({row["payload_mib"] for row in aggregation}) == 1
    rates = rows_of(results / "rate_sweep.csv")
    assert rates[0]["of_zero_stall"] == "0.5"
    assert float(rates[0]["ttft_ms"]) > stalled_ms(QUICK_LAYERS)
    assert (results / "rate_sweep.svg").exists()
    if (results / "kernel_cap.csv").exists():
        capped = rows_of(results / "kernel_cap.csv")
        assert capped[0]["of_zero_stall"] == "0.5"
        assert all(float(capped[0][f"{who}_ttft_ms"]) > stalled_ms(NUM_LAYERS) for who in WHO)
    else:
        assert "left out" in capsys.readouterr().out
    assert not any((tmp_path / "data").iterdir())
