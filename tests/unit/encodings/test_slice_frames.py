"""What is encoded is decoded, byte for byte, into any place; and of what is damaged nothing is."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from objectcache_encodings import (
    ENCODINGS,
    HEADER_BYTES,
    SliceCodec,
    SliceDecoder,
    SliceEncoder,
    element_bytes_of,
    frame_bytes_max,
    pack_row,
    slice_checksums,
    smallest_element_bytes,
)
from objectcache_encodings.frames import FrameHeader
from objectcache_schemas.errors import DamagedData, InvalidRequest
from tests.unit.encodings.kv_numbers import kv_slices
from tests.unit.examples import examples

SIZES = st.sampled_from([1, 2, 4])
SLICES = st.one_of(
    st.binary(min_size=1, max_size=400),
    st.builds(
        lambda data, times: data * times, st.binary(min_size=1, max_size=9), st.integers(1, 99)
    ),
    st.builds(
        lambda count, seed: kv_slices(1, 2 * count, 2, seed).tobytes(),
        st.integers(1, 3000),
        st.integers(0, 99),
    ),
)


def decoded(frame: bytes, slice_bytes: int) -> bytes:
    out = np.zeros(slice_bytes, np.uint8)
    SliceDecoder().decode_into(frame, out)
    return out.tobytes()


@given(SLICES, SIZES, st.sampled_from(sorted(ENCODINGS)))
@settings(max_examples=examples(150), deadline=None)
def test_a_slice_is_decoded_as_it_was(data: bytes, element_bytes: int, encoding: str) -> None:
    data = data[: len(data) // element_bytes * element_bytes] or bytes(element_bytes)
    frame = SliceEncoder(encoding, element_bytes).encode_slice(data)
    assert len(frame) <= frame_bytes_max(len(data))
    assert decoded(frame, len(data)) == data
    assert slice_checksums(np.frombuffer(frame, np.uint8)[np.newaxis]) == [
        xxhash.xxh3_64_intdigest(data)
    ]


@given(st.data(), SLICES, SIZES, st.sampled_from(sorted(ENCODINGS)))
@settings(max_examples=examples(150), deadline=None)
def test_any_changed_byte_of_a_frame_and_of_what_fills_its_row_is_found(
    data: st.DataObject, slice_: bytes, element_bytes: int, encoding: str
) -> None:
    slice_ = slice_[: len(slice_) // element_bytes * element_bytes] or bytes(element_bytes)
    frame = SliceEncoder(encoding, element_bytes).encode_slice(slice_)
    row = pack_row([frame, frame])
    where = data.draw(st.integers(0, row.shape[1] - 1))
    row[1, where] ^= data.draw(st.integers(1, 255))
    out = np.zeros((2, len(slice_)), np.uint8)
    with pytest.raises(DamagedData, match="frame 1"):
        SliceDecoder().decode_row(row, out)
    assert out[0].tobytes() == slice_


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_bit_of_an_encoded_frame_counts(encoding: str) -> None:
    """Those too of the coded plane that its decoder passes over."""
    slice_ = kv_slices(1, 600)[0]
    frame = SliceEncoder(encoding).encode_slice(slice_)
    assert frame[0] == ENCODINGS[encoding]
    out, decoder = np.zeros(600, np.uint8), SliceDecoder()
    for bit in range(8 * len(frame)):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedData):
            decoder.decode_into(bytes(damaged), out)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_shortened_frame_is_found(encoding: str) -> None:
    frame = SliceEncoder(encoding).encode_slice(kv_slices(1, 600)[0])
    for length in range(len(frame)):
        with pytest.raises(DamagedData):
            decoded(frame[:length], 600)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(("element_bytes", "ratio"), [(2, 1.42), (4, 1.17)], ids=["bf16", "fp32"])
def test_numbers_like_kv_shrink(encoding: str, element_bytes: int, ratio: float) -> None:
    slices = kv_slices(4, 48 * 1024, element_bytes)
    row = pack_row(SliceEncoder(encoding, element_bytes).encode_slices(slices))
    assert slices.nbytes / row.nbytes > ratio


def test_random_bytes_are_plain_and_sixteen_bytes_longer() -> None:
    slice_ = kv_slices(1, 4096, 1)[0].tobytes()
    for element_bytes in (1, 2, 4):
        frame = SliceEncoder(element_bytes=element_bytes).encode_slice(slice_)
        assert frame[0] == SliceCodec.PLAIN
        assert frame[HEADER_BYTES:] == slice_


def test_one_row_may_have_frames_of_several_codecs_and_sizes_of_elements() -> None:
    plain, numbers = kv_slices(2, 2048, 1), kv_slices(4, 2048)
    slices = np.concatenate([numbers[:1], plain, numbers[1:]])
    encoders = [SliceEncoder(name, size) for name in ENCODINGS for size in (2, 1, 4)]
    frames = [one.encode_slice(s) for one, s in zip(encoders, slices, strict=True)]
    assert len({frame[:2] for frame in frames}) > 3
    out = np.zeros_like(slices)
    SliceDecoder().decode_row(pack_row(frames), out)
    assert (out == slices).all()


@pytest.mark.parametrize("element_bytes", [1, 2, 4])
def test_parts_of_slices_are_decoded_into_places_of_their_own(element_bytes: int) -> None:
    """K and V of blocks of an engine's memory, in which other blocks lie between."""
    slices = kv_slices(5, 2 * 768, element_bytes) & np.uint8(0x7F)
    memory = np.full((2, 11, 768), 0xEE, np.uint8)
    out = memory[:, 1::2].transpose(1, 0, 2)
    row = pack_row(SliceEncoder(element_bytes=element_bytes).encode_slices(slices))
    SliceDecoder().decode_row(row, out)
    assert (out == slices.reshape(5, 2, 768)).all()
    assert (memory[:, ::2] == 0xEE).all()


def test_a_row_may_be_a_part_of_a_wider_one_at_any_address() -> None:
    slices = kv_slices(3, 1000)
    row = pack_row(SliceEncoder().encode_slices(slices), multiple_bytes=1)
    wider = np.full((3, row.shape[1] + 9), 7, np.uint8)
    wider[:, 5 : 5 + row.shape[1]] = row
    memory = np.zeros(1 + slices.size, np.uint8)
    out = memory[1:].reshape(3, 1000)
    SliceDecoder().decode_row(wider[:, 5 : 5 + row.shape[1]], out)
    assert (out == slices).all()


def test_slices_of_many_blocks_of_the_coders_are_decoded() -> None:
    slices = kv_slices(1, 3 << 20)
    for encoding in ENCODINGS:
        assert decoded(SliceEncoder(encoding).encode_slice(slices[0]), 3 << 20) == slices.tobytes()


def test_no_rows_are_decoded_into_nothing() -> None:
    SliceDecoder().decode_row(np.empty((0, 64), np.uint8), np.empty((0, 64), np.uint8))


def forged(
    coded: bytes, codec: int = SliceCodec.PLANES_ZSTD, raw: bytes = b"", element_bytes: int = 1
) -> bytes:
    """A frame whose header is right and whose slice has checksum 0."""
    header = FrameHeader(codec, element_bytes, 0)  # type: ignore[arg-type]
    return header.to_bytes(coded) + raw + coded


ZEROS = bytes(64 << 20)
DEFLATE = SliceEncoder("planes-deflate", 1)


FORGERIES = [
    (forged(zstandard.compress(ZEROS)), "states 67108864 bytes, not 4096"),
    (forged(zstandard.compress(b"")), "states 0 bytes"),
    (forged(zstandard.compress(bytes(4096)) + b"x"), "zstd"),
    (forged(zstandard.compress(bytes(4096))[:-1]), "zstd"),
    (forged(zstandard.compress(bytes(4096))), "checksum"),
    (forged(b"\x28\xb5\x2f\xfd"), "zstd"),
    (forged(b""), "zstd"),
    (forged(DEFLATE.encode_slice(ZEROS)[16:], 2), "does not hold 4096"),
    (forged(DEFLATE.encode_slice(bytes(4095))[16:], 2), "does not hold 4096"),
    (forged(DEFLATE.encode_slice(bytes(4096))[16:] + b"x", 2), "does not hold 4096"),
    (forged(DEFLATE.encode_slice(bytes(4096))[16:-1], 2), "does not hold 4096"),
    (forged(b"\xff\xff", 2), "Deflate"),
    (forged(b"", 2), "does not hold 4096"),
    (forged(b"x", 0, bytes(4096)), "plain"),
    (forged(b"", 0, bytes(4096), 2), "plain"),
    (forged(b"x", 3), "no codec 3"),
    (forged(b"x", element_bytes=0), "elements of 0 bytes"),
    (forged(b"x", element_bytes=3), "elements of 3 bytes"),
    (forged(b"x", element_bytes=2), "2064 at least"),
    (b"", "at least 16 bytes"),
]


@pytest.mark.parametrize(("frame", "why"), FORGERIES, ids=map(str, range(len(FORGERIES))))
def test_a_forged_frame_is_refused(frame: bytes, why: str) -> None:
    with pytest.raises(DamagedData, match=why):
        decoded(frame, 4096)


def test_elements_that_do_not_fit_a_part_are_refused() -> None:
    frame = SliceEncoder(element_bytes=4).encode_slice(bytes(4096))
    with pytest.raises(DamagedData, match="elements of 4"):
        SliceDecoder().decode_into(frame, np.zeros((2048, 2), np.uint8))


BOMBS = """
import resource, sys
import numpy as np, zstandard
from objectcache_encodings import SliceDecoder
from objectcache_encodings.frames import FrameHeader
from objectcache_schemas.errors import DamagedData
import zlib

def bombs():
    zeros = bytes(256 << 20)
    yield 1, zstandard.compress(zeros)
    # The right size, and a window of 128 MiB that a decoder would have to keep.
    wide = zstandard.ZstdCompressionParameters(window_log=27, write_content_size=False)
    frame = bytearray(zstandard.ZstdCompressor(compression_params=wide).compress(zeros))
    assert frame[4] == 0
    yield 1, bytes(frame)
    frame[4] = 0x80  # with a content's size of four bytes
    frame[6:6] = (4096).to_bytes(4, "little")
    yield 1, bytes(frame)
    yield 1, bytes(frame[:-1])
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    yield 2, deflate.compress(zeros) + deflate.flush()

frames = [FrameHeader(codec, 1, 0).to_bytes(coded) + coded for codec, coded in bombs()]
decoder, out = SliceDecoder(), np.zeros(4096, np.uint8)
with open("/proc/self/clear_refs", "w") as clear:
    clear.write("5")
def peak_kib():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
before = peak_kib()
for frame in frames:
    try:
        decoder.decode_into(frame, out)
    except DamagedData as error:
        print(error)
print(peak_kib() - before)
"""


def test_no_frame_makes_a_decoder_use_memory() -> None:
    run = subprocess.run(
        [sys.executable, "-c", BOMBS], capture_output=True, text=True, timeout=60, check=True
    )
    *errors, grown_kib = run.stdout.splitlines()
    assert len(errors) == 5
    assert int(grown_kib) < 4096


@pytest.mark.parametrize(
    ("dtype", "element_bytes"),
    [
        ("bfloat16", 2),
        ("torch.bfloat16", 2),
        ("torch.float16", 2),
        ("auto/torch.bfloat16", 2),
        ("fp8_e4m3/torch.bfloat16", 1),
        ("torch.float8_e4m3fn", 1),
        ("float32", 4),
        ("uint8", None),
        ("auto", None),
        ("", None),
    ],
)
def test_a_dtypes_name_says_how_long_its_numbers_are(dtype: str, element_bytes: int | None) -> None:
    assert element_bytes_of(dtype) == element_bytes


@pytest.mark.parametrize("element_bytes", [2, 4])
def test_a_slice_shows_how_long_its_numbers_are(element_bytes: int) -> None:
    assert smallest_element_bytes(kv_slices(1, 8192, element_bytes)[0]) == element_bytes


@pytest.mark.parametrize(
    ("encoding", "element_bytes", "slice_bytes", "why"),
    [
        ("plain", 2, 64, "encoding must be one of planes-zstd"),
        ("planes-zstd", 3, 64, "element_bytes must be 1, 2 or 4"),
        ("planes-zstd", 2, 63, "not whole elements of 2"),
        ("planes-zstd", 2, 0, "must have 1 to"),
    ],
)
def test_what_cannot_be_encoded_is_refused(
    encoding: str, element_bytes: int, slice_bytes: int, why: str
) -> None:
    with pytest.raises(InvalidRequest, match=why):
        SliceEncoder(encoding, element_bytes).encode_slice(bytes(slice_bytes))


@pytest.mark.parametrize(
    ("row", "out"),
    [
        (np.zeros((2, 64), np.uint8), np.zeros((3, 64), np.uint8)),
        (np.zeros(64, np.uint8), np.zeros((1, 64), np.uint8)),
        (np.zeros((1, 64), np.int8), np.zeros((1, 64), np.uint8)),
        (np.zeros((1, 64), np.uint8), np.zeros((1, 2, 2, 16), np.uint8)),
        (np.zeros((1, 128), np.uint8)[:, ::2], np.zeros((1, 64), np.uint8)),
        (np.zeros((1, 64), np.uint8), np.zeros((1, 128), np.uint8)[:, ::2]),
        (np.zeros((1, 64), np.uint8), np.frombuffer(bytes(64), np.uint8).reshape(1, 64)),
    ],
)
def test_arrays_of_other_shapes_are_refused(
    row: np.ndarray[tuple[int, ...], np.dtype[np.uint8]],
    out: np.ndarray[tuple[int, ...], np.dtype[np.uint8]],
) -> None:
    with pytest.raises(InvalidRequest):
        SliceDecoder().decode_row(row, out)
