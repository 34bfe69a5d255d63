"""What a fetcher and its workers have of a host's memory, as the system counts it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class FetcherMemory:
    """Bytes: of the processes' own, all of them; of memory files, each counted once."""

    own_bytes: int
    landing_bytes: int

    def most(self, other: FetcherMemory) -> FetcherMemory:
        """The larger of each."""
        return FetcherMemory(
            max(self.own_bytes, other.own_bytes), max(self.landing_bytes, other.landing_bytes)
        )


def taken_memory(fetcher_pid: int, engine_pid: int) -> FetcherMemory:
    """That of a fetcher with its workers. Files that the engine maps, too, are the engine's."""
    pids = [fetcher_pid, *(one.pid for one in psutil.Process(fetcher_pid).children())]
    files: dict[int, int] = {}
    for pid in pids:
        files.update(_memory_files(pid))
    of_engine = _memory_files(engine_pid)
    landing_bytes = sum(size for inode, size in files.items() if inode not in of_engine)
    return FetcherMemory(sum(map(own_bytes, pids)), landing_bytes)


def own_bytes(pid: int) -> int:
    """Bytes that a process has to itself, whatever it maps of files."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("the system counts it")


def _memory_files(pid: int) -> dict[int, int]:
    """Bytes mapped of each memory file of ours, by inode."""
    files: dict[int, int] = {}
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        bounds, _, _, _, inode, *name = line.split()
        if name and name[0].startswith("/memfd:objectcache"):
            begin, end = (int(one, 16) for one in bounds.split("-"))
            files[int(inode)] = end - begin
    return files
