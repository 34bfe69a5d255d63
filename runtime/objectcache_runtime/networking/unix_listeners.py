"""Listening unix sockets: a process never takes the path from another one that uses it.

Beside the socket lies a lock file, which is kept: whoever removed it could have another one lock
what nobody sees any more. A process that was killed holds no lock, and its socket is replaced.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from pathlib import Path

from objectcache_runtime.networking.socket_paths import check_socket_path
from objectcache_schemas.errors import Unavailable

LOCK_SUFFIX = ".lock"
LOCK_MODE = 0o600


class UnixListener:
    """A listening socket at a path that is this process's until `leave`."""

    def __init__(self, path: Path, listening: socket.socket, lock_descriptor: int) -> None:
        self.path = path
        self.socket = listening
        self._lock_descriptor: int | None = lock_descriptor

    def leave(self) -> None:
        """Take the socket off its path, which others may have then. Does not close it: what is
        connected, or is being accepted, goes on. A second call has no effect.
        """
        descriptor, self._lock_descriptor = self._lock_descriptor, None
        if descriptor is None:
            return
        with contextlib.suppress(OSError):
            self.path.unlink()
        os.close(descriptor)

    def __repr__(self) -> str:
        return f"<UnixListener {self.path}>"


def open_unix_listener(path: Path, mode: int, backlog: int, setting: str) -> UnixListener:
    """Listen at a path, in a directory that is made where it is missing, with this mode.

    Raises `InvalidRequest` for a path that no socket can have. Raises `Unavailable` where another
    process uses it, or where it cannot be had; `setting` is named as what says where else.
    """
    check_socket_path(path)
    _make_directory(path.parent, setting)
    lock_descriptor: int | None = None
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock_descriptor = _locked(path, setting)
        _check_nobody_answers(path, setting)
        path.unlink(missing_ok=True)
        before = os.umask(0o777 & ~mode)  # it is open to others for not a moment
        try:
            listening.bind(str(path))
        finally:
            os.umask(before)
        listening.listen(backlog)
        listening.setblocking(False)
    except BaseException as error:
        listening.close()
        if lock_descriptor is not None:
            os.close(lock_descriptor)
        if isinstance(error, OSError):
            raise Unavailable(
                f"cannot listen on {path}: {error.strerror}; {setting} says where else"
            ) from error
        raise
    return UnixListener(path, listening, lock_descriptor)


def _make_directory(directory: Path, setting: str) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise Unavailable(
            f"the directory {directory} cannot be made: {error.strerror}; {setting} says where else"
        ) from error


def _locked(path: Path, setting: str) -> int:
    lock = path.with_name(path.name + LOCK_SUFFIX)
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, LOCK_MODE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise _in_use(path, setting) from error
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_nobody_answers(path: Path, setting: str) -> None:
    """Whoever listens there without a lock is of another release, or another program."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)
        try:
            asking.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return
        except BlockingIOError as error:  # so many wait to be accepted
            raise _in_use(path, setting) from error
    raise _in_use(path, setting)


def _in_use(path: Path, setting: str) -> Unavailable:
    return Unavailable(
        f"another process listens on {path}: give this one a directory of its own ({setting}), "
        "or end the other"
    )
