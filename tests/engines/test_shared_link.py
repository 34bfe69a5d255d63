"""The benchmark of engines on one link runs, and says what it should; nothing is judged by time."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks.shared_link import __main__ as shared_link
from benchmarks.shared_link.requests import QUICK


def test_a_quick_run_shares_by_windows_that_the_engines_learned_themselves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "results.json"
    results = shared_link.main(["--quick", "--rounds", "1", "--json", str(file)])
    assert results.policies() == ["stall_dynamic", "equal", "equal for life"]
    assert list(results.alone_s) == [request.name for request in QUICK]
    own, count = results.own_windows()
    assert own == count == 9
    shown = capsys.readouterr().out
    assert "9 of 9 deliveries had a window of the engine's own." in shown
    for name in ("equal", "equal for life"):
        assert math.isfinite(results.ratio("stall_dynamic", name))
        assert f"stall_dynamic / {name}: " in shown
    kept = json.loads(file.read_text())
    assert len(kept["results"]["rounds"]) == 3
