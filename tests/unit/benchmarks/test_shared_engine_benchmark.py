"""The benchmark of the shared engine, on very little."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.shared_engine import main


def test_the_benchmark_shows_the_engine_beside_bare_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--store", f"file://{tmp_path / 'store'}", "--chunks", "3", "--rounds", "1"]) == 0
    shown = re.findall(r"^  (.+?) +best .*GiB/s", capsys.readouterr().out, re.MULTILINE)
    assert shown == [
        *("put layerwise", "put chunkwise", "bare, whole objects"),
        *("verification full", "verification sampled", "verification off"),
    ]
