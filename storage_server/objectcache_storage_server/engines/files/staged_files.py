"""Object files being written by the files engine."""

from __future__ import annotations

import contextlib
import os
from array import array
from collections.abc import Callable

from objectcache_storage_server.engines.base import Staged
from objectcache_storage_server.engines.block_checksums import (
    block_checksums,
    block_count,
    stored_block_bytes,
)
from objectcache_storage_server.engines.files.object_files import ObjectFiles
from objectcache_storage_server.engines.system_errors import translated


class FilesStaged(Staged):
    """An object file that no index row names yet; checksums are taken as bytes arrive."""

    def __init__(
        self,
        files: ObjectFiles,
        bucket: str,
        key: str,
        checksum_block_bytes: int,
        on_end: Callable[[FilesStaged], None],
    ) -> None:
        """Create the file; raises `OSError`. `on_end` is called once, when the file is closed."""
        self.bucket = bucket
        self.key = key
        self.checksum_block_bytes = checksum_block_bytes
        self.block_bytes = stored_block_bytes(checksum_block_bytes)
        self.object_id, self.file_descriptor = files.create()
        self._files = files
        self._on_end = on_end
        self._checksums = array("Q")
        self._written_bytes = 0
        self._end_bytes = 0
        self._is_open = True

    def write_at(self, offset_bytes: int, data: memoryview) -> None:
        assert self._is_open, "written to after its end"
        assert offset_bytes % self.checksum_block_bytes == 0, offset_bytes
        if not data:
            return
        end_bytes = offset_bytes + len(data)
        self._grow(end_bytes)
        first = offset_bytes // self.block_bytes
        checksums = array("Q", block_checksums(data, self.block_bytes))
        self._checksums[first : first + len(checksums)] = checksums
        with translated("write an object", self._files.path(self.object_id)):
            self._write(offset_bytes, data)
        self._written_bytes += len(data)

    def discard(self) -> None:
        if self._is_open:
            with contextlib.suppress(OSError):  # the next start removes what no row names
                self._files.remove(self.object_id)
            self.release()

    def release(self) -> None:
        """Close the file and leave it to the index."""
        if self._is_open:
            self._is_open = False
            os.close(self.file_descriptor)
            self._on_end(self)

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole object; asserts that each was written, once."""
        assert self._written_bytes == self._end_bytes, f"{self.key!r} is torn"
        return self._end_bytes

    @property
    def checksums(self) -> array[int]:
        """xxh3_64 of each block."""
        return self._checksums

    def _grow(self, end_bytes: int) -> None:
        if end_bytes > self._end_bytes:
            assert self._end_bytes % self.block_bytes == 0, f"{self.key!r} has ended before"
            self._end_bytes = end_bytes
            more = block_count(end_bytes, self.block_bytes) - len(self._checksums)
            self._checksums.frombytes(bytes(more * self._checksums.itemsize))

    def _write(self, offset_bytes: int, data: memoryview) -> None:
        while data:
            written_bytes = os.pwrite(self.file_descriptor, data, offset_bytes)
            offset_bytes += written_bytes
            data = data[written_bytes:]
