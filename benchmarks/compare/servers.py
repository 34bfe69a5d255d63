"""The stores under comparison, each as child processes that are stopped by their process ids."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from benchmarks.s3.radosgw import free_ports

READY_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
LEASE = "120s"  # Mooncake's 10 s by default must outlive a fetch, also on a busy machine
ATTEMPT_INTERVAL_S = 0.05


def missing_redis() -> str:
    """What keeps Redis from running here; empty where nothing does."""
    if shutil.which("redis-server") is None:
        return "redis-server not found: apt-get install redis-server"
    return missing_modules("redis")


def missing_modules(*names: str) -> str:
    """Which Python packages are not installed; empty where all are."""
    absent = [name for name in names if importlib.util.find_spec(name) is None]
    return f"{', '.join(absent)} not installed: make test-engines does it" if absent else ""


@contextmanager
def running_redis(folder: Path) -> Generator[tuple[int, Sequence[int]]]:
    """Redis with its append-only file, as one who wants to keep data runs it; gives its port and
    process ids. The file is never rewritten, which would take a core in the midst of it.
    """
    folder.mkdir()
    (port,) = free_ports(1)
    settings = {
        "port": str(port),
        "bind": "127.0.0.1",
        "dir": str(folder),
        "save": "",
        "appendonly": "yes",
        "appendfsync": "everysec",
        "auto-aof-rewrite-percentage": "0",
    }
    flags = [word for name, value in settings.items() for word in (f"--{name}", value)]
    with _child(["redis-server", *flags], folder / "log") as process:
        _wait_for_port(process, port, folder / "log")
        yield port, (process.pid,)


@contextmanager
def running_mooncake(folder: Path, segment_bytes: int) -> Generator[tuple[int, Sequence[int]]]:
    """A master and a process with a segment; gives the master's port and both process ids."""
    folder.mkdir()
    master_port, metrics_port, segment_port = free_ports(3)
    master_words = [
        str(Path(sys.executable).with_name("mooncake_master")),
        *("--rpc_address", "127.0.0.1", "--rpc_port", str(master_port)),
        *("--metrics_host", "127.0.0.1", "--metrics_port", str(metrics_port)),
        *("--default_kv_lease_ttl", LEASE),
    ]
    segment_words = [
        *(sys.executable, "-m", "benchmarks.compare.clients.mooncake_segment"),
        *(str(segment_port), str(master_port), str(segment_bytes)),
    ]
    with _child(master_words, folder / "master.log") as master:
        _wait_for_port(master, master_port, folder / "master.log")
        with _child(segment_words, folder / "segment.log", says_ready=True) as segment:
            yield master_port, (master.pid, segment.pid)


def processor_s(pids: Sequence[int]) -> float:
    """Processor seconds that processes and those they started have used so far."""
    total = 0.0
    for pid in pids:
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            times = process.cpu_times()
            total += times.user + times.system
    return total


@contextmanager
def _child(
    words: Sequence[str], log: Path, says_ready: bool = False
) -> Generator[subprocess.Popen[bytes]]:
    with ExitStack() as undo:
        output = undo.enter_context(log.open("wb"))
        process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if says_ready else output,
            stderr=output,
        )
        undo.callback(_stop, process)
        if says_ready and not _said_ready(process):
            raise RuntimeError(f"{words[0]} did not start: {_tail(log)}")
        yield process


def _said_ready(process: subprocess.Popen[bytes]) -> bool:
    """Libraries of the child may print lines of their own before."""
    assert process.stdout is not None
    return any(line.strip() == b"ready" for line in iter(process.stdout.readline, b""))


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


def _wait_for_port(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while not _listens(process.pid, port):
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"nothing listens on port {port}: {_tail(log)}")
        time.sleep(ATTEMPT_INTERVAL_S)


def _listens(pid: int, port: int) -> bool:
    connections = psutil.Process(pid).net_connections("tcp")
    return any(
        each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in connections
    )


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-300:]
