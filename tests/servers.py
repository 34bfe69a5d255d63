"""Real servers for tests: a storage server and a gateway as processes of their own.

`start_server` returns when both serve; `RunningServer.stop` ends them by their process ids.
"""

from __future__ import annotations

import configparser
import contextlib
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from tests.forked_servers import ForkedProcess

READY_TIMEOUT_S = 100.0  # just below what a test may take: machines may be busy
STOP_TIMEOUT_S = 60.0
LOG_TAIL_BYTES = 4000
RUN_DIR_PARENT = "/tmp"  # a socket's path must be short, and pytest's directories are long
_PORTS = range(20_000, 32_768)  # below those that Linux takes for connections' own ends


def free_port(ports: Sequence[int] = _PORTS) -> int:
    """A port of the loopback that nobody listens at. No connection takes it meanwhile, so that it
    is free when a server begins there, and when it begins again.
    """
    while True:
        port = secrets.choice(ports)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@dataclass(frozen=True, slots=True)
class Credentials:
    """The root key pair of a running server."""

    access_key: str
    secret_key: str


class ServerProcess:
    """One server process: started, waited for, stopped by its id."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        log: Path,
        variables: Mapping[str, str] | None = None,
        within: Sequence[str] = (),
    ) -> None:
        """`within` are words before the command that run it elsewhere, as the same process, from
        the interpreter's start on; all others are forked.
        """
        self._module = module
        self._log = log
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("OBJECTCACHE_")
        }
        environment |= variables or {}
        self._process: subprocess.Popen[bytes] | ForkedProcess
        with log.open("ab") as log_file:
            if within:
                self._process = subprocess.Popen(
                    [*within, sys.executable, "-m", module, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=log_file,
                    env=environment,
                )
            else:
                self._process = ForkedProcess(module, arguments, log_file, environment)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status, or None while it runs."""
        return self._process.poll()

    def wait_ready(self) -> str:
        """The last word of the ready line. Where none comes it fails with the log's end; the
        process has ended then, whatever is raised here.
        """
        assert self._process.stdout is not None
        try:
            readable, _, _ = select.select([self._process.stdout], [], [], READY_TIMEOUT_S)
            line = self._process.stdout.readline().decode() if readable else ""
            is_ready = line.startswith("ready ")
            assert is_ready, f"{self._module} is not ready: {line!r}\n{self.log_tail()}"
        except BaseException:
            self.kill()
            raise
        return line.split()[-1]

    def log_tail(self) -> str:
        """The end of what it logged."""
        return self._log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")

    def terminate(self) -> int:
        """SIGTERM, then SIGKILL where that does not help in time; returns the exit status."""
        self.signal_stop()
        return self.wait_or_kill()

    def signal_stop(self) -> None:
        """SIGTERM, without waiting."""
        self._process.terminate()

    def wait_or_kill(self) -> int:
        """Wait for the end, SIGKILL where it does not come in time; returns the exit status."""
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return self.kill()
        return self._closed()

    def wait(self) -> int:
        """Wait for the end, bounded; returns the exit status."""
        self._process.wait(STOP_TIMEOUT_S)
        return self._closed()

    def kill(self) -> int:
        """SIGKILL; returns the exit status."""
        self._process.kill()
        self._process.wait(STOP_TIMEOUT_S)
        return self._closed()

    def _closed(self) -> int:
        assert self._process.stdout is not None
        self._process.stdout.close()
        assert self._process.returncode is not None
        return self._process.returncode


def stop_whole(pid: int) -> None:
    """SIGSTOP; returns once every thread stands still. On a busy machine they go on for a while,
    and answer.
    """
    os.kill(pid, signal.SIGSTOP)
    deadline_s = time.monotonic() + STOP_TIMEOUT_S
    while not all(map(_is_stopped, Path(f"/proc/{pid}/task").iterdir())):
        assert time.monotonic() < deadline_s, f"process {pid} does not stand still"
        time.sleep(0.001)


def _is_stopped(thread: Path) -> bool:
    try:
        status = (thread / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return True
    return status.rpartition(")")[2].split()[0] in "TtZX"


@contextmanager
def standing_still(*pids: int) -> Iterator[None]:
    """Have processes do nothing for the length of the block."""
    try:
        for pid in pids:
            stop_whole(pid)
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


# A store allocates whole data files, which stay until the last test has run: dozens of the default
# size would fill a small machine's disk.
DATA_FILES = "storage.data_file_bytes=134217728"


class RunningServer:
    """A storage server and a gateway on one data directory, on free ports of 127.0.0.1."""

    def __init__(self, data_dir: Path, settings: Sequence[str]) -> None:
        self.data_dir = data_dir
        data_dir.mkdir(parents=True, exist_ok=True)
        # The sockets' directory is a link in /tmp so that their paths stay short.
        self._run_dir = Path(RUN_DIR_PARENT) / f"objectcache-test-{os.getpid()}-{time.time_ns()}"
        self._run_dir.mkdir(mode=0o700)
        self._settings = (DATA_FILES, *settings)
        try:
            self._storage = self._start_storage()
            try:
                self._gateway = self._start_gateway("127.0.0.1:0")
            except BaseException:
                self._storage.kill()
                raise
        except BaseException:
            self._remove_run_dir()
            raise

    # --- what tests use ---

    @property
    def endpoint(self) -> str:
        """The gateway's URL, such as http://127.0.0.1:43121."""
        return self._endpoint

    @property
    def host(self) -> str:
        """The gateway's address."""
        return urlsplit(self._endpoint).hostname or ""

    @property
    def port(self) -> int:
        """The gateway's port."""
        port = urlsplit(self._endpoint).port
        assert port is not None
        return port

    @property
    def credentials_file(self) -> Path:
        """An AWS shared credentials file with the root credentials."""
        return self.data_dir / "root-credentials"

    @property
    def credentials(self) -> Credentials:
        """The root credentials, which the gateway made at its first start."""
        parser = configparser.ConfigParser(interpolation=None)
        parser.read(self.credentials_file)
        section = parser["default"]
        return Credentials(section["aws_access_key_id"], section["aws_secret_access_key"])

    @property
    def run_dir(self) -> Path:
        """The directory of the processes' sockets."""
        return self._run_dir

    @property
    def gateway_pid(self) -> int:
        """Process id of the gateway."""
        return self._gateway.pid

    @property
    def storage_pid(self) -> int:
        """Process id of the storage server."""
        return self._storage.pid

    @property
    def gateway(self) -> ServerProcess:
        """The gateway's process."""
        return self._gateway

    @property
    def storage(self) -> ServerProcess:
        """The storage server's process."""
        return self._storage

    def kill_storage(self) -> None:
        """End the storage server as a power loss would."""
        self._storage.kill()

    def restart_storage(self, *settings: str) -> None:
        """Start the storage server again, on the same data."""
        if self._storage.returncode is None:
            self._storage.terminate()
        self._storage = self._start_storage(*settings)

    def kill_gateway(self) -> None:
        """End the gateway as a power loss would."""
        self._gateway.kill()

    def restart_gateway(self, *settings: str) -> None:
        """Start the gateway again, on the same port."""
        if self._gateway.returncode is None:
            self._gateway.terminate()
        self._gateway = self._start_gateway(f"{self.host}:{self.port}", *settings)

    def stop(self) -> None:
        """End both, the gateway first. A second call has no effect."""
        for process in (self._gateway, self._storage):
            if process.returncode is None:
                process.terminate()
        self._remove_run_dir()

    def _remove_run_dir(self) -> None:
        for left in self._run_dir.glob("*"):
            left.unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            self._run_dir.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # --- starting ---

    def _arguments(self, *settings: str) -> list[str]:
        every = [f"server.run_dir={self._run_dir}", *self._settings, *settings]
        return [
            "--data-dir",
            str(self.data_dir),
            *(part for one in every for part in ("--set", one)),
        ]

    def _start_storage(self, *settings: str) -> ServerProcess:
        log = self.data_dir / "storage.log"
        process = ServerProcess("objectcache_storage_server", self._arguments(*settings), log)
        process.wait_ready()
        return process

    def _start_gateway(self, listen: str, *settings: str) -> ServerProcess:
        arguments = self._arguments(*settings, f"gateway.listen={listen}")
        process = ServerProcess("objectcache_gateway", arguments, self.data_dir / "gateway.log")
        self._endpoint = process.wait_ready()
        return process

    def __repr__(self) -> str:
        pids = f"gateway {self.gateway_pid} storage {self.storage_pid}"
        return f"<RunningServer {self._endpoint} {pids}>"


def start_server(data_dir: Path, *settings: str) -> RunningServer:
    """Start both processes; `settings` are `section.key=value`. The caller stops them."""
    return RunningServer(data_dir, settings)


@contextmanager
def running_server(data_dir: Path, *settings: str) -> Iterator[RunningServer]:
    """Both processes for the length of a `with` block."""
    with start_server(data_dir, *settings) as server:
        yield server
