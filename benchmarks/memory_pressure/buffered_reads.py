"""The peer of reads under memory pressure: plain buffered reads, with the kernel's own readahead.

The kernel alone decides what stays in memory. Nothing is verified.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from benchmarks.machine.page_cache_copy import FileRun


class BufferedReads:
    """Threads that read runs of files with `preadv`, each the next one that nobody has taken.

    Each reads into memory of its own, overwritten by its next run.
    """

    def __init__(self, runs: Sequence[FileRun], threads: int, stack: ExitStack) -> None:
        self._runs = runs
        self._descriptors: dict[Path, int] = {}
        for file in {run.file for run in runs}:
            self._descriptors[file] = os.open(file, os.O_RDONLY)
            stack.callback(os.close, self._descriptors[file])
        run_bytes_max = max(run.length_bytes for run in runs)
        self._memories = [memoryview(mmap.mmap(-1, run_bytes_max)) for _ in range(threads)]
        self._pool = stack.enter_context(ThreadPoolExecutor(threads))

    def read(self) -> int:
        """Read everything once; returns how many bytes that is."""
        waiting = deque(self._runs)
        return sum(self._pool.map(lambda memory: self._read_share(memory, waiting), self._memories))

    def _read_share(self, memory: memoryview, waiting: deque[FileRun]) -> int:
        read_bytes = 0
        while True:
            try:
                run = waiting.popleft()
            except IndexError:
                return read_bytes
            part = memory[: run.length_bytes]
            read = os.preadv(self._descriptors[run.file], [part], run.offset_bytes)
            assert read == run.length_bytes
            read_bytes += read
