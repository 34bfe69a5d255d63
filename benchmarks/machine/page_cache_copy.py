"""A limit of the machine: plain copies out of the page cache."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from objectcache_schemas.limits import MIB

PIECE_BYTES = 1 * MIB
COPY_THREADS = 2


class FileRun(NamedTuple):
    """Bytes of a file."""

    file: Path
    offset_bytes: int
    length_bytes: int

    def pieces(self, piece_bytes: int) -> list[FileRun]:
        """The same in pieces."""
        end_bytes = self.offset_bytes + self.length_bytes
        return [
            FileRun(self.file, begin, min(piece_bytes, end_bytes - begin))
            for begin in range(self.offset_bytes, end_bytes, piece_bytes)
        ]


class PageCacheCopy:
    """`COPY_THREADS` threads that read the same bytes of the same files into warm memory.

    Into the target that deliveries in shared memory land in, and into anonymous memory. Deliveries
    are judged by the former: what a copy costs depends on the pages it writes to, by a factor of up
    to two on a virtual machine, so both have to write to the same ones.
    """

    def __init__(self, runs: Sequence[FileRun], target: memoryview, stack: ExitStack) -> None:
        self._pieces: list[tuple[int, int, int, int]] = []  # descriptor, offset, length, landing
        landing_bytes = 0
        descriptors: dict[Path, int] = {}
        for run in runs:
            if run.file not in descriptors:
                descriptors[run.file] = os.open(run.file, os.O_RDONLY)
                stack.callback(os.close, descriptors[run.file])
            for _, offset_bytes, length_bytes in run.pieces(PIECE_BYTES):
                piece = (descriptors[run.file], offset_bytes, length_bytes, landing_bytes)
                self._pieces.append(piece)
                landing_bytes += length_bytes
        self._target = target
        self._anonymous = mmap.mmap(-1, landing_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._pool = stack.enter_context(ThreadPoolExecutor(COPY_THREADS))
        self.into_target()
        self.into_anonymous_memory()

    def into_target(self) -> None:
        """Copy everything once."""
        self._copy(self._target)

    def into_anonymous_memory(self) -> None:
        """Copy everything once."""
        self._copy(memoryview(self._anonymous))

    def _copy(self, memory: memoryview) -> None:
        shares = [self._pieces[first::COPY_THREADS] for first in range(COPY_THREADS)]
        list(self._pool.map(partial(_copy_share, memory), shares))


def _copy_share(memory: memoryview, share: Sequence[tuple[int, int, int, int]]) -> None:
    for descriptor, offset_bytes, length_bytes, landing_bytes in share:
        part = memory[landing_bytes : landing_bytes + length_bytes]
        read = os.preadv(descriptor, [part], offset_bytes)
        assert read == length_bytes
