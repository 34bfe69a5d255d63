"""The direct path: alignment, batches, and both ways to submit them."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import random
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache_schemas.limits import KIB, MIB
from objectcache_storage_server.engines.local.direct import ring as ring_module
from objectcache_storage_server.engines.local.direct import uring as uring_module
from objectcache_storage_server.engines.local.direct.alignment import (
    IN_PLACE_BYTES_MIN,
    PAGE_ALIGNMENT,
    Alignment,
    split_at,
)
from objectcache_storage_server.engines.local.direct.batches import (
    BOUNCE_BYTES,
    Bounce,
    DirectPiece,
    ReadBatch,
    Submitter,
    WriteBatch,
    address_of,
)
from objectcache_storage_server.engines.local.direct.kernel_facts import (
    PIECE_BYTES_MAX,
    parse_alignment,
    piece_bytes_max,
)
from objectcache_storage_server.engines.local.direct.ring import Ring, Sqes
from objectcache_storage_server.engines.local.direct.threads import ThreadSubmitter
from objectcache_storage_server.engines.local.direct.uring import UringSubmitter

BLOCK = 4 * KIB
FILE_BYTES = 12 * MIB
alignments = st.builds(
    Alignment, st.sampled_from([1, 512, 4096]), st.sampled_from([1, 4, 512, 4096])
)


@given(
    alignment=alignments,
    offset=st.integers(0, 20_000),
    address=st.integers(1, 20_000),
    length=st.integers(1, 300_000),
)
def test_parts_are_the_transfer_and_only_whole_aligned_ones_are_done_in_place(
    alignment: Alignment, offset: int, address: int, length: int
) -> None:
    head, whole, tail = alignment.parts(offset, address, length)
    assert min(head, whole, tail) >= 0
    assert head + whole + tail == length
    if whole:
        assert (offset + head) % alignment.offset_bytes == 0
        assert whole % alignment.offset_bytes == 0
        assert (address + head) % alignment.memory_bytes == 0
        assert max(head, tail) < alignment.offset_bytes


def test_what_is_aligned_is_done_in_place_as_a_whole() -> None:
    alignment = Alignment(512, 512)
    assert alignment.parts(18 * KIB, 18 * KIB + 512, 18 * KIB) == (0, 18 * KIB, 0)
    assert PAGE_ALIGNMENT.parts(18 * KIB, 18 * KIB + 512, 18 * KIB) == (18 * KIB, 0, 0)


def test_of_a_large_ragged_transfer_only_the_ends_are_copied() -> None:
    alignment = Alignment(512, 4)
    ends = 2 * 512 - 1 - 3
    whole = IN_PLACE_BYTES_MIN
    assert alignment.parts(1, 4097, whole + ends) == (511, whole, ends - 511)
    assert alignment.parts(1, 4097, whole + ends - 512) == (whole + ends - 512, 0, 0)


@given(alignment=alignments, offset=st.integers(0, 20_000), length=st.integers(1, 20_000))
def test_the_covering_range_is_the_least_aligned_one(
    alignment: Alignment, offset: int, length: int
) -> None:
    unit = alignment.offset_bytes
    begin, covered = alignment.covering(offset, length)
    assert begin % unit == 0
    assert covered % unit == 0
    assert begin <= offset < begin + unit
    assert begin + covered - unit < offset + length <= begin + covered


@given(offset=st.integers(0, 1000), length=st.integers(0, 1000), unit=st.integers(1, 300))
def test_a_range_is_cut_at_every_multiple(offset: int, length: int, unit: int) -> None:
    ranges = list(split_at(offset, length, unit))
    covered = [position for begin, size in ranges for position in range(begin, begin + size)]
    assert covered == list(range(offset, offset + length))
    assert all(begin // unit == (begin + size - 1) // unit for begin, size in ranges)
    assert all(begin % unit == 0 for begin, _ in ranges[1:])


def statx(mask: int, memory_bytes: int, offset_bytes: int) -> bytes:
    found = bytearray(256)
    struct.pack_into("=I", found, 0, mask)
    struct.pack_into("=II", found, 0x98, memory_bytes, offset_bytes)
    return bytes(found)


def test_the_kernel_s_word_on_alignment_counts_and_pages_where_it_has_none() -> None:
    assert parse_alignment(statx(0x37FF, 4, 512)) == Alignment(512, 4)
    assert parse_alignment(statx(0x17FF, 4, 512)) == PAGE_ALIGNMENT
    assert parse_alignment(statx(0x37FF, 0, 0)) is None


def test_a_request_is_whole_pages_and_bounded(tmp_path: Path) -> None:
    assert piece_bytes_max(tmp_path) % BLOCK == 0
    assert 0 < piece_bytes_max(tmp_path) <= PIECE_BYTES_MAX <= BOUNCE_BYTES
    assert piece_bytes_max(Path("/proc")) > 0  # of no device


@pytest.fixture(params=["io_uring", "threads"])
def submitter(request: pytest.FixtureRequest) -> Iterator[Submitter]:
    if request.param == "threads":
        made: Submitter = ThreadSubmitter(4, "a test")
    else:
        try:
            made = UringSubmitter(4)
        except OSError as error:
            pytest.skip(f"io_uring is not allowed here: {error}")
    yield made
    made.close()


@pytest.fixture
def content() -> bytes:
    return random.Random(7).randbytes(FILE_BYTES)


@pytest.fixture
def direct_file(tmp_path: Path, content: bytes) -> Iterator[int]:
    (tmp_path / "file").write_bytes(content)
    try:
        opened = os.open(tmp_path / "file", os.O_RDWR | os.O_DIRECT)
    except OSError as error:
        pytest.skip(f"no direct path on this file system: {error}")
    yield opened
    os.close(opened)


def pieces_of(
    file_descriptor: int, memory: memoryview, ranges: Sequence[tuple[int, int]]
) -> list[DirectPiece]:
    """Pieces that follow one another in `memory`."""
    pieces, done = [], 0
    for offset, length in ranges:
        part = memory[done : done + length]
        pieces.append(DirectPiece(file_descriptor, offset, address_of(part), part))
        done += length
    return pieces


def test_many_more_pieces_than_depth_are_read(
    submitter: Submitter, direct_file: int, content: bytes
) -> None:
    ranges = [(i * 37 % 97 * BLOCK, BLOCK * (1 + i % 3)) for i in range(97)]
    memory = memoryview(mmap.mmap(-1, sum(length for _, length in ranges)))
    submitter.read(pieces_of(direct_file, memory, ranges))
    assert bytes(memory) == b"".join(content[o : o + n] for o, n in ranges)


def test_what_is_written_is_read(submitter: Submitter, direct_file: int, content: bytes) -> None:
    memory = memoryview(mmap.mmap(-1, 32 * BLOCK))
    memory[:] = content[: 32 * BLOCK][::-1]
    ranges = [(i * 2 * BLOCK, BLOCK) for i in reversed(range(32))]
    submitter.write(pieces_of(direct_file, memory, ranges))
    found = memoryview(mmap.mmap(-1, 32 * BLOCK))
    submitter.read(pieces_of(direct_file, found, ranges))
    assert found == memory
    between = memoryview(mmap.mmap(-1, BLOCK))
    submitter.read(pieces_of(direct_file, between, [(BLOCK, BLOCK)]))
    assert between == content[BLOCK : 2 * BLOCK]


@pytest.mark.parametrize("beyond", [FILE_BYTES, FILE_BYTES - BLOCK])
def test_a_file_that_ends_early_is_an_error(
    submitter: Submitter, direct_file: int, beyond: int
) -> None:
    memory = memoryview(mmap.mmap(-1, 4 * BLOCK))
    with pytest.raises(OSError, match=rf"Errno {errno.EIO}\b"):
        submitter.read(pieces_of(direct_file, memory, [(0, 2 * BLOCK), (beyond, 2 * BLOCK)]))


def test_a_failed_piece_is_an_error_whatever_its_place(
    submitter: Submitter, direct_file: int
) -> None:
    for bad in range(3):
        memory = memoryview(mmap.mmap(-1, 3 * BLOCK))
        pieces = pieces_of(direct_file, memory, [(0, BLOCK), (BLOCK, BLOCK), (0, BLOCK)])
        pieces[bad] = pieces[bad]._replace(file_descriptor=-1)
        with pytest.raises(OSError, match=rf"Errno {errno.EBADF}\b"):
            submitter.read(pieces)


class ShortRing:
    """A ring whose requests move at most `most` bytes, and at times none, to be tried again."""

    def __init__(self, ring: Ring, most: int, again_every: int) -> None:
        self._ring = ring
        self._most = most
        self._again_every = again_every
        self.runs = 0

    def prepare(self, count: int) -> Sqes:
        return self._ring.prepare(count)

    def run(self, sqes: Sqes) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        self.runs += 1
        if self.runs % self._again_every == 0:
            return np.full(len(sqes), -errno.EAGAIN, np.int32)
        short = sqes.copy()
        short["len"] = np.minimum(short["len"], self._most)
        return self._ring.run(short)


def short_uring(
    monkeypatch: pytest.MonkeyPatch, most: int, again_every: int
) -> tuple[UringSubmitter, list[ShortRing]]:
    try:
        submitter = UringSubmitter(4)
    except OSError as error:
        pytest.skip(f"io_uring is not allowed here: {error}")
    made: list[ShortRing] = []

    def make(entries: int) -> ShortRing:
        made.append(ShortRing(Ring(entries), most, again_every))
        return made[-1]

    monkeypatch.setattr(uring_module, "Ring", make)
    return submitter, made


def test_short_reads_are_read_on(
    monkeypatch: pytest.MonkeyPatch, direct_file: int, content: bytes
) -> None:
    submitter, made = short_uring(monkeypatch, 3 * BLOCK, 3)
    memory = memoryview(mmap.mmap(-1, 20 * BLOCK))
    submitter.read(pieces_of(direct_file, memory, [(0, BLOCK), (8 * BLOCK, 19 * BLOCK)]))
    assert memory[:BLOCK] == content[:BLOCK]
    assert memory[BLOCK:] == content[8 * BLOCK : 27 * BLOCK]
    assert made[0].runs == 10  # seven that move bytes, three that are told to try again


def test_a_device_that_always_asks_to_try_again_is_an_error(
    monkeypatch: pytest.MonkeyPatch, direct_file: int
) -> None:
    submitter, made = short_uring(monkeypatch, BLOCK, 1)
    memory = memoryview(mmap.mmap(-1, BLOCK))
    with pytest.raises(OSError, match="try again"):
        submitter.read(pieces_of(direct_file, memory, [(0, BLOCK)]))
    assert made[0].runs < 100


def test_a_kernel_without_plain_reads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without_io_uring()
    monkeypatch.setattr(uring_module, "OP_READ", 255)
    with pytest.raises(OSError, match="too old"):
        UringSubmitter(4)


def skip_without_io_uring() -> None:
    try:
        UringSubmitter(4).close()
    except OSError as error:
        pytest.skip(f"io_uring is not allowed here: {error}")


def test_rings_go_with_their_submitter() -> None:
    skip_without_io_uring()
    gc.collect()  # so that what other tests left does not close meanwhile
    before = len(os.listdir("/proc/self/fd"))
    submitter = UringSubmitter(4)
    submitter._ring()
    assert len(os.listdir("/proc/self/fd")) > before
    submitter.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_refused_io_uring_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_module, "_SYS_SETUP", 100_000)
    with pytest.raises(OSError, match="io_uring_setup"):
        UringSubmitter(4)


class CountingSubmitter(Submitter):
    """Keeps the pieces, and reads and writes an image of the device in memory."""

    description = "memory"

    def __init__(self, image: bytearray) -> None:
        self.image = image
        self.batches: list[list[DirectPiece]] = []

    def read(self, pieces: Sequence[DirectPiece]) -> None:
        self.batches.append(list(pieces))
        for piece in pieces:
            end = piece.offset_bytes + len(piece.memory)
            piece.memory[:] = self.image[piece.offset_bytes : end]

    def write(self, pieces: Sequence[DirectPiece]) -> None:
        self.batches.append(list(pieces))
        for piece in pieces:
            end = piece.offset_bytes + len(piece.memory)
            self.image[piece.offset_bytes : end] = piece.memory

    def close(self) -> None:
        pass


def assert_aligned(
    batches: Sequence[Sequence[DirectPiece]], alignment: Alignment, most: int
) -> None:
    for piece in (piece for batch in batches for piece in batch):
        assert piece.offset_bytes % alignment.offset_bytes == 0
        assert len(piece.memory) % alignment.offset_bytes == 0
        assert 0 < len(piece.memory) <= most
        assert piece.address == address_of(piece.memory)
        assert piece.address % alignment.memory_bytes == 0


def test_one_batch_serves_many_reads_and_a_full_bounce_buffer_starts_another(
    content: bytes,
) -> None:
    alignment = Alignment(512, 512)
    device = CountingSubmitter(bytearray(content))
    batch = ReadBatch(device, alignment, Bounce(), 1 * MIB)
    memory = memoryview(mmap.mmap(-1, 10 * MIB + 1))[1:]  # nowhere aligned
    batch.add(0, 512 * 3, memory)
    batch.run()
    assert memory == content[512 * 3 : 512 * 3 + 10 * MIB]
    assert_aligned(device.batches, alignment, 1 * MIB)
    assert len(device.batches) == 3
    device.batches.clear()
    for i in range(100):
        batch.add(0, i * 5000, memory[i * 5000 : i * 5000 + 4900])
    batch.run()
    assert len(device.batches) == 1


def test_writes_fill_their_last_block_with_zeros_whatever_the_memory(content: bytes) -> None:
    for skew in (0, 1, 512):
        device = CountingSubmitter(bytearray(b"\xff" * FILE_BYTES))
        batch = WriteBatch(device, Alignment(512, 512), Bounce(), 1 * MIB)
        memory = memoryview(mmap.mmap(-1, 5 * MIB + 4 * KIB))[skew:]
        length = 5 * MIB + 777
        memory[:length] = content[:length]
        batch.add(0, 3 * BLOCK, memory[:length])
        batch.add(0, 0, memory[:100])
        batch.run()
        begin, end = 3 * BLOCK, 3 * BLOCK + length
        assert device.image[begin:end] == content[:length]
        assert device.image[end : end + BLOCK - 777] == bytes(BLOCK - 777)
        assert device.image[end + BLOCK - 777] == 0xFF
        assert device.image[:BLOCK] == content[:100] + bytes(BLOCK - 100)
        assert_aligned(device.batches, Alignment(512, 512), 1 * MIB)
