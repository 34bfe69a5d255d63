"""The experiment behind a shaped link runs: every byte is compared in it. No figure is judged."""

from __future__ import annotations

import os

import pytest

from benchmarks.figures.experiment import NotPossible
from benchmarks.figures.shaped_link import own_namespaces, shaped_link
from benchmarks.shadow.__main__ import PARTS, main
from benchmarks.shadow.rig import two_processors

pytestmark = pytest.mark.timeout(600)  # of a machine that does much else


def test_a_quick_run_prints_a_table_of_each_part(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        two_processors()
        with shaped_link() as link:
            link.shape(1e6)
    except NotPossible as why:
        pytest.skip(str(why))
    processors = os.sched_getaffinity(0)
    assert main(["--quick"]) == 0
    printed = capsys.readouterr().out
    assert all(f"**{name}**" in printed for name in PARTS)
    for row in ("| 10 / 16 | plain |", "| no bound |", "| matmul, 2 ms |", "| all of it |"):
        assert row in printed
    assert own_namespaces() == []
    assert os.sched_getaffinity(0) == processors
