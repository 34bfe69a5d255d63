"""What a client sends that puts slices as frames."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from objectcache_encodings import SliceEncoder, pack_row
from objectcache_encodings.frames import codec_of
from objectcache_encodings.payload_directory import PayloadDirectory, PayloadRun


def put_payload_of(layers: npt.NDArray[np.uint8], encoding: str = "planes-zstd") -> bytes:
    """The payload of slices uint8[layers, chunks, slice_bytes]: a directory, then rows of frames,
    even where those are longer than the slices.
    """
    encoder = SliceEncoder(encoding)
    frames = [encoder.encode_slices(layer) for layer in layers]
    return put_payload_of_frames(frames, layers.shape[2], encoding)


def put_payload_of_frames(
    layers: Sequence[Sequence[bytes]], slice_bytes: int, encoding: str = "planes-zstd"
) -> bytes:
    """The payload of each layer's frames, one a chunk."""
    rows = [pack_row(frames) for frames in layers]
    run = PayloadRun(len(layers[0]), codec_of(encoding), tuple(row.shape[1] for row in rows))
    directory = PayloadDirectory((run,), slice_bytes)
    return directory.to_bytes() + b"".join(row.tobytes() for row in rows)
