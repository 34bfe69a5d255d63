"""The namespaces that tests may overwrite: those that NVME_TEST_DEVICES names (/dev/ng0n1,
separated by colons), in the emulated machine or of a drive of your own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from objectcache_storage_server.engines.local.direct.nvme.nvme_kernel import (
    block_name,
    generic_name,
)
from objectcache_storage_server.engines.local.volumes.nvme_superblock import MARGIN_BYTES

DEVICES = [name for name in os.environ.get("NVME_TEST_DEVICES", "").split(":") if name]
WHY_NOT = "NVME_TEST_DEVICES names no namespace that may be overwritten"


def block_path(path: Path) -> Path:
    """The block device of a character device."""
    return Path("/dev") / block_name(generic_name(path))


@contextlib.contextmanager
def block_device(path: Path, flags: int) -> Iterator[int]:
    """The block device of a character device, open."""
    file_descriptor = os.open(block_path(path), flags | os.O_CLOEXEC)
    try:
        yield file_descriptor
    finally:
        os.close(file_descriptor)


def wipe(path: Path) -> None:
    """Leave nothing at either end, so that a store takes the namespace for blank."""
    with block_device(path, os.O_RDWR) as file_descriptor:
        end = os.lseek(file_descriptor, 0, os.SEEK_END)
        for begin in (0, end - MARGIN_BYTES):
            os.pwrite(file_descriptor, bytes(MARGIN_BYTES), begin)
        os.fsync(file_descriptor)
