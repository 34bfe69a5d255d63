"""Documents as files of the data directory, which one server alone writes.

A file is replaced whole: written beside, flushed, renamed, and the directory flushed. A crash at
any moment leaves the file as it was or as it is to be.
"""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

from objectcache_runtime.private_files import NameNotFlushed, open_at_once, replace_private
from objectcache_schemas.errors import InvalidRequest, Unavailable
from objectcache_storage_server.documents.documents import (
    DocumentKind,
    Documents,
    Kept,
    KeptDocument,
    first_version,
)
from objectcache_storage_server.engines.disk.system_errors import as_our_error, translated

FILE_BYTES_MAX = 256 << 20  # far above what any of them holds


class FileDocuments(Documents):
    """NAME.json each. Nobody else writes them, so what is expected is always so."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._version = first_version()
        self._lock = threading.Lock()

    def file(self, kind: DocumentKind) -> Path:
        """Where it lies."""
        return self._folder / f"{kind.name}.json"

    def place(self, kind: DocumentKind) -> str:
        return str(self.file(kind))

    def get(self, kind: DocumentKind) -> KeptDocument | None:
        file = self.file(kind)
        try:
            # Without waiting: whatever stands there may be no file that anybody writes to.
            with open_at_once(file) as stream:
                is_file = stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
                data = stream.read(FILE_BYTES_MAX + 1) if is_file else b""
        except FileNotFoundError:
            return None
        except OSError as error:
            raise as_our_error(error, f"reading {kind.words}", file) from error
        if not is_file or len(data) > FILE_BYTES_MAX:
            reason = f"it is over {FILE_BYTES_MAX} bytes" if is_file else "it is no ordinary file"
            raise InvalidRequest(f"{file} cannot be read as {kind.words}: {reason}; remove it")
        return KeptDocument(self._version, data)

    def put(self, kind: DocumentKind, data: bytes, expected: int | None) -> Kept:
        file = self.file(kind)
        with self._lock, translated(f"keeping {kind.words}", file):
            fault: Unavailable | None = None
            try:
                replace_private(file, data)
            except NameNotFlushed as error:
                reason = as_our_error(error, f"flushing the name of {file.name}", file)
                fault = Unavailable(
                    f"the change is in force, but a power loss may undo it: {reason}; see to the "
                    "device, then make the change or any other once more"
                )
            self._version += 1
            return Kept(self._version, fault)

    def __repr__(self) -> str:
        return f"<FileDocuments {self._folder}>"
