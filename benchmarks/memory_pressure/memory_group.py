"""A cgroup that bounds the memory of a child process, page cache included; needs root."""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

V1_ROOT = Path("/sys/fs/cgroup/memory")
V2_ROOTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
REMOVAL_ATTEMPTS, REMOVAL_PAUSE_S = 50, 0.1  # a group is busy until its last process is reaped


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A group, or the hierarchy that one can be made in."""

    folder: Path
    version: int

    def command(self, words: list[str]) -> list[str]:
        """The command as one that joins the group first, so that all of its memory counts."""
        join = f'echo $$ > "{self.folder / "cgroup.procs"}" && exec "$@"'
        return ["sh", "-c", join, "sh", *words]

    def limit(self, limit_bytes: int) -> None:
        """Set the limit; raises `OSError`."""
        name = "memory.limit_in_bytes" if self.version == 1 else "memory.max"
        (self.folder / name).write_text(str(limit_bytes))


def hierarchy() -> MemoryGroup | str:
    """Where groups can be made, or why nowhere."""
    if os.geteuid() != 0:
        return "making a memory cgroup needs root"
    for root in V2_ROOTS:
        control = root / "cgroup.subtree_control"
        if control.is_file() and "memory" in control.read_text().split():
            return MemoryGroup(root, 2)
    if (V1_ROOT / "memory.limit_in_bytes").is_file():
        return MemoryGroup(V1_ROOT, 1)
    return "no hierarchy of cgroups controls memory here"


@contextmanager
def memory_group(name: str, limit_bytes: int) -> Generator[MemoryGroup]:
    """A group with a limit, removed at the end, also after a failure; its processes end before.
    `name` tells it from this process' other groups.

    Raises `OSError` where the kernel does not allow it.
    """
    found = hierarchy()
    assert isinstance(found, MemoryGroup), found
    folder = found.folder / f"objectcache-bench-{os.getpid()}-{name}"
    folder.mkdir()
    try:
        group = MemoryGroup(folder, found.version)
        group.limit(limit_bytes)
        yield group
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    for attempt in range(REMOVAL_ATTEMPTS):
        try:
            folder.rmdir()
        except OSError:
            if attempt + 1 == REMOVAL_ATTEMPTS:
                raise
            time.sleep(REMOVAL_PAUSE_S)
        else:
            return
