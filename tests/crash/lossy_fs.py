"""`LossyTree` as a mounted file system, served by a process of its own, whose power can be cut.

The kernel's page cache stands before it, writing through: mmap, O_DIRECT and locks work as on any
file system, and the tree sees every write and every fsync. After a cut it is mounted anew, so that
no cache remembers what was lost.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import itertools
import multiprocessing
import os
import posixpath
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.crash.lossy_files import CutStyle, LossyDirectory, LossyFile, LossyTree, Node

ROOM_BYTES = 1 << 30  # as statfs says
BLOCK_BYTES = 4096
TIMEOUT_S = 60.0
HIDDEN = ".fuse_hidden"  # how libfuse renames an open file that is removed
PR_SET_PDEATHSIG = 1  # of linux/prctl.h
FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE = 1, 2
FLUSHES_UNTIL_FAILURE = "user.flushes_until_failure"  # counts down
NO_FAILURE = 1 << 30  # more flushes than there ever are


def reason_to_skip() -> str:
    """Why no file system can be mounted here; empty where it can."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse is missing or not ours to use"
    if os.geteuid() != 0:
        return "mounting a file system for its own process takes root"
    try:
        _binding()
    except (ImportError, OSError) as error:
        return f"mfusepy and Debian's fuse3 are needed: {error}"
    return ""


class PowerlessFiles:
    """Callbacks of the FUSE binding. `fh` names an open file or directory, whatever its path is."""

    use_ns = True

    def __init__(self, tree: LossyTree, mounted: Connection) -> None:
        self.tree = tree
        self._open: dict[int, Node] = {}
        self._hidden: dict[str, Node] = {}  # removed, and still open, by libfuse's name for it
        self._handles = itertools.count(1)
        self._mounted = mounted
        self._flushes_until_failure = NO_FAILURE

    def setxattr(self, path: str, name: str, value: bytes, options: int, position: int = 0) -> int:
        """Name the flush that fails: the first is 1."""
        if name != FLUSHES_UNTIL_FAILURE:
            raise OSError(errno.EOPNOTSUPP, name)
        self._flushes_until_failure = int(value)
        return 0

    def getxattr(self, path: str, name: str, position: int = 0) -> bytes:
        """How far it is until the flush that fails; negative after it."""
        if name != FLUSHES_UNTIL_FAILURE:
            raise OSError(errno.ENODATA, name)
        return str(self._flushes_until_failure).encode()

    def init(self, path: str) -> None:
        """The kernel has mounted it."""
        self._mounted.send("mounted")

    def destroy(self, path: str) -> None:
        """It is unmounted."""

    def statfs(self, path: str) -> dict[str, int]:
        """Plenty of room."""
        blocks = ROOM_BYTES // BLOCK_BYTES
        return {
            "f_bsize": BLOCK_BYTES,
            "f_frsize": BLOCK_BYTES,
            "f_blocks": blocks,
            "f_bfree": blocks,
            "f_bavail": blocks,
            "f_namemax": 255,
        }

    def getattr(self, path: str | None, fh: int | None = None) -> dict[str, Any]:
        """Everything belongs to us; times are always the beginning of time."""
        node = self._node(path, fh)
        if isinstance(node, LossyDirectory):
            return {"st_mode": stat.S_IFDIR | 0o700, "st_nlink": 2}
        size_bytes = len(node.content)
        blocks = -(-size_bytes // 512)
        return {
            "st_mode": stat.S_IFREG | 0o600,
            "st_nlink": 1,
            "st_size": size_bytes,
            "st_blocks": blocks,
            "st_blksize": BLOCK_BYTES,
        }

    def readdir(self, path: str | None, fh: int) -> list[str]:
        """Names in no particular order."""
        directory = self._open[fh]
        assert isinstance(directory, LossyDirectory)
        return [".", "..", *directory.names]

    def mkdir(self, path: str, mode: int) -> int:
        """A directory is flushed empty."""
        self.tree.add(path, LossyDirectory())
        return 0

    def rmdir(self, path: str) -> int:
        """Remove an empty directory."""
        if self.tree.directory(path).names:
            raise OSError(errno.ENOTEMPTY, path)
        self.tree.remove(path)
        return 0

    def unlink(self, path: str) -> int:
        """Who has the file open reads on: libfuse has renamed it, and removes that name at last."""
        if self._hidden.pop(path, None) is None:
            self.tree.remove(path)
        return 0

    def rename(self, old: str, new: str) -> int:
        """Replace what has the name. What libfuse hides is removed, as the caller asked."""
        if posixpath.basename(new).startswith(HIDDEN):
            self._hidden[new] = self.tree.find(old)
            self.tree.remove(old)
        else:
            self.tree.rename(old, new)
        return 0

    def chmod(self, path: str | None, mode: int) -> int:
        """Nobody else is here."""
        return 0

    def chown(self, path: str | None, uid: int, gid: int) -> int:
        """Nobody else is here."""
        return 0

    def utimens(self, path: str | None, times: object = None) -> int:
        """Times are not kept."""
        return 0

    def create(self, path: str, mode: int) -> int:
        """A file whose name and content a cut may lose."""
        file = LossyFile()
        self.tree.add(path, file)
        return self._handle(file)

    def open(self, path: str, flags: int) -> int:
        """Open a file; O_TRUNC comes as a truncate of its own."""
        return self._handle(self.tree.file(path))

    def opendir(self, path: str) -> int:
        """Open a directory."""
        return self._handle(self.tree.directory(path))

    def release(self, path: str | None, fh: int) -> int:
        """The last descriptor is closed; nothing is flushed by that."""
        del self._open[fh]
        return 0

    releasedir = release

    def read(self, path: str | None, size: int, offset: int, fh: int) -> bytes:
        """Read what is there now."""
        return self._file(path, fh).read(offset, size)

    def write(self, path: str | None, data: bytes, offset: int, fh: int) -> int:
        """Write what a cut may lose."""
        self._file(path, fh).write(offset, data)
        return len(data)

    def truncate(self, path: str | None, length: int, fh: int | None = None) -> int:
        """Resize."""
        self._file(path, fh).resize(length)
        return 0

    def fallocate(self, path: str | None, mode: int, offset: int, size: int, fh: int) -> int:
        """Allocation is only a size here, and a hole is zeros."""
        file = self._file(path, fh)
        if mode & FALLOC_PUNCH_HOLE:
            file.write(offset, bytes(max(0, min(size, len(file.content) - offset))))
        elif mode & ~FALLOC_KEEP_SIZE:
            raise OSError(errno.EOPNOTSUPP, "fallocate")
        elif not mode:
            file.resize(max(len(file.content), offset + size))
        return 0

    def fsync(self, path: str | None, datasync: int, fh: int) -> int:
        """Flush content and size, and no name."""
        file = self._file(path, fh)
        if self._is_to_fail():
            file.lose()
            raise OSError(errno.EIO, "flush")
        file.flush()
        return 0

    def fsyncdir(self, path: str | None, datasync: int, fh: int) -> int:
        """Flush the names."""
        if self._is_to_fail():
            raise OSError(errno.EIO, "flush")
        directory = self._open[fh]
        assert isinstance(directory, LossyDirectory)
        directory.flush()
        return 0

    def _is_to_fail(self) -> bool:
        self._flushes_until_failure -= 1
        return self._flushes_until_failure == 0

    def _handle(self, node: Node) -> int:
        handle = next(self._handles)
        self._open[handle] = node
        return handle

    def _node(self, path: str | None, fh: int | None) -> Node:
        if fh is not None and fh in self._open:
            return self._open[fh]
        assert path is not None
        return self._hidden[path] if path in self._hidden else self.tree.find(path)

    def _file(self, path: str | None, fh: int | None) -> LossyFile:
        node = self._node(path, fh)
        assert isinstance(node, LossyFile)
        return node


class LossyMount:
    """The mounted file system, from the outside."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._here, there = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(
            target=_serve, args=(str(folder), there), daemon=True
        )
        self._process.start()
        there.close()
        self._mount()

    def cut(self, seed: int, how: CutStyle | None = None) -> str:
        """Cut the power and return with it; says how it was cut. Nobody has a file open."""
        self._unmount()
        answer = self._ask((seed, how))
        self._mount()
        return answer

    def fail_flush(self, number: int = NO_FAILURE) -> None:
        """Have one flush fail, of whichever file: 1 is the next one."""
        os.setxattr(self.folder, FLUSHES_UNTIL_FAILURE, str(number).encode())

    def flushes_until_failure(self) -> int:
        """0 or less once the flush that was to fail has."""
        return int(os.getxattr(self.folder, FLUSHES_UNTIL_FAILURE))

    def close(self) -> None:
        """Unmount for good; what was in it is gone."""
        self._unmount()
        self._here.send("end")
        self._process.join()
        self._here.close()

    def _mount(self) -> None:
        answer = self._ask("mount")
        assert answer == "mounted", answer

    def _unmount(self) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while (failure := _umount(self.folder)) and time.monotonic() < deadline_s:
            pass  # what a killed process had in flight holds its files a little longer
        assert not failure, failure
        answer = self._receive()
        assert answer == "unmounted", answer

    def _ask(self, question: object) -> str:
        self._here.send(question)
        return self._receive()

    def _receive(self) -> str:
        if not self._here.poll(TIMEOUT_S):
            raise TimeoutError(f"the file system at {self.folder} does not answer")
        answer = self._here.recv()
        assert isinstance(answer, str)
        return answer


@contextmanager
def lossy_mount(folder: Path) -> Iterator[LossyMount]:
    """Mount an empty one on an existing directory."""
    mount = LossyMount(folder)
    try:
        yield mount
    finally:
        mount.close()


def _umount(folder: Path) -> str:
    """What is wrong; empty where it is unmounted. By force, as another test's network namespace has
    mounts of its own, a copy of this one among them, which would keep the process serving.
    """
    return subprocess.run(
        ["umount", "--force", str(folder)], capture_output=True, text=True, check=False
    ).stderr


def _binding() -> ModuleType:
    return importlib.import_module("mfusepy")


def _serve(folder: str, commands: Connection) -> None:
    """The process: mount when asked, until unmounted; cut when given a seed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # which unmounts
    tree = LossyTree()
    while (command := commands.recv()) != "end":
        if command == "mount":
            _mount_until_unmounted(tree, folder, commands)
            commands.send("unmounted")
        else:
            commands.send(repr(tree.cut(*command)))


def _mount_until_unmounted(tree: LossyTree, folder: str, commands: Connection) -> None:
    assert threading.active_count() == 1
    _binding().FUSE(
        PowerlessFiles(tree, commands),
        folder,
        foreground=True,
        nothreads=True,
        kernel_cache=True,  # as of any file system: what is in memory stays over a close
        entry_timeout=0,
        attr_timeout=0,
        negative_timeout=0,
        ac_attr_timeout=0,
        fsname="objectcache-lossy",
    )
