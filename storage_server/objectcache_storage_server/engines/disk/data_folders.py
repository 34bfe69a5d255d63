"""The folder that an engine owns: locked for it alone, its names made durable."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import resource
import time
from collections.abc import Generator
from pathlib import Path

from objectcache_schemas.errors import Unavailable
from objectcache_storage_server.engines.disk.file_systems import file_system_of
from objectcache_storage_server.engines.disk.flush_latch import FlushLatch
from objectcache_storage_server.engines.disk.host_lease import HostLease, this_host
from objectcache_storage_server.engines.disk.system_errors import translated

ORPHAN_WAIT_S = 15.0  # for a server that drains because its supervisor has gone
ASK_AGAIN_S = 0.1
_HOLDER_BYTES_MAX = 64  # two numbers

log = logging.getLogger("objectcache.storage_server.engines.disk")


def sync_folder(folder: str | Path) -> None:
    """Make the names in a folder durable; raises `OSError`."""
    file_descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file_descriptor)
    finally:
        os.close(file_descriptor)


def lock_folder(folder: Path, orphan_wait_s: float = ORPHAN_WAIT_S) -> int:
    """Lock the folder for this engine; returns the lock's file descriptor, which holds it. An
    engine whose supervisor was killed ends soon: that long is waited for it.

    Raises `Unavailable` where another engine holds it.
    """
    path = folder / "lock"
    with translated("open the data directory's lock", path):
        file_descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    until_s = time.monotonic() + orphan_wait_s
    is_waiting = False
    while not _is_locked(file_descriptor):
        if time.monotonic() >= until_s or not _is_orphan(
            os.pread(file_descriptor, _HOLDER_BYTES_MAX, 0)
        ):
            os.close(file_descriptor)
            raise Unavailable(
                f"{folder} is in use by another storage server; stop that one, or set another "
                f"server.data_dir"
            )
        if not is_waiting:
            log.info(
                "%s is in use by a storage server whose supervisor has gone: waiting for up to "
                "%g s for it to end",
                folder,
                orphan_wait_s,
            )
        is_waiting = True
        time.sleep(ASK_AGAIN_S)
    with contextlib.suppress(OSError):  # a full disk: then nobody waits for this engine
        os.ftruncate(file_descriptor, 0)
        os.pwrite(file_descriptor, b"%d %d\n" % (os.getpid(), os.getppid()), 0)
    return file_descriptor


def _is_locked(file_descriptor: int) -> bool:
    """Whether it is locked by us now."""
    try:
        fcntl.flock(file_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_orphan(holder: bytes) -> bool:
    """Whether the process that the lock's file names has lost the parent that is named there."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        pid, parent = (int(number) for number in holder.split())
        state = Path(f"/proc/{pid}/stat").read_text()
        return int(state.rpartition(")")[2].split()[1]) != parent
    return False


@contextlib.contextmanager
def owned_folder(folder: Path, latch: FlushLatch) -> Generator[None, None, None]:
    """Have the folder for this engine alone: on this host and, where others may have it mounted, on
    all of them. Nothing is acknowledged any more once another host has taken it.

    Raises `Unavailable` where another engine has it.
    """
    with contextlib.ExitStack() as held:
        held.callback(os.close, lock_folder(folder))
        system = file_system_of(folder)
        if system.may_be_shared:
            log.warning(
                "%s is on %s, which several hosts can mount: an index there is for one server, and "
                "not as safe as on a disk of this host; put server.data_dir on a local file system",
                folder,
                system.type or "a file system of an unknown type",
            )
            lease = HostLease(folder, latch.give_up, host=this_host())
            held.callback(lease.close)
        yield


def raise_open_files_limit() -> int:
    """Raise this process's soft limit on open files to the hard one, and return it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
