"""A process of `pressed_reads` under a memory limit, which reads when it is asked to."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from benchmarks.basis.prefix import Geometry
from benchmarks.memory_pressure.memory_group import memory_group
from benchmarks.memory_pressure.pressed_reads import Opened, Round

SaidT = TypeVar("SaidT", Opened, Round)
STOP_TIMEOUT_S = 60.0


class PressedProcess:
    """A reader of one store that has been opened."""

    def __init__(self, asked: IO[bytes], said: IO[bytes], limit_bytes: int) -> None:
        self._asked, self._said, self._limit_bytes = asked, said, limit_bytes
        self.opened = self._hear(Opened)

    def read(self) -> Round:
        """Have it read everything once."""
        self._asked.write(b"\n")
        self._asked.flush()
        return self._hear(Round)

    def _hear(self, kind: type[SaidT]) -> SaidT:
        line = self._said.readline()
        if not line:
            raise SystemExit(f"a reader under {self._limit_bytes} bytes ended; see its words above")
        return msgspec.json.decode(line, type=kind)


@contextmanager
def pressed_process(
    folder: Path, name: str, way: str, geometry: Geometry, limit_bytes: int
) -> Generator[PressedProcess]:
    """Start one on the store in `folder`; stopped at the end, and its group with it.

    Raises `OSError` where the kernel allows no group, and `SystemExit` where the process ends.
    """
    words = [
        *(sys.executable, "-m", "benchmarks.memory_pressure.pressed_reads"),
        *(str(folder), way, str(geometry.chunk_count)),
    ]
    with memory_group(name.replace(" ", "-"), limit_bytes) as group:
        process = subprocess.Popen(
            group.command(words), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield PressedProcess(process.stdin, process.stdout, limit_bytes)
        finally:
            process.stdin.close()
            process.wait(STOP_TIMEOUT_S)
            process.stdout.close()
