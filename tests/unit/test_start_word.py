"""Processes that a supervisor has loaded, and that wait for its word."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("module", ["objectcache_gateway", "objectcache_gateway.admin"])
def test_a_process_that_never_gets_the_word_ends_and_has_made_nothing(
    module: str, tmp_path: Path
) -> None:
    data_dir = tmp_path / "data"
    arguments = ["--data-dir", str(data_dir), "--set", "gateway.listen=127.0.0.1:0"]
    run = subprocess.run(
        [sys.executable, "-m", module, *arguments, "--start-with-stdin"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
    assert not data_dir.exists()
