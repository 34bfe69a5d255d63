"""How the bytes of a payload lie in landing memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from objectcache_encodings.payload_directory import PayloadDirectory


class LandedRow(NamedTuple):
    """Neighbours of one layer as they lie in landing memory: frames, or slices, at one pitch.

    Of slices as they are (codec 0) a row may be any run of bytes: one, of any length.
    """

    first_chunk: int  # in the payload; of a run of bytes that which it begins in
    slice_count: int
    offset_bytes: int  # in the landing memory
    pitch_bytes: int
    codec: int
    slice_bytes: int  # decoded

    @property
    def decoded_bytes(self) -> int:
        """Bytes that they are in the target."""
        return self.slice_count * self.slice_bytes

    def moved(self, by_bytes: int) -> LandedRow:
        """The same so many bytes further on."""
        return self._replace(offset_bytes=self.offset_bytes + by_bytes)


def encoded_rows(
    directory: PayloadDirectory, begin_bytes: int, length_bytes: int
) -> Iterator[LandedRow]:
    """Where whole slices of one layer lie: as many decoded bytes, from `begin_bytes` of the decoded
    payload on.
    """
    slice_bytes = directory.slice_bytes
    layer, layer_offset_bytes = divmod(begin_bytes, directory.chunk_count * slice_bytes)
    first = layer_offset_bytes // slice_bytes
    end = first + length_bytes // slice_bytes
    for row in directory.rows(layer):
        begin, stop = max(first, row.first_chunk), min(end, row.first_chunk + row.chunk_count)
        if begin < stop:
            offset_bytes = row.offset_bytes + (begin - row.first_chunk) * row.pitch_bytes
            yield LandedRow(
                begin, stop - begin, offset_bytes, row.pitch_bytes, row.codec, slice_bytes
            )
