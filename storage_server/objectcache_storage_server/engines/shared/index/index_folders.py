"""The folder of a replayed index, and when it is of no use any more.

Each index has a folder of its own, so that another can be made while readers use one. It is used
again after a restart of the server where it says that it is whole and of this boot: after a crash
of the machine pages may be lost, since nothing was flushed.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from objectcache_schemas.errors import Unavailable
from objectcache_storage_server.engines.disk.system_errors import translated
from objectcache_storage_server.engines.shared.index.index_tables import FORMAT_VERSION

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_STORE_NAME = "store"  # file with the id of the store
_WHOLE_NAME = "whole"  # file in an index's folder, with format and boot

log = logging.getLogger("objectcache.storage_server.engines.shared")


class IndexFolders:
    """The folders of one server's index. `boot_id` is of this run of the machine."""

    def __init__(self, folder: Path, boot_id: str | None = None) -> None:
        with translated("open the index", folder):
            self._boot_id = boot_id or _BOOT_ID.read_text().strip()
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder

    def check_store(self, store_id: bytes) -> None:
        """Raise `Unavailable` where another store's index is in it."""
        with translated("open the index", self._folder):
            path = self._folder / _STORE_NAME
            if not path.exists():
                _write(path, store_id.hex())
                return
            found = path.read_text()
        if found != store_id.hex():
            raise Unavailable(
                f"the data directory belongs to the shared store {found}, and this is the store "
                f"{store_id.hex()}: give the server a data directory of its own (server.data_dir), "
                f"or remove {self._folder} to use this one"
            )

    def find(self) -> Path | None:
        """The newest whole index of this boot; what else there is goes."""
        found: Path | None = None
        for path in sorted(self._each(), reverse=True):
            if found is None and self._is_whole(path):
                found = path
            else:
                self.discard(path)
        return found

    def create(self) -> Path:
        """An empty folder for an index, which is not whole yet."""
        newest = max((int(path.name, 16) for path in self._each()), default=-1)
        path = self._folder / f"{newest + 1:08x}"
        with translated("make an index", path):
            path.mkdir(mode=0o700)
        return path

    def set_whole(self, path: Path) -> None:
        """From now on it may be used after a restart."""
        with translated("make an index", path):
            _write(path / _WHOLE_NAME, self._mark)

    def discard(self, path: Path) -> None:
        """Remove an index that nobody has open."""
        try:
            path.joinpath(_WHOLE_NAME).unlink(missing_ok=True)
            shutil.rmtree(path)
        except OSError as error:
            log.warning("could not remove the old index %s: %s", path, error)

    @property
    def _mark(self) -> str:
        return f"{FORMAT_VERSION} {self._boot_id}"

    def _each(self) -> list[Path]:
        with translated("open the index", self._folder):
            return [path for path in self._folder.iterdir() if path.is_dir()]

    def _is_whole(self, path: Path) -> bool:
        with translated("open the index", path):
            mark = path / _WHOLE_NAME
            return mark.exists() and mark.read_text() == self._mark


def _write(path: Path, text: str) -> None:
    """A file that nobody else reads. Raises `OSError`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w", encoding="ascii") as stream:
        stream.write(text)
