"""What a path lies on, as the kernel's table of mounts says it."""

from __future__ import annotations

from pathlib import Path

import pytest

from objectcache_storage_server.engines.disk.file_systems import file_system_of

MOUNTS = """\
22 27 0:21 / / rw,relatime - ext4 /dev/vda1 rw,errors=remount-ro
23 22 0:40 / /data rw,nosuid shared:3 master:1 - nfs4 server:/export rw,vers=4.2,acdirmax=0
24 22 0:41 /sub /data/deep rw - fuse.juicefs JuiceFS:cache rw,user_id=0
25 22 0:42 / /with\\040space rw - ceph 10.0.0.1:/ rw,name=admin
26 22 0:43 / /again rw - ext4 /dev/vdb rw
27 26 0:44 / /again rw - lustre mgs@tcp:/fs rw
"""


@pytest.mark.parametrize(
    ("path", "type_", "may_be_shared"),
    [
        ("/", "ext4", False),
        ("/database", "ext4", False),
        ("/data", "nfs4", True),
        ("/data/store", "nfs4", True),
        ("/data/deep/store", "fuse.juicefs", True),
        ("/with space/store", "ceph", True),
        ("/again", "lustre", True),
    ],
)
def test_a_path_lies_on_the_last_of_the_deepest_mounts(
    path: str, type_: str, may_be_shared: bool
) -> None:
    found = file_system_of(Path(path), MOUNTS)
    assert (found.type, found.may_be_shared) == (type_, may_be_shared)


def test_options_are_those_of_the_mount_and_of_the_file_system() -> None:
    options = file_system_of(Path("/data"), MOUNTS).options
    assert {"nosuid", "vers=4.2", "acdirmax=0"} <= options


def test_the_kernel_s_own_table_is_understood() -> None:
    assert file_system_of(Path("/proc/self")).type == "proc"
    assert file_system_of(Path("/")).type


def test_what_nothing_is_known_of_may_be_shared() -> None:
    assert file_system_of(Path("/"), "").may_be_shared
