"""The benchmark of the store in RADOS, on very little."""

from __future__ import annotations

import re

import pytest

from benchmarks.rados_store import measure
from tests.ceph import CephCluster


def test_the_benchmark_shows_the_store_beside_bare_calls(
    cluster: CephCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    measure(cluster, objects=2, rounds=2)
    shown = re.findall(r"^  (\w+) .*ratio +[\d.]+$", capsys.readouterr().out, re.MULTILINE)
    assert shown == ["bare", "store", "bare", "store", "one_batch", "bare", "store"]
