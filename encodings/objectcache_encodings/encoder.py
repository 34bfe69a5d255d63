"""Encode slices: the planes of their numbers, the highest entropy-coded, the others as they are.

The highest byte of a float holds its sign and most of its exponent, of which KV cache uses few: 3
to 4 of 8 bits. The other bytes are mantissa, and random. Interleaved they compress to 1/1.27, and
in planes to 1/1.45.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from objectcache_encodings.frames import (
    FrameHeader,
    SliceCodec,
    check_slice_bytes,
    codec_of,
    slice_checksum,
)
from objectcache_encodings.plane_coders import plane_coder
from objectcache_schemas.errors import InvalidRequest

Planes = npt.NDArray[np.uint8]


class SliceEncoder:
    """Encodes slices of numbers of `element_bytes` bytes: 2 for bf16 and fp16, 4 for fp32, 1 for
    fp8, integers and bytes of which nothing is known. For one thread at a time.

    Raises `InvalidRequest` for an encoding, or a size of elements, that there is none of.
    """

    def __init__(self, encoding: str = "planes-zstd", element_bytes: int = 2) -> None:
        self._codec = codec_of(encoding)
        check_slice_bytes(element_bytes, element_bytes)
        self._element_bytes = element_bytes
        self._words = np.dtype(f"<u{element_bytes}")
        self._coder = plane_coder(self._codec)
        self._planes: Planes = np.empty((element_bytes, 0), np.uint8)  # of the slice at hand

    def encode_slice(
        self,
        slice_: bytes | memoryview | npt.NDArray[np.uint8],
        checksum: int | None = None,
    ) -> bytes:
        """The frame of one slice, whose bytes lie together: `frame_bytes_max` at most.

        `checksum` is the slice's xxh3_64 where that is known: of another slice it makes a frame
        that decodes to an error.

        Raises `InvalidRequest` where the slice is empty or over the layout's limit, or is not whole
        elements.
        """
        data = np.frombuffer(slice_, np.uint8)
        check_slice_bytes(data.size, self._element_bytes)
        plane_bytes = data.size // self._element_bytes
        if self._planes.shape[1] != plane_bytes:
            self._planes = np.empty((self._element_bytes, plane_bytes), np.uint8)
        planes, words = self._planes, data.view(self._words)
        _copy_plane(words, self._element_bytes - 1, planes[-1])
        coded = self._coder.encode(planes[-1].data)
        if checksum is None:
            checksum = slice_checksum(data.data)
        if len(coded) >= plane_bytes:
            plain = FrameHeader(SliceCodec.PLAIN, 1, checksum)
            return b"".join((plain.to_bytes(b""), data.data))
        for number in range(self._element_bytes - 1):
            _copy_plane(words, number, planes[number])
        header = FrameHeader(self._codec, self._element_bytes, checksum)
        return b"".join((header.to_bytes(coded), planes[:-1].data, coded))

    def encode_slices(
        self, slices: npt.NDArray[np.uint8], checksums: Sequence[int] | None = None
    ) -> list[bytes]:
        """The frames of slices uint8[n, slice_bytes], each of which lies together; `checksums` of
        them as `encode_slice` has it.
        """
        if slices.ndim != 2 or slices.dtype != np.uint8:
            raise InvalidRequest(f"slices must be uint8[n, S], got {slices.dtype}{slices.shape}")
        if checksums is None:
            return [self.encode_slice(one) for one in slices]
        return list(map(self.encode_slice, slices, checksums))


def _copy_plane(words: npt.NDArray[np.unsignedinteger], number: int, plane: Planes) -> None:
    """Copy byte `number` of each word, counted from the lowest.

    A shift and a cast work on whole vectors; a copy with a stride of several bytes does not.
    """
    if number:
        np.right_shift(words, 8 * number, out=plane, casting="unsafe")
    else:
        np.copyto(plane, words, casting="unsafe")
