"""How busy links are, against the paper's equations (1) to (8) and by hand where it has none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache_dispatch import (
    Node,
    PrefixFlow,
    StorageHost,
    Topology,
    bottlenecks,
    pd_ratio,
    saturating_flows,
    symmetric,
)
from objectcache_dispatch.capacity.bottlenecks import LinkKind
from objectcache_schemas.errors import InvalidRequest
from tests.unit.dispatch.clusters import node, one_of_each

G, B, M = 8, 50e9, 500e9


def shares(
    topology: Topology, flows: list[PrefixFlow], copies: bool = True
) -> dict[tuple[str, LinkKind], float]:
    found = bottlenecks(topology, flows, copies_over_compute_nic=copies)
    assert [each.share for each in found] == sorted((u.share for u in found), reverse=True)
    return {(each.place, each.link): each.share for each in found}


@pytest.mark.parametrize("s", [0.5, 1.0, 2.5])
@pytest.mark.parametrize(("p", "d"), [(1, 1), (2, 4), (7, 2), (1, 7)])
def test_symmetric_clusters_have_the_loads_of_the_papers_equations(
    p: int, d: int, s: float
) -> None:
    cluster = symmetric(p, d, storage_nic_bytes_per_s=s * B)
    busy = shares(cluster, saturating_flows(cluster))
    assert all(
        share == pytest.approx(1) for (_, link), share in busy.items() if link == "storage_nic"
    )
    assert busy["p0", "compute_nic_out"] == pytest.approx(2 * s / G)  # (1)
    assert busy["p0", "compute_nic_in"] == pytest.approx(s / G * (1 + d / p))  # (2)
    assert busy["d0", "compute_nic_out"] == pytest.approx(s / G * (p / d + 2))  # (4)
    assert busy["d0", "compute_nic_in"] == pytest.approx(s / G * (2 * p / d + 1))  # (6)
    assert busy["p0", "memory"] == pytest.approx(2 * s * B / M)
    assert busy["d0", "memory"] == pytest.approx((3 + 2 * p / d) * s * B / M)  # (8)


@pytest.mark.parametrize("s", [0.5, 1.0, 2.5])
@pytest.mark.parametrize(("p", "d"), [(1, 1), (2, 4), (7, 2), (1, 7)])
def test_copies_over_pcie_leave_the_compute_nics_to_transfers(p: int, d: int, s: float) -> None:
    cluster = symmetric(p, d, storage_nic_bytes_per_s=s * B)
    busy = shares(cluster, saturating_flows(cluster), copies=False)
    assert busy["p0", "compute_nic_out"] == pytest.approx(s / G)
    assert busy["p0", "compute_nic_in"] == pytest.approx(s / G * d / p)
    assert busy["d0", "compute_nic_out"] == pytest.approx(s / G)
    assert busy["d0", "compute_nic_in"] == pytest.approx(s / G * p / d)
    assert busy["d0", "memory"] == pytest.approx((3 + 2 * p / d) * s * B / M)


@given(
    p=st.integers(1, 12), d=st.integers(1, 12), s=st.sampled_from([0.5, 1.0, 1.5, 3.0]),
    memory=st.sampled_from([200e9, 500e9, 2000e9]), copies=st.booleans(),
)  # fmt: skip
def test_ratios_of_the_range_are_those_without_a_bottleneck(
    p: int, d: int, s: float, memory: float, copies: bool
) -> None:
    cluster = symmetric(p, d, gpus=4, storage_nic_bytes_per_s=s * B, memory_bytes_per_s=memory)
    found = pd_ratio(4, s * B, B, memory, copies_over_compute_nic=copies)
    inside = found.least.ratio <= p / d <= found.largest.ratio
    near = any(abs(p / d - bound.ratio) < 1e-9 for bound in found.bounds)
    busy = shares(cluster, saturating_flows(cluster), copies)
    fits = max(share for share in busy.values()) <= 1 + 1e-12
    # A prefill node's memory, 2 s B, is no equation of the paper's: it never binds before the
    # decode node's 3 s B.
    assert near or inside == fits


def test_the_papers_example() -> None:
    found = pd_ratio(8, 50e9, 50e9, 500e9)
    assert found.least.ratio == pytest.approx(1 / 7)
    assert found.largest.ratio == pytest.approx(7 / 2)
    assert [bound.equation for bound in found.bounds] == ["(3)", "(5)", "(7)", "(8)"]
    assert [bound.ratio for bound in found.bounds] == pytest.approx([1 / 7, 6, 3.5, 3.5])
    without_copies = pd_ratio(8, 50e9, 50e9, copies_over_compute_nic=False)
    assert (without_copies.least.ratio, without_copies.largest.ratio) == (1 / 8, 8)


def test_memory_binds_where_it_is_slow_and_nothing_is_left_where_nics_are_too_few() -> None:
    found = pd_ratio(8, 50e9, 50e9, 300e9)
    assert (found.largest.ratio, found.largest.by) == (1.5, "memory of decode nodes")
    assert pd_ratio(8, 50e9, 50e9, 100e9).is_empty
    assert pd_ratio(1, 50e9, 50e9).is_empty  # 2 s > g
    assert pd_ratio(2, 50e9, 50e9).is_empty  # P/D of 1 at least, and at most (g - 2s) / s = 0
    assert not pd_ratio(8, 50e9, 50e9, 400e9).is_empty


@pytest.mark.parametrize(
    ("field", "figures"),
    [
        ("gpus", (0, 1.0, 1.0, 1.0)),
        ("storage_nic_bytes_per_s", (8, 0.0, 1.0, 1.0)),
        ("compute_nic_bytes_per_s", (8, 1.0, -1.0, 1.0)),
        ("memory_bytes_per_s", (8, 1.0, 1.0, float("nan"))),
    ],
)
def test_figures_that_are_none_are_named(
    field: str, figures: tuple[int, float, float, float]
) -> None:
    with pytest.raises(InvalidRequest, match=field):
        pd_ratio(*figures)


def test_another_nodes_nic_costs_its_memory_and_its_compute_nic() -> None:
    relay = Node("cpu", 1000.0, 2000.0, 1, 8000.0)
    cluster = Topology((*one_of_each().nodes, relay))
    busy = shares(cluster, [PrefixFlow("p", "d", "cpu", 1000.0)])
    assert busy["cpu", "storage_nic"] == 1
    assert busy["cpu", "compute_nic_out"] == 1000 / 2000
    assert busy["cpu", "memory"] == 2000 / 8000
    assert busy["p", "compute_nic_in"] == 1000 / 8000
    assert busy["p", "compute_nic_out"] == 1000 / 8000
    assert busy["d", "compute_nic_in"] == 2000 / 8000  # from p, and the copy into its GPU
    assert busy["p", "storage_nic"] == busy["d", "storage_nic"] == 0


def test_storage_hosts_share_the_reads_by_their_nics() -> None:
    hosts = (StorageHost("one", 3000.0), StorageHost("two", 1000.0))
    cluster = Topology(one_of_each().nodes, hosts)
    busy = shares(cluster, saturating_flows(cluster))
    assert busy["one", "storage_host"] == busy["two", "storage_host"] == 2000 / 4000


def test_unequal_nodes_without_decode_workers_hand_nothing_over() -> None:
    cluster = Topology((node("p", "prefill"), node("cpu", rate=4000.0), node("dark", rate=0.0)))
    flows = saturating_flows(cluster)
    assert [(f.prefill, f.decode, f.reader, f.bytes_per_s) for f in flows] == [
        ("p", None, "p", 1000.0),
        ("p", None, "cpu", 4000.0),
    ]
    busy = shares(cluster, flows, copies=False)
    assert busy["p", "compute_nic_in"] == 4000 / 8000
    assert busy["p", "compute_nic_out"] == 0


def test_flows_that_cannot_be_are_named() -> None:
    with pytest.raises(InvalidRequest, match="'x' of a flow"):
        bottlenecks(one_of_each(), [PrefixFlow("p", "x", "p", 1.0)])
    dark = Topology((node("p", "prefill", rate=0.0),))
    with pytest.raises(InvalidRequest, match="'p' reads, and has no storage NIC"):
        bottlenecks(dark, [PrefixFlow("p", None, "p", 1.0)])
