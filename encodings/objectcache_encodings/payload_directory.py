"""What an encoded payload says of itself before its first layer: which chunks are frames, how long.

    run_count      u32
    layer_count    u32
    for each run of neighbours in the prefix:
      chunk_count  u32
      codec        u32    0: slices as they are; else frames, which readers of that encoding decode
      pitch        u32    for each delivered layer: bytes of one frame; slice bytes where codec is 0
    checksum       u64    xxh3_64 of all before
    zeros                 up to a multiple of 64 bytes

Integers are little-endian. Then come the layers: of each run, in order, chunk_count frames at the
layer's pitch, or slices. So where a chunk's frame lies is arithmetic, and a layer is one piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from objectcache_encodings.decoder import SliceDecoder
from objectcache_encodings.frames import (
    PITCH_MULTIPLE_BYTES,
    SliceCodec,
    frame_bytes_max,
)
from objectcache_schemas.errors import DamagedData, InvalidRequest

_WORD = np.dtype("<u4")
_HEAD_BYTES = 8
_CHECKSUM_BYTES = 8


class PayloadRun(NamedTuple):
    """Neighbours in a prefix whose slices of a layer lie at one pitch."""

    chunk_count: int
    codec: SliceCodec
    pitches: tuple[int, ...]  # bytes, one for each delivered layer


class PayloadRow(NamedTuple):
    """One layer of one run: `chunk_count` frames, or slices, `pitch_bytes` apart."""

    first_chunk: int  # in the payload
    chunk_count: int
    offset_bytes: int  # in the payload, whose directory begins at 0
    pitch_bytes: int
    codec: SliceCodec


@dataclass(frozen=True)
class PayloadDirectory:
    """Where everything lies in an encoded payload of layers in order.

    `runs` are in the order of the prefix, each with as many pitches as there are layers;
    `slice_bytes` is that of a decoded slice. Raises `InvalidRequest` for other shapes.
    """

    runs: tuple[PayloadRun, ...]
    slice_bytes: int

    def __post_init__(self) -> None:
        if not self.runs or not self.runs[0].pitches:
            raise InvalidRequest("an encoded payload has at least one chunk and one layer")
        longest = _pitch_bytes_max(self.slice_bytes)
        for number, run in enumerate(self.runs):
            is_plain = run.codec is SliceCodec.PLAIN
            least, most = (self.slice_bytes, self.slice_bytes) if is_plain else (1, longest)
            if len(run.pitches) != self.layer_count:
                raise InvalidRequest(
                    f"run {number} has {len(run.pitches)} layers, the first {self.layer_count}"
                )
            if run.chunk_count < 1 or not all(least <= pitch <= most for pitch in run.pitches):
                raise InvalidRequest(
                    f"run {number} must have at least one chunk, and pitches of {least} to {most} "
                    f"bytes, got {run.chunk_count} and {min(run.pitches)} to {max(run.pitches)}"
                )

    @property
    def layer_count(self) -> int:
        """Delivered layers."""
        return len(self.runs[0].pitches)

    @cached_property
    def chunk_count(self) -> int:
        """Chunks of the payload."""
        return sum(run.chunk_count for run in self.runs)

    @property
    def directory_bytes(self) -> int:
        """Bytes before the first layer."""
        return directory_bytes(len(self.runs), self.layer_count)

    @cached_property
    def layer_offsets(self) -> tuple[int, ...]:
        """Where each layer begins in the payload, and at last where the payload ends: L + 1."""
        layers = range(self.layer_count)
        lengths = (
            sum(run.chunk_count * run.pitches[layer] for run in self.runs) for layer in layers
        )
        return tuple(accumulate(lengths, initial=self.directory_bytes))

    @property
    def payload_bytes(self) -> int:
        """Bytes on the wire, directory and all."""
        return self.layer_offsets[-1]

    @property
    def decoded_bytes(self) -> int:
        """Bytes of all slices."""
        return self.chunk_count * self.layer_count * self.slice_bytes

    def rows(self, layer: int) -> Iterator[PayloadRow]:
        """The runs of a layer, which is counted from the first delivered one, in order."""
        offset_bytes, first = self.layer_offsets[layer], 0
        for run in self.runs:
            pitch = run.pitches[layer]
            yield PayloadRow(first, run.chunk_count, offset_bytes, pitch, run.codec)
            offset_bytes += run.chunk_count * pitch
            first += run.chunk_count

    def decode_layer(
        self,
        layer: int,
        wire: memoryview | npt.NDArray[np.uint8],
        out: npt.NDArray[np.uint8],
        decoder: SliceDecoder,
        keys: Sequence[str] = (),
    ) -> None:
        """Decode a layer's bytes of the payload into `out`, uint8[chunk_count, slice_bytes], or
        uint8[chunk_count, parts, part_bytes].

        Raises `DamagedData` that names the chunk, by its key where `keys` has those of all chunks,
        where any byte is not what was encoded, and `InvalidRequest` for memory of another size.
        """
        data = np.frombuffer(wire, np.uint8)
        begin_bytes, end_bytes = self.layer_offsets[layer : layer + 2]
        if data.size != end_bytes - begin_bytes or len(out) != self.chunk_count:
            raise InvalidRequest(
                f"layer {layer} has {self.chunk_count} chunks in {end_bytes - begin_bytes} bytes, "
                f"got {len(out)} and {data.size}"
            )
        for row in self.rows(layer):
            at_bytes = row.offset_bytes - begin_bytes
            frames = data[at_bytes : at_bytes + row.chunk_count * row.pitch_bytes]
            frames = frames.reshape(row.chunk_count, -1)
            slices = out[row.first_chunk : row.first_chunk + row.chunk_count]
            try:
                decode_rows(row, frames, slices, decoder)
            except DamagedData:
                _name_damaged(row, frames, slices, decoder, keys)
                raise

    def to_bytes(self) -> bytes:
        """The directory as it precedes the first layer."""
        words = [len(self.runs), self.layer_count]
        for run in self.runs:
            words += [run.chunk_count, run.codec, *run.pitches]
        data = np.array(words, _WORD).tobytes()
        data += xxhash.xxh3_64_intdigest(data).to_bytes(_CHECKSUM_BYTES, "little")
        return data.ljust(self.directory_bytes, b"\0")

    @classmethod
    def from_bytes(
        cls, data: bytes | memoryview, *, chunk_count: int, layer_count: int, slice_bytes: int
    ) -> PayloadDirectory:
        """Read what `to_bytes` wrote, of a payload of as many chunks and layers as was asked for.

        Raises `DamagedData` where it is another, or any bit is not what was written.
        """
        data = bytes(data)
        if len(data) < _HEAD_BYTES + _CHECKSUM_BYTES:
            raise DamagedData(f"a directory has more than {len(data)} bytes")
        run_count, layers = np.frombuffer(data, _WORD, 2).tolist()
        if layers != layer_count or not 1 <= run_count <= chunk_count:
            raise DamagedData(
                f"a directory of {chunk_count} chunks and {layer_count} layers says that it has "
                f"{run_count} runs of {layers} layers"
            )
        if len(data) != directory_bytes(run_count, layers):
            raise DamagedData(
                f"a directory of {run_count} runs and {layers} layers has "
                f"{directory_bytes(run_count, layers)} bytes, got {len(data)}"
            )
        end = _HEAD_BYTES + run_count * (2 + layers) * _WORD.itemsize
        checksum = int.from_bytes(data[end : end + _CHECKSUM_BYTES], "little")
        if checksum != xxhash.xxh3_64_intdigest(data[:end]) or data[end + _CHECKSUM_BYTES :].strip(
            b"\0"
        ):
            raise DamagedData("a directory does not match its checksum")
        table = np.frombuffer(data[_HEAD_BYTES:end], _WORD).reshape(run_count, 2 + layers).tolist()
        try:
            runs = tuple(
                PayloadRun(chunks, SliceCodec(codec), tuple(pitches))
                for chunks, codec, *pitches in table
            )
            directory = cls(runs, slice_bytes)
        except ValueError as error:
            codecs = ", ".join(str(int(codec)) for codec in SliceCodec)
            raise DamagedData(f"a directory names a codec that is none of {codecs}") from error
        except InvalidRequest as error:
            raise DamagedData(f"a directory cannot be: {error}") from error
        if directory.chunk_count != chunk_count:
            raise DamagedData(
                f"a directory of {chunk_count} chunks has {directory.chunk_count} in its runs"
            )
        return directory


def directory_bytes(run_count: int, layer_count: int) -> int:
    """Bytes of a directory of so many runs and layers."""
    words = run_count * (2 + layer_count)
    return _rounded(_HEAD_BYTES + words * _WORD.itemsize + _CHECKSUM_BYTES)


def decode_rows(
    row: PayloadRow,
    frames: npt.NDArray[np.uint8],
    out: npt.NDArray[np.uint8],
    decoder: SliceDecoder,
) -> None:
    """Decode frames of a row, uint8[n, pitch], into `out`: uint8[n, slice_bytes], or
    uint8[n, parts, part_bytes]. Raises `DamagedData` that names the codec or the frame.
    """
    if row.codec is SliceCodec.PLAIN:
        np.copyto(out, frames.reshape(out.shape))
    else:
        decoder.decode_row(frames, out)


def _name_damaged(
    row: PayloadRow,
    frames: npt.NDArray[np.uint8],
    out: npt.NDArray[np.uint8],
    decoder: SliceDecoder,
    keys: Sequence[str],
) -> None:
    """Raise `DamagedData` that names the first chunk of a row that cannot be decoded."""
    for index in range(row.chunk_count):
        try:
            decode_rows(row, frames[index : index + 1], out[index : index + 1], decoder)
        except DamagedData as damage:
            chunk = row.first_chunk + index
            key = keys[chunk] if keys else None
            name = f"chunk {chunk}" if key is None else f"chunk {chunk} ({key!r})"
            reason = damage.message.removeprefix("frame 0: ")  # it was alone
            raise DamagedData(f"{name}: {reason}", key=key) from damage


def _pitch_bytes_max(slice_bytes: int) -> int:
    return _rounded(frame_bytes_max(slice_bytes))


def _rounded(length_bytes: int) -> int:
    return -(-length_bytes // PITCH_MULTIPLE_BYTES) * PITCH_MULTIPLE_BYTES
