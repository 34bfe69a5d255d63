"""A throwaway Ceph on loopback: one monitor, one manager and a few OSDs, each a process of ours.

    with ceph_cluster(folder) as ceph:
        RadosStore(RadosSettings(ceph.create_pool(), conf=str(ceph.conf)), create=True)

Ports are free ones, and everything lies in the folder, so that several clusters run side by side.
The processes end with the `with`, or with the process that started them. One OSD is enough for a
replicated pool of one copy; an erasure-coded one (k=2, m=1) needs two.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.servers import free_port, standing_still

PROGRAMS = ("ceph-mon", "ceph-mgr", "ceph-osd", "ceph", "monmaptool")
START_TIMEOUT_S = 60.0
PLACEMENT_GROUPS = 8
DEVICE_BYTES = 8 << 30  # of an OSD: a sparse file
CONFIGURATION = """\
[global]
fsid = {fsid}
mon host = v2:{host}:{port}/0
auth cluster required = none
auth service required = none
auth client required = none
public addr = {host}
cluster addr = {host}
osd pool default size = 1
osd pool default min size = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
[mon]
mon data = {folder}/mon
mon allow pool size one = true
mon allow pool delete = true
mon warn on pool no redundancy = false
mon data avail warn = 2
mon data avail crit = 1
auth allow insecure global id reclaim = false
mon compact on start = false
mon tick interval = 1
mgr initial modules =
[osd]
osd data = {folder}/osd$id
osd objectstore = bluestore
osd memory target = 1073741824
osd mon report interval = 1
osd heartbeat interval = 1
bluestore block size = {device_bytes}
[mgr]
mgr data = {folder}/mgr
mgr tick period = 1
mgr stats period = 1
"""
DAEMONS = """\
run dir = {folder}/run
log file =
err to stderr = true
admin socket = {folder}/run/$name.asok
pid file = {folder}/run/$name.pid
"""


def reason_to_skip() -> str:
    """Why no Ceph can be started here; empty where it can."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"Debian's ceph-mon, ceph-mgr and ceph-osd are needed: {', '.join(missing)}"
    if os.geteuid() != 0:
        return "Ceph's daemons are started as root"
    return ""


class CephCluster:
    """A running cluster. `osds` and `monitor` are its processes, to be stopped and gone on with."""

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        """`host`: an address of this host that the processes listen at."""
        self._host = host
        self.folder = folder
        self.conf = folder / "ceph.conf"
        self.fsid = str(uuid.uuid4())
        self.port = free_port()
        self.osds: dict[int, subprocess.Popen[bytes]] = {}
        self.monitor: subprocess.Popen[bytes] | None = None
        self.manager: subprocess.Popen[bytes] | None = None
        self._pools = 0
        self._shared_pool = ""

    # --- starting and stopping ---

    def start(self, osd_count: int) -> None:
        for name in ("mon", "mgr", "run", "log"):
            (self.folder / name).mkdir(parents=True)
        self.conf.write_text(self._configuration())
        self._make_monitor()
        self.start_monitor()
        self.manager = self._spawn("ceph-mgr", "x")
        for osd in range(osd_count):
            self._make_osd(osd)
            self.start_osd(osd)
        self.wait_for_osds(osd_count)

    def start_monitor(self) -> None:
        self.monitor = self._spawn("ceph-mon", "a")

    def start_osd(self, osd: int) -> None:
        self.osds[osd] = self._spawn("ceph-osd", str(osd))

    def stop(self) -> None:
        """Kill what runs, also what is stopped, and wait until it is gone."""
        for process in (*self.osds.values(), self.manager, self.monitor):
            if process is not None:
                process.kill()
                process.wait()

    def kill_osd(self, osd: int = 0) -> None:
        """As a crash of its machine would; `start_osd` brings it back."""
        self.osds[osd].kill()
        self.osds[osd].wait()

    def kill_monitor(self) -> None:
        assert self.monitor is not None
        self.monitor.kill()
        self.monitor.wait()

    @contextmanager
    def paused_osds(self) -> Iterator[None]:
        """The OSDs take what is sent to them and do nothing, until the `with` ends."""
        with standing_still(*(process.pid for process in self.osds.values())):
            yield

    # --- asking and telling ---

    def tell(self, *words: str) -> str:
        """Run the `ceph` command. Raises `CalledProcessError`."""
        command = ["ceph", "--conf", str(self.conf), "--connect-timeout", "20", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if done.returncode != 0:
            raise AssertionError(f"{' '.join(words)}: {done.stderr}")
        return done.stdout

    def ask(self, *words: str) -> Any:
        return json.loads(self.tell(*words, "--format", "json"))

    def create_pool(self, *kind: str) -> str:
        """Another pool, which can be used; its name. `kind` may be `"erasure", profile`."""
        self._pools += 1
        name = f"pool{self._pools}"
        self.tell("osd", "pool", "create", name, str(PLACEMENT_GROUPS), *kind)
        if kind:
            # Without this a pool of k=2, m=1 waits for a third OSD.
            self.tell("osd", "pool", "set", name, "min_size", "2")
        self.tell("osd", "pool", "application", "enable", name, "objectcache")
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._is_active(name):
            assert time.monotonic() < deadline, f"pool {name} did not become active"
            time.sleep(0.1)
        return name

    def shared_pool(self) -> str:
        """A pool that many tests use, each in a namespace of its own."""
        self._shared_pool = self._shared_pool or self.create_pool()
        return self._shared_pool

    def remove_pool(self, name: str) -> None:
        if name == self._shared_pool:
            self._shared_pool = ""
        self.tell("osd", "pool", "delete", name, name, "--yes-i-really-really-mean-it")
        self.wait_for_map()

    def wait_for_map(self) -> None:
        """Until the OSDs have heard of what the monitor was told."""
        epoch = self.ask("osd", "dump")["epoch"]
        deadline = time.monotonic() + START_TIMEOUT_S
        for osd in self.osds:
            while self.ask("tell", f"osd.{osd}", "status")["newest_map"] < epoch:
                assert time.monotonic() < deadline, f"osd.{osd} does not hear of epoch {epoch}"
                time.sleep(0.1)

    def wait_for_osds(self, count: int) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while self.ask("osd", "stat")["num_up_osds"] < count:
            for process in self.osds.values():
                assert process.poll() is None, f"an OSD ended; see {self.folder}/log"
            assert time.monotonic() < deadline, f"OSDs did not start; see {self.folder}/log"
            time.sleep(0.2)

    # --- parts ---

    def _configuration(self) -> str:
        shared = DAEMONS.format(folder=self.folder)
        whole = CONFIGURATION.replace("[mon]\n", "[mon]\n" + shared)
        whole = whole.replace("[osd]\n", "[osd]\n" + shared).replace("[mgr]\n", "[mgr]\n" + shared)
        return whole.format(
            fsid=self.fsid,
            host=self._host,
            port=self.port,
            folder=self.folder,
            device_bytes=DEVICE_BYTES,
        )

    def _make_monitor(self) -> None:
        monmap = str(self.folder / "monmap")
        address = f"[v2:{self._host}:{self.port}]"
        self._run("monmaptool", "--create", "--fsid", self.fsid, "--addv", "a", address, monmap)
        self._run("ceph-mon", "-c", str(self.conf), "--mkfs", "-i", "a", "--monmap", monmap)

    def _make_osd(self, osd: int) -> None:
        (self.folder / f"osd{osd}").mkdir()
        name = str(uuid.uuid4())
        assert int(self.tell("osd", "new", name)) == osd
        self._run("ceph-osd", "-c", str(self.conf), "-i", str(osd), "--mkfs", "--osd-uuid", name)

    def _run(self, *command: str) -> None:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"

    def _spawn(self, program: str, name: str) -> subprocess.Popen[bytes]:
        command = (
            "setpriv",
            "--pdeathsig",
            "KILL",
            program,
            "-f",
            "-c",
            str(self.conf),
            "-i",
            name,
        )
        with (self.folder / "log" / f"{program}.{name}").open("ab") as log:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _is_active(self, pool: str) -> bool:
        groups = self.ask("pg", "ls-by-pool", pool)["pg_stats"]
        return bool(groups) and all("active" in group["state"].split("+") for group in groups)


@contextmanager
def ceph_cluster(
    osd_count: int = 1, folder: Path | None = None, host: str = "127.0.0.1"
) -> Iterator[CephCluster]:
    """Start a cluster; stop it, and remove its files. They lie on a device, as OSDs read and write
    past the page cache, in a folder with a short name, as the daemons' sockets are there.
    """
    with tempfile.TemporaryDirectory(prefix="ceph-", dir=folder) as files:
        cluster = CephCluster(Path(files), host)
        try:
            cluster.start(osd_count)
            yield cluster
        finally:
            cluster.stop()
