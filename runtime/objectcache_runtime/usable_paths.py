"""The files and directories that settings name, looked at before a process starts.

Nothing is made here. What the system would say later, about a name without its setting ("File
exists"), is said at once: which setting, what is there, and what to do.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from enum import Enum
from pathlib import Path

import msgspec

from objectcache_schemas.errors import InvalidRequest

PATH_USE = "path_use"  # under which a declaration carries its `FileUse`


class FileUse(Enum):
    """What is done with the path of a setting."""

    KEPT_DIRECTORY = "made where it is missing, read and written"
    READ_DIRECTORY = "read; it need not be there"
    APPENDED_FILE = "made where it is missing, appended to and renamed"
    READ_FILE = "read"


def used_as(use: FileUse) -> msgspec.Meta:
    """The declaration of a setting that is a path, or empty."""
    return msgspec.Meta(extra={PATH_USE: use})


def check_path(name: str, text: str, use: FileUse) -> None:
    """Raises `InvalidRequest` where the path of the setting `name` cannot be used like this."""
    path = Path(text).absolute()
    try:
        fault = _fault(path, use)
    except OSError as error:
        fault = f"it cannot be looked at: {error.strerror}"
    except ValueError as error:  # a NUL in the name
        fault = str(error)
    if fault:
        raise InvalidRequest(f"{name} is {path}: {fault}")


def _fault(path: Path, use: FileUse) -> str:
    match use:
        case FileUse.KEPT_DIRECTORY:
            return _directory_fault(path, os.R_OK | os.W_OK | os.X_OK, may_be_made=True)
        case FileUse.READ_DIRECTORY:
            return _directory_fault(path, os.R_OK | os.X_OK, may_be_made=False)
        case FileUse.APPENDED_FILE:
            return _appended_fault(path)
        case FileUse.READ_FILE:
            return _read_fault(path)


def _directory_fault(path: Path, access: int, *, may_be_made: bool) -> str:
    found = _nearest(path)
    fault = _blocked(path, found)
    if fault:
        return fault
    if found == path:
        return _denied(path, access)
    return _denied(found, os.W_OK | os.X_OK) if may_be_made else ""


def _appended_fault(path: Path) -> str:
    folder = path.parent
    found = _nearest(path)
    if found == path:
        if path.is_dir():
            return "it is a directory; name a file in it"
        return _dangling(path) or _denied(path, os.W_OK)
    fault = _blocked(path, found)
    if fault:
        return fault
    if found != folder:
        return f"there is no directory {folder}; make it, or name a file elsewhere"
    return _denied(folder, os.W_OK | os.X_OK)


def _read_fault(path: Path) -> str:
    found = _nearest(path)
    if found != path:
        return _blocked(path, found) or "there is no such file"
    if path.is_dir():
        return "it is a directory; name a file"
    return _dangling(path) or _denied(path, os.R_OK)


def _nearest(path: Path) -> Path:
    """The path, or the nearest of the directories above that is there, a dangling link too."""
    for place in (path, *path.parents):
        try:
            os.lstat(place)
        except (FileNotFoundError, NotADirectoryError):
            continue
        return place
    return path


def _blocked(path: Path, found: Path) -> str:
    """Why no directory can be at or below what is there."""
    fault = _dangling(found)
    if fault:
        return fault
    if found.is_dir():
        return ""
    kind = "a file" if stat.S_ISREG(found.stat().st_mode) else "no directory"
    if found == path:
        return f"it is {kind}; name a directory, or move what is there away"
    return f"{found} is {kind}, and nothing can lie below it; name another path"


def _dangling(found: Path) -> str:
    if not found.is_symlink() or found.exists():
        return ""
    target = os.readlink(found)
    return f"{found} is a link to {target}, which is not there; make that, or mend the link"


def _denied(path: Path, access: int) -> str:
    """What the process's user may not do there, which is `access` of `os.access`."""
    wanted: Iterable[tuple[int, str]] = (
        (os.R_OK, "read"),
        (os.W_OK, "write"),
        (os.X_OK, "enter"),
    )
    denied = [
        word
        for bit, word in wanted
        if access & bit and not os.access(path, bit, effective_ids=True)
    ]
    if not denied:
        return ""
    if access & os.W_OK and os.statvfs(path).f_flag & os.ST_RDONLY:
        return (
            f"the file system of {path} is mounted read-only; mount it for writing, or name "
            "another path"
        )
    return (
        f"user {os.geteuid()} may not {' or '.join(denied)} {path}; "
        "change its owner or its mode, or name another path"
    )
