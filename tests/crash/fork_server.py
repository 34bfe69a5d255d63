"""Processes that start in a few milliseconds: forked from one that has imported everything.

`ForkServer` is the outside; `python -m tests.crash.fork_server` the process, which has one thread.
It takes a line for each job, and answers with a line when the job's process has ended: its exit
status, or the negative number of the signal that killed it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
import traceback
from typing import Self

import msgspec
import numpy.ma  # noqa: F401  # which np.unique imports at its first call, in every process

from tests.crash.worker import Job, run

PR_SET_PDEATHSIG = 1  # of linux/prctl.h


class Request(msgspec.Struct, frozen=True):
    """A job, and when its process is killed: so long after its start, or after it says that its
    store is open. None is never.
    """

    job: Job
    kill_after_s: float | None
    once_open: bool


class ForkServer:
    """Runs jobs one after the other, each in a process of its own."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.fork_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # a process that forks has one thread
        )

    def run(self, job: Job, kill_after_s: float | None = None, *, once_open: bool = False) -> int:
        """Run a job until it ends or is killed; returns its exit status."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(
            msgspec.json.encode(Request(job, kill_after_s, once_open)) + b"\n"
        )
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the fork server has died"
        return int(answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # and with it what it runs
        self._process.communicate()


def _serve() -> None:
    _die_with_parent()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    gc.freeze()  # so that children do not copy pages to count references
    decode = msgspec.json.Decoder(Request).decode
    for line in sys.stdin.buffer:
        request = decode(line)
        opened, opening = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(opened)
            _run_and_exit(request.job, opening)
        os.close(opening)
        if request.once_open:
            os.read(opened, 1)  # or the child has ended
        os.close(opened)
        if request.kill_after_s is not None:
            signal.sigtimedwait([signal.SIGCHLD], request.kill_after_s)
            os.kill(child, signal.SIGKILL)  # a zombie takes it, too
        _, status = os.waitpid(child, 0)
        signal.sigtimedwait([signal.SIGCHLD], 0)  # of this child
        print(os.waitstatus_to_exitcode(status), flush=True)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _run_and_exit(job: Job, opening: int) -> None:
    try:
        _die_with_parent()
        run(job, lambda: os.close(opening))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    _serve()
