"""Ceph's radosgw over the OSD of a throwaway cluster that runs already."""

from __future__ import annotations

import http.client
import subprocess
import time
from collections.abc import Generator
from contextlib import contextmanager

from benchmarks.s3.radosgw import ACCESS_KEY, SECRET_KEY, Radosgw
from tests.ceph import CephCluster
from tests.servers import free_port

READY_S = 60.0
STOP_S = 10.0


@contextmanager
def gateway_of(ceph: CephCluster) -> Generator[Radosgw]:
    """Start a gateway; it ends with the block. Raises `RuntimeError`."""
    ceph.tell("config", "set", "global", "osd_pool_default_pg_num", "8")
    ceph.tell("config", "set", "global", "mon_max_pg_per_osd", "1000")
    user = ("user", "create", "--uid", "bench", "--display-name", "bench")
    keys = ("--access-key", ACCESS_KEY, "--secret-key", SECRET_KEY)
    _run("radosgw-admin", "-c", str(ceph.conf), *user, *keys)
    port = free_port()
    (ceph.folder / "rgw").mkdir()
    options = {
        "rgw-data": str(ceph.folder / "rgw"),
        "rgw-frontends": f"beast endpoint=127.0.0.1:{port} tcp_nodelay=1",
        "rgw-enable-apis": "s3",
        "rgw-dns-name": "s3.invalid",
        "log-file": "/dev/null",
        "ms-mon-client-mode": "crc",  # without keys there is no other
        "run-dir": str(ceph.folder / "run"),
        "debug-rgw": "0/0",
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    process = subprocess.Popen(
        ["radosgw", "-f", "-c", str(ceph.conf), "-n", "client.rgw", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait(process, port)
        yield Radosgw("127.0.0.1", port, (process.pid, *(osd.pid for osd in ceph.osds.values())))
    finally:
        process.kill()
        process.wait(STOP_S)


def _wait(process: subprocess.Popen[bytes], port: int) -> None:
    deadline_s = time.monotonic() + READY_S
    while not _answers(port):
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError("radosgw does not answer")
        time.sleep(0.1)


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/")
        return connection.getresponse().status < 500
    except OSError:
        return False
    finally:
        connection.close()


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise RuntimeError(f"{words[0]}: {done.stderr[-300:]}")
