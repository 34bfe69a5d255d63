"""Server processes without an interpreter's start: forked from one that has imported the servers.

Half of the processor's time of a server that a test starts is imports, the same ones each time.
`ForkedProcess` is a `Popen` as far as tests use one. `python -m tests.forked_servers FD` is the
process that forks: it has one thread, runs nothing itself, and ends with the one that started it.
Each fork runs its module as `python -m` does, with arguments, environment and files of its own, and
what was to be run at exit. The rest is left to the kernel: to take an interpreter apart is to copy
what it shares with the others, which takes as long as a server's start.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

PACKAGES = (
    "objectcache_storage_server",
    "objectcache_gateway",
    "objectcache_gateway.admin",
    "objectcache_relay",
    "objectcache_gateway.dispatch_service",
)
REQUEST_BYTES_MAX = 1 << 18
START_S = 100.0  # for the imports, and for a fork; just below what a test may take


class _Request(msgspec.Struct, frozen=True):
    module: str
    arguments: list[str]
    variables: dict[str, str]
    folder: str


class ForkedProcess:
    """A module that runs in a fork; what it prints comes out of `stdout`."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        log: BinaryIO,
        variables: Mapping[str, str],
        given: BinaryIO | None = None,
    ) -> None:
        """`log` takes its standard error; `variables` are its whole environment; `given` is its
        standard input, which else has nothing.
        """
        printed, prints = os.pipe()
        told, tells = os.pipe()
        self.stdout: BinaryIO | None = os.fdopen(printed, "rb", buffering=0)
        self._told: BinaryIO = os.fdopen(told, "rb", buffering=0)
        self.returncode: int | None = None
        request = _Request(module, list(arguments), dict(variables), str(Path.cwd()))
        try:
            try:
                files = [prints, log.fileno(), tells, *([given.fileno()] if given else [])]
                socket.send_fds(_forker(), [msgspec.json.encode(request)], files)
            finally:
                os.close(prints)
                os.close(tells)
            line = self._line(START_S)
            assert line, f"{module} was not forked"
        except BaseException:
            self.stdout.close()
            self._told.close()
            raise
        self.pid = int(line)

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""
        if self.returncode is None and (line := self._line(0)):
            self.returncode = int(line)
            self._told.close()
        return self.returncode

    def wait(self, timeout_s: float) -> int:
        """The exit status. Raises `subprocess.TimeoutExpired`."""
        if self.returncode is None and (line := self._line(timeout_s)):
            self.returncode = int(line)
            self._told.close()
        if self.returncode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout_s)
        return self.returncode

    def terminate(self) -> None:
        """SIGTERM, if it runs."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, if it runs."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)

    def _line(self, timeout_s: float) -> bytes:
        """What the forking process says next; nothing where it says nothing in time."""
        readable, _, _ = select.select([self._told], [], [], timeout_s)
        if not readable:
            return b""
        line = self._told.readline()
        assert line, "the process that forks has died"
        return line


@functools.cache
def _forker() -> socket.socket:
    """The connection to the process that forks, which lives as long as this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.forked_servers", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd=Path(__file__).parents[1],
            # A process that forks has one thread.
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
            pass_fds=[theirs.fileno()],
        )
    atexit.register(_end, process, ours)
    return ours


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    process.wait(START_S)


def _serve(control: socket.socket) -> _Request | None:
    """Fork for each request. Returns it in the fork, and None when there are no more."""
    waiting = select.poll()
    waiting.register(control, select.POLLIN)
    running: dict[int, tuple[int, int]] = {}  # by process descriptor: process, whom to tell
    while True:
        for descriptor, _ in waiting.poll():
            if descriptor in running:
                child, tells = running.pop(descriptor)
                _, status = os.waitpid(child, 0)
                _tell(tells, os.waitstatus_to_exitcode(status))
                waiting.unregister(descriptor)
                os.close(descriptor)
                os.close(tells)
                continue
            data, files, _, _ = socket.recv_fds(control, REQUEST_BYTES_MAX, 4)
            if not data:
                return None
            request = msgspec.json.decode(data, type=_Request)
            child = os.fork()
            if child == 0:
                _settle(request, files)
                return request
            _tell(files[2], child)
            for file in (*files[:2], *files[3:]):
                os.close(file)
            process = os.pidfd_open(child)
            waiting.register(process, select.POLLIN)
            running[process] = (child, files[2])


def _tell(file: int, number: int) -> None:
    try:
        os.write(file, f"{number}\n".encode())
    except BrokenPipeError:  # nobody asks any more
        return


def _settle(request: _Request, files: Sequence[int]) -> None:
    """Have what `python -m` would have."""
    os.dup2(files[0], 1)
    os.dup2(files[1], 2)
    for given in files[3:]:
        os.dup2(given, 0)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(request.variables)
    os.chdir(request.folder)


def main() -> None:
    """Import, fork, and in a fork run the module."""
    status = 1  # of what is raised, too
    # The first that is registered is called last: the modules register others as they are imported.
    atexit.register(lambda: _leave(status))
    from objectcache_runtime.settings import each_setting, load_settings

    for package in PACKAGES:
        importlib.import_module(f"{package}.__main__")
        del sys.modules[f"{package}.__main__"]  # a fork makes it anew, as `__main__`
    # What a server's start works out once.
    importlib.import_module("numpy.ma")  # by the first call of numpy.unique
    load_settings(None, {})
    list(each_setting())
    assert len(os.listdir("/proc/self/task")) == 1
    # Forks do not copy pages to count references, neither as they run nor three times as they end.
    gc.freeze()
    control = socket.socket(fileno=int(sys.argv[1]))
    request = _serve(control)
    control.detach() if request else control.close()
    if request is not None:
        sys.argv = [request.module, *request.arguments]
        try:
            runpy.run_module(request.module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
            raise
    status = 0


def _leave(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
