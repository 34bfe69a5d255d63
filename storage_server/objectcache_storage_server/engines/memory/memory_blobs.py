"""A blob store in this process's memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from concurrent.futures import Future

from objectcache_storage_server.engines.blobs.blob_store import (
    DONE,
    BlobCapabilities,
    BlobRead,
    BlobStore,
    LostBlob,
    OpenBlob,
    failed,
)


class _OpenBytes(OpenBlob):
    __slots__ = ("data",)

    def __init__(self, number: int, data: bytearray) -> None:
        super().__init__(number)
        self.data = data


class MemoryBlobStore(BlobStore):
    """A byte array a blob. Who has one open keeps it alive."""

    capabilities = BlobCapabilities(is_verified=True)

    def __init__(self) -> None:
        self._blobs: dict[int, bytearray] = {}
        self._numbers = itertools.count(1)

    def create(self, deadline_s: float) -> int:
        number = next(self._numbers)
        self._blobs[number] = bytearray()
        return number

    def write(self, number: int, offset_bytes: int, data: memoryview, deadline_s: float) -> None:
        blob = self._blobs[number]
        missing_bytes = offset_bytes - len(blob)
        if missing_bytes > 0:
            blob += bytes(missing_bytes)
        blob[offset_bytes : offset_bytes + len(data)] = data

    def flush(self, numbers: Sequence[int], deadline_s: float) -> None:
        """Nothing outlives this process."""

    def delete(self, numbers: Iterable[int], deadline_s: float) -> None:
        for number in numbers:
            self._blobs.pop(number, None)

    def open(self, number: int) -> OpenBlob:
        data = self._blobs.get(number)
        if data is None:
            raise LostBlob(OpenBlob(number), "its blob is missing")
        return _OpenBytes(number, data)

    def release(self, blobs: Iterable[OpenBlob]) -> None:
        """The garbage collector does it."""

    def begin_reads(self, reads: Sequence[BlobRead], deadline_s: float) -> Future[None]:
        for blob, offset_bytes, landing in reads:
            assert isinstance(blob, _OpenBytes)
            found = memoryview(blob.data)[offset_bytes : offset_bytes + len(landing)]
            if len(found) < len(landing):
                return failed(LostBlob(blob, f"it ends at byte {len(blob.data)}"))
            landing[:] = found
        return DONE

    def sizes(self) -> dict[int, int]:
        return {number: len(data) for number, data in self._blobs.items()}

    def close(self) -> None:
        self._blobs = {}
