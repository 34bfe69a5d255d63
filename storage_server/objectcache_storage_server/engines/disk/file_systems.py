"""Which file system a path lies on, and whether other hosts may have it mounted too."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
# fmt: off
LOCAL_TYPES = frozenset((
    "bcachefs", "btrfs", "devtmpfs", "exfat", "ext2", "ext3", "ext4", "f2fs", "fuseblk", "jfs",
    "msdos", "nilfs2", "ntfs", "ntfs3", "overlay", "ramfs", "reiserfs", "rootfs", "squashfs",
    "tmpfs", "ubifs", "vfat", "xfs", "zfs",
))
# fmt: on


@dataclass(frozen=True, slots=True)
class FileSystem:
    """A mounted file system. `options` are the mount's and the file system's own."""

    type: str
    options: frozenset[str]

    @property
    def may_be_shared(self) -> bool:
        """Other hosts may have it mounted; so of every type that is not known to be local."""
        return self.type not in LOCAL_TYPES


def file_system_of(path: Path, mounts: str | None = None) -> FileSystem:
    """What `path`, which is there, lies on; `mounts` is as in `MOUNTS`, which says it otherwise."""
    resolved = path.resolve()
    found, depth = FileSystem("", frozenset()), -1
    for line in (MOUNTS.read_text() if mounts is None else mounts).splitlines():
        mount, _, system = line.partition(" - ")
        _, _, _, _, point, options, *_ = mount.split(" ")
        kind, _, system_options = system.split(" ", 2)
        folder = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), point))
        # A later line lies over an earlier one of the same folder.
        if resolved.is_relative_to(folder) and len(folder.parts) >= depth:
            depth = len(folder.parts)
            found = FileSystem(kind, frozenset(f"{options},{system_options}".split(",")))
    return found
