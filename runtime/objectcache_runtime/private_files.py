"""Files that only the server's user reads, made or replaced whole: a crash leaves the one or the
other.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from io import BufferedReader
from pathlib import Path

from objectcache_schemas.errors import InvalidRequest

FILE_MODE = 0o600
OTHERS = stat.S_IRWXG | stat.S_IRWXO
# Of a file that somebody else owns and gave this user to read: systemd's LoadCredential does so for
# a service with a user of its own by an access list, whose mask shows as the group's bits, and
# Kubernetes' secrets do by the group.
OTHERS_OF_GIVEN = stat.S_IWGRP | stat.S_IXGRP | stat.S_IRWXO


class NameNotFlushed(OSError):
    """A file has been replaced, but after a power loss it may be the one before."""


def flush_directory(directory: Path) -> None:
    """Make the names in a directory outlive a power loss. Raises `OSError`."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_at_once(file: Path) -> BufferedReader:
    """Open what stands there to be read, without waiting where it is a pipe. Raises `OSError`."""

    def open_it(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)

    # `open` closes what its opener opened, and itself refuses: a directory.
    return open(file, "rb", opener=open_it)


def read_private(file: Path, bytes_max: int) -> bytes | None:
    """What a file holds, one byte over `bytes_max` at the most; None where there is none. Raises
    `OSError`, and `InvalidRequest` where others may read it: of a file of this process's user
    anybody else, of another's everybody, or its group more than read.
    """
    try:
        stream = open_at_once(file)
    except FileNotFoundError:
        return None
    with stream:
        found = os.fstat(stream.fileno())
        is_own = found.st_uid == os.geteuid()
        if found.st_mode & (OTHERS if is_own else OTHERS_OF_GIVEN):
            raise InvalidRequest(f"{file} can be read by others; run: chmod 600 {file}")
        return stream.read(bytes_max + 1)


def write_private(file: Path, data: bytes) -> None:
    """Write a file that is not there yet, durably but for its name. Raises `OSError`."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    with open(descriptor, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(descriptor)


def create_once(file: Path, data: bytes) -> None:
    """Make a file, durably, unless there is one: of several that try at once one makes it. Raises
    `OSError`.
    """
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        write_private(temporary, data)
        # A link, unlike a rename, fails where another starter was first.
        with contextlib.suppress(FileExistsError):
            os.link(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
    flush_directory(file.parent)


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
