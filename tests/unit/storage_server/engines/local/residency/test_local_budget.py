"""The page-cache budget from captured trees of /proc and /sys."""

from __future__ import annotations

from pathlib import Path

import pytest

from objectcache_schemas.limits import GIB, KIB, MIB
from objectcache_storage_server.engines.local.residency.budget import (
    Budget,
    page_cache_budget,
    settled_budget,
)
from objectcache_storage_server.engines.local.residency.memory_state import (
    GroupMemory,
    MemoryReader,
    MemoryState,
    parse_limit_bytes,
)

V1_NO_LIMIT = "9223372036854771712\n"
V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"


def meminfo(available_bytes: int) -> str:
    return (
        "MemTotal:       24684092 kB\nMemFree:          442252 kB\n"
        f"MemAvailable:   {available_bytes // KIB} kB\nHugePages_Total:       0\n"
    )


def v2_stat(anon_bytes: int, shmem_bytes: int, file_bytes: int = 0, **others: int) -> str:
    counters = {"anon": anon_bytes, "file": file_bytes, "shmem": shmem_bytes, **others}
    return "".join(f"{name} {count}\n" for name, count in counters.items())


class Machine:
    """A tree of files as a kernel shows it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, files: dict[str, str]) -> None:
        for name, text in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def state(self) -> MemoryState:
        return MemoryReader(self.root).read()

    def budget(self) -> Budget:
        return page_cache_budget(self.state(), 0, 1.0)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    made.write({"proc/meminfo": meminfo(16 * GIB)})
    return made


def v2_service(machine: Machine, *, own: str, parent: str = "max\n") -> None:
    machine.write(
        {
            "proc/self/cgroup": "0::/system.slice/store.service\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/memory.stat": v2_stat(3 * GIB, 0),
            "sys/fs/cgroup/system.slice/memory.max": parent,
            "sys/fs/cgroup/system.slice/memory.high": "max\n",
            "sys/fs/cgroup/system.slice/memory.stat": v2_stat(2 * GIB, 256 * MIB),
            "sys/fs/cgroup/system.slice/store.service/memory.max": own,
            "sys/fs/cgroup/system.slice/store.service/memory.high": "max\n",
            "sys/fs/cgroup/system.slice/store.service/memory.stat": v2_stat(
                512 * MIB, 128 * MIB, file_bytes=3 * GIB
            ),
        }
    )


def test_without_limits_the_available_memory_is_the_budget(machine: Machine) -> None:
    v2_service(machine, own="max\n")
    assert machine.budget() == Budget(16 * GIB, "meminfo")


def test_a_v2_limit_less_anonymous_and_shared_memory_is_the_budget(machine: Machine) -> None:
    v2_service(machine, own=f"{4 * GIB}\n")
    assert machine.budget() == Budget(4 * GIB - 640 * MIB, "cgroup v2")


def test_an_ancestor_with_less_room_counts_though_its_limit_is_higher(machine: Machine) -> None:
    v2_service(machine, own=f"{4 * GIB}\n", parent=f"{5 * GIB}\n")
    assert machine.budget().bytes == 5 * GIB - 2 * GIB - 256 * MIB


def test_cached_extents_do_not_shrink_their_own_budget(machine: Machine) -> None:
    v2_service(machine, own=f"{4 * GIB}\n")
    before = machine.budget()
    stat = v2_stat(512 * MIB, 128 * MIB, file_bytes=int(3.3 * GIB), inactive_file=3 * GIB)
    machine.write({"sys/fs/cgroup/system.slice/store.service/memory.stat": stat})
    assert machine.budget() == before


def test_memory_high_counts_because_page_cache_is_reclaimed_there(machine: Machine) -> None:
    v2_service(machine, own=f"{4 * GIB}\n")
    machine.write({"sys/fs/cgroup/system.slice/store.service/memory.high": f"{2 * GIB}\n"})
    assert machine.budget().bytes == 2 * GIB - 640 * MIB


def test_kernel_memory_that_cannot_be_reclaimed_is_held(machine: Machine) -> None:
    v2_service(machine, own=f"{4 * GIB}\n")
    stat = v2_stat(0, 0, kernel=96 * MIB, slab_reclaimable=64 * MIB, sock=1 * MIB)
    machine.write({"sys/fs/cgroup/system.slice/store.service/memory.stat": stat})
    assert machine.budget().bytes == 4 * GIB - 33 * MIB


def test_a_container_sees_its_own_group_at_the_mount_point(machine: Machine) -> None:
    machine.write(
        {
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/memory.max": f"{1 * GIB}\n",
            "sys/fs/cgroup/memory.stat": v2_stat(100 * MIB, 0),
        }
    )
    assert machine.budget() == Budget(1 * GIB - 100 * MIB, "cgroup v2")


@pytest.mark.parametrize("path", ["/../../other", "/docker/f00"])
def test_a_path_outside_of_the_mount_means_the_mount_point(machine: Machine, path: str) -> None:
    mount = V2_MOUNT.replace(" / /sys", " /kubepods/pod7 /sys")
    machine.write(
        {
            "proc/self/cgroup": f"0::{path}\n",
            "proc/self/mountinfo": mount,
            "sys/fs/cgroup/memory.max": f"{1 * GIB}\n",
            "sys/fs/cgroup/memory.stat": v2_stat(0, 0),
        }
    )
    assert machine.budget() == Budget(1 * GIB, "cgroup v2")


def test_a_mount_of_a_subtree_is_followed_from_its_root(machine: Machine) -> None:
    machine.write(
        {
            "proc/self/cgroup": "3:cpu,memory:/docker/f00/inner\n",
            "proc/self/mountinfo": V1_MOUNT.replace(" / /sys", " /docker/f00 /sys"),
            "sys/fs/cgroup/memory/memory.limit_in_bytes": V1_NO_LIMIT,
            "sys/fs/cgroup/memory/inner/memory.limit_in_bytes": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory/inner/memory.stat": "total_rss 1048576\ntotal_shmem 4096\n",
        }
    )
    assert machine.budget() == Budget(2 * GIB - MIB - 4096, "cgroup v1")


def test_a_v1_limit_counts_the_groups_in_it_and_those_above_that_are_not_visible(
    machine: Machine,
) -> None:
    stat = f"rss 1\nshmem 2\nhierarchical_memory_limit {3 * GIB}\n" + (
        f"total_cache {2 * GIB}\ntotal_rss {256 * MIB}\ntotal_shmem {64 * MIB}\n"
    )
    machine.write(
        {
            "proc/self/cgroup": "4:memory:/\n0::/\n",
            "proc/self/mountinfo": V1_MOUNT,
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{8 * GIB}\n",
            "sys/fs/cgroup/memory/memory.stat": stat,
        }
    )
    assert machine.budget() == Budget(3 * GIB - 320 * MIB, "cgroup v1")


def test_in_a_hybrid_machine_the_hierarchy_with_the_memory_controller_counts(
    machine: Machine,
) -> None:
    machine.write(
        {
            "proc/self/cgroup": "8:pids:/\n4:memory:/api/1\n1:name=systemd:/\n0::/\n",
            "proc/self/mountinfo": V1_MOUNT
            + "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
            + "40 31 0:37 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n",
            "sys/fs/cgroup/unified/cgroup.procs": "1\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": V1_NO_LIMIT,
            "sys/fs/cgroup/memory/memory.stat": "total_rss 0\nhierarchical_memory_limit "
            + V1_NO_LIMIT,
            "sys/fs/cgroup/memory/api/memory.limit_in_bytes": f"{6 * GIB}\n",
            "sys/fs/cgroup/memory/api/memory.stat": f"total_rss {1 * GIB}\ntotal_shmem 0\n",
            "sys/fs/cgroup/memory/api/1/memory.limit_in_bytes": V1_NO_LIMIT,
            "sys/fs/cgroup/memory/api/1/memory.stat": f"total_rss {1 * GIB}\ntotal_shmem 0\n",
        }
    )
    assert machine.state() == MemoryState(16 * GIB, (GroupMemory(1, 6 * GIB, 1 * GIB),))


def test_a_malformed_limit_lets_the_next_source_count_and_is_named(machine: Machine) -> None:
    v2_service(machine, own="a lot\n")
    budget = machine.budget()
    assert budget.bytes == 16 * GIB
    name = "sys/fs/cgroup/system.slice/store.service/memory.max"
    assert budget.source == f"meminfo ({name} unreadable)"


@pytest.mark.parametrize("stat", [None, "", "anon\nshmem x\n", "\x00\xff\n"])
def test_a_limit_without_its_counters_is_named_and_does_not_count(
    machine: Machine, stat: str | None
) -> None:
    v2_service(machine, own=f"{1 * GIB}\n")
    path = machine.root / "sys/fs/cgroup/system.slice/store.service/memory.stat"
    path.unlink() if stat is None else path.write_text(stat)
    budget = machine.budget()
    assert budget.bytes == 16 * GIB
    assert "memory.stat unreadable" in budget.source


def test_without_meminfo_a_limit_still_counts(machine: Machine) -> None:
    v2_service(machine, own=f"{1 * GIB}\n")
    machine.write({"proc/meminfo": "MemTotal: much\n"})
    assert machine.budget() == Budget(1 * GIB - 640 * MIB, "cgroup v2 (proc/meminfo unreadable)")


def test_a_machine_that_says_nothing_has_no_budget_and_raises_nothing(tmp_path: Path) -> None:
    budget = Machine(tmp_path).budget()
    assert budget.bytes == 0
    assert budget.source.startswith("none (proc/meminfo")


def test_what_is_pinned_comes_off_before_the_fraction_and_never_below_nothing() -> None:
    state = MemoryState(8 * GIB)
    assert page_cache_budget(state, 2 * GIB, 0.5) == Budget(3 * GIB, "meminfo")
    assert page_cache_budget(state, 9 * GIB, 0.5) == Budget(0, "meminfo")


def test_a_group_over_its_limit_leaves_no_budget() -> None:
    state = MemoryState(8 * GIB, (GroupMemory(2, 1 * GIB, 2 * GIB),))
    assert page_cache_budget(state, 0, 1.0) == Budget(0, "cgroup v2")


@pytest.mark.parametrize("setting_bytes", [0, 5 * GIB])
def test_a_setting_fixes_the_budget(setting_bytes: int) -> None:
    budget = page_cache_budget(MemoryState(1 * GIB), 1 * GIB, 0.5, setting_bytes)
    assert budget == Budget(setting_bytes, "setting")


def test_a_budget_settles_until_it_has_clearly_changed() -> None:
    settled = Budget(1600, "meminfo")
    assert settled_budget(settled, Budget(1700, "meminfo")).bytes == 1600
    assert settled_budget(settled, Budget(1500, "cgroup v2")) == Budget(1600, "cgroup v2")
    assert settled_budget(settled, Budget(1701, "meminfo")).bytes == 1701
    assert settled_budget(settled, Budget(1499, "meminfo")).bytes == 1499
    assert settled_budget(Budget(0, "none"), Budget(1, "meminfo")) == Budget(1, "meminfo")


def test_limits_are_read_as_the_kernels_write_them() -> None:
    assert parse_limit_bytes("max\n") is None
    assert parse_limit_bytes(V1_NO_LIMIT) is None
    assert parse_limit_bytes("1048576\n") == MIB
    with pytest.raises(ValueError, match="no limit"):
        parse_limit_bytes("-1\n")


def test_this_machine_has_a_budget_within_its_memory() -> None:
    meminfo_path = Path("/proc/meminfo")
    if not meminfo_path.exists():
        pytest.skip("no /proc/meminfo: not Linux")
    total_bytes = int(meminfo_path.read_text().split()[1]) * KIB
    state = MemoryReader().read()
    assert state.unread == ()
    budget = page_cache_budget(state, 0, 1.0)
    assert 0 < budget.bytes <= total_bytes
    assert budget.source in ("meminfo", "cgroup v1", "cgroup v2")
