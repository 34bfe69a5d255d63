"""What of a client's frames reaches aiohttp's parser."""

from __future__ import annotations

import pytest

from objectcache_gateway.connections.masked_frames import REFUSED, MaskedFrames

KEY = bytes(4)
SIZES = [0, 1, 125, 126, 200, 65_535, 65_536]


class Parser:
    """Keeps what it is fed."""

    def __init__(self) -> None:
        self.fed = b""
        self.has_ended = False

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        self.fed += data
        return False, b""

    def feed_eof(self) -> None:
        self.has_ended = True


def frame(size: int, mask: int = 0x80) -> bytes:
    """A binary one of 0xff bytes, which look like any head."""
    if size < 126:
        head = bytes([0x82, mask | size])
    elif size < 1 << 16:
        head = bytes([0x82, mask | 126]) + size.to_bytes(2)
    else:
        head = bytes([0x82, mask | 127]) + size.to_bytes(8)
    return head + (KEY if mask else b"") + b"\xff" * size


def fed(data: bytes, step: int) -> bytes:
    parser = Parser()
    frames = MaskedFrames(parser)
    for start in range(0, len(data), step):
        frames.feed_data(data[start : start + step])
    frames.feed_eof()
    assert parser.has_ended
    return parser.fed


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000, 1 << 20])
def test_masked_frames_pass_however_they_come(step: int) -> None:
    data = b"".join(map(frame, SIZES))
    assert fed(data, step) == data


@pytest.mark.parametrize("step", [1, 2, 5, 1 << 20])
@pytest.mark.parametrize("size", SIZES[:-2])
def test_nothing_of_a_frame_that_is_not_masked_passes(size: int, step: int) -> None:
    before = frame(size) + frame(3)
    assert fed(before + frame(size, 0)[:2], step) == before + REFUSED
