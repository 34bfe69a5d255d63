"""A folder on a FUSE mount whose processes die, and that is mounted anew."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from objectcache_schemas.errors import Unavailable
from objectcache_storage_server.engines.stores.folder.folder_store import FolderStore
from objectcache_storage_server.engines.stores.shared_store import StoredObject
from tests.contract.stores.juicefs_mounts import juicefs_volume, reason_to_skip
from tests.unit.storage_server.engines.stores.folder.conftest import put, read, soon


@pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip())
def test_a_mount_that_dies_has_lost_nothing_and_is_used_again_when_it_is_back() -> None:
    with juicefs_volume(1) as (mount,):
        root = mount.point / "store"
        store = FolderStore(root, create=True)
        put(store, "w/1", b"there")
        assert store.append(0, b"record", soon())

        def check_away() -> None:
            for call in (
                lambda: store.get("w/1", soon()),
                lambda: store.get("w/2", soon()),
                lambda: read(store, "w/1", 5),
                lambda: list(store.list_objects("", soon())),
                lambda: store.log_end(0, soon()),
                lambda: store.append(1, b"new", soon()),
                lambda: put(store, "w/2", b"new"),
                lambda: FolderStore(root),
            ):
                with pytest.raises(Unavailable):
                    call()

        mount.kill()
        check_away()
        mount.unmount()
        check_away()
        mount.mount_again()
        end_s = soon()
        while True:
            try:
                found = store.get("w/1", soon())
            except Unavailable:
                assert time.monotonic() < end_s
                continue
            break
        assert found == b"there"
        assert list(store.list_objects("", soon())) == [StoredObject("w/1", 5)]
        assert store.append(1, b"new", soon())
        store.close()


MOUNTED = """
import time
from tests.contract.stores.juicefs_mounts import juicefs_volume
with juicefs_volume(1) as (mount,):
    print(mount.point, flush=True)
    time.sleep(3600)
"""


@pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip())
def test_a_run_of_tests_that_is_killed_leaves_no_mount_behind() -> None:
    run = subprocess.Popen([sys.executable, "-c", MOUNTED], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    point = Path(run.stdout.readline().strip())
    assert os.path.ismount(point)
    run.kill()
    run.wait()
    run.stdout.close()
    end_s = soon()
    while os.path.ismount(point):
        assert time.monotonic() < end_s
        time.sleep(0.05)
    shutil.rmtree(point.parent, ignore_errors=True)  # what is ending may write to its log
