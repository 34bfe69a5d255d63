"""Decode rows of frames into the caller's memory: what a fetcher and a storage server do all day.

A slice of 48 KiB takes about 20 us, so what Python does for each of them shows: the headers of a
row are read at once, and each slice is finished while its bytes are in the core's nearest caches.
"""

from __future__ import annotations

import itertools
import operator

import numpy as np
import numpy.typing as npt
import xxhash

from objectcache_encodings.frames import (
    CODED_CHECK_MASK,
    ELEMENT_BYTES,
    HEADER_BYTES,
    SliceCodec,
    coded_check_seed,
    headers_of,
)
from objectcache_encodings.plane_coders import PlaneCoder, plane_coder
from objectcache_schemas.errors import DamagedData, InvalidRequest

_Header = tuple[int, int, int, int, int]  # the fields of `frames.HEADER`
_kind = operator.itemgetter(0, 1)  # codec, element_bytes
xxh3_64 = xxhash.xxh3_64_intdigest

_WORDS = {size: np.dtype(f"<u{size}") for size in ELEMENT_BYTES}
_HIGHEST_BYTE = {size: words.type(1 << 8 * (size - 1)) for size, words in _WORDS.items()}


class SliceDecoder:
    """Decodes frames. For one thread at a time.

    Uses no memory beside the caller's but that of one plane, and a fixed part, whatever a frame
    claims.
    """

    def __init__(self) -> None:
        self._coders: dict[int, PlaneCoder] = {}

    def decode_into(
        self, frame: bytes | memoryview | npt.NDArray[np.uint8], out: npt.NDArray[np.uint8]
    ) -> None:
        """Decode one frame into `out`, uint8[slice_bytes], or uint8[parts, part_bytes] with the
        parts in places of their own. Errors are those of `decode_row`.
        """
        row = np.frombuffer(frame, np.uint8)
        self.decode_row(row[np.newaxis], out[np.newaxis])

    def decode_row(self, row: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8]) -> None:
        """Decode the frames of a row, uint8[n, pitch] and zeros behind each, into `out`.

        `out` is uint8[n, slice_bytes], or uint8[n, parts, part_bytes] where a slice has parts in
        different places, such as K and V. Any strides will do but that of the last axis, along
        which bytes lie together.

        Raises `DamagedData` that names the frame if any byte is not what was encoded, and
        `InvalidRequest` if `row` or `out` have other shapes. Then some of `out` may be overwritten,
        with bytes that are to be used for nothing.
        """
        _check_shapes(row, out)
        if not len(row):
            return
        begin = 0
        headers: list[_Header] = headers_of(row).tolist()
        for kind, alike in itertools.groupby(headers, key=_kind):
            some = list(alike)
            end = begin + len(some)
            self._decode_alike(kind, some, begin, row[begin:end], out[begin:end])
            begin = end

    def _decode_alike(
        self,
        kind: tuple[int, int],
        headers: list[_Header],
        first: int,
        row: npt.NDArray[np.uint8],
        out: npt.NDArray[np.uint8],
    ) -> None:
        """Decode frames of one codec and one size of elements, of which `first` is the first."""
        index = 0
        try:
            planes = _Planes(row, out, *kind)
            coder = self._coder(kind[0])
            for index, (codec, element_bytes, check, coded_bytes, checksum) in enumerate(headers):
                frame = row[index].data
                end = planes.raw_end + coded_bytes
                if end > len(frame):
                    raise _DamagedFrame(f"it would have {end} bytes, and has {len(frame)}")
                coded = frame[planes.raw_end : end]
                seed = coded_check_seed(codec, element_bytes, coded_bytes)
                if xxh3_64(coded, seed) & CODED_CHECK_MASK != check:
                    raise _DamagedFrame("its coded plane or header does not match coded_check")
                if frame[end:].tobytes().strip(b"\0"):
                    raise _DamagedFrame("what follows it is not zero")
                if coder is not None:
                    planes.join(index, coder.decode(coded, planes.plane_bytes))
                elif not coded:
                    planes.copy(index)
                else:
                    raise _DamagedFrame("it is plain, and has a coded plane")
                if planes.checksum(index) != checksum:
                    raise _DamagedFrame("the decoded slice does not match its checksum")
        except (_DamagedFrame, DamagedData) as damage:
            raise DamagedData(f"frame {first + index}: {damage}") from damage

    def _coder(self, codec: int) -> PlaneCoder | None:
        """The coder of a codec, None of plain frames."""
        if codec == SliceCodec.PLAIN:
            return None
        if codec not in self._coders:
            try:
                self._coders[codec] = plane_coder(SliceCodec(codec))
            except ValueError as error:
                raise _DamagedFrame(f"there is no codec {codec}") from error
        return self._coders[codec]


class _Planes:
    """The raw planes of frames of one kind, and the words that they are a part of."""

    def __init__(
        self,
        row: npt.NDArray[np.uint8],
        out: npt.NDArray[np.uint8],
        codec: int,
        element_bytes: int,
    ) -> None:
        is_plain = codec == SliceCodec.PLAIN
        if element_bytes not in ELEMENT_BYTES or out.shape[-1] % element_bytes:
            raise _DamagedFrame(f"no elements of {element_bytes} bytes fit {out.shape}")
        if is_plain and element_bytes != 1:
            raise _DamagedFrame("it is plain, and its elements are not bytes")
        slice_bytes = out[0].size
        self.plane_bytes = slice_bytes // element_bytes
        self.raw_end = HEADER_BYTES + slice_bytes - (0 if is_plain else self.plane_bytes)
        if self.raw_end > row.shape[1]:
            raise _DamagedFrame(f"it has {row.shape[1]} bytes, and {self.raw_end} at least")
        self._out = out
        self._is_whole = bool(out[0].flags.c_contiguous)
        self._words = out.view(_WORDS[element_bytes])
        self._highest_byte = _HIGHEST_BYTE[element_bytes]
        self._raw = [
            row[:, begin : begin + self.plane_bytes].reshape(self._words.shape)
            for begin in range(HEADER_BYTES, self.raw_end, self.plane_bytes)
        ]

    def copy(self, index: int) -> None:
        """Write a plain slice."""
        np.copyto(self._words[index], self._raw[0][index])

    def join(self, index: int, last_plane: bytes) -> None:
        """Write a slice.

        The last and the first plane are joined as whole words, which vectors do at once. A copy
        with a stride of several bytes takes twice as long, and is left to the middle of fp32.
        """
        words, raw = self._words[index], self._raw
        plane = np.frombuffer(last_plane, np.uint8).reshape(words.shape)
        if not raw:
            np.copyto(words, plane)
            return
        np.multiply(plane, self._highest_byte, out=words)
        np.bitwise_or(words, raw[0][index], out=words)
        for number in range(1, len(raw)):
            self._out[index][..., number :: len(raw) + 1] = raw[number][index]

    def checksum(self, index: int) -> int:
        """xxh3_64 of a written slice, of which parts may lie apart."""
        if self._is_whole:
            return xxh3_64(self._out[index].data)
        hasher = xxhash.xxh3_64()
        for part in self._out[index]:
            hasher.update(part.data)
        return hasher.intdigest()


class _DamagedFrame(Exception):
    """A frame cannot be decoded, and this is why."""


def _check_shapes(row: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8]) -> None:
    for name, array, dimensions in (("row", row, (2,)), ("out", out, (2, 3))):
        if array.dtype != np.uint8 or array.ndim not in dimensions:
            raise InvalidRequest(
                f"{name} is {array.dtype} of shape {array.shape}, not uint8[n, ..]"
            )
        if array.size and array.shape[-1] > 1 and array.strides[-1] != 1:
            raise InvalidRequest(f"the bytes of {name} do not lie together along its last axis")
    if len(row) != len(out) or not out.flags.writeable:
        raise InvalidRequest(f"out must have room for {len(row)} slices, and be writable")
