"""The frame of an encoded slice: a header, raw planes, a coded plane. docs/wire.md has its bytes.

    codec           u8    0 plain, 1 planes-zstd, 2 planes-deflate
    element_bytes   u8    bytes of one number, which are as many planes; 1 where plain
    coded_check     u16   of the coded plane and the rest of the first eight bytes
    coded_bytes     u32   of the coded plane; 0 where plain
    slice_checksum  u64   xxh3_64 of the decoded slice
    raw planes            all but the last, slice_bytes / element_bytes each; the slice where plain
    coded plane           the last plane, of each number's highest byte

Integers are little-endian. A frame does not say how long its slice is: whoever decodes knows that
from the layout, and no frame can make them use more memory. Raw planes come first, so that in a row
of frames at one pitch they lie at one pitch too, however long the coded planes are.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from objectcache_schemas.errors import DamagedData, InvalidRequest
from objectcache_schemas.layout import SLICE_BYTES_MAX

HEADER_BYTES = 16
CODED_CHECK_MASK = 0xFFFF
ELEMENT_BYTES = (1, 2, 4)
PITCH_MULTIPLE_BYTES = 64  # a cache line: rows begin where a core begins to read

HEADER = np.dtype(
    [
        ("codec", "u1"),
        ("element_bytes", "u1"),
        ("coded_check", "<u2"),
        ("coded_bytes", "<u4"),
        ("slice_checksum", "<u8"),
    ]
)

_PACKED = struct.Struct("<BBHIQ")

slice_checksum = xxhash.xxh3_64_intdigest


class SliceCodec(enum.IntEnum):
    """How the last plane of a frame is coded."""

    PLAIN = 0
    PLANES_ZSTD = 1
    PLANES_DEFLATE = 2


# The names of what a reader may ask for; PLAIN is none, any reader takes it.
ENCODINGS = {
    "planes-zstd": SliceCodec.PLANES_ZSTD,
    "planes-deflate": SliceCodec.PLANES_DEFLATE,
}


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """What the sixteen bytes before a frame's planes say, and the coded plane does not."""

    codec: SliceCodec
    element_bytes: int
    slice_checksum: int

    def to_bytes(self, coded: bytes) -> bytes:
        """The header of a frame whose coded plane is `coded`."""
        seed = coded_check_seed(self.codec, self.element_bytes, len(coded))
        check = xxhash.xxh3_64_intdigest(coded, seed) & CODED_CHECK_MASK
        return _PACKED.pack(self.codec, self.element_bytes, check, len(coded), self.slice_checksum)


def codec_of(encoding: str) -> SliceCodec:
    """The codec of a name among `ENCODINGS`; raises `InvalidRequest` for any other name."""
    codec = ENCODINGS.get(encoding)
    if codec is None:
        raise InvalidRequest(f"encoding must be one of {', '.join(ENCODINGS)}, got {encoding!r}")
    return codec


def coded_check_seed(codec: int, element_bytes: int, coded_bytes: int) -> int:
    """The seed of the xxh3_64 of a coded plane, whose lowest 16 bits are `coded_check`: the first
    eight bytes of the header, but for `coded_check`, as a number.

    A decoder ignores some bits of what it decodes, such as those that fill up the last byte of a
    Huffman table: the checksum of the slice cannot find them damaged.
    """
    return codec | element_bytes << 8 | coded_bytes << 32


def frame_bytes_max(slice_bytes: int) -> int:
    """The longest frame of a slice: it is plain where its coded form would not be shorter."""
    return HEADER_BYTES + slice_bytes


def check_slice_bytes(slice_bytes: int, element_bytes: int) -> None:
    """Raise `InvalidRequest` where slices of such a length and such elements cannot be framed."""
    if element_bytes not in ELEMENT_BYTES:
        raise InvalidRequest(f"element_bytes must be 1, 2 or 4, got {element_bytes}")
    if not 1 <= slice_bytes <= SLICE_BYTES_MAX:
        raise InvalidRequest(f"a slice must have 1 to {SLICE_BYTES_MAX} bytes, got {slice_bytes}")
    if slice_bytes % element_bytes:
        raise InvalidRequest(
            f"a slice of {slice_bytes} bytes is not whole elements of {element_bytes}"
        )


def pack_row(
    frames: Sequence[bytes], multiple_bytes: int = PITCH_MULTIPLE_BYTES
) -> npt.NDArray[np.uint8]:
    """Frames as a row, uint8[len(frames), pitch], zeros behind each.

    The pitch is that of the longest frame, rounded up to a multiple of `multiple_bytes`.
    """
    pitch_bytes = -(-max(map(len, frames)) // multiple_bytes) * multiple_bytes
    row = np.zeros((len(frames), pitch_bytes), np.uint8)
    for place, frame in zip(row, frames, strict=True):
        place[: len(frame)] = np.frombuffer(frame, np.uint8)
    return row


def slice_checksums(row: npt.NDArray[np.uint8]) -> list[int]:
    """xxh3_64 of each decoded slice of a row uint8[n, pitch], as its frames say: what is the same
    however a slice was encoded. Nothing is decoded.

    Raises `DamagedData` where the pitch has no room for a header.
    """
    checksums: list[int] = headers_of(row)["slice_checksum"].tolist()
    return checksums


def headers_of(row: npt.NDArray[np.uint8]) -> npt.NDArray[np.void]:
    """The headers of a row uint8[n, pitch]: `HEADER`[n]. Raises `DamagedData` for a short pitch."""
    if row.shape[1] < HEADER_BYTES:
        raise DamagedData(f"a frame has at least {HEADER_BYTES} bytes, got {row.shape[1]}")
    return np.ascontiguousarray(row[:, :HEADER_BYTES]).view(HEADER)[:, 0]
