"""The payload of a put that comes encoded: a directory, then layers of frames.

Taken apart as it arrives, in pieces of any length. Between two pieces it holds a frame that has
begun, whatever the payload claims to be; what is decoded of a piece lies in memory of the thread.
"""

from __future__ import annotations

import numpy as np

from objectcache_encodings.frames import PITCH_MULTIPLE_BYTES, SliceCodec, frame_bytes_max
from objectcache_encodings.payload_directory import PayloadDirectory, directory_bytes
from objectcache_schemas.errors import DamagedData, InvalidRequest
from objectcache_schemas.limits import MIB
from objectcache_storage_server.engines.base import PrefixShape, StagedPrefix
from objectcache_storage_server.engines.puts.put_buffers import Bytes
from objectcache_storage_server.engines.puts.received_frames import PutDecoder, ReceivedFrames

PIECE_BYTES = 2 * MIB  # copied at once from memory that others may change
DECODED_BYTES = 4 * MIB  # of slices decoded at once, at most, or one slice


class EncodedPayload:
    """Hands the frames of a payload to a staged prefix, in the order in which they come."""

    def __init__(self, prefix: StagedPrefix, shape: PrefixShape, *, copies: bool) -> None:
        """`shape.encoded_bytes` is the payload's length. `copies`: others may change the pieces
        meanwhile.
        """
        self._prefix = prefix
        self._shape = shape
        self._copies = copies
        self._decoder = PutDecoder(shape.keys, shape.slice_bytes)
        self._frames_max = max(1, DECODED_BYTES // shape.slice_bytes)
        self._directory: PayloadDirectory | None = None
        self._begun = bytearray()  # of the directory, or of a frame
        self._wanted_bytes = directory_bytes(1, shape.num_layers)  # of what is begun
        self._layer = self._chunk = 0  # of the next frame

    @property
    def held_bytes_max(self) -> int:
        """The most that it holds between two pieces: a frame, and what fills up its pitch."""
        return frame_bytes_max(self._shape.slice_bytes) + PITCH_MULTIPLE_BYTES

    def write(self, position_bytes: int, data: memoryview) -> None:
        """Take the payload's next bytes, which follow those of the call before.

        Raises `InvalidRequest` that names what is wrong, and as `StagedPrefix.write`.
        """
        for begin in range(0, len(data), PIECE_BYTES):
            piece = data[begin : begin + PIECE_BYTES]
            self._take(np.frombuffer(bytes(piece) if self._copies else piece, np.uint8))

    def _take(self, piece: Bytes) -> None:
        while len(piece):
            if self._directory is None or self._begun:
                missing_bytes = self._wanted_bytes - len(self._begun)
                self._begun += piece[:missing_bytes].data
                piece = piece[missing_bytes:]
                if len(self._begun) == self._wanted_bytes:
                    begun, self._begun = self._begun, bytearray()
                    self._end_begun(np.frombuffer(begun, np.uint8))
                continue
            pitch_bytes = self._wanted_bytes
            count = min(
                len(self._shape.keys) - self._chunk, len(piece) // pitch_bytes, self._frames_max
            )
            if count == 0:
                self._begun += piece.data
                return
            self._store(piece[: count * pitch_bytes].reshape(count, pitch_bytes))
            piece = piece[count * pitch_bytes :]

    def _end_begun(self, begun: Bytes) -> None:
        if self._directory is not None:
            self._store(begun[np.newaxis])
            return
        self._directory = self._checked_directory(begun.tobytes())
        self._wanted_bytes = self._directory.runs[0].pitches[0]

    def _checked_directory(self, data: bytes) -> PayloadDirectory:
        shape = self._shape
        try:
            directory = PayloadDirectory.from_bytes(
                data,
                chunk_count=len(shape.keys),
                layer_count=shape.num_layers,
                slice_bytes=shape.slice_bytes,
            )
        except DamagedData as damage:
            raise InvalidRequest(f"payload: {damage.message}", code="BadDigest") from damage
        if len(directory.runs) != 1:
            raise InvalidRequest(
                f"payload: its directory has {len(directory.runs)} runs, that of a put has one run "
                "of all chunks"
            )
        if directory.runs[0].codec is SliceCodec.PLAIN:
            raise InvalidRequest(
                "payload: its directory says that no chunk is encoded: leave encoded_bytes out"
            )
        if directory.payload_bytes != shape.encoded_bytes:
            raise InvalidRequest(
                f"encoded_bytes is {shape.encoded_bytes}, by the directory of the payload it is "
                f"{directory.payload_bytes}",
                code="InvalidDescriptor",
            )
        return directory

    def _store(self, row: Bytes) -> None:
        """Hand on neighbours' frames, of the layer that is at hand."""
        shape, directory = self._shape, self._directory
        assert directory is not None
        run = directory.runs[0]
        frames = ReceivedFrames(self._decoder, row, run.codec, self._layer, self._chunk)
        slices_before = self._layer * len(shape.keys) + self._chunk
        self._prefix.write_frames(slices_before * shape.slice_bytes, frames)
        self._chunk += len(frames)
        if self._chunk == len(shape.keys):
            self._layer, self._chunk = self._layer + 1, 0
            if self._layer < shape.num_layers:
                self._wanted_bytes = run.pitches[self._layer]
