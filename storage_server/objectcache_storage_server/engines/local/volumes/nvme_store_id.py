"""Which namespace a store owns: its id, in a file beside the index.

Formatting takes two steps, so that a crash between them is told from a namespace that was erased:
the id is *begun* (durable under another name) before the superblock is written, and *finished*
after.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from objectcache_storage_server.engines.disk.data_folders import sync_folder
from objectcache_storage_server.engines.local.volumes.nvme_superblock import STORE_ID_BYTES

FINISHED_NAME = "nvme_store_id"
BEGUN_NAME = "nvme_store_id.begun"


class StoreId:
    """The id of the store whose index is in `folder`."""

    def __init__(self, folder: Path) -> None:
        """Raises `OSError`, and `ValueError` where the file holds no id."""
        self._finished_path = folder / FINISHED_NAME
        self._begun_path = folder / BEGUN_NAME
        finished = _read(self._finished_path)
        self.is_finished = finished is not None
        self.value = finished or _read(self._begun_path)

    def begin(self) -> bytes:
        """An id for a namespace that is about to be formatted; the one that was begun, if any."""
        if self.value is None:
            value = secrets.token_bytes(STORE_ID_BYTES)
            _write(self._begun_path, value)
            self.value = value
        return self.value

    def finish(self) -> None:
        """The namespace carries the id."""
        if not self.is_finished:
            self._begun_path.rename(self._finished_path)
            sync_folder(self._finished_path.parent)
            self.is_finished = True


def _read(path: Path) -> bytes | None:
    try:
        text = path.read_text("ascii")
    except FileNotFoundError:
        return None
    value = bytes.fromhex(text)
    if len(value) != STORE_ID_BYTES:
        raise ValueError(f"{path} holds no store id")
    return value


def _write(path: Path, value: bytes) -> None:
    """Durable, and whole or not there at all."""
    unfinished = path.with_suffix(".unfinished")
    file_descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(file_descriptor, value.hex().encode())
        os.fsync(file_descriptor)
    finally:
        os.close(file_descriptor)
    unfinished.rename(path)
    sync_folder(path.parent)
