"""What a topology refuses, and what the library loads."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import objectcache_dispatch
from objectcache_dispatch import (
    ClusterWorker,
    DispatchRequest,
    DispatchSettings,
    Node,
    NodeLoad,
    Topology,
    WorkerLoad,
    symmetric,
)
from objectcache_schemas.errors import InvalidRequest
from tests.unit.dispatch.clusters import node


def test_the_papers_cluster_by_its_name() -> None:
    cluster = symmetric(2, 4, group_nodes=2)
    assert [n.name for n in cluster.nodes] == ["p0", "p1", "d0", "d1", "d2", "d3"]
    assert cluster.groups("prefill") == ("prefill0",)
    assert cluster.groups("decode") == ("decode0", "decode1")
    assert sum(1 for _ in cluster.placed_workers()) == 48


BOTH: Any = "both"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Topology((node("a"), node("a"))), "node 'a' is there twice"),
        (
            lambda: Topology((node("a", "prefill"), node("b", "decode", group="prefills"))),
            "group 'prefills' has workers of both roles",
        ),
        (lambda: ClusterWorker("w", BOTH, "g"), "role of worker w is 'both'"),
        (lambda: ClusterWorker("w", "decode", "g"), "kv_capacity_tokens of worker w is 0"),
        (lambda: ClusterWorker("w", "prefill", ""), "group of worker w is empty"),
        (lambda: Node("n", -1.0, 1.0), "storage_nic_bytes_per_s of node n is -1"),
        (lambda: Node("n", 1.0, 0.0), "compute_nic_bytes_per_s of node n is 0"),
        (lambda: Node("n", float("inf"), 1.0), "storage_nic_bytes_per_s of node n is inf"),
        (lambda: DispatchRequest("r", 1, 0, 0, 0, 1), "new_tokens of request r is 0"),
        (lambda: DispatchRequest("r", 1, 1, 9, 4, 2), "num_layers x layer_bytes = 8"),
        (lambda: DispatchRequest("r", 1, 1, 8, 4, 2, chunk_bytes=3), "must be whole chunks"),
        (lambda: DispatchRequest("r", 1, 1, 8, 4, 2, -1.0), "compute_window_s of request r"),
        (lambda: WorkerLoad("w", -1), "seq of worker w is -1"),
        (lambda: NodeLoad("n", rate_bytes_per_s=0.0), "rate_bytes_per_s of node n is 0"),
        (lambda: DispatchSettings(0), "beta_tokens is 0"),
        (lambda: DispatchSettings(1, slack=0.9), "slack is 0.9"),
        (lambda: DispatchSettings(1, report_age_s_max=float("nan")), "report_age_s_max is nan"),
        (lambda: symmetric(0, 1), "prefill_nodes is 0"),
    ],
)
def test_what_cannot_be_is_named(make, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidRequest) as refused:
        make()
    assert words in refused.value.message


def test_it_asks_no_clock_and_opens_no_socket() -> None:
    allowed = {
        "__future__", "collections", "dataclasses", "math", "typing",
        "numpy", "objectcache_dispatch", "objectcache_schemas",
    }  # fmt: skip
    imported = set[str]()
    for file in Path(objectcache_dispatch.__file__).parent.rglob("*.py"):
        for statement in ast.walk(ast.parse(file.read_text())):
            if isinstance(statement, ast.ImportFrom):
                imported.add(str(statement.module).split(".")[0])
            elif isinstance(statement, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in statement.names}
    assert "numpy" in imported
    assert imported <= allowed
