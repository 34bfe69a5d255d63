"""What is known of frames that nobody has decoded yet."""

from __future__ import annotations

import numpy as np
import pytest

from objectcache_encodings import SliceCodec, SliceEncoder, pack_row
from objectcache_encodings.frame_lengths import frame_lengths
from objectcache_schemas.errors import DamagedData
from tests.unit.encodings.kv_numbers import kv_slices

ZSTD, DEFLATE = SliceCodec.PLANES_ZSTD, SliceCodec.PLANES_DEFLATE
SLICE_BYTES = 512


def frames_of(encoding: str = "planes-zstd", element_bytes: int = 2) -> list[bytes]:
    """One that shrinks, one of random bytes, which stays plain, and one more."""
    slices = kv_slices(3, SLICE_BYTES, 4 if element_bytes == 4 else 2)
    slices[1] = kv_slices(1, SLICE_BYTES, 1)[0]
    return SliceEncoder(encoding, element_bytes).encode_slices(slices)


@pytest.mark.parametrize(
    ("encoding", "codec"), [("planes-zstd", ZSTD), ("planes-deflate", DEFLATE)]
)
@pytest.mark.parametrize("element_bytes", [1, 2, 4])
def test_lengths_are_those_of_the_frames(
    encoding: str, codec: SliceCodec, element_bytes: int
) -> None:
    frames = frames_of(encoding, element_bytes)
    lengths = frame_lengths(pack_row(frames), SLICE_BYTES, codec)
    assert lengths == [len(one) for one in frames]


def test_a_frame_of_another_codec_than_the_rows_is_none_of_it() -> None:
    row = pack_row(frames_of("planes-deflate"))
    with pytest.raises(DamagedData, match="frame 0: it is of codec 2, the row of 1"):
        frame_lengths(row, SLICE_BYTES, ZSTD)


def test_numbers_must_fit_the_slice_and_the_frame_its_pitch() -> None:
    row = pack_row(frames_of(element_bytes=4))
    with pytest.raises(DamagedData, match="no elements of 4 bytes fit 510"):
        frame_lengths(row, SLICE_BYTES - 2, ZSTD)
    with pytest.raises(DamagedData, match="it would have"):
        frame_lengths(row[:, :256], SLICE_BYTES, ZSTD)
    with pytest.raises(DamagedData, match="at least 16 bytes"):
        frame_lengths(np.zeros((2, 8), np.uint8), SLICE_BYTES, ZSTD)
