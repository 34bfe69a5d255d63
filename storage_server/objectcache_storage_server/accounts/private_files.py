"""Files that only the server's user reads, replaced whole: a crash leaves the one or the other."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from objectcache_runtime.durable_names import flush_directory

FILE_MODE = 0o600


class NameNotFlushed(OSError):
    """A file has been replaced, but after a power loss it may be the one before."""


def write_private(file: Path, data: bytes) -> None:
    """Write a file that is not there yet, durably but for its name. Raises `OSError`."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    with open(descriptor, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(descriptor)


def replace_private(file: Path, data: bytes) -> None:
    """Replace a file, durably. One thread at a time.

    Raises `NameNotFlushed` where it was replaced and a power loss may undo that, and any other
    `OSError` where nothing changed.
    """
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
    try:
        flush_directory(file.parent)
    except OSError as error:
        raise NameNotFlushed(error.errno, error.strerror) from error
