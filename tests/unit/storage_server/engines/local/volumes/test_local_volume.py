"""The volume of data files, on both paths and with both ways to submit."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import random
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from objectcache_schemas.errors import Unavailable
from objectcache_schemas.limits import KIB, MIB
from objectcache_storage_server.engines.local.direct import ring as ring_module
from objectcache_storage_server.engines.local.volumes import data_files
from objectcache_storage_server.engines.local.volumes.data_files import DataFiles
from objectcache_storage_server.engines.local.volumes.volume import BLOCK_BYTES, IoPath, Transfer
from tests.unit.examples import examples

SEGMENT_BYTES = 4 * MIB
VOLUME_BYTES = 2 * SEGMENT_BYTES


def open_volume(
    folder: Path, direct_io: str = "auto", *, capacity_bytes: int = 0, reserve_bytes: int = 0
) -> DataFiles:
    return DataFiles(folder, SEGMENT_BYTES, capacity_bytes, reserve_bytes, direct_io, depth=8)


@pytest.fixture(params=["io_uring", "threads"])
def volume(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DataFiles]:
    try:
        made = open_volume(tmp_path / "data", request.param)
    except OSError as error:
        pytest.skip(f"io_uring is not allowed here: {error}")
    if IoPath.DIRECT not in made.paths:
        made.close()
        pytest.skip("no direct path on this file system")
    yield made
    made.close()


@pytest.fixture
def filled(volume: DataFiles) -> tuple[DataFiles, bytes]:
    """A volume of two segments, and what it holds."""
    content = random.Random(11).randbytes(VOLUME_BYTES)
    volume.extend()
    volume.extend()
    volume.write([Transfer(0, memoryview(content))], IoPath.PAGE_CACHE)
    return volume, content


def open_descriptors() -> int:
    """How many file descriptors this process has open, without those of what nobody refers to."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def read(volume: DataFiles, offset_bytes: int, length_bytes: int, path: IoPath) -> bytes:
    memory = bytearray(length_bytes)
    volume.read([Transfer(offset_bytes, memoryview(memory))], path)
    return bytes(memory)


def names(folder: Path) -> list[str]:
    """What lies beside the file that says how long the others are."""
    found = sorted(path.name for path in (folder / "data").iterdir())
    found.remove("segment_bytes")
    return found


def skewed(length_bytes: int, skew_bytes: int) -> memoryview:
    """Memory that begins `skew_bytes` behind a page."""
    memory = memoryview(mmap.mmap(-1, length_bytes + skew_bytes + 1))
    return memory[skew_bytes : skew_bytes + length_bytes]


lengths = st.one_of(
    st.integers(1, 3 * BLOCK_BYTES),
    st.integers(1, 700_000),
    st.integers(1, 200).map(lambda blocks: blocks * BLOCK_BYTES),
    st.integers(1, 400).map(lambda sectors: sectors * 512),
)
offsets = st.one_of(
    st.integers(0, VOLUME_BYTES - 1),
    st.integers(0, VOLUME_BYTES // BLOCK_BYTES - 1).map(lambda block: block * BLOCK_BYTES),
    st.integers(0, VOLUME_BYTES // 512 - 1).map(lambda sector: sector * 512),
    st.integers(SEGMENT_BYTES - 9000, SEGMENT_BYTES + 9000),
)
skews = st.sampled_from([0, 0, 1, 3, 512, 1536, 4095])
many_examples = settings(
    max_examples=examples(10),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    deadline=None,
)


@many_examples
@given(
    shapes=st.lists(st.tuples(offsets, lengths, skews), min_size=1, max_size=12),
    path=st.sampled_from(IoPath),
)
def test_any_reads_give_what_was_written(
    filled: tuple[DataFiles, bytes], shapes: list[tuple[int, int, int]], path: IoPath
) -> None:
    volume, content = filled
    transfers = [
        Transfer(offset, skewed(min(length, VOLUME_BYTES - offset), skew))
        for offset, length, skew in shapes
    ]
    volume.read(transfers, path)
    for offset, memory in transfers:
        assert memory == content[offset : offset + len(memory)]


@settings(many_examples, max_examples=examples(7))
@given(
    shapes=st.lists(
        st.tuples(st.integers(0, 40), lengths, skews, st.sampled_from(IoPath)),
        min_size=1,
        max_size=8,
    ),
    seed=st.integers(0, 99),
)
def test_any_writes_are_read_on_either_path_and_touch_nothing_else(
    filled: tuple[DataFiles, bytes], shapes: list[tuple[int, int, int, IoPath]], seed: int
) -> None:
    volume, _ = filled
    expected = bytearray(random.Random(seed).randbytes(VOLUME_BYTES))
    volume.write([Transfer(0, memoryview(bytes(expected)))], IoPath.PAGE_CACHE)
    position = 0
    by_path: dict[IoPath, list[Transfer]] = {IoPath.PAGE_CACHE: [], IoPath.DIRECT: []}
    for gap_blocks, length, skew, path in shapes:
        begin = position + gap_blocks * BLOCK_BYTES
        end = begin + -(-length // BLOCK_BYTES) * BLOCK_BYTES
        if end > VOLUME_BYTES:
            break
        memory = skewed(length, skew)
        memory[:] = random.Random(seed + begin).randbytes(length)
        by_path[path].append(Transfer(begin, memory))
        padded = end if path is IoPath.DIRECT else begin + length
        expected[begin:padded] = bytes(memory).ljust(padded - begin, b"\0")
        position = end
    for path, transfers in by_path.items():
        volume.write(transfers, path)
    volume.flush([(0, VOLUME_BYTES)])
    for path in IoPath:
        assert read(volume, 0, VOLUME_BYTES, path) == expected


def test_what_is_in_memory_is_counted_on_the_page_cache_path_only(
    filled: tuple[DataFiles, bytes],
) -> None:
    volume, _ = filled
    volume.flush([(0, VOLUME_BYTES)])
    warm = memoryview(bytearray(MIB))
    assert volume.read([Transfer(0, warm), Transfer(SEGMENT_BYTES, warm)], IoPath.PAGE_CACHE) == (
        2 * MIB
    )
    assert volume.read([Transfer(0, warm)], IoPath.DIRECT) == 0
    volume.drop_cache(0, VOLUME_BYTES)
    assert volume.read([Transfer(0, warm)], IoPath.PAGE_CACHE) < MIB


def test_a_file_system_that_cannot_tell_what_is_in_memory_counts_nothing(
    filled: tuple[DataFiles, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    volume, content = filled
    preadv = os.preadv

    def without_flags(
        descriptor: int, buffers: list[memoryview], offset: int, flags: int = 0
    ) -> int:
        if flags:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", without_flags)
    memory = memoryview(bytearray(MIB))
    assert volume.read([Transfer(5, memory)], IoPath.PAGE_CACHE) == 0
    assert memory == content[5 : 5 + MIB]


@pytest.mark.parametrize("path", IoPath)
def test_a_range_beyond_the_volume_is_an_error(
    filled: tuple[DataFiles, bytes], path: IoPath
) -> None:
    volume, _ = filled
    with pytest.raises(OSError, match=rf"Errno {errno.EIO}\b"):
        read(volume, VOLUME_BYTES - BLOCK_BYTES, 2 * BLOCK_BYTES, path)


@pytest.mark.parametrize("path", IoPath)
def test_a_file_that_ends_early_is_an_error(
    filled: tuple[DataFiles, bytes], tmp_path: Path, path: IoPath
) -> None:
    volume, _ = filled
    os.truncate(tmp_path / "data" / "000001", BLOCK_BYTES)
    assert read(volume, SEGMENT_BYTES, BLOCK_BYTES, path)
    with pytest.raises(OSError, match=rf"Errno {errno.EIO}\b"):
        read(volume, SEGMENT_BYTES, 2 * BLOCK_BYTES, path)


@pytest.mark.parametrize("path", IoPath)
def test_a_closed_volume_refuses(filled: tuple[DataFiles, bytes], path: IoPath) -> None:
    volume, _ = filled
    before = open_descriptors()
    volume.close()
    volume.close()
    assert open_descriptors() <= before - 4
    for call in (
        lambda: read(volume, 0, BLOCK_BYTES, path),
        lambda: volume.write([Transfer(0, memoryview(b"x"))], path),
        lambda: volume.flush([(0, 1)]),
        volume.extend,
    ):
        with pytest.raises(OSError, match=rf"Errno {errno.EBADF}\b"):
            call()


def test_many_threads_read_and_write_at_once(filled: tuple[DataFiles, bytes]) -> None:
    """Each writes its own part, and all read the second segment, which nobody writes."""
    volume, content = filled
    failures: list[str] = []
    part_bytes = SEGMENT_BYTES // 8

    def work(number: int) -> None:
        chooser = random.Random(number)
        for round_number in range(10):
            path = chooser.choice(list(IoPath))
            written = chooser.randbytes(chooser.randrange(1, part_bytes))
            volume.write([Transfer(number * part_bytes, memoryview(written))], path)
            if read(volume, number * part_bytes, len(written), path) != written:
                failures.append(f"written, thread {number}, round {round_number}, {path.name}")
            begin = SEGMENT_BYTES + chooser.randrange(SEGMENT_BYTES - 100_000)
            if read(volume, begin, 100_000, path) != content[begin : begin + 100_000]:
                failures.append(f"read, thread {number}, round {round_number}, {path.name}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_segments_are_whole_private_files_that_a_later_open_finds(tmp_path: Path) -> None:
    volume = open_volume(tmp_path / "data")
    assert [volume.extend(), volume.extend(), volume.extend()] == [0, 1, 2]
    volume.write([Transfer(2 * SEGMENT_BYTES + 5, memoryview(b"kept"))], IoPath.PAGE_CACHE)
    volume.remove(1)
    assert volume.segments() == [0, 2]
    volume.close()
    for path in map((tmp_path / "data").joinpath, names(tmp_path)):
        assert path.stat().st_blocks * 512 >= SEGMENT_BYTES == path.stat().st_size
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = open_volume(tmp_path / "data")
    assert again.segments() == [0, 2]
    assert read(again, 2 * SEGMENT_BYTES + 5, 4, IoPath.PAGE_CACHE) == b"kept"
    assert again.extend() == 1
    again.close()


def test_a_removed_segment_s_space_is_given_back(tmp_path: Path) -> None:
    volume = open_volume(tmp_path / "data", capacity_bytes=SEGMENT_BYTES)
    open_files = open_descriptors()
    volume.extend()
    assert volume.room_bytes() == 0
    volume.remove(0)
    assert volume.room_bytes() == SEGMENT_BYTES
    assert names(tmp_path) == []
    assert open_descriptors() == open_files
    volume.close()


def test_the_capacity_bounds_what_is_added_in_whole_segments(tmp_path: Path) -> None:
    volume = open_volume(tmp_path / "data", capacity_bytes=2 * SEGMENT_BYTES + MIB)
    assert volume.room_bytes() == 2 * SEGMENT_BYTES
    volume.extend()
    assert volume.room_bytes() == SEGMENT_BYTES
    volume.extend()
    with pytest.raises(OSError, match=rf"Errno {errno.ENOSPC}\b"):
        volume.extend()
    assert volume.segments() == [0, 1]
    volume.close()


def test_the_reserve_is_left_to_others(tmp_path: Path) -> None:
    system = os.statvfs(tmp_path)
    whole_bytes = system.f_blocks * system.f_frsize  # what is free changes meanwhile
    volume = open_volume(tmp_path / "data", reserve_bytes=whole_bytes)
    assert volume.room_bytes() == 0
    with pytest.raises(OSError, match=rf"Errno {errno.ENOSPC}\b"):
        volume.extend()
    volume.close()


def test_a_device_that_fills_up_meanwhile_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = open_volume(tmp_path / "data")
    volume.extend()

    def full(descriptor: int, offset: int, length: int) -> None:
        os.ftruncate(descriptor, length // 2)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=rf"Errno {errno.ENOSPC}\b"):
        volume.extend()
    monkeypatch.undo()
    assert names(tmp_path) == ["000000"]
    assert volume.extend() == 1
    volume.close()


def test_a_truncated_file_is_given_its_length_again(tmp_path: Path) -> None:
    volume = open_volume(tmp_path / "data")
    volume.extend()
    volume.write([Transfer(0, memoryview(b"kept" * 1024))], IoPath.PAGE_CACHE)
    volume.close()
    os.truncate(tmp_path / "data" / "000000", 4096)
    volume = open_volume(tmp_path / "data")
    assert read(volume, 0, 4096, IoPath.PAGE_CACHE) == b"kept" * 1024
    assert read(volume, 4096, 4096, IoPath.PAGE_CACHE) == bytes(4096)
    volume.close()


def test_the_length_of_files_is_settled_when_the_folder_is_made(tmp_path: Path) -> None:
    open_volume(tmp_path / "data").close()
    volume = DataFiles(tmp_path / "data", 2 * SEGMENT_BYTES, 0, 0)
    assert volume.segment_bytes == SEGMENT_BYTES
    volume.close()
    (tmp_path / "data" / "segment_bytes").write_text("all of it")
    open_files = open_descriptors()
    with pytest.raises(Unavailable, match="segment_bytes"):
        open_volume(tmp_path / "data")
    assert open_descriptors() == open_files


@pytest.mark.parametrize("said", [None, "8388608"])
def test_a_length_that_no_file_has_is_refused_and_nothing_is_touched(
    tmp_path: Path, said: str | None
) -> None:
    volume = open_volume(tmp_path / "data")
    volume.extend()
    volume.close()
    settled = tmp_path / "data" / "segment_bytes"
    if said is None:
        settled.unlink()
    else:
        settled.write_text(said)
    with pytest.raises(Unavailable, match="length in bytes of the data files"):
        open_volume(tmp_path / "data")
    assert (tmp_path / "data" / "000000").stat().st_size == SEGMENT_BYTES


def test_an_interrupted_extend_is_cleaned_up_and_what_is_not_ours_is_left(
    tmp_path: Path,
) -> None:
    open_volume(tmp_path / "data").close()
    (tmp_path / "data" / "000000.unfinished").write_bytes(b"half")
    (tmp_path / "data" / "lost+found").mkdir()
    volume = open_volume(tmp_path / "data")
    assert volume.segments() == []
    assert names(tmp_path) == ["lost+found"]
    volume.close()


def test_the_device_path_says_how_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    volume = open_volume(tmp_path / "data", "threads")
    if IoPath.DIRECT not in volume.paths:
        pytest.skip("no direct path on this file system")
    assert volume.device_path == "threads: as storage.direct_io says"
    volume.close()

    def refuse(entries: int, flags: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(ring_module, "_system_setup", refuse)
    volume = open_volume(tmp_path / "data", "auto")
    assert volume.device_path == "threads: io_uring is not allowed here (EPERM)"
    volume.extend()
    volume.write([Transfer(0, memoryview(b"direct"))], IoPath.DIRECT)
    assert read(volume, 0, 6, IoPath.DIRECT) == b"direct"
    volume.close()
    with pytest.raises(PermissionError):
        open_volume(tmp_path / "data", "io_uring")


def test_without_a_direct_path_there_is_the_page_cache_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_files, "direct_alignment", lambda descriptor: None)
    volume = open_volume(tmp_path / "data")
    assert volume.paths == {IoPath.PAGE_CACHE}
    assert volume.device_path.startswith("none")
    volume.extend()
    volume.write([Transfer(3, memoryview(b"cached"))], IoPath.PAGE_CACHE)
    volume.flush([(0, 10)])
    assert read(volume, 3, 6, IoPath.PAGE_CACHE) == b"cached"
    with pytest.raises(AssertionError):
        read(volume, 0, 6, IoPath.DIRECT)
    volume.close()


def test_files_in_memory_serve_too() -> None:
    if not os.path.isdir("/dev/shm"):
        pytest.skip("no /dev/shm here")
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        volume = open_volume(folder / "data")
        volume.extend()
        for path in volume.paths:
            volume.write([Transfer(0, memoryview(b"in memory"))], path)
            assert read(volume, 3, 6, path) == b"memory"
        volume.flush([(0, BLOCK_BYTES)])
        volume.close()
    finally:
        shutil.rmtree(folder)


def test_nothing_is_read_or_written_for_nothing(volume: DataFiles) -> None:
    for path in IoPath:
        volume.write([], path)
        assert volume.read([Transfer(0, memoryview(b""))], path) == 0
    volume.flush([])
    volume.drop_cache(0, 0)
    volume.discard(0, 16 * KIB)
