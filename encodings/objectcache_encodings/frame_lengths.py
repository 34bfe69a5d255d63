"""What can be known of a row of frames without decoding them: how long each is, and that it is one.

For whoever stores frames that others encoded. A row that passes may still hold planes that cannot
be decoded, or slices with other checksums: those a `SliceDecoder` finds, in bounded memory.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from objectcache_encodings.frames import ELEMENT_BYTES, HEADER_BYTES, SliceCodec, headers_of
from objectcache_schemas.errors import DamagedData


def frame_lengths(row: npt.NDArray[np.uint8], slice_bytes: int, codec: SliceCodec) -> list[int]:
    """Bytes of each frame of a row, uint8[n, pitch] and zeros behind each, of slices of
    `slice_bytes`, by the frames' headers; all are of `codec`, or plain.

    Raises `DamagedData` that names the first frame of another codec, with another size of numbers
    than there is, or that does not end within the pitch.
    """
    headers: list[tuple[int, int, int, int, int]] = headers_of(row).tolist()
    lengths: list[int] = []
    for index, (its_codec, element_bytes, _, coded_bytes, _) in enumerate(headers):
        raw_bytes = _raw_bytes(its_codec, element_bytes, coded_bytes, slice_bytes, codec)
        if isinstance(raw_bytes, str):
            raise DamagedData(f"frame {index}: {raw_bytes}")
        length_bytes = HEADER_BYTES + raw_bytes + coded_bytes
        if length_bytes > row.shape[1]:
            raise DamagedData(
                f"frame {index}: it would have {length_bytes} bytes, and has {row.shape[1]}"
            )
        lengths.append(length_bytes)
    return lengths


def _raw_bytes(
    codec: int, element_bytes: int, coded_bytes: int, slice_bytes: int, wanted: SliceCodec
) -> int | str:
    """Bytes of a frame's raw planes, or what is wrong with its header."""
    if codec == SliceCodec.PLAIN:
        if element_bytes != 1:
            return "it is plain, and its elements are not bytes"
        return "it is plain, and has a coded plane" if coded_bytes else slice_bytes
    if codec != wanted:
        return f"it is of codec {codec}, the row of {wanted.value}"
    if element_bytes not in ELEMENT_BYTES or slice_bytes % element_bytes:
        return f"no elements of {element_bytes} bytes fit {slice_bytes}"
    return slice_bytes - slice_bytes // element_bytes
