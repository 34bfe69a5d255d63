"""A volume in preallocated files, with both paths: the page cache, and past it.

Rules. A file has its name only when it has its whole length: it is allocated under another name,
flushed and renamed. What that length is was settled when the folder was made (`segment_bytes` in
it), since every address follows from it, so a file of another length is damaged: it is given its
length again, and checksums find what is gone. Each is open twice, once for each path. Space within
a file is never given back (`discard` does nothing): it will be written again, and a hole costs an
allocation then (measured for 896 MiB: 0.13 s to punch, and 0.49 s instead of 0.32 s to write and
flush) that could meet a full device.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import mmap
import os
import re
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from objectcache_schemas.errors import Unavailable
from objectcache_schemas.limits import MIB
from objectcache_storage_server.engines.disk.data_folders import sync_folder
from objectcache_storage_server.engines.local.direct.alignment import (
    Alignment,
    split_at,
)
from objectcache_storage_server.engines.local.direct.batches import (
    Bounce,
    ReadBatch,
    Submitter,
    WriteBatch,
)
from objectcache_storage_server.engines.local.direct.cached_pages import (
    read_resident,
    resident_pages,
)
from objectcache_storage_server.engines.local.direct.in_flight import lock_when_idle
from objectcache_storage_server.engines.local.direct.kernel_facts import (
    direct_alignment,
    piece_bytes_max,
    read_ahead,
)
from objectcache_storage_server.engines.local.direct.threads import (
    ThreadSubmitter,
    read_whole,
)
from objectcache_storage_server.engines.local.direct.uring import UringSubmitter
from objectcache_storage_server.engines.local.volumes.joined_writes import (
    CachedWrites,
    DirectWrites,
)
from objectcache_storage_server.engines.local.volumes.volume import (
    BLOCK_BYTES,
    IoPath,
    Transfer,
    Volume,
)

SEGMENT_UNIT_BYTES = 4 * MIB  # files are made of whole ones
FLUSH_THREADS = 8  # a device takes several flushes at once
MORE_SPACE = "add space to the file system of server.data_dir"
_NAME = re.compile(r"\d{6,}")
_UNFINISHED = ".unfinished"
_SEGMENT_BYTES = "segment_bytes"
_HOW_TO_MEND_IT = "write the length in bytes of the data files beside it into it"
_READ_WRITE = os.O_RDWR | os.O_CLOEXEC


log = logging.getLogger("objectcache.storage_server.engines.local.data_files")


class _DataFile(NamedTuple):
    """One segment's file descriptors."""

    buffered: int
    direct: int  # -1 where the volume has no direct path

    def close(self) -> None:
        os.close(self.buffered)
        if self.direct >= 0:
            os.close(self.direct)


class DataFiles(Volume):
    """Files `000000`, `000001`, ... of `segment_bytes` in a folder."""

    gives_segments_back = True
    joins_writes = True

    def __init__(
        self,
        folder: Path,
        segment_bytes: int,
        capacity_bytes: int,
        reserve_bytes: int,
        direct_io: str = "auto",
        depth: int = 32,
    ) -> None:
        """Open the folder, made where it is missing, and the files in it.

        `segment_bytes` counts when the folder is made; after that, what was settled then.
        `capacity_bytes` bounds what the files take, 0: what the file system has; `reserve_bytes` of
        that stay free. `direct_io` is auto, io_uring or threads; `depth` bounds what one thread has
        in flight. Where the file system has no direct path, `paths` has the page cache only, and a
        transfer on the other fails an assertion.

        Raises `Unavailable` where the files and what was settled of their length contradict each
        other, and `OSError`: EINVAL where `direct_io` is io_uring and the kernel does not allow it.
        """
        assert segment_bytes > 0
        assert segment_bytes % BLOCK_BYTES == 0
        self._folder = folder
        self._capacity_bytes = capacity_bytes
        self._reserve_bytes = reserve_bytes
        self._changing = threading.Lock()  # of the set of files
        self._local = threading.local()  # bounce buffers
        _make_folder(folder)
        self.segment_bytes = _settled_segment_bytes(folder, segment_bytes)
        self._alignment = _probe_alignment(folder)
        self._submitter: Submitter | None = None
        self.paths = frozenset({IoPath.PAGE_CACHE})
        self.device_path = "none: the file system has no direct path"
        self.cache_path = "that of the file system"
        if self._alignment is not None:
            self._submitter = _open_submitter(direct_io, depth)
            self.paths = frozenset(IoPath)
            self.device_path = self._submitter.description
        self._files: dict[int, _DataFile] = {}
        self._flush_pool = ThreadPoolExecutor(FLUSH_THREADS, "objectcache-flush")
        self._is_closed = False
        self._piece_bytes_max = piece_bytes_max(folder)
        try:
            self._open_files()
        except OSError:
            self.close()
            raise

    def __repr__(self) -> str:
        return (
            f"<DataFiles {len(self._files)} of {self.segment_bytes} bytes, "
            f"direct path: {self.device_path}>"
        )

    # --- space ---

    def segments(self) -> Sequence[int]:
        return sorted(self._files)

    def extend(self) -> int:
        with self._changing:
            self._check_open()
            if self.room_bytes() < self.segment_bytes:
                raise OSError(errno.ENOSPC, "no room for another data file")
            segment = next(number for number in itertools.count() if number not in self._files)
            self._create(segment)
            try:
                self._files[segment] = self._open_file(segment)
            except OSError:
                self._path(segment).unlink()
                raise
            return segment

    def remove(self, segment: int) -> None:
        with self._changing:
            self._check_open()
            self._path(segment).unlink()
            self._files.pop(segment).close()

    def room_bytes(self) -> int:
        room_bytes = min(self._system_room_bytes(), self._setting_room_bytes())
        return max(0, room_bytes - room_bytes % self.segment_bytes)

    def growth_remedy(self) -> str:
        if self._setting_room_bytes() <= self._system_room_bytes():
            return "raise storage.capacity_bytes"
        return f"{MORE_SPACE}, or lower storage.capacity_reserve_bytes"

    def _system_room_bytes(self) -> int:
        """What the file system has for more files."""
        system = os.statvfs(self._folder)
        return system.f_bavail * system.f_frsize - self._reserve_bytes

    def _setting_room_bytes(self) -> int:
        """What storage.capacity_bytes leaves to more files."""
        if not self._capacity_bytes:
            return sys.maxsize
        return self._capacity_bytes - len(self._files) * self.segment_bytes

    # --- bytes ---

    def read(self, transfers: Sequence[Transfer], path: IoPath) -> int:
        if path is IoPath.PAGE_CACHE:
            located = self._located(transfers)
            return sum(
                _read_cached(file.buffered, offset, memory) for file, offset, memory in located
            )
        batch = ReadBatch(*self._direct_parts())
        for file, offset, memory in self._located(transfers):
            batch.add(file.direct, offset, memory)
        batch.run()
        return 0

    def read_resident(self, transfer: Transfer) -> bool:
        segment, begin = divmod(transfer.offset_bytes, self.segment_bytes)
        memory, file = transfer.memory, self._files.get(segment)
        length_bytes = len(memory)
        if file is not None and begin + length_bytes <= self.segment_bytes:  # as nearly all are
            return read_resident(file.buffered, begin, memory) == length_bytes
        return all(
            read_resident(file.buffered, offset, part) == len(part)
            for file, offset, part in self._located((transfer,))
        )

    def cached_bytes(self, offset_bytes: int, length_bytes: int) -> int | None:
        pages = 0
        for offset, length in split_at(offset_bytes, length_bytes, self.segment_bytes):
            segment, begin = divmod(offset, self.segment_bytes)
            try:
                pages += resident_pages(self._file(segment).buffered, begin, length)
            except OSError:  # Linux before 6.5, or forbidden
                return None
        return pages * mmap.PAGESIZE

    def prefetch(self, offset_bytes: int, length_bytes: int) -> None:
        for offset, length in split_at(offset_bytes, length_bytes, self.segment_bytes):
            segment, begin = divmod(offset, self.segment_bytes)
            with contextlib.suppress(OSError):  # the file may be gone since the range was read
                file = self._file(segment)
                read_ahead(file.buffered, begin, length, self._piece_bytes_max)
                os.pread(file.buffered, 1, begin + length - 1)  # waits for the last of it

    def write(self, transfers: Sequence[Transfer], path: IoPath) -> None:
        if path is IoPath.PAGE_CACHE:
            writes = CachedWrites()
            for file, offset, memory in self._located(transfers):
                writes.add(file.buffered, offset, memory)
            writes.run()
            return
        parts = self._direct_parts()
        direct_writes = DirectWrites(WriteBatch(*parts), parts[1])
        for file, offset, memory in self._located(transfers):
            direct_writes.add(file.direct, offset, memory)
        direct_writes.run()

    def flush(self, ranges: Sequence[tuple[int, int]]) -> None:
        touched = {
            offset // self.segment_bytes
            for begin, length in ranges
            for offset, _ in split_at(begin, length, self.segment_bytes)
        }
        file_descriptors = [self._file(segment).buffered for segment in sorted(touched)]
        if len(file_descriptors) == 1:
            os.fdatasync(file_descriptors[0])
            return
        for _ in self._flush_pool.map(os.fdatasync, file_descriptors):
            pass

    def drop_cache(self, offset_bytes: int, length_bytes: int) -> None:
        for offset, length in split_at(offset_bytes, length_bytes, self.segment_bytes):
            segment, begin = divmod(offset, self.segment_bytes)
            os.posix_fadvise(self._file(segment).buffered, begin, length, os.POSIX_FADV_DONTNEED)

    def discard(self, offset_bytes: int, length_bytes: int) -> None:
        """Nothing: see the head of this module."""

    def close(self) -> None:
        with self._changing:
            self._is_closed = True
            files, self._files = self._files, {}
        self._flush_pool.shutdown()
        if self._submitter is not None:
            self._submitter.close()
        self._local = threading.local()
        for file in files.values():
            file.close()

    def _located(
        self, transfers: Iterable[Transfer]
    ) -> Iterator[tuple[_DataFile, int, memoryview]]:
        """Each transfer's file, its offset there, and its memory; empty ones are left out."""
        for offset_bytes, memory in transfers:
            segment, begin = divmod(offset_bytes, self.segment_bytes)
            if 0 < len(memory) <= self.segment_bytes - begin:  # as all that lie in one extent
                yield self._file(segment), begin, memory
                continue
            done = 0
            for offset, length in split_at(offset_bytes, len(memory), self.segment_bytes):
                segment, begin = divmod(offset, self.segment_bytes)
                yield self._file(segment), begin, memory[done : done + length]
                done += length

    def _direct_parts(self) -> tuple[Submitter, Alignment, Bounce, int]:
        assert self._submitter is not None, "this volume has no direct path"
        assert self._alignment is not None, "this volume has no direct path"
        bounce: Bounce | None = getattr(self._local, "bounce", None)
        if bounce is None:
            bounce = self._local.bounce = Bounce()
        bounce.used_bytes = 0
        return self._submitter, self._alignment, bounce, self._piece_bytes_max

    # --- files ---

    def _file(self, segment: int) -> _DataFile:
        try:
            return self._files[segment]
        except KeyError:
            self._check_open()
            raise OSError(errno.EIO, f"the volume has no data file {segment}") from None

    def _check_open(self) -> None:
        if self._is_closed:
            raise OSError(errno.EBADF, "the volume is closed")

    def _path(self, segment: int) -> Path:
        return self._folder / f"{segment:06d}"

    def _create(self, segment: int) -> None:
        """A file of the whole length, durable, or none; raises `OSError`."""
        unfinished = self._folder / f"{segment:06d}{_UNFINISHED}"
        try:
            _allocate(unfinished, self.segment_bytes)
            unfinished.rename(self._path(segment))
            sync_folder(self._folder)
        except OSError:
            unfinished.unlink(missing_ok=True)
            self._path(segment).unlink(missing_ok=True)
            raise

    def _open_files(self) -> None:
        for path in sorted(self._folder.iterdir()):
            if path.name.endswith(_UNFINISHED):
                path.unlink()
            elif _NAME.fullmatch(path.name):
                self._mend_length(path)
                self._files[int(path.name)] = self._open_file(int(path.name))

    def _mend_length(self, path: Path) -> None:
        length_bytes = path.stat().st_size
        if length_bytes != self.segment_bytes:
            log.error(
                "data file %s has %d bytes in place of %d: what is gone will read as missing",
                path,
                length_bytes,
                self.segment_bytes,
            )
            os.truncate(path, self.segment_bytes)

    def _open_file(self, segment: int) -> _DataFile:
        path = self._path(segment)
        buffered = os.open(path, _READ_WRITE)
        if IoPath.DIRECT not in self.paths:
            return _DataFile(buffered, -1)
        # What is not in memory is read directly, so reading ahead would read it twice.
        os.posix_fadvise(buffered, 0, 0, os.POSIX_FADV_RANDOM)
        try:
            return _DataFile(buffered, _open_locked(path))
        except OSError:
            os.close(buffered)
            raise


def _open_locked(path: Path) -> int:
    direct = os.open(path, _READ_WRITE | os.O_DIRECT)
    try:
        lock_when_idle(direct)
    except OSError:
        os.close(direct)
        raise
    return direct


def _settled_segment_bytes(folder: Path, segment_bytes: int) -> int:
    """The length of this folder's files; `segment_bytes` where none is settled yet."""
    path = folder / _SEGMENT_BYTES
    lengths = {file.stat().st_size for file in folder.iterdir() if _NAME.fullmatch(file.name)}
    if not path.exists():
        if lengths:
            raise Unavailable(f"{path} is gone; {_HOW_TO_MEND_IT}")
        unfinished = path.with_suffix(_UNFINISHED)
        with open(unfinished, "w", encoding="ascii", opener=_open_private) as file:
            file.write(f"{segment_bytes}\n")
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)
        sync_folder(folder)
    text = path.read_text("ascii", errors="replace").strip()
    if not text.isdecimal() or int(text) == 0 or int(text) % BLOCK_BYTES:
        raise Unavailable(f"{path} holds {text[:20]!r}; {_HOW_TO_MEND_IT}")
    settled_bytes = int(text)
    # A file may have been cut short; a length that files are made with is what this one should say.
    others = {length for length in lengths if length and length % SEGMENT_UNIT_BYTES == 0}
    if max(lengths, default=0) > settled_bytes or (others and settled_bytes not in others):
        raise Unavailable(f"{path} says {text}, no data file has that length; {_HOW_TO_MEND_IT}")
    return settled_bytes


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        folder.mkdir(mode=0o700)
        sync_folder(folder.parent)


def _allocate(path: Path, length_bytes: int) -> None:
    file_descriptor = os.open(path, _READ_WRITE | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(file_descriptor, 0, length_bytes)
        os.fsync(file_descriptor)
    finally:
        os.close(file_descriptor)


def _probe_alignment(folder: Path) -> Alignment | None:
    """What the direct path asks of files in this folder; None where they have none that can write
    single blocks.
    """
    probe = folder / f"probe{_UNFINISHED}"
    probe.unlink(missing_ok=True)
    try:
        file_descriptor = os.open(probe, _READ_WRITE | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
    except OSError as error:
        probe.unlink(missing_ok=True)
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return None
    try:
        alignment = direct_alignment(file_descriptor)
    finally:
        os.close(file_descriptor)
        probe.unlink()
    if alignment is None or alignment.offset_bytes > BLOCK_BYTES:
        return None
    return alignment


def _open_submitter(direct_io: str, depth: int) -> Submitter:
    if direct_io == "threads":
        return ThreadSubmitter(depth, "as storage.direct_io says")
    try:
        return UringSubmitter(depth)
    except OSError as error:
        if direct_io == "io_uring":
            raise
        name = errno.errorcode.get(error.errno or 0, "unknown error")
        return ThreadSubmitter(depth, f"io_uring is not allowed here ({name})")


def _read_cached(file_descriptor: int, offset_bytes: int, memory: memoryview) -> int:
    """Fill `memory` through the page cache; returns how many bytes from its begin on were there."""
    found_bytes = read_resident(file_descriptor, offset_bytes, memory)
    if found_bytes < len(memory):
        read_whole(file_descriptor, offset_bytes + found_bytes, memory[found_bytes:])
    return found_bytes
