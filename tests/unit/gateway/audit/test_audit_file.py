"""A file to which several processes append whole lines, and its renaming."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from objectcache_gateway.audit.audit_file import WRITE_BYTES_MAX, AuditFile

LARGE = 1 << 40


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.log"


def lines_of(*files: Path) -> list[bytes]:
    return [line for file in files for line in file.read_bytes().splitlines(keepends=True)]


def test_lines_are_appended_and_counted(path: Path) -> None:
    path.write_bytes(b"from before\n")
    file = AuditFile(path, LARGE, 3)
    assert file.write([b"a\n", b"b\n"]) is None
    assert file.write([b"c\n"]) is None
    file.close()
    assert path.read_bytes() == b"from before\na\nb\nc\n"
    assert (file.written_lines, file.lost_lines) == (3, 0)


def test_the_file_is_its_owners_alone(path: Path) -> None:
    file = AuditFile(path, LARGE, 3)
    file.write([b"a\n"])
    assert path.stat().st_mode & 0o777 == 0o600
    file.close()


def test_a_large_batch_goes_in_pieces_of_whole_lines(path: Path) -> None:
    file = AuditFile(path, LARGE, 3)
    line = b"x" * 99_999 + b"\n"
    assert file.write([line] * 25) is None
    assert lines_of(path) == [line] * 25
    assert 25 * len(line) > WRITE_BYTES_MAX
    file.close()


def test_a_file_that_is_large_is_renamed_and_so_many_are_kept(path: Path) -> None:
    file = AuditFile(path, 10, 2)  # gateway.audit_log_bytes_max, gateway.audit_log_files_max
    for number in range(4):
        assert file.write([b"line %d of ten\n" % number]) is None
    assert not path.exists()
    assert path.with_name("audit.log.1").read_bytes() == b"line 3 of ten\n"
    assert path.with_name("audit.log.2").read_bytes() == b"line 2 of ten\n"
    assert not path.with_name("audit.log.3").exists()
    file.write([b"five\n"])
    assert path.read_bytes() == b"five\n"
    file.close()


def test_a_file_below_the_size_stays(path: Path) -> None:
    file = AuditFile(path, 10, 2)
    file.write([b"12345678\n"])
    assert path.read_bytes() == b"12345678\n"
    file.write([b"\n"])
    assert not path.exists()
    file.close()


def test_a_file_that_logrotate_moved_is_left_for_the_one_that_the_path_names(path: Path) -> None:
    file = AuditFile(path, LARGE, 3)
    file.write([b"before\n"])
    moved = path.with_name("moved")
    path.rename(moved)
    file.write([b"after\n"])
    path.unlink()
    file.write([b"after that\n"])
    assert moved.read_bytes() == b"before\n"
    assert path.read_bytes() == b"after that\n"
    assert file.lost_lines == 0
    file.close()


def test_another_process_that_renamed_it_is_noticed(path: Path) -> None:
    one, other = AuditFile(path, 10, 8), AuditFile(path, 10, 8)
    one.write([b"1\n"])
    other.write([b"2 is long enough\n"])
    one.write([b"3\n"])
    assert path.with_name("audit.log.1").read_bytes() == b"1\n2 is long enough\n"
    assert path.read_bytes() == b"3\n"
    one.close()
    other.close()


WRITER = """
import sys
from pathlib import Path
from objectcache_gateway.audit.audit_file import AuditFile
file = AuditFile(Path(sys.argv[1]), 20_000, 50)
name = sys.argv[2].encode()
for number in range(200):
    assert file.write([b"%s %03d %d\\n" % (name, number, k) for k in range(5)]) is None
assert file.lost_lines == 0
"""


def test_several_processes_lose_and_mix_no_line_while_files_are_renamed(path: Path) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), name])
        for name in ("a", "b", "c")
    ]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    files = [file for file in path.parent.iterdir() if file.suffix != ".lock"]
    assert len(files) > 1
    wanted = {
        b"%s %03d %d\n" % (name, number, k)
        for name in (b"a", b"b", b"c")
        for number in range(200)
        for k in range(5)
    }
    found = lines_of(*files)
    assert len(found) == len(wanted)
    assert set(found) == wanted


def test_a_path_that_cannot_be_opened_loses_lines_and_counts_them(tmp_path: Path) -> None:
    file = AuditFile(tmp_path / "no such directory" / "audit.log", LARGE, 3)
    error = file.write([b"a\n", b"b\n"])
    assert isinstance(error, FileNotFoundError)
    assert (file.written_lines, file.lost_lines) == (0, 2)


@contextmanager
def file_size_limit(size_bytes: int) -> Iterator[None]:
    """Writes beyond it fail, as they do on a full disk; Python ignores the signal."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_finds_no_room_is_counted_and_later_lines_are_whole(path: Path) -> None:
    file = AuditFile(path, LARGE, 3)
    with file_size_limit(13):
        file.write([b"12345\n", b"12345\n", b"12345\n"])  # one byte of the third fits
        error = file.write([b"none\n"])
        assert isinstance(error, OSError)
    assert (file.written_lines, file.lost_lines) == (2, 2)
    assert file.write([b"there is room again\n"]) is None
    assert path.read_bytes() == b"12345\n12345\n1\nthere is room again\n"
    file.close()


def test_a_full_device_is_no_reason_to_fail() -> None:
    file = AuditFile(Path("/dev/full"), LARGE, 3)
    error = file.write([b"a\n"])
    assert isinstance(error, OSError)
    assert error.strerror == os.strerror(error.errno or 0)
    assert file.lost_lines == 1
    file.close()
