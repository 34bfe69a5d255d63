"""A process on a node, which is told what to do over a pipe.

What it does are functions of the modules beside this one, called with its `NodeSide` before what
they are given.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from benchmarks.dual_path.namespaces import Node
from benchmarks.dual_path.node_side import NodeSide, Reached

P = ParamSpec("P")
T = TypeVar("T")
ANSWER_S = 300.0  # the longest that anything takes
END_S = 20.0
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}  # more of them spin where others want the processor


class Pending(Generic[T]):
    """What a process was told to do, until its result is taken."""

    def __init__(self, process: NodeProcess) -> None:
        self._process = process

    def result(self) -> T:
        """Wait for it. Raises `SystemExit` with what went wrong there."""
        result: T = self._process.answer()
        return result


class NodeProcess:
    """From the parent's side. One thing at a time."""

    def __init__(self, node: Node, reached: Reached, log: Path) -> None:
        """`reached` is where servers and relays are; `log` takes what it prints."""
        self.node = node
        ours, theirs = multiprocessing.Pipe()
        self._pipe: Connection = ours  # type: ignore[assignment,unused-ignore]
        words = (sys.executable, "-m", "benchmarks.dual_path.node_process", str(theirs.fileno()))
        with log.open("ab") as printed, theirs:
            self._process = subprocess.Popen(
                [*node.within, *words],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                pass_fds=[theirs.fileno()],
                env=os.environ | ONE_THREAD,
            )
        self._log = log
        self._pipe.send(reached)

    def begin(
        self, work: Callable[Concatenate[NodeSide, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> Pending[T]:
        """Have it call `work`."""
        assert not kwargs
        self._pipe.send((work, args))
        return Pending(self)

    def call(
        self, work: Callable[Concatenate[NodeSide, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Have it call `work`, and wait for the result."""
        return self.begin(work, *args, **kwargs).result()

    def answer(self) -> Any:
        """See `Pending.result`."""
        if not self._pipe.poll(ANSWER_S):
            raise SystemExit(f"the process on {self.node.name} does not answer")
        try:
            is_well, result = self._pipe.recv()
        except EOFError:
            tail = self._log.read_bytes()[-2000:].decode(errors="replace")
            raise SystemExit(f"the process on {self.node.name} has ended: {tail}") from None
        if not is_well:
            raise SystemExit(f"on {self.node.name}: {result}")
        return result

    def close(self) -> None:
        """End it."""
        self._pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        if self._process.returncode is None:
            self._process.kill()
            self._process.wait()

    def __repr__(self) -> str:
        return f"<NodeProcess on {self.node.name}, pid {self._process.pid}>"


def main() -> None:
    """Do as one is told until the pipe is closed."""
    pipe: Connection = Connection(int(sys.argv[1]))
    side = NodeSide(pipe.recv())
    try:
        while True:
            work, args = pipe.recv()
            try:
                answer = pickle.dumps((True, work(side, *args)))
            except BaseException:
                answer = pickle.dumps((False, traceback.format_exc()))
            pipe.send_bytes(answer)
    except EOFError:
        pass
    finally:
        side.close()


if __name__ == "__main__":
    main()
