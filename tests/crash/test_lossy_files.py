"""What the lossy files keep and lose."""

from __future__ import annotations

import mmap
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.crash.lossy_files import CutStyle, LossyFile, LossyTree
from tests.crash.lossy_fs import LossyMount, lossy_mount, reason_to_skip

SEEDS = range(40)
WRITES = st.lists(st.tuples(st.integers(0, 5000), st.binary(min_size=1, max_size=2000)), max_size=6)


def written(writes: list[tuple[int, bytes]]) -> LossyFile:
    file = LossyFile()
    for offset_bytes, data in writes:
        file.write(offset_bytes, data)
    return file


@given(flushed=WRITES, unflushed=WRITES, seed=st.integers(0, 2**32))
def test_each_sector_is_as_it_was_at_some_time_since_the_flush(
    flushed: list[tuple[int, bytes]], unflushed: list[tuple[int, bytes]], seed: int
) -> None:
    file = written(flushed)
    file.flush()
    states = [bytes(file.content)]
    for offset_bytes, data in unflushed:
        file.write(offset_bytes, data)
        states.append(bytes(file.content))
    rng = random.Random(seed)
    how = CutStyle.chosen(rng)
    file.cut(rng, how)
    assert len(file.content) in {len(state) for state in states}
    for begin in range(0, len(file.content), how.sector_bytes):
        end = min(begin + how.sector_bytes, len(file.content))
        possible = {state[begin:end].ljust(end - begin, b"\0") for state in states}
        assert bytes(file.content[begin:end]) in possible


@given(writes=WRITES, seed=st.integers(0, 2**32))
def test_what_was_flushed_survives_every_cut(writes: list[tuple[int, bytes]], seed: int) -> None:
    file = written(writes)
    file.flush()
    before = bytes(file.content)
    rng = random.Random(seed)
    file.cut(rng, CutStyle.chosen(rng))
    assert bytes(file.content) == before


def test_unflushed_sectors_of_one_write_may_part() -> None:
    outcomes = set()
    for seed in SEEDS:
        file = written([(0, bytes(1024))])
        file.flush()
        file.write(0, b"x" * 1024)
        rng = random.Random(seed)
        file.cut(rng, CutStyle.chosen(rng))
        outcomes.add(bytes(file.content[::512]))
    assert outcomes == {b"\0\0", b"x\0", b"\0x", b"xx"}


@pytest.mark.parametrize("is_flushed", [False, True])
def test_a_files_name_is_safe_once_its_directory_is_flushed(is_flushed: bool) -> None:
    survived = set()
    for seed in SEEDS:
        tree = LossyTree()
        file = LossyFile()
        tree.add("/name", file)
        file.write(0, b"data")
        file.flush()
        if is_flushed:
            tree.root.flush()
        tree.cut(seed)
        survived.add("name" in tree.root.names)
    assert survived == ({True} if is_flushed else {True, False})


def test_a_rename_happens_wholly_or_not_at_all() -> None:
    outcomes = set()
    for seed in SEEDS:
        tree = LossyTree()
        tree.add("/old", LossyFile())
        tree.root.flush()
        tree.rename("/old", "/new")
        tree.cut(seed)
        outcomes.add(tuple(tree.root.names))
    assert outcomes == {("old",), ("new",)}


# --- mounted ---


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[LossyMount]:
    if reason := reason_to_skip():
        pytest.skip(reason)
    (tmp_path / "mounted").mkdir()
    with lossy_mount(tmp_path / "mounted") as mounted:
        yield mounted


def flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def test_a_mounted_file_is_read_and_mapped_as_any_other(mount: LossyMount) -> None:
    path = mount.folder / "file"
    path.write_bytes(bytes(10_000))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        os.pwrite(file.fileno(), b"through", 5000)
        assert mapped[5000:5007] == b"through"
        path.unlink()
        assert os.pread(file.fileno(), 7, 5000) == b"through"
    assert list(mount.folder.iterdir()) == []


def test_a_cut_waits_for_no_mount_namespace_that_was_made_meanwhile(mount: LossyMount) -> None:
    other = ("unshare", "--mount", "--propagation", "slave")
    with subprocess.Popen([*other, "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as copy:
        assert copy.stdin is not None
        assert copy.stdout is not None
        copy.stdin.write(b"begun\n")
        copy.stdin.flush()
        assert copy.stdout.readline() == b"begun\n"
        assert str(mount.folder) in Path(f"/proc/{copy.pid}/mountinfo").read_text()
        mount.cut(1)
        assert list(mount.folder.iterdir()) == []
        copy.stdin.close()


@pytest.mark.parametrize("flush", [os.fsync, os.fdatasync])
def test_a_mounted_file_keeps_what_was_flushed(mount: LossyMount, flush: object) -> None:
    assert callable(flush)
    with (mount.folder / "file").open("wb", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, 8192)
        os.pwrite(file.fileno(), b"safe", 100)
        flush(file.fileno())
        os.pwrite(file.fileno(), b"lost", 5000)
    flush_folder(mount.folder)
    for seed in range(8):
        mount.cut(seed)
    content = (mount.folder / "file").read_bytes()
    assert len(content) == 8192
    assert content[100:104] == b"safe"


def test_a_mounted_file_loses_what_was_not_flushed(mount: LossyMount) -> None:
    kept = 0
    for seed in range(8):
        (mount.folder / f"file {seed}").write_bytes(b"x" * 4096)
        mount.cut(seed)
        kept += (mount.folder / f"file {seed}").exists()
    assert 0 < kept < 8


def test_a_direct_write_is_durable_only_after_a_flush_too(mount: LossyMount) -> None:
    block = mmap.mmap(-1, 4096)
    block.write(b"d" * 4096)
    path = mount.folder / "file"
    path.write_bytes(bytes(8192))
    descriptor = os.open(path, os.O_RDWR | os.O_DIRECT)
    os.pwritev(descriptor, [block], 0)
    os.fdatasync(descriptor)
    os.pwritev(descriptor, [block], 4096)
    os.close(descriptor)
    flush_folder(mount.folder)
    how = [mount.cut(seed) for seed in range(3)]
    assert path.read_bytes()[:4096] == b"d" * 4096, how
