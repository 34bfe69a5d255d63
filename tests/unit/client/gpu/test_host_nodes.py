"""Which NUMA node a GPU is nearest to, by a folder as Linux has it, and memory put there."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache.gpu import host_nodes
from objectcache.gpu.host_nodes import HostNodes, node_at, put_on_node
from objectcache.gpu.links import relay_check
from objectcache.gpu.links.checked_links import checked_links
from objectcache.landing.memory_file import MemoryFile
from objectcache_schemas.limits import MIB
from tests.emulated_device import EmulatedDevice

DISTANCES = {0: "10 12 32", 2: "12 10 32", 5: "32 32 10"}  # of nodes 0, 2 and 5


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    nodes = tmp_path / "devices/system/node"
    for node, distances in DISTANCES.items():
        (nodes / f"node{node}").mkdir(parents=True)
        (nodes / f"node{node}/distance").write_text(distances + "\n")
    (nodes / "online").write_text("0,2,5\n")
    for address, said in (("0000:1b:00.0", "5"), ("0000:2c:00.0", "-1"), ("0000:3d:00.0", "?")):
        (tmp_path / "bus/pci/devices" / address).mkdir(parents=True)
        (tmp_path / "bus/pci/devices" / address / "numa_node").write_text(f"{said}\n")
    return tmp_path


def test_a_gpu_is_found_by_the_address_that_cuda_gives(sysfs: Path) -> None:
    nodes = HostNodes(sysfs)
    assert nodes.node_of_pci("0000:1B:00.0") == 5
    for unknown in ("0000:2C:00.0", "0000:3D:00.0", "0000:4E:00.0"):
        assert nodes.node_of_pci(unknown) is None


def test_distances_are_those_of_the_kernel_also_where_numbers_are_missing(sysfs: Path) -> None:
    nodes = HostNodes(sysfs)
    known = {(a, b): nodes.distance(a, b) for a in DISTANCES for b in DISTANCES}
    assert known[0, 2] == known[2, 0] == 12
    assert known[0, 5] == known[5, 2] == 32
    assert {known[node, node] for node in DISTANCES} == {10}
    assert nodes.distance(0, 1) == nodes.distance(1, 0) == 255
    assert HostNodes(sysfs / "nothing").distance(0, 2) == 255
    assert HostNodes(sysfs / "nothing").distance(2, 2) == 10


@pytest.mark.parametrize(
    ("text", "numbers"), [("0-1\n", [0, 1]), ("3", [3]), ("0,2-4,9", [0, 2, 3, 4, 9]), ("\n", [])]
)
def test_lists_are_read_as_the_kernel_writes_them(text: str, numbers: list[int]) -> None:
    assert host_nodes._listed(text) == numbers


def test_what_is_near_comes_first_and_of_equals_what_came_first(sysfs: Path) -> None:
    nodes = HostNodes(sysfs)
    things = [("a", 5), ("b", None), ("c", 2), ("d", 0), ("e", 5), ("f", 0)]
    for node, order in ((0, "dfcaeb"), (5, "aecdfb"), (None, "abcdef")):
        found = nodes.nearest_first(node, things, lambda thing: thing[1])
        assert "".join(name for name, _ in found) == order


@given(st.lists(st.none() | st.integers(0, 3), max_size=8), st.none() | st.integers(0, 3))
def test_nothing_is_lost_and_the_own_node_is_first(
    places: list[int | None], node: int | None
) -> None:
    things = list(enumerate(places))
    found = HostNodes().nearest_first(node, things, lambda thing: thing[1])
    assert sorted(found) == sorted(things) if None not in places else len(found) == len(things)
    if node is not None:
        own = [place == node for _, place in found]
        assert own == sorted(own, reverse=True)


def test_links_of_the_same_node_relay_before_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_check, "RATE_MIN", 0.0)
    device = EmulatedDevice(node=1)
    far, near, unknown = (EmulatedDevice(beside=device, node=node) for node in (0, 1, None))
    assert checked_links(device, [far, unknown, near]).relays == (near, far, unknown)


HAS_NODES = platform.system() == "Linux" and Path("/sys/devices/system/node/node0").exists()


@pytest.mark.skipif(not HAS_NODES, reason="the kernel knows no NUMA nodes")
def test_memory_is_put_on_a_node_and_found_there() -> None:
    file = MemoryFile(MIB)
    array = file.array()
    array[:] = 7
    address = array.ctypes.data
    if (why_not := put_on_node(address, MIB, 0)) is not None:
        pytest.skip(f"this process may not place memory: {why_not}")
    assert node_at(address) == 0
    assert (array == 7).all()
    mode, mask = ctypes.c_int(), (ctypes.c_uint64 * 16)()
    at = (ctypes.c_void_p(address), 2)  # MPOL_F_ADDR: the policy of what is there
    arguments = ctypes.byref(mode), mask, ctypes.c_ulong(1024)
    assert host_nodes._system_call(host_nodes._GET_MEMPOLICY, *arguments, *at) is None
    assert (mode.value, mask[0]) == (1, 1)


def test_what_cannot_be_put_there_says_why() -> None:
    file = MemoryFile(MIB)
    address = file.array().ctypes.data
    assert put_on_node(address, MIB, -1) == "there is no NUMA node -1"
    assert put_on_node(address, MIB, 1 << 20) == f"there is no NUMA node {1 << 20}"
    assert put_on_node(address, MIB, 1000)  # which no machine of ours has
    assert put_on_node(address + 1, MIB, 0)
