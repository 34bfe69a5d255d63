"""The server under measurement: `objectcache serve` in a temporary directory."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from objectcache import Client
from objectcache.cli.credentials import read_credentials

STOP_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Server:
    """A running server and the process whose memory counts."""

    endpoint: str
    access_key: str
    secret_key: str
    data_dir: Path
    storage_pid: int

    def client(self, transport: str = "auto") -> Client:
        """A client of it."""
        return Client(
            self.endpoint,
            access_key=self.access_key,
            secret_key=self.secret_key,
            transport=transport,
        )


@contextmanager
def running_server(parent: Path | None) -> Generator[Server]:
    """Start it on a free port with data below `parent`; stopped, and its data gone, at the end."""
    with (
        tempfile.TemporaryDirectory(prefix="objectcache-bench-", dir=parent) as directory,
        tempfile.TemporaryDirectory(prefix="objectcache-") as run_dir,  # a socket's path is short
    ):
        data_dir = Path(directory) / "data"
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "objectcache.cli", "serve"),
                *("--data-dir", str(data_dir), "--listen", "127.0.0.1:0"),
                *("--set", f"server.run_dir={run_dir}"),
                *("--set", "gateway.log_level=warning", "--set", "storage.log_level=warning"),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            endpoint = _ready_url(process)
            storage_pid = _child_running(process.pid, "objectcache_storage_server")
            keys = read_credentials(data_dir / "root-credentials")
            yield Server(endpoint, *keys, data_dir, storage_pid)
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=STOP_TIMEOUT_S)


def _ready_url(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.startswith("ready "):
        raise SystemExit(f"the server did not start (exit code {process.wait()})")
    return line.removeprefix("ready ").strip()


def _child_running(pid: int, module: str) -> int:
    children = psutil.Process(pid).children()
    return int(next(child.pid for child in children if module in child.cmdline()))
