"""Bare reads of RADOS objects: by ctypes in this process, and by a C program where there is cc."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from ctypes import addressof, byref, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import NamedTuple

from objectcache_storage_server.engines.stores.rados.librados import RadosPool, address_of

SOURCE = Path(__file__).with_name("bare_reads.c")


class Part(NamedTuple):
    """Bytes of an object."""

    name: str
    offset_bytes: int
    size_bytes: int


class Cost(NamedTuple):
    """What one pass took: seconds, and those of processors, of the client and of servers."""

    wall_s: float
    client_s: float
    servers_s: float = 0.0


def read_bare(pool: RadosPool, parts: Sequence[Part], memory: memoryview, depth: int) -> None:
    """All parts, one after the other into `memory`, `depth` under way, an operation each."""
    quick, waiting = pool.calls.quick, pool.calls.waiting
    under_way: deque[tuple[c_void_p, object]] = deque()

    def end() -> None:
        completion, _kept = under_way.popleft()
        if not quick.aio_is_complete(completion):
            waiting.aio_wait_for_complete(completion)
        assert quick.aio_get_return_value(completion) >= 0
        quick.aio_release(completion)

    landing = address_of(memory)
    for part in parts:
        if len(under_way) == depth:
            end()
        size, code, completion = c_size_t(), c_int(), c_void_p()
        steps = c_void_p(quick.create_read_op())
        quick.read_op_read(
            steps, part.offset_bytes, part.size_bytes, landing, addressof(size), addressof(code)
        )
        quick.aio_create_completion2(None, None, byref(completion))
        quick.aio_read_op_operate(steps, pool.handle, completion, part.name.encode(), 0)
        quick.release_read_op(steps)
        under_way.append((completion, (size, code)))
        landing += part.size_bytes
    while under_way:
        end()


def missing_compiler() -> str:
    """What keeps the C program from being made; empty where nothing does."""
    return "" if shutil.which("cc") else "cc not found: apt-get install gcc"


class BareProgram:
    """The C program, which is connected and reads when it is asked to."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def read(self) -> Cost:
        """One pass. Raises `RuntimeError` where it ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        words = self._process.stdout.readline().split()
        if len(words) != 2:
            raise RuntimeError("bare_reads ended, see its messages above")
        return Cost(float(words[0]), float(words[1]))


@contextmanager
def bare_program(
    folder: Path, conf: Path, pool: str, namespace: str, parts: Sequence[Part], depth: int
) -> Generator[BareProgram]:
    """Compile and start it; it ends with the block."""
    binary, listing = folder / "bare_reads", folder / f"parts-{time.monotonic_ns()}"
    listing.write_text("".join(f"{part[0]} {part[1]} {part[2]}\n" for part in parts))
    if not binary.exists():
        command = ["cc", "-O2", "-o", str(binary), str(SOURCE), "-l:librados.so.2"]
        subprocess.run(command, check=True)
    process = subprocess.Popen(
        [str(binary), str(conf), pool, namespace, str(depth), str(listing)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield BareProgram(process)
    finally:
        process.kill()
        process.communicate()
