"""What is known of the page cache, on this machine's kernel and an ordinary file."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from objectcache_schemas.limits import KIB
from objectcache_storage_server.engines.local.direct.cached_pages import (
    Drop,
    drop_counted,
    drop_read,
    find_dropper,
    read_resident,
    resident_pages,
)

FILE_BYTES = 256 * KIB
DROPS = {"cachestat": drop_counted, "mincore": drop_read}


@pytest.fixture
def file_descriptor(tmp_path: Path) -> Iterator[int]:
    """A file of which everything is in memory and on the device."""
    opened = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        os.pwrite(opened, os.urandom(FILE_BYTES), 0)
        os.fsync(opened)
        os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_RANDOM)
        yield opened
    finally:
        os.close(opened)


@pytest.fixture(params=DROPS)
def drop(request: pytest.FixtureRequest, file_descriptor: int) -> Drop:
    found: Drop = DROPS[request.param]
    try:
        resident_pages(file_descriptor, 0, mmap.PAGESIZE)
    except OSError as error:
        if found is drop_counted:
            pytest.skip(f"this kernel has no cachestat: {error.strerror}")
    if not found(file_descriptor, 0, FILE_BYTES):
        pytest.skip("the file system of temporary files keeps them in memory alone")
    os.pread(file_descriptor, FILE_BYTES, 0)
    return found


def are_resident(file_descriptor: int, offset_bytes: int, length_bytes: int) -> bool:
    memory = memoryview(bytearray(length_bytes))
    return read_resident(file_descriptor, offset_bytes, memory) == length_bytes


def test_what_was_dropped_is_gone_and_the_rest_is_there(file_descriptor: int, drop: Drop) -> None:
    assert are_resident(file_descriptor, 0, FILE_BYTES)
    assert drop(file_descriptor, 64 * KIB, 64 * KIB)
    assert not are_resident(file_descriptor, 64 * KIB, 4 * KIB)
    assert are_resident(file_descriptor, 0, 4 * KIB)


def test_a_page_that_is_mapped_is_known_to_be_there_still(file_descriptor: int, drop: Drop) -> None:
    with mmap.mmap(file_descriptor, FILE_BYTES, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
        assert mapped[64 * KIB] is not None  # from here on the page is in use
        assert not drop(file_descriptor, 0, FILE_BYTES)
    assert drop(file_descriptor, 0, FILE_BYTES)


def test_a_dirty_page_is_known_to_be_there_still(file_descriptor: int, drop: Drop) -> None:
    os.pwrite(file_descriptor, b"new", 64 * KIB)
    if drop(file_descriptor, 0, FILE_BYTES):  # the hint may have written it, and be quick about it
        assert os.pread(file_descriptor, 3, 64 * KIB) == b"new"
    os.fdatasync(file_descriptor)
    assert drop(file_descriptor, 0, FILE_BYTES)
    assert os.pread(file_descriptor, 3, 64 * KIB) == b"new"


def test_this_kernel_has_one_of_them(file_descriptor: int) -> None:
    assert find_dropper(file_descriptor).name in DROPS
