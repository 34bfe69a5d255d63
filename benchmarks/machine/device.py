"""A limit of the machine: sequential reads and writes of the device, past the page cache.

By fio in several shapes, where there is one, and by two threads of our own; the fastest counts.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

from benchmarks.basis.measure import Samples, timed
from objectcache_schemas.limits import MIB

OWN_THREADS = 2
OWN_PIECE_BYTES = 4 * MIB


class Shape(NamedTuple):
    """How fio reads or writes."""

    block_mib: int
    depth: int

    def __str__(self) -> str:
        return f"fio, {self.block_mib}m x {self.depth}"


OWN = f"own threads, {OWN_PIECE_BYTES // MIB}m x {OWN_THREADS}"
READ_SHAPES = tuple(Shape(*each) for each in product((1, 4), (1, 8, 32)))
WRITE_SHAPES = (Shape(1, 32), Shape(4, 8))
QUICK_SHAPES = (Shape(4, 8),)


def has_fio() -> bool:
    """Whether fio is installed."""
    return shutil.which("fio") is not None


class DeviceLimit:
    """Samples of every shape, under names of their own, and which of them is the limit."""

    def __init__(
        self, what: str, shapes: Sequence[Shape], seconds: Callable[[Shape | None], float]
    ) -> None:
        """`seconds` measures one shape once; None is by our own threads."""
        self._names: dict[str, Shape | None] = {f"{what}, {OWN}": None}
        if has_fio():
            self._names |= {f"{what}, {shape}": shape for shape in shapes}
        self._seconds = seconds

    def take(self, samples: Samples) -> None:
        """Measure each shape once."""
        for name, shape in self._names.items():
            samples.add(name, self._seconds(shape))

    def best(self, samples: Samples) -> str:
        """The name of the shape with the shortest median."""
        return min(self._names, key=samples.median_s)

    def best_of_fio(self, samples: Samples) -> str | None:
        """The same among fio's shapes; None where there is no fio."""
        names = [name for name, shape in self._names.items() if shape is not None]
        return min(names, key=samples.median_s, default=None)


def device_reads(file: Path, length_bytes: int, *, is_quick: bool) -> DeviceLimit:
    """Reads of the first bytes of a file."""

    def seconds(shape: Shape | None) -> float:
        if shape is None:
            return timed(lambda: _own_pass(file, length_bytes, os.O_RDONLY))
        return _fio_seconds(file, length_bytes, "read", shape)

    return DeviceLimit("limit: read", QUICK_SHAPES if is_quick else READ_SHAPES, seconds)


def device_writes(file: Path, length_bytes: int, *, fresh: bool, is_quick: bool) -> DeviceLimit:
    """Writes of a preallocated file and one fsync: each time a fresh one, or again and again."""

    def seconds(shape: Shape | None) -> float:
        if fresh:
            file.unlink(missing_ok=True)
        _preallocate(file, length_bytes)
        if shape is None:
            return timed(lambda: _own_pass(file, length_bytes, os.O_WRONLY)) + _sync_seconds(file)
        return _fio_seconds(file, length_bytes, "write", shape) + _sync_seconds(file)

    if not fresh:
        seconds(None)
    where = "fresh space" if fresh else "written before"
    shapes = QUICK_SHAPES if is_quick else WRITE_SHAPES
    return DeviceLimit(f"limit: write and fsync, {where}", shapes, seconds)


def _fio_seconds(file: Path, length_bytes: int, direction: str, shape: Shape) -> float:
    command = [
        *("fio", "--name=limit", f"--filename={file}", f"--size={length_bytes}"),
        *(f"--rw={direction}", f"--bs={shape.block_mib}m", f"--iodepth={shape.depth}"),
        *("--direct=1", "--ioengine=io_uring", "--overwrite=1", "--output-format=json"),
    ]
    if direction == "read":
        command.append("--readonly")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {done.stderr or done.stdout}")
    (job,) = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    moved = job[direction]
    return float(
        length_bytes / moved["bw_bytes"]
    )  # it moves whole blocks, maybe a part of one more


def _own_pass(file: Path, length_bytes: int, flags: int) -> None:
    with _opened(file, flags | os.O_DIRECT) as descriptor:
        pieces = range(0, length_bytes, OWN_PIECE_BYTES)
        shares = [pieces[first::OWN_THREADS] for first in range(OWN_THREADS)]
        move = os.preadv if flags == os.O_RDONLY else os.pwritev
        with ThreadPoolExecutor(OWN_THREADS) as pool:
            list(pool.map(partial(_move_share, move, descriptor, length_bytes), shares))


def _move_share(
    move: Callable[[int, list[memoryview], int], int],
    descriptor: int,
    length_bytes: int,
    share: Sequence[int],
) -> None:
    memory = memoryview(mmap.mmap(-1, OWN_PIECE_BYTES))
    for offset in share:
        moved = move(descriptor, [memory[: length_bytes - offset]], offset)
        assert moved == min(OWN_PIECE_BYTES, length_bytes - offset)


def _preallocate(file: Path, length_bytes: int) -> None:
    with _opened(file, os.O_RDWR | os.O_CREAT) as descriptor:
        os.posix_fallocate(descriptor, 0, length_bytes)
        os.fsync(descriptor)


def _sync_seconds(file: Path) -> float:
    with _opened(file, os.O_RDWR) as descriptor:
        return timed(lambda: os.fsync(descriptor))


@contextmanager
def _opened(file: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(file, flags, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
