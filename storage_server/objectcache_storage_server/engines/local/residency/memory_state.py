"""What the kernel says about memory: /proc/meminfo and the memory cgroups of this process.

Nothing here raises for a file that is missing or says something else than expected: containers hide
some of them. What could not be read is named in `MemoryState.unread`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from objectcache_schemas.limits import KIB

FILESYSTEM_ROOT = Path("/")
NO_LIMIT_BYTES = (
    1 << 60
)  # what cgroup v1 says without a limit is the largest page count, above this


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """One cgroup that has a limit; M_max and M_anon+shmem of Dual-Blade's equation (1).

    `held_bytes` is what the kernel cannot take back by dropping clean pages: anonymous and shared
    memory and, where the kernel tells it apart, its own structures. Page cache is not in it, so
    cached extents do not shrink their own budget.
    """

    version: int  # of cgroups, 1 or 2
    limit_bytes: int
    held_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryState:
    """What bounds the page cache at one moment.

    `available_bytes` is MemAvailable, M_avail of equation (1): free memory and page cache alike.
    Shared memory and locked pages are not in it.
    """

    available_bytes: int | None
    groups: tuple[GroupMemory, ...] = ()  # with a limit, from the process' own up to the root
    unread: tuple[str, ...] = ()  # files that should have counted and could not


@dataclass(frozen=True, slots=True)
class CgroupMount:
    """A mounted hierarchy that may limit memory."""

    version: int
    root: PurePosixPath  # the cgroup that lies at the mount point
    mount_point: PurePosixPath


# --- parsing -------------------------------------------------------------------------------------


def parse_available_bytes(meminfo: str) -> int | None:
    """MemAvailable of /proc/meminfo; None where there is no such line."""
    for line in meminfo.splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if name == "MemAvailable" and len(words) == 2 and words[1] == "kB":
            return _number_or_none(words[0], KIB)
    return None


def parse_limit_bytes(text: str) -> int | None:
    """Content of a limit's file: bytes, or None for "max" and what cgroup v1 writes for it.

    Raises `ValueError` for anything else.
    """
    word = text.strip()
    if word == "max":
        return None
    limit_bytes = _number_or_none(word)
    if limit_bytes is None:
        raise ValueError(f"{word[:40]!r} is no limit")
    return limit_bytes if limit_bytes < NO_LIMIT_BYTES else None


def parse_stat(text: str) -> dict[str, int]:
    """The counters of a memory.stat; lines of another form are left out."""
    counters: dict[str, int] = {}
    for line in text.splitlines():
        words = line.split()
        count = _number_or_none(words[1]) if len(words) == 2 else None
        if count is not None:
            counters[words[0]] = count
    return counters


def held_bytes_v2(counters: dict[str, int]) -> int:
    """What a v2 group holds besides page cache; raises `KeyError` where the stat is another."""
    kernel_bytes = counters.get("kernel", 0) - counters.get("slab_reclaimable", 0)
    return counters["anon"] + counters["shmem"] + max(0, kernel_bytes) + counters.get("sock", 0)


def held_bytes_v1(counters: dict[str, int]) -> int:
    """The same of a v1 group and the groups in it, whose kernel memory the stat does not split."""
    if "total_rss" in counters:
        return counters["total_rss"] + counters.get("total_shmem", 0)
    return counters["rss"] + counters.get("shmem", 0)


def parse_cgroup_paths(text: str) -> dict[int, PurePosixPath]:
    """/proc/self/cgroup: the process' path in the hierarchies that may limit memory, by version."""
    paths: dict[int, PurePosixPath] = {}
    for line in text.splitlines():
        fields = line.split(":", 2)
        if len(fields) != 3 or not fields[2].startswith("/"):
            continue
        if fields[0] == "0" and fields[1] == "":
            paths[2] = PurePosixPath(fields[2])
        elif "memory" in fields[1].split(","):
            paths[1] = PurePosixPath(fields[2])
    return paths


def parse_cgroup_mounts(mountinfo: str) -> list[CgroupMount]:
    """/proc/self/mountinfo: the v2 hierarchy and the v1 hierarchy of the memory controller."""
    mounts: list[CgroupMount] = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")
        if len(fields) < 5 or len(kind) < 3:
            continue
        root, mount_point = (PurePosixPath(_unescape(field)) for field in fields[3:5])
        if kind[0] == "cgroup2":
            mounts.append(CgroupMount(2, root, mount_point))
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            mounts.append(CgroupMount(1, root, mount_point))
    return mounts


def group_folders(mount: CgroupMount, cgroup_path: PurePosixPath) -> list[PurePosixPath]:
    """Folders of a cgroup and of its ancestors as far as this mount shows them, own first.

    A container may see its own cgroup as the mount's root under a path that is not below it; then
    only the mount point counts.
    """
    try:
        below = cgroup_path.relative_to(mount.root)
    except ValueError:
        return [mount.mount_point]
    if ".." in below.parts:
        return [mount.mount_point]
    folders = [mount.mount_point]
    for part in below.parts:
        folders.append(folders[-1] / part)
    return folders[::-1]


def _number_or_none(word: str, unit_bytes: int = 1) -> int | None:
    return int(word) * unit_bytes if word.isascii() and word.isdigit() else None


def _unescape(field: str) -> str:
    for code, character in (("040", " "), ("011", "\t"), ("012", "\n"), ("134", "\\")):
        field = field.replace("\\" + code, character)
    return field


# --- reading -------------------------------------------------------------------------------------


class MemoryReader:
    """Reads the memory state of this process, again and again.

    `root` is where /proc and /sys are looked for.
    """

    def __init__(self, root: Path = FILESYSTEM_ROOT) -> None:
        self._root = root
        self._unread: list[str] = []

    def read(self) -> MemoryState:
        """The state now. Never raises for what the files say; reads about ten small ones."""
        self._unread = []
        meminfo = self._text("proc/meminfo")
        available_bytes = parse_available_bytes(meminfo or "")
        if meminfo is not None and available_bytes is None:
            self._unread.append("proc/meminfo")
        groups = tuple(self._groups())
        return MemoryState(available_bytes, groups, tuple(dict.fromkeys(self._unread)))

    def _groups(self) -> Iterator[GroupMemory]:
        paths = parse_cgroup_paths(self._text("proc/self/cgroup") or "")
        for mount in parse_cgroup_mounts(self._text("proc/self/mountinfo") or ""):
            if mount.version not in paths:
                continue
            for folder in group_folders(mount, paths[mount.version]):
                group = self._group(mount.version, str(folder).lstrip("/"))
                if group is not None:
                    yield group

    def _group(self, version: int, folder: str) -> GroupMemory | None:
        """The group of one folder, None where it has no limit or does not control memory."""
        limit_bytes = self._limit_bytes(version, folder)
        if limit_bytes is None:
            return None
        counters = parse_stat(self._text(f"{folder}/memory.stat") or "")
        try:
            held_bytes = held_bytes_v2(counters) if version == 2 else held_bytes_v1(counters)
        except KeyError:
            self._unread.append(f"{folder}/memory.stat")
            return None
        return GroupMemory(version, limit_bytes, held_bytes)

    def _limit_bytes(self, version: int, folder: str) -> int | None:
        """The lowest limit: above memory.high the kernel takes page cache back as at memory.max."""
        if version == 2:
            limits = [
                self._file_limit_bytes(f"{folder}/{name}") for name in ("memory.max", "memory.high")
            ]
        else:
            counters = parse_stat(self._text(f"{folder}/memory.stat", is_expected=False) or "")
            # Ancestors that a container does not see count in the hierarchical one.
            above_bytes = counters.get("hierarchical_memory_limit", NO_LIMIT_BYTES)
            limits = [
                self._file_limit_bytes(f"{folder}/memory.limit_in_bytes"),
                above_bytes if above_bytes < NO_LIMIT_BYTES else None,
            ]
        return min((limit for limit in limits if limit is not None), default=None)

    def _file_limit_bytes(self, name: str) -> int | None:
        text = self._text(name, is_expected=False)  # the root of a hierarchy has none
        if text is None:
            return None
        try:
            return parse_limit_bytes(text)
        except ValueError:
            self._unread.append(name)
            return None

    def _text(self, name: str, *, is_expected: bool = True) -> str | None:
        try:
            return (self._root / name).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            if is_expected:
                self._unread.append(name)
        except OSError:
            self._unread.append(name)
        return None
