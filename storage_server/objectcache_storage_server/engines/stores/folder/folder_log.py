"""The log in a shared folder: one file a record, and files that say where the log begins.

A record is written and flushed under a name of its own, then linked to its number, which one of
those who try succeeds with. What is trimmed is removed only after a floor above it is durable, and
floors only grow; so whoever links a number that was trimmed sees a floor above it. That is looked
for before and after linking, since a server may stand still anywhere.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import uuid

from objectcache_schemas.errors import Unavailable
from objectcache_storage_server.engines.blobs.blob_store import StoreTimeout
from objectcache_storage_server.engines.stores.folder.folder_reserve import IS_FULL, FolderReserve
from objectcache_storage_server.engines.stores.folder.mounted_folder import (
    FLOORS,
    LOG,
    READ_FOLDER,
    MountedFolder,
    read_file,
    sync_names,
    unlink_if_there,
    write_new_file,
)

FLOORS_KEPT = 3  # so that a look at the floors, one removed meanwhile, sees another that is recent
_REFUSALS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}
)  # of a link that was not made; whatever else goes wrong leaves that open
LEFTOVER_AGE_S = 86400.0  # an append that is older fails, if it goes on at all

log = logging.getLogger("objectcache.storage_server.engines.stores.folder")


class FolderLog:
    """Each method is given the folder's descriptor, and raises `OSError` but where it says more."""

    def __init__(self, folder: MountedFolder, reserve: FolderReserve) -> None:
        self._folder = folder
        self._reserve = reserve
        self._writer = uuid.uuid4().hex
        self._fresh = itertools.count()

    def append(self, descriptor: int, number: int, record: bytes) -> bool:
        """See `SharedStore.append`."""
        # The file system forgets what it has cached of a folder that this host changes: the floors
        # are read after changes of theirs.
        fresh = f"{FLOORS}/~{self._writer}-{next(self._fresh)}"
        written = self._reserve.use(
            descriptor, lambda: write_new_file(fresh, descriptor, [memoryview(record)])
        )
        try:
            if not self._is_next(descriptor, number):
                return False
            if not self._linked(descriptor, fresh, number, written):
                return False
        finally:
            with contextlib.suppress(OSError):  # a file without a use, not a reason to fail
                os.unlink(fresh, dir_fd=descriptor)
        try:
            sync_names(LOG, descriptor)
            floor = self.floor(descriptor)
        except OSError as error:
            raise StoreTimeout(f"record {number} may have been stored: {error.strerror}") from error
        if number < floor:
            with contextlib.suppress(OSError):  # nobody reads it
                unlink_if_there(record_path(number), descriptor)
            raise StoreTimeout(f"record {number} may have been another's: it has been trimmed")
        return True

    def _is_next(self, descriptor: int, number: int) -> bool:
        """Whether the number may be free; false where it has been trimmed. Raises `Unavailable`
        where the record before it is not there: the log has no hole.
        """
        floor = self.floor(descriptor)
        if number > floor and not self.has(descriptor, number - 1):
            self._folder.check_there(descriptor)
            floor = self.floor(descriptor)
            if number > floor:
                raise Unavailable(f"the log has no record {number - 1} for {number} to follow")
        return number >= floor

    def _linked(self, descriptor: int, fresh: str, number: int, written: os.stat_result) -> bool:
        """Whether the number is this record's. Raises `StoreTimeout` where nobody can tell."""
        path = record_path(number)
        try:
            self._reserve.use(
                descriptor,
                lambda: os.link(fresh, path, src_dir_fd=descriptor, dst_dir_fd=descriptor),
            )
            return True
        except OSError as error:
            # NFS sends a request again whose answer was lost: then it meets its own link.
            try:
                return os.path.samestat(os.stat(path, dir_fd=descriptor), written)
            except FileNotFoundError as unknown:
                if error.errno in _REFUSALS:
                    raise error from None
                reason = f"{error.strerror}; the link may be on its way"
                if isinstance(error, FileExistsError):
                    reason = "it was another's, or has been trimmed"
                raise StoreTimeout(f"record {number} may have been stored: {reason}") from unknown
            except OSError as unknown:
                reason = os.strerror(unknown.errno or 0)
                raise StoreTimeout(f"record {number} may have been stored: {reason}") from error

    def floor(self, descriptor: int) -> int:
        """The first record that is kept."""
        return max(self._floors(descriptor), default=0)

    def record(self, descriptor: int, number: int) -> bytes | None:
        """A record, or none where there is no such file."""
        try:
            return read_file(record_path(number), descriptor)
        except FileNotFoundError:
            self._folder.check_there(descriptor)
            return None

    def end(self, descriptor: int, known: int) -> int:
        """The number of the next record, which is not below `known`."""
        while True:
            first = max(known, self.floor(descriptor))
            end = self._first_without(descriptor, first)
            if end > first or self.floor(descriptor) <= first:
                self._folder.check_there(descriptor)
                return end

    def _first_without(self, descriptor: int, first: int) -> int:
        """Records have no gap: look twice as far each time, then in between."""
        step = 1
        while self.has(descriptor, first + step - 1):
            step *= 2
        low, high = first + step // 2, first + step - 1  # low - 1 is there, high is not
        while low < high:
            middle = (low + high) // 2
            if self.has(descriptor, middle):
                low = middle + 1
            else:
                high = middle
        return low

    def has(self, descriptor: int, number: int) -> bool:
        """Whether there is such a record."""
        try:
            os.stat(record_path(number), dir_fd=descriptor)
        except FileNotFoundError:
            return False
        return True

    def trim(self, descriptor: int, first: int) -> None:
        """See `SharedStore.trim_log`."""
        floors = self._floors(descriptor)
        if first > max(floors, default=0):
            path = f"{FLOORS}/{first:020d}"
            with contextlib.suppress(FileExistsError):
                self._reserve.use(
                    descriptor, lambda: write_new_file(path, descriptor, [memoryview(b"floor")])
                )
            sync_names(FLOORS, descriptor)
            floors.append(first)
            _remove_leftovers(descriptor, os.stat(path, dir_fd=descriptor).st_mtime)
        for number in sorted(floors)[:-FLOORS_KEPT]:
            unlink_if_there(f"{FLOORS}/{number:020d}", descriptor)
        floor = max(floors, default=0)
        for number in _numbers(LOG, descriptor):
            if number < floor:
                unlink_if_there(record_path(number), descriptor)

    def _floors(self, descriptor: int) -> list[int]:
        return _numbers(FLOORS, descriptor)


def _remove_leftovers(folder: int, now_s: float) -> None:
    """Remove what crashes left of appends. `now_s` is by the clock that dates the files."""
    opened = os.open(FLOORS, READ_FOLDER, dir_fd=folder)
    try:
        for name in os.listdir(opened):
            with contextlib.suppress(FileNotFoundError):
                if name.startswith("~"):
                    age_s = now_s - os.stat(name, dir_fd=opened).st_mtime
                    if age_s > LEFTOVER_AGE_S:
                        os.unlink(name, dir_fd=opened)
    finally:
        os.close(opened)


def record_path(number: int) -> str:
    """Where a record lies."""
    return f"{LOG}/{number:020d}"


def _numbers(path: str, folder: int) -> list[int]:
    """The numbers that a folder has files of; raises `OSError`."""
    opened = os.open(path, READ_FOLDER, dir_fd=folder)
    try:
        return [int(name) for name in os.listdir(opened) if name.isdecimal()]
    finally:
        os.close(opened)


def check_links(folder: int, reserve: FolderReserve) -> None:
    """Raise `Unavailable` where a name can be given twice, which the log is built on. Where there
    is no space at all to look, what is stored is to be read and deleted all the same.
    """
    fresh = f"{FLOORS}/~{uuid.uuid4().hex}"
    try:
        reserve.use(folder, lambda: write_new_file(fresh, folder, [memoryview(b"link")]))
    except OSError as error:
        if error.errno not in IS_FULL:
            raise
        log.warning("the shared folder is full: nobody looked whether it has hard links")
        return
    try:
        _link_twice(folder, fresh, reserve)
    finally:
        os.unlink(fresh, dir_fd=folder)


def _link_twice(folder: int, fresh: str, reserve: FolderReserve) -> None:
    twice = f"{fresh}2"

    def link() -> None:
        os.link(fresh, twice, src_dir_fd=folder, dst_dir_fd=folder)

    try:
        reserve.use(folder, link)
        try:
            link()
        except FileExistsError:
            return
        finally:
            os.unlink(twice, dir_fd=folder)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise Unavailable(
            f"the file system of the shared folder has no hard links ({reason}): use one that has"
        ) from error
    raise Unavailable("the file system of the shared folder gives a name out twice: use another")
