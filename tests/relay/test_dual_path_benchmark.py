"""The experiment over shaped links runs: every byte, and what each link carried, is compared in it.

What the figures are is not judged.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks.dual_path.__main__ import main
from benchmarks.dual_path.carried import CarriedWrongly, bytes_by_route, check_count
from benchmarks.dual_path.namespaces import node_network
from benchmarks.dual_path.questions import PARTS
from benchmarks.figures.experiment import NotPossible
from benchmarks.figures.shaped_link import PREFIX, run_tool

pytestmark = pytest.mark.timeout(300)  # a dozen processes are started


def test_a_quick_run_compares_all_bytes_and_what_links_carried(tmp_path: Path) -> None:
    try:
        with node_network(["p0"]) as network:
            network.shape_storage("p0", 1e6)
            network.shape_compute("p0", 1e6)
    except NotPossible as why:
        pytest.skip(str(why))
    assert main(["--quick", "--transport", "body", "--results", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("*.json")
    rows = json.loads(file.read_text())["rows"]
    assert {row["details"]["part"] for row in rows} == set(PARTS)
    assert all(row["samples"] and row["by_hand"] for row in rows)
    judged = [row for row in rows if row["goal"]]
    assert judged
    assert all(row["ratio"] is not None and row["ratio_of"] for row in judged)
    assert f"{PREFIX}{os.getpid()}-" not in run_tool("ip", "netns", "list")


def test_a_link_that_carried_a_delivery_twice_or_not_is_found() -> None:
    payload_bytes = 8 << 20
    check_count("a link", round(1.01 * payload_bytes), payload_bytes)
    check_count("a link", 40_000, 0)
    for count, payload in ((2 * payload_bytes, payload_bytes), (payload_bytes, 0), (0, 1)):
        with pytest.raises(CarriedWrongly, match="a link carried"):
            check_count("a link", count, payload)


def test_the_routes_of_deliveries_say_how_many_bytes_came_over_each() -> None:
    routes = ["direct", "relay:d0", "split:direct=12,relay:d0=4", "split:relay:d0=8,relay:d1=8"]
    assert bytes_by_route(routes, 1600, 16) == {
        "direct": 1600 + 1200,
        "relay:d0": 1600 + 400 + 800,
        "relay:d1": 800,
    }
