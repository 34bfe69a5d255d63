"""Compute profiles as files of a directory, read once and again when they change."""

from __future__ import annotations

import logging
import os
import re
import stat
import threading
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.limits import KIB
from objectcache_storage_server.scheduling.windows.compute_profile import (
    ComputeProfile,
    parse_profile,
)

FILE_BYTES_MAX = 512 * KIB
PROFILES_MAX = 256  # that are kept; the least recently used one is read again
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

logger = logging.getLogger("objectcache.storage_server.compute_profiles")


class _Version(NamedTuple):
    """What tells one content of a file from another."""

    modified_ns: int
    size_bytes: int
    inode: int


class ProfileFiles:
    """Profiles by name: NAME.csv in the directory, which need not exist. Thread-safe."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._profiles: OrderedDict[str, tuple[_Version, ComputeProfile | None]] = OrderedDict()
        self._lock = threading.Lock()

    def path(self, name: str) -> Path:
        """Where the profile of this name is."""
        return self.directory / f"{name}.csv"

    def find(self, name: str) -> ComputeProfile | None:
        """The profile of this name; None where there is none, or where its file is broken, which
        is logged once. Any text may be asked for. Blocks on the file system.
        """
        if not _NAME.fullmatch(name):
            return None
        try:
            status = os.stat(f"{self.directory}/{name}.csv")  # each get asks; a Path costs more
        except OSError:
            return None
        version = _Version(status.st_mtime_ns, status.st_size, status.st_ino)
        with self._lock:
            known = self._profiles.get(name)
            if known is None or known[0] != version:
                known = version, self._load(name, status)
            self._keep(name, known)
            return known[1]

    def _keep(self, name: str, known: tuple[_Version, ComputeProfile | None]) -> None:
        self._profiles[name] = known
        self._profiles.move_to_end(name)
        while len(self._profiles) > PROFILES_MAX:
            self._profiles.popitem(last=False)

    def _load(self, name: str, status: os.stat_result) -> ComputeProfile | None:
        path = self.path(name)
        try:
            if not stat.S_ISREG(status.st_mode):
                raise InvalidRequest("it is no ordinary file")
            if status.st_size > FILE_BYTES_MAX:
                raise InvalidRequest(f"it holds {status.st_size} bytes, at most {FILE_BYTES_MAX}")
            profile = parse_profile(path.read_text("utf-8-sig"))
        except (InvalidRequest, OSError, ValueError) as error:
            logger.error("compute profile %s is not used: %s", path, error)
            return None
        logger.info("compute profile %s: %r", path, profile)
        return profile

    def __repr__(self) -> str:
        return f"<ProfileFiles {len(self._profiles)} of {self.directory}>"
