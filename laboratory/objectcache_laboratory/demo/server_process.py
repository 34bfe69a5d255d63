"""A real server for the time of the demo: a subprocess on a free port, with data of its own."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path

from objectcache.channel.credentials_file import read_credentials
from objectcache_runtime.root_key import ROOT_CREDENTIALS_FILE
from objectcache_runtime.settings import ENVIRONMENT_PREFIX
from objectcache_schemas.errors import Unavailable

READY_PREFIX = b"ready http"
COMMAND_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0  # the server's own bound on draining is 20 s


@dataclass(frozen=True, slots=True)
class RunningServer:
    """Where the server listens, and its root credentials."""

    endpoint: str
    access_key: str
    secret_key: str
    data_dir: Path


def serve_command(data_dir: Path) -> list[str]:
    """The command that starts both servers on a free port of this host."""
    serve = [sys.executable, "-m", "objectcache_operations", "serve"]
    return [*serve, "--data-dir", str(data_dir), "--listen", "127.0.0.1:0"]


@contextlib.contextmanager
def running_server(log_file: Path, start_timeout_s: float) -> Generator[RunningServer]:
    """Start a server in a temporary directory, and stop it and remove its data at the end.

    `log_file` stays. Raises `Unavailable` with the last words of a server that does not come up in
    time.
    """
    with tempfile.TemporaryDirectory(prefix="objectcache-demo-") as directory:
        data_dir = Path(directory)
        with started(serve_command(data_dir), log_file) as process:
            endpoint = await_ready(process, log_file, start_timeout_s)
            keys = read_credentials(data_dir / ROOT_CREDENTIALS_FILE)
            yield RunningServer(endpoint, *keys, data_dir)


def store_encoded(server: RunningServer, bucket: str) -> None:
    """Have the bucket's chunks stored encoded from now on, as an operator would. Raises
    `Unavailable` with what the command says where it fails.
    """
    command = [sys.executable, "-m", "objectcache_operations", "admin", "bucket", "policy", bucket]
    done = subprocess.run(
        [*command, "--encoding", "planes-zstd", "--data-dir", str(server.data_dir)],
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        env=_environment(os.environ),
        check=False,
    )
    if done.returncode:
        raise Unavailable(f"the bucket's policy was not changed: {done.stderr.strip()}")


@contextlib.contextmanager
def started(command: list[str], log_file: Path) -> Generator[subprocess.Popen[bytes]]:
    """Run a command with its standard error in `log_file`; it has ended when this returns."""
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env=_environment(os.environ),
        )
    try:
        yield process
    finally:
        _stop(process)


def await_ready(process: subprocess.Popen[bytes], log_file: Path, timeout_s: float) -> str:
    """Read the server's output up to its `ready URL` line and return the URL.

    Raises `Unavailable` if it ends or takes longer.
    """
    assert process.stdout is not None
    deadline_s = time.monotonic() + timeout_s
    output = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while (endpoint := _endpoint(output)) is None:
            if not selector.select(max(deadline_s - time.monotonic(), 0)):
                raise Unavailable(
                    f"the server did not come up within {timeout_s:g} s{_last_words(log_file)}"
                )
            piece = os.read(process.stdout.fileno(), 4096)
            if not piece:
                raise Unavailable(
                    f"the server ended before it was ready, "
                    f"with exit code {process.wait(STOP_TIMEOUT_S)}{_last_words(log_file)}"
                )
            output += piece
    return endpoint


def _endpoint(output: bytes) -> str | None:
    """The URL of the ready line, once that line is whole."""
    for line in output.splitlines(keepends=True):
        if line.startswith(READY_PREFIX) and line.endswith(b"\n"):
            return line.split()[1].decode()
    return None


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Without settings and credentials that are meant for another server."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(ENVIRONMENT_PREFIX)
    }


def _last_words(log_file: Path) -> str:
    lines = log_file.read_text("utf-8", "replace").strip().splitlines()
    return f": {lines[-1]}" if lines else ""


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
