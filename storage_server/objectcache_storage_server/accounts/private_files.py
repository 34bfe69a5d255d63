"""Files that only the server's user reads, replaced whole: a crash leaves the one or the other."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

FILE_MODE = 0o600


def write_private(file: Path, data: bytes) -> None:
    """Write a file that is not there yet, durably but for its name. Raises `OSError`."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    with open(descriptor, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(descriptor)


def replace_private(file: Path, data: bytes) -> None:
    """Replace a file, durably. One thread at a time. Raises `OSError`; then nothing changed."""
    temporary = file.with_name(f"{file.name}.new")
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        temporary.unlink(missing_ok=True)  # left by a crash
        write_private(temporary, data)
        temporary.replace(file)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    flush_directory(file.parent)


def flush_directory(directory: Path) -> None:
    """Make the names in a directory outlive a power loss. Raises `OSError`."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
