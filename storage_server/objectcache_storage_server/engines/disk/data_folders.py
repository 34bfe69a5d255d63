"""The folder that an engine owns: locked for it alone, its names made durable."""

from __future__ import annotations

import fcntl
import os
import resource
from pathlib import Path

from objectcache_schemas.errors import Unavailable
from objectcache_storage_server.engines.disk.system_errors import translated


def sync_folder(folder: str | Path) -> None:
    """Make the names in a folder durable; raises `OSError`."""
    file_descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file_descriptor)
    finally:
        os.close(file_descriptor)


def lock_folder(folder: Path) -> int:
    """Lock the folder for this engine; returns the lock's file descriptor, which holds it.

    Raises `Unavailable` where another engine holds it.
    """
    path = folder / "lock"
    with translated("open the data directory's lock", path):
        file_descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file_descriptor)
        raise Unavailable(
            f"{folder} is in use by another storage server; stop that one, or set another "
            f"server.data_dir"
        ) from error
    return file_descriptor


def raise_open_files_limit() -> int:
    """Raise this process's soft limit on open files to the hard one, and return it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
