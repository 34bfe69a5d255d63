"""Open object files: verified reads, and the cache that keeps files open for the next read.

A file is pinned while somebody reads it and while the cache holds it; its descriptor is closed when
the last pin goes, so neither eviction nor deletion can close it under a reader.

Rules of the cache. It holds only versions that the index holds. Whoever replaces or deletes
versions does so inside `changing`; meanwhile the cache answers nothing and takes nothing in, and
afterwards an `epoch` from before no longer counts, so a reader that looked up an old version cannot
put it back.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from array import array
from collections import OrderedDict
from collections.abc import Generator, Iterable, Sequence

import xxhash

from objectcache_schemas.limits import KIB
from objectcache_storage_server.engines.block_checksums import BlockHasher, block_checksum
from objectcache_storage_server.engines.files.index_records import Version

# Read, then hashed while still in the processor's cache; also the bound on a bounce buffer.
PIECE_BYTES = 256 * KIB


class FileDamage(Exception):
    """The file's bytes are not those that were stored."""


class OpenFile:
    """One object version, open for reading."""

    __slots__ = ("block_bytes", "checksums", "file_descriptor", "pins", "size_bytes", "version")

    def __init__(self, path: str, version: Version) -> None:
        """Open `path`, pinned once; raises `OSError`."""
        self.file_descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.version = version
        self.size_bytes = version.info.size_bytes
        self.block_bytes = version.block_bytes
        self.checksums: array[int] = version.checksums
        self.pins = 1

    def read(self, offset_bytes: int, target: memoryview) -> None:
        """Fill `target` (of bytes) from `offset_bytes` on: whole blocks in place, what is left of
        them at either end through memory of our own.

        Raises `FileDamage`, or `OSError`; the target's content is then undefined.
        """
        end_bytes = offset_bytes + len(target)
        assert 0 <= offset_bytes <= end_bytes <= self.size_bytes
        whole_begin = min(end_bytes, offset_bytes + -offset_bytes % self.block_bytes)
        whole_end = end_bytes
        if end_bytes != self.size_bytes:
            whole_end = max(whole_begin, end_bytes - end_bytes % self.block_bytes)
        head_bytes, whole_bytes = whole_begin - offset_bytes, whole_end - offset_bytes
        self._read_part(offset_bytes, target[:head_bytes])
        self._read_whole(whole_begin, target[head_bytes:whole_bytes])
        self._read_part(whole_end, target[whole_bytes:])

    def verify_and_hash(self, block_bytes: int) -> array[int]:
        """Checksums of the object's blocks of another size, from bytes that match their own.

        Raises `FileDamage`, or `OSError`.
        """
        own, other = BlockHasher(self.block_bytes), BlockHasher(block_bytes)
        piece = memoryview(bytearray(min(PIECE_BYTES, self.size_bytes)))
        for offset_bytes in range(0, self.size_bytes, PIECE_BYTES):
            part = piece[: self.size_bytes - offset_bytes]
            self._fill(offset_bytes, part)
            own.update(part)
            other.update(part)
        if own.finish() != self.checksums:
            raise FileDamage("a block does not match its checksum")
        return other.finish()

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.file_descriptor)

    def _read_whole(self, offset_bytes: int, target: memoryview) -> None:
        block_bytes = self.block_bytes
        piece_bytes = max(block_bytes, PIECE_BYTES - PIECE_BYTES % block_bytes)
        for begin in range(0, len(target), piece_bytes):
            piece = target[begin : begin + piece_bytes]
            self._fill(offset_bytes + begin, piece)
            first = (offset_bytes + begin) // block_bytes
            for index, start in enumerate(range(0, len(piece), block_bytes), first):
                self._check(index, block_checksum(piece[start : start + block_bytes]))

    def _read_part(self, offset_bytes: int, target: memoryview) -> None:
        """Fill `target` from inside of one block, all of which is read and checked."""
        if not target:
            return
        index = offset_bytes // self.block_bytes
        begin = index * self.block_bytes
        end = min(begin + self.block_bytes, self.size_bytes)
        bounce = memoryview(bytearray(min(PIECE_BYTES, end - begin)))
        hasher = xxhash.xxh3_64()
        for position in range(begin, end, len(bounce)):
            piece = bounce[: end - position]
            self._fill(position, piece)
            hasher.update(piece)
            low = max(position, offset_bytes)
            high = min(position + len(piece), offset_bytes + len(target))
            if low < high:
                wanted = piece[low - position : high - position]
                target[low - offset_bytes : high - offset_bytes] = wanted
        self._check(index, hasher.intdigest())

    def _check(self, index: int, checksum: int) -> None:
        if checksum != self.checksums[index]:
            raise FileDamage(f"block {index} does not match its checksum")

    def _fill(self, offset_bytes: int, target: memoryview) -> None:
        filled = 0
        while filled < len(target):
            position = offset_bytes + filled
            try:
                read_bytes = os.preadv(self.file_descriptor, (target[filled:],), position)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                raise FileDamage(f"the device cannot read it at byte {position}") from error
            if read_bytes == 0:
                raise FileDamage(f"it ends at byte {position} of {self.size_bytes}")
            filled += read_bytes


class OpenFileCache:
    """The files read last, kept open; safe to use from any thread."""

    def __init__(self, files_max: int) -> None:
        self._files_max = files_max
        self._lock = threading.Lock()
        self._files: OrderedDict[tuple[int, str], OpenFile] = OrderedDict()  # oldest use first
        self._epoch = 0
        self._changes = 0  # in progress

    def __repr__(self) -> str:
        return f"<OpenFileCache {len(self._files)}/{self._files_max} files>"

    def __len__(self) -> int:
        return len(self._files)

    def pin(self, bucket_number: int, keys: Sequence[str]) -> tuple[int, dict[str, OpenFile]]:
        """Pin what is cached of `keys`; returns it by key, and the epoch it belongs to."""
        pinned: dict[str, OpenFile] = {}
        with self._lock:
            if self._changes:
                return self._epoch, pinned
            files = self._files
            for key in keys:
                file = files.get((bucket_number, key))
                if file is not None and key not in pinned:
                    files.move_to_end((bucket_number, key))
                    file.pins += 1
                    pinned[key] = file
            return self._epoch, pinned

    def is_current(self, epoch: int) -> bool:
        """Whether no version was replaced or deleted since `epoch`, nor is just now."""
        with self._lock:
            return epoch == self._epoch and not self._changes

    def add(self, files: Iterable[OpenFile], epoch: int) -> None:
        """Keep files that were looked up in the index during `epoch`, if that has not ended."""
        with self._lock:
            if epoch != self._epoch or self._changes:
                return
            for file in files:
                version = file.version
                cached = self._files.setdefault((version.bucket_number, version.info.key), file)
                if cached is file:
                    file.pins += 1
            over = max(0, len(self._files) - self._files_max)
            unused = self._released([self._files.popitem(last=False)[1] for _ in range(over)])
        _close(unused)

    def unpin(self, files: Iterable[OpenFile]) -> None:
        """Give back pins; the last one closes the file."""
        with self._lock:
            unused = self._released(files)
        _close(unused)

    @contextlib.contextmanager
    def changing(self, bucket_number: int, keys: Iterable[str]) -> Generator[None, None, None]:
        """Versions under `keys` are replaced or deleted in the body."""
        with self._lock:
            self._changes += 1
            self._epoch += 1
        try:
            yield
        finally:
            with self._lock:
                gone = (self._files.pop((bucket_number, key), None) for key in keys)
                unused = self._released(file for file in gone if file is not None)
                self._changes -= 1
                self._epoch += 1
            _close(unused)

    def clear(self) -> None:
        """Let all files go that nobody reads."""
        with self._lock:
            unused = self._released(self._files.values())
            self._files.clear()
        _close(unused)

    @staticmethod
    def _released(files: Iterable[OpenFile]) -> list[OpenFile]:
        unused: list[OpenFile] = []
        for file in files:
            file.pins -= 1
            if file.pins == 0:
                unused.append(file)
        return unused


def _close(files: Iterable[OpenFile]) -> None:
    for file in files:
        file.close()
