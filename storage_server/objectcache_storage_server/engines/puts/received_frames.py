"""Frames that a put brings: neighbours' slices of one layer, as whoever puts them encoded them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from objectcache_encodings.decoder import SliceDecoder
from objectcache_encodings.frame_lengths import frame_lengths
from objectcache_encodings.frames import SliceCodec, slice_checksums
from objectcache_schemas.errors import DamagedData, InvalidRequest
from objectcache_schemas.limits import KIB
from objectcache_storage_server.engines.puts.put_buffers import Bytes

T = TypeVar("T")

VERIFIED_BYTES = 256 * KIB  # of slices decoded at once for nobody: what a core's own caches hold


class _Scratch(threading.local):
    """What a thread decodes with. A put that stands still holds none of it."""

    def __init__(self) -> None:
        self.decoder = SliceDecoder()
        self._memory: Bytes = np.empty(0, np.uint8)

    def memory(self, length_bytes: int) -> Bytes:
        """Memory that each call overwrites."""
        if len(self._memory) < length_bytes:
            self._memory = np.empty(length_bytes, np.uint8)
        return self._memory[:length_bytes]


_scratch = _Scratch()


class PutDecoder:
    """Decodes the frames of one put, into memory that each call in the same thread overwrites."""

    def __init__(self, keys: Sequence[str], slice_bytes: int) -> None:
        """`keys` are those of the put's chunks, for what it says of damaged frames."""
        self.keys = keys
        self.slice_bytes = slice_bytes

    def decode(self, row: Bytes) -> Bytes:
        """The slices uint8[n, slice_bytes] of a row of frames. Raises `DamagedData`."""
        out = _scratch.memory(len(row) * self.slice_bytes).reshape(len(row), self.slice_bytes)
        _scratch.decoder.decode_row(row, out)
        return out

    def verify(self, row: Bytes) -> None:
        """Decode a row of frames a few at a time, and keep nothing. Raises `DamagedData`."""
        step = max(1, VERIFIED_BYTES // self.slice_bytes)
        for begin in range(0, len(row), step):
            self.decode(row[begin : begin + step])


class ReceivedFrames:
    """A row of frames, uint8[n, pitch] and zeros behind each, of a codec or plain: of slices of
    `layer`, from chunk `first_chunk` of the put on. The memory is the caller's.
    """

    def __init__(
        self, decoder: PutDecoder, row: Bytes, codec: SliceCodec, layer: int, first_chunk: int
    ) -> None:
        """Raises `InvalidRequest` that names the chunk whose header is not that of such a frame."""
        self.row, self.codec = row, codec
        self.layer, self.first_chunk = layer, first_chunk
        self._decoder = decoder
        self.lengths = self._checked(lambda some: frame_lengths(some, decoder.slice_bytes, codec))

    def __len__(self) -> int:
        return len(self.row)

    def __getitem__(self, part: slice) -> ReceivedFrames:
        """Some of them."""
        some = object.__new__(ReceivedFrames)
        begin, _, _ = part.indices(len(self))
        some.row, some.codec, some.lengths = self.row[part], self.codec, self.lengths[part]
        some.layer, some.first_chunk = self.layer, self.first_chunk + begin
        some._decoder = self._decoder
        return some

    def frames(self) -> list[memoryview]:
        """Each frame, without what is behind it, once all were decoded: what a frame says of its
        slice is by what a chunk is known from then on. Raises as `decoded`.
        """
        self._checked(self._decoder.verify)
        return [frame[:length].data for frame, length in zip(self.row, self.lengths, strict=True)]

    def checksums(self) -> list[int]:
        """xxh3_64 of each decoded slice, as its frame says."""
        return slice_checksums(self.row)

    def decoded(self) -> Bytes:
        """The slices, uint8[n, slice_bytes], until the thread decodes a put's next frames.

        Raises `InvalidRequest` (BadDigest) that names the chunk whose frame cannot be decoded, or
        decodes to another slice than it says.
        """
        return self._checked(self._decoder.decode)

    def _checked(self, check: Callable[[Bytes], T]) -> T:
        """What `check` has of the row; raises `InvalidRequest` for the first frame that does not
        pass by itself.
        """
        try:
            return check(self.row)
        except DamagedData:
            self._name_damaged(check)
            raise

    def _name_damaged(self, check: Callable[[Bytes], object]) -> None:
        for index in range(len(self.row)):
            try:
                check(self.row[index : index + 1])
            except DamagedData as damage:
                chunk = self.first_chunk + index
                key = self._decoder.keys[chunk]
                reason = damage.message.removeprefix("frame 0: ")  # it was alone
                raise InvalidRequest(
                    f"payload: the frame of layer {self.layer} of chunk_keys[{chunk}] ({key!r}) is "
                    f"damaged: {reason}",
                    code="BadDigest",
                    key=key,
                    layer=self.layer,
                ) from damage
