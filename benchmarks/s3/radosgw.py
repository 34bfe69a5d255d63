"""The peer of ordinary S3 requests: Ceph's radosgw on one object store daemon, on 127.0.0.1.

A monitor, one OSD and the gateway, as Debian packages them (ceph-mon, ceph-osd, ceph-common,
radosgw), each a child process that writes into one folder of its own. The OSD is bluestore
on a file, so that a put that was acknowledged is on the device, as with ours. A manager would only
report, so there is none. Authentication within the cluster and logs are off, which is work that
does not count, and the gateway's sockets send at once, which spares it the 40 ms of a delayed
acknowledgement on each GET.
"""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = ("ceph-mon", "ceph-osd", "monmaptool", "ceph", "radosgw", "radosgw-admin")
READY_TIMEOUT_S = 60.0
COMMAND_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
ATTEMPT_INTERVAL_S = 0.1
STORE_BYTES = 8 << 30  # of the sparse file that the OSD keeps its objects in
ACCESS_KEY, SECRET_KEY = "benchaccess", "benchsecretkey"

_CONFIGURATION = """
[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{mon_port}]
mon initial members = a
mon data = {folder}/mon
mon allow pool size one = true
mon max pg per osd = 1000
paxos propose interval = 0.1
paxos min wait = 0.01
mon data avail warn = 1
mon data avail crit = 0
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
ms mon client mode = crc
run dir = {folder}
admin socket =
pid file =
log to stderr = false
log file = /dev/null
mon cluster log file = /dev/null
debug rgw = 0/0
debug osd = 0/0
debug ms = 0/0
debug bluestore = 0/0
osd data = {folder}/osd
osd objectstore = bluestore
bluestore block size = {store_bytes}
osd crush chooseleaf type = 0
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pgp num = 8
osd pool default pg autoscale mode = off
rgw enable apis = s3
rgw enable usage log = false
[client.rgw]
ms mon client mode = crc
rgw data = {folder}/rgw
rgw dns name = {dns_name}
"""


def missing_programs() -> str:
    """What keeps the peer from running here; empty where nothing does."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if not absent:
        return ""
    return f"{', '.join(absent)} not found: apt-get install ceph-mon ceph-osd ceph-common radosgw"


@dataclass(frozen=True, slots=True)
class Radosgw:
    """A running gateway with its OSD, whose processor time counts together."""

    host: str
    port: int
    pids: tuple[int, ...]
    access_key: str = ACCESS_KEY
    secret_key: str = field(default=SECRET_KEY, repr=False)


@contextmanager
def running_radosgw(dns_name: str = "") -> Generator[Radosgw]:
    """Start all of it, and stop it by its process ids with the block. With a `dns_name` a host that
    is outside of it, and no address, names a bucket. Raises `RuntimeError`.
    """
    with ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="radosgw-")))
        ports = free_ports(2)
        cluster = _Cluster(folder, ports[0], dns_name)
        undo.callback(cluster.stop)
        osd_pid = cluster.start_store()
        cluster.add_user()
        gateway_pid = cluster.start_gateway(ports[1])
        yield Radosgw("127.0.0.1", ports[1], (gateway_pid, osd_pid))


class _Cluster:
    def __init__(self, folder: Path, mon_port: int, dns_name: str) -> None:
        self._folder = folder
        self._mon_port = mon_port
        self._fsid = str(uuid.uuid4())
        self._running: list[subprocess.Popen[bytes]] = []
        for name in ("mon", "osd", "rgw"):
            (folder / name).mkdir()
        self._configuration = folder / "ceph.conf"
        self._configuration.write_text(
            _CONFIGURATION.format(
                fsid=self._fsid,
                mon_port=mon_port,
                folder=folder,
                store_bytes=STORE_BYTES,
                dns_name=dns_name,
            )
        )

    def start_store(self) -> int:
        """The monitor and the OSD; returns the OSD's process id."""
        monmap = str(self._folder / "monmap")
        address = f"[v2:127.0.0.1:{self._mon_port}]"
        self._run("monmaptool", "--create", "--fsid", self._fsid, "--addv", "a", address, monmap)
        self._run("ceph-mon", "-i", "a", "--mkfs", "--monmap", monmap)
        self._start("ceph-mon", "-i", "a")
        osd = str(uuid.uuid4())
        self._run("ceph", "osd", "new", osd)
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        return self._start("ceph-osd", "-i", "0")

    def add_user(self) -> None:
        """The user who asks; also makes the pools that the gateway begins with."""
        self._run(
            *("radosgw-admin", "user", "create", "--uid", "bench", "--display-name", "bench"),
            *("--access-key", ACCESS_KEY, "--secret-key", SECRET_KEY),
        )

    def start_gateway(self, port: int) -> int:
        """The gateway, once it answers; returns its process id."""
        frontend = f"beast endpoint=127.0.0.1:{port} tcp_nodelay=1"
        pid = self._start("radosgw", "-n", "client.rgw", "--rgw-frontends", frontend)
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while not _answers(port):
            if time.monotonic() > deadline_s or self._running[-1].poll() is not None:
                raise RuntimeError(f"radosgw does not answer: {self._tail()}")
            time.sleep(ATTEMPT_INTERVAL_S)
        return pid

    def stop(self) -> None:
        """Stop what was started, last first; what does not end in time is killed."""
        for process in reversed(self._running):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, program: str, *arguments: str) -> int:
        with (self._folder / "output").open("ab") as output:
            process = subprocess.Popen(
                self._words(program, *arguments, "-f"),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self._running.append(process)
        return process.pid

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            self._words(program, *arguments),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{program} failed: {done.stderr.decode(errors='replace')[-500:]}")

    def _words(self, program: str, *arguments: str) -> Sequence[str]:
        return [program, "-c", str(self._configuration), *arguments]

    def _tail(self) -> str:
        return (self._folder / "output").read_text(errors="replace")[-500:]


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/")
        return connection.getresponse().status < 500
    except OSError:
        return False
    finally:
        connection.close()


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that were free just now, all different."""
    with ExitStack() as opened:
        sockets = [
            opened.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [each.getsockname()[1] for each in sockets]


def processor_s(pids: Sequence[int]) -> float:
    """Processor seconds that processes have used so far, their threads together."""
    ticks = os.sysconf("SC_CLK_TCK")
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])  # utime and stime
    return total / ticks
