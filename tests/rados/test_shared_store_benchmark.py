"""The benchmark of a shared store, on very little."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.shared_store.bench import Amount, SharedBench
from benchmarks.shared_store.commits import measure_commits
from benchmarks.shared_store.many_chunks import measure_many_chunks
from benchmarks.shared_store.several_servers import measure_servers
from benchmarks.shared_store.tiers import (
    COLD,
    DEVICE,
    LOCAL,
    LOCAL_DEVICE,
    STORE,
    WARM,
    measure_tiers,
)
from tests.ceph import CephCluster

LITTLE = Amount(2, 2, 1, 2, 1, (1, 2), 0.5)


def test_commits_are_seen_by_another_server(cluster: CephCluster, tmp_path: Path) -> None:
    with ExitStack() as undo:
        rows = list(measure_commits(SharedBench(tmp_path, LITTLE, undo, cluster)))
    *commits, data = rows
    assert [row.goal for row in commits] == ["<= 3 ms", "", "", "", "<= 5 ms"]
    assert all(len(row.samples) == LITTLE.commits for row in commits)
    assert data.name == "2 chunks of 2 MiB written"


def test_no_acknowledged_put_of_several_servers_is_lost(
    cluster: CephCluster, tmp_path: Path
) -> None:
    with ExitStack() as undo:
        rows = list(measure_servers(SharedBench(tmp_path, LITTLE, undo, cluster)))
    for row, count in zip(rows, LITTLE.server_counts, strict=True):
        found = re.match(rf"{count} servers: (\d+) acknowledged, 0 lost, 0 twice", row.name)
        assert found is not None, row.name
        assert int(found[1]) > 0


def test_a_cache_is_measured_beside_its_store_and_the_local_engine(tmp_path: Path) -> None:
    with ExitStack() as undo:
        rows = list(measure_tiers(SharedBench(tmp_path, LITTLE, undo)))
    if not rows:
        pytest.skip("there is no SeaweedFS here, or no link of its own")
    reads = {row.name.partition(";")[0]: row.median for row in rows if "1 Gbit/s" in row.group}
    assert reads.keys() == {STORE, COLD, WARM, DEVICE, LOCAL, LOCAL_DEVICE}
    assert [len(row.samples) for row in rows] == [LITTLE.rounds] * 8


def test_new_servers_have_what_was_put(cluster: CephCluster, tmp_path: Path) -> None:
    with ExitStack() as undo:
        rows = list(measure_many_chunks(SharedBench(tmp_path, LITTLE, undo, cluster)))
    started = [row for row in rows if row.name.startswith("a new server")]
    assert len(started) == 2
    assert all(row.median > 0 for row in started)
