"""Two hosts, each a process that says it is one, and one data directory on a mount of both."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from objectcache_runtime.settings import StorageSettings
from objectcache_schemas.errors import Unavailable
from objectcache_storage_server.engines.disk import data_folders
from objectcache_storage_server.engines.disk.file_systems import FileSystem, file_system_of
from objectcache_storage_server.engines.disk.host_lease import HostLease, this_host
from objectcache_storage_server.engines.files.engine import FilesEngine
from objectcache_storage_server.engines.open_engine import open_local_engine
from tests.contract.engine_suite import BUCKET, put, stored_keys

LONG_S = 30.0

HOLDER = """
import sys, threading
from pathlib import Path
from objectcache_storage_server.engines.disk.host_lease import HostLease
lost = threading.Event()
def tell(reason):
    print("lost", reason, flush=True)
    lost.set()
lease = HostLease(Path(sys.argv[1]), tell, host=sys.argv[2], renew_s=0.05)
print("held", flush=True)
sys.stdin.readline()
lease.close()
"""


class Holder:
    """A process that has the lease, until it is told to end."""

    def __init__(self, folder: Path, host: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(folder), host],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.line() == "held"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.communicate("\n")


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Callable[[str], Holder]]:
    holders: list[Holder] = []

    def hold(host: str) -> Holder:
        holders.append(Holder(tmp_path, host))
        return holders[-1]

    yield hold
    for holder in holders:
        if holder.process.returncode is None:
            holder.process.kill()
            holder.process.communicate()


def take(folder: Path, host: str, dead_after_s: float) -> HostLease:
    return HostLease(
        folder, lambda reason: None, host=host, renew_s=0.05, dead_after_s=dead_after_s
    )


def test_a_live_server_of_another_host_is_told_by_its_name(
    tmp_path: Path, hold: Callable[[str], Holder]
) -> None:
    hold("boot-1 alpha")
    with pytest.raises(Unavailable, match=r"in use by a storage server on the host alpha"):
        take(tmp_path, "boot-2 beta", LONG_S)


def test_a_server_that_was_killed_is_found_to_be_dead(
    tmp_path: Path, hold: Callable[[str], Holder]
) -> None:
    holder = hold("boot-1 alpha")
    holder.process.kill()
    holder.process.communicate()
    take(tmp_path, "boot-2 beta", 0.3).close()
    assert list(tmp_path.iterdir()) == []


def test_a_server_of_this_host_that_was_killed_is_not_waited_for(
    tmp_path: Path, hold: Callable[[str], Holder]
) -> None:
    holder = hold("boot-1 alpha")
    holder.process.kill()
    holder.process.communicate()
    take(tmp_path, "boot-1 alpha", 3600.0).close()


def test_a_server_that_has_ended_leaves_nothing(
    tmp_path: Path, hold: Callable[[str], Holder]
) -> None:
    hold("boot-1 alpha").end()
    assert list(tmp_path.iterdir()) == []
    take(tmp_path, "boot-2 beta", 3600.0).close()


def test_a_server_that_stood_still_learns_that_it_has_lost_the_lease(
    tmp_path: Path, hold: Callable[[str], Holder]
) -> None:
    holder = hold("boot-1 alpha")
    holder.process.send_signal(signal.SIGSTOP)
    lease = take(tmp_path, "boot-2 beta", 0.3)
    holder.process.send_signal(signal.SIGCONT)
    assert "taken by beta while this server stood still" in holder.line()
    holder.end()
    assert (tmp_path / "lease").exists()  # which is the other's now
    lease.close()


def test_a_renewal_leaves_alone_what_another_host_has_made_since_it_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = HostLease(tmp_path, lambda reason: None, host="boot-1 alpha", renew_s=3600.0)
    is_ours, others = lease._is_ours, "boot-2 beta\nprocess 1 token\n0\n"

    def taken_meanwhile(content: str) -> bool:
        monkeypatch.undo()
        (tmp_path / "lease").unlink()
        (tmp_path / "lease").write_text(others)
        return is_ours(content)

    monkeypatch.setattr(lease, "_is_ours", taken_meanwhile)
    lease._renew()
    assert (tmp_path / "lease").read_text() == others
    with pytest.raises(Unavailable, match="taken by beta"):
        lease._renew()
    lease.close()


def test_a_file_that_is_no_lease_is_taken_when_it_does_not_change(tmp_path: Path) -> None:
    (tmp_path / "lease").write_bytes(b"")
    take(tmp_path, "boot-2 beta", 0.1).close()


def test_a_host_is_another_one_after_it_was_started_anew() -> None:
    boot_id, _, name = this_host().partition(" ")
    assert len(boot_id) == 36
    assert name


@pytest.fixture
def on_a_shared_mount(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data directories of engines are on NFS, and locks hold on one host only."""
    nfs = FileSystem("nfs4", frozenset())
    monkeypatch.setattr(data_folders, "file_system_of", lambda path: nfs)
    monkeypatch.setattr(fcntl, "flock", lambda *args: None)


@pytest.mark.usefixtures("on_a_shared_mount")
@pytest.mark.parametrize("name", ["files", "local"])
def test_an_engine_refuses_what_another_host_has_open_and_warns_of_the_mount(
    tmp_path: Path,
    hold: Callable[[str], Holder],
    name: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def open_and_close() -> None:
        if name == "files":
            FilesEngine(tmp_path, 16).close()
        else:
            open_local_engine(tmp_path, StorageSettings(capacity_bytes=64 << 20)).close()

    monkeypatch.setattr(
        data_folders, "HostLease", lambda *args, **kwargs: HostLease(*args, **kwargs, renew_s=0.05)
    )
    open_and_close()
    assert "is on nfs4, which several hosts can mount" in caplog.text
    assert not (tmp_path / "lease").exists()
    holder = hold("boot-1 alpha")
    with pytest.raises(Unavailable, match="on the host alpha"):
        open_and_close()
    holder.end()
    open_and_close()


@pytest.mark.usefixtures("on_a_shared_mount")
def test_an_engine_that_has_lost_its_directory_changes_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        data_folders, "HostLease", lambda *args, **kwargs: HostLease(*args, **kwargs, renew_s=0.05)
    )
    engine = FilesEngine(tmp_path, 16)
    engine.create_bucket(BUCKET)
    put(engine, "before", b"data")
    others = tmp_path / "lease-token"
    others.write_text("boot-2 beta\nprocess 1 token\n0\n")
    others.replace(tmp_path / "lease")  # another file, as whoever takes a lease makes one
    while not engine.flush_failure:
        time.sleep(0.01)
    with pytest.raises(Unavailable, match="taken by beta"):
        put(engine, "after", b"data")
    assert stored_keys(engine) == ["before"]
    engine.close()


def test_on_a_disk_of_this_host_there_is_no_lease(tmp_path: Path) -> None:
    if (system := file_system_of(tmp_path)).may_be_shared:
        pytest.skip(f"the tests' own folder is on {system.type}, which hosts may share")
    engine = FilesEngine(tmp_path, 16)
    assert not (tmp_path / "lease").exists()
    engine.close()
