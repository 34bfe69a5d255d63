"""The frames of records in RADOS, and where the log says it stands."""

from __future__ import annotations

import pytest

from objectcache_schemas.errors import DamagedData
from objectcache_storage_server.engines.stores.rados.log_frames import (
    CALL_BYTES,
    FRAME_HEAD_BYTES,
    LogEnd,
    LogKept,
    make_frame,
    parse_frames,
)

CALL = bytes(range(CALL_BYTES))
RECORDS = [b"zero", b"", b"two" * 100]
FRAMES = b"".join(make_frame(7 + i, CALL, record) for i, record in enumerate(RECORDS))


def test_frames_are_read_as_they_were_made() -> None:
    frames = parse_frames(memoryview(FRAMES), 7)
    assert [(frame.number, frame.record) for frame in frames] == [
        (7, b"zero"),
        (8, b""),
        (9, b"two" * 100),
    ]
    assert all(frame.call == CALL for frame in frames)
    assert sum(frame.size_bytes for frame in frames) == len(FRAMES)


@pytest.mark.parametrize("cut_bytes", [1, 299, 300, 301, 339])
def test_a_frame_that_is_cut_off_is_not_there_yet(cut_bytes: int) -> None:
    assert len(parse_frames(memoryview(FRAMES)[:-cut_bytes], 7)) == 2


def test_every_byte_counts() -> None:
    frame = make_frame(7, CALL, b"zero")
    for position in range(len(frame)):
        if 4 <= position < 8:
            continue  # the size: then the frame ends elsewhere
        damaged = bytearray(frame)
        damaged[position] ^= 1
        with pytest.raises(DamagedData, match="record 7"):
            parse_frames(memoryview(damaged), 7)
    longer = bytearray(frame + bytes(8))
    longer[4] += 1
    with pytest.raises(DamagedData, match="record 7"):
        parse_frames(memoryview(longer), 7)


def test_another_s_bytes_are_no_record() -> None:
    for foreign in (bytes(FRAME_HEAD_BYTES), make_frame(8, CALL, b"zero")):
        with pytest.raises(DamagedData, match="record 7"):
            parse_frames(memoryview(foreign), 7)


def test_where_the_log_stands_is_read_as_it_was_written() -> None:
    end = LogEnd(7, 1000, 3, 5)
    for each in (end, end.after(b"frame"), end.after_segment(), LogEnd(2**63, 0, 1, 2, True)):
        assert LogEnd.from_bytes(each.to_bytes()) == each
    assert LogKept.from_bytes(LogKept(9, 2).to_bytes()) == LogKept(9, 2)


@pytest.mark.parametrize(
    "value", [None, b"", b"1 2 3", b"1 2 3 4 x", b"-1 2 3 4 0", b"1 2 3 4 5 6"]
)
def test_what_does_not_say_where_the_log_stands_is_damage(value: bytes | None) -> None:
    with pytest.raises(DamagedData, match="head"):
        LogEnd.from_bytes(value)
