"""Space held back on the device, so that a full one can still be told to delete."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_MODE = 0o600


class SpaceReserve:
    """A file that holds space back, to be given up when the device is full."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._path = path
        self._size_bytes = size_bytes
        self._is_held = False
        self.take()

    def take(self) -> None:
        """Hold the space, where there is room for it."""
        if self._is_held:
            return
        try:
            with open(self._path, "wb", opener=_open_private) as file:
                os.fchmod(file.fileno(), _MODE)  # of one that was made with another
                os.posix_fallocate(file.fileno(), 0, self._size_bytes)
            self._is_held = True
        except OSError:
            self.release()

    def release(self) -> None:
        """Give the space back to the device."""
        with contextlib.suppress(OSError):
            os.truncate(self._path, 0)
        self._is_held = False


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, _MODE)
