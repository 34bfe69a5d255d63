"""The kernel's block device of an NVMe namespace: /dev/nvme<controller>n<namespace>.

It is open three times, because the kernel says of a failed write-back once to each opening: what
`write_back` is told must not be kept from `flush`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Generator
from pathlib import Path

from objectcache_schemas.limits import MIB
from objectcache_storage_server.engines.local.direct.alignment import split_at
from objectcache_storage_server.engines.local.direct.block_device import BlockDevice
from objectcache_storage_server.engines.local.direct.cached_pages import (
    find_dropper,
    read_resident,
)
from objectcache_storage_server.engines.local.direct.kernel_facts import (
    read_ahead,
    start_write_back,
    wait_for_write_back,
)
from objectcache_storage_server.engines.local.direct.nvme.nvme_kernel import (
    IOCTL_ID,
    block_name,
    generic_name,
)
from objectcache_storage_server.engines.local.direct.threads import read_whole, write_whole
from objectcache_storage_server.engines.local.volumes.volume import BLOCK_BYTES

WRITE_BYTES = 1 * MIB  # after which the device is given something to do
BLOCK_DEVICES = Path("/sys/dev/block")


class UnsuitableBlockDevice(Exception):
    """A namespace has no page cache here; the message names the device, and says why."""


class KernelBlockDevice(BlockDevice):
    """The page cache of the namespace behind a character device."""

    def __init__(self, path: Path, generic_path: Path) -> None:
        """`generic_path` is the character device. Raises `UnsuitableBlockDevice`."""
        self.name = str(path)
        if mmap.PAGESIZE != BLOCK_BYTES:  # a page would hold parts of two extents
            raise UnsuitableBlockDevice(
                f"this system's pages have {mmap.PAGESIZE} bytes, extents lie in blocks of "
                f"{BLOCK_BYTES}"
            )
        self._descriptors = contextlib.ExitStack()
        with contextlib.ExitStack() as undo, _explained(path):
            undo.callback(self._descriptors.close)
            check_names(path, generic_path)
            self._file_descriptor = self._open(path)
            self._flushed = self._open(path)
            self._written_back = self._open(path)
            _check_same_namespace(self._file_descriptor, path, generic_path)
            # What is not in memory is read past the cache, so reading ahead would read it twice.
            os.posix_fadvise(self._file_descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            try:
                how, self._drop = find_dropper(self._file_descriptor)
            except OSError as error:
                raise UnsuitableBlockDevice(
                    f"{path}: neither cachestat nor mincore says what is cached ({error.strerror})"
                ) from error
            self.description = f"{path}, pages known by {how}"
            undo.pop_all()

    def __repr__(self) -> str:
        return f"<KernelBlockDevice {self.description}>"

    def read(self, offset_bytes: int, memory: memoryview) -> None:
        read_whole(self._file_descriptor, offset_bytes, memory)

    def read_resident(self, offset_bytes: int, memory: memoryview) -> int:
        return read_resident(self._file_descriptor, offset_bytes, memory)

    def prefetch(self, offset_bytes: int, length_bytes: int) -> None:
        with contextlib.suppress(OSError):
            read_ahead(self._file_descriptor, offset_bytes, length_bytes)

    def write(self, offset_bytes: int, memory: memoryview) -> None:
        for begin, length in split_at(0, len(memory), WRITE_BYTES):
            write_whole(self._file_descriptor, offset_bytes + begin, memory[begin:][:length])
            start_write_back(self._file_descriptor, offset_bytes + begin, length)

    def write_back(self, offset_bytes: int, length_bytes: int) -> None:
        wait_for_write_back(self._written_back, offset_bytes, length_bytes)

    def flush(self) -> None:
        os.fdatasync(self._flushed)

    def forget(self, offset_bytes: int, length_bytes: int) -> None:
        with contextlib.suppress(OSError):
            os.posix_fadvise(
                self._file_descriptor, offset_bytes, length_bytes, os.POSIX_FADV_DONTNEED
            )

    def drop(self, offset_bytes: int, length_bytes: int) -> bool:
        return self._drop(self._file_descriptor, offset_bytes, length_bytes)

    def read_past_cache(self, offset_bytes: int, length_bytes: int) -> bytes:
        memory = memoryview(mmap.mmap(-1, length_bytes))  # aligned
        direct = os.open(self.name, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        try:
            read_whole(direct, offset_bytes, memory)
        finally:
            os.close(direct)
        return bytes(memory)

    def close(self) -> None:
        self._descriptors.close()

    def _open(self, path: Path) -> int:
        file_descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._descriptors.callback(os.close, file_descriptor)
        return file_descriptor


def check_names(path: Path, generic_path: Path, block_devices: Path = BLOCK_DEVICES) -> None:
    """Raise `UnsuitableBlockDevice` where the kernel calls it otherwise than the block device of
    the namespace, whatever `path` is called: a partition, or another namespace.
    """
    status = path.stat()
    wanted = block_name(generic_name(generic_path))
    if not stat.S_ISBLK(status.st_mode):
        raise UnsuitableBlockDevice(
            f"{path} is no block device; that of {generic_path} is {wanted}"
        )
    number = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    found = (block_devices / number).resolve().name
    if found != wanted:
        raise UnsuitableBlockDevice(
            f"{path} is {found}; the block device of {generic_path} is {wanted}"
        )


@contextlib.contextmanager
def _explained(path: Path) -> Generator[None, None, None]:
    try:
        yield
    except OSError as error:
        raise UnsuitableBlockDevice(
            f"{path} cannot be opened: {error.strerror}; the server needs to read and write it"
        ) from error


def _check_same_namespace(file_descriptor: int, path: Path, generic_path: Path) -> None:
    generic = os.open(generic_path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        wanted = fcntl.ioctl(generic, IOCTL_ID)
    finally:
        os.close(generic)
    try:
        found = fcntl.ioctl(file_descriptor, IOCTL_ID)
    except OSError as error:
        if error.errno != errno.ENOTTY:
            raise
        raise UnsuitableBlockDevice(f"{path} is no namespace of an NVMe controller") from error
    if found != wanted:
        raise UnsuitableBlockDevice(f"{path} is namespace {found}, {generic_path} is {wanted}")
