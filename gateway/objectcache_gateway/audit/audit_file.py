"""A file to which several processes append whole lines, renamed when it is large.

Each write is one call on a descriptor opened with O_APPEND, so lines of several processes do not
mix. Before a write every process looks whether the path still names its file: one that was
renamed, by another process or by logrotate, is left for the one that is there now. Renaming happens
under a lock on `PATH.lock`; `PATH.1` is the latest. These calls block: `audit_log` makes them in a
thread, one at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

WRITE_BYTES_MAX = 1 << 20  # of one call; a line is far shorter
MODE = 0o600  # it names who asked for what


class AuditFile:
    """The current file and its renamed predecessors.

    `written_lines` and `lost_lines` count; a line is lost where the file cannot be opened or
    written, and no later line is held up by it.
    """

    def __init__(self, path: Path, bytes_max: int, files_max: int) -> None:
        """Renamed from `bytes_max` up; `files_max` renamed files are kept."""
        self.written_lines = self.lost_lines = 0
        self._path = path
        self._bytes_max = bytes_max
        self._files_max = files_max
        self._descriptor: int | None = None
        self._is_torn = False  # the last write ended within a line

    def write(self, lines: Sequence[bytes]) -> OSError | None:
        """Append lines, each with its newline; returns what went wrong, if anything did."""
        error: OSError | None = None
        begin = 0
        while begin < len(lines):
            end, length_bytes = begin + 1, len(lines[begin])
            while end < len(lines) and length_bytes + len(lines[end]) <= WRITE_BYTES_MAX:
                length_bytes += len(lines[end])
                end += 1
            error = self._write_piece(lines[begin:end]) or error
            begin = end
        return error

    def _write_piece(self, lines: Sequence[bytes]) -> OSError | None:
        try:
            descriptor = self._current()
            data = b"\n" * self._is_torn + b"".join(lines)
            written_bytes = os.write(descriptor, data)
        except OSError as error:
            self.lost_lines += len(lines)
            return error
        whole = _whole_lines(lines, written_bytes - self._is_torn)
        self._is_torn = written_bytes < len(data) and not _ends_line(data, written_bytes)
        self.written_lines += whole
        self.lost_lines += len(lines) - whole
        try:
            if os.fstat(descriptor).st_size >= self._bytes_max:
                self._rename()
        except OSError as error:
            return error
        return None

    def _current(self) -> int:
        """A descriptor of the file that the path names."""
        if self._descriptor is not None and not self._is_named(self._descriptor):
            self.close()
        if self._descriptor is None:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, MODE)
        return self._descriptor

    def _is_named(self, descriptor: int) -> bool:
        """Whether the path names this file."""
        try:
            named = os.stat(self._path)
        except FileNotFoundError:
            return False
        return os.path.samestat(named, os.fstat(descriptor))

    def _rename(self) -> None:
        """Make room for a file of its own, unless another process just did."""
        with self._locked():
            descriptor = self._descriptor
            if descriptor is None or not self._is_named(descriptor):
                return
            for number in range(self._files_max, 1, -1):
                with contextlib.suppress(FileNotFoundError):
                    os.replace(self._numbered(number - 1), self._numbered(number))
            os.replace(self._path, self._numbered(1))
        self.close()

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")

    @contextmanager
    def _locked(self) -> Generator[None]:
        lock = self._path.with_name(f"{self._path.name}.lock")
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, MODE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)  # which lets the lock go

    def close(self) -> None:
        """Close the file; the next write opens it again."""
        descriptor, self._descriptor = self._descriptor, None
        self._is_torn = False  # in another file the next line begins at its beginning
        if descriptor is not None:
            os.close(descriptor)

    def __repr__(self) -> str:
        return f"<AuditFile {self._path} {self.written_lines} lines, {self.lost_lines} lost>"


def _whole_lines(lines: Sequence[bytes], length_bytes: int) -> int:
    """How many of the lines lie whole within the first `length_bytes`."""
    for count, line in enumerate(lines):
        length_bytes -= len(line)
        if length_bytes < 0:
            return count
    return len(lines)


def _ends_line(data: bytes, end: int) -> bool:
    return end == 0 or data[end - 1 : end] == b"\n"
