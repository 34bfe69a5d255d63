"""An encoded payload says where everything in it lies, and is decoded layer by layer."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objectcache_encodings import SliceCodec, SliceDecoder, SliceEncoder, pack_row
from objectcache_encodings.payload_directory import PayloadDirectory, PayloadRun, directory_bytes
from objectcache_schemas.errors import DamagedData, InvalidRequest
from tests.unit.encodings.kv_numbers import kv_slices
from tests.unit.examples import examples

CODECS = {SliceCodec.PLANES_ZSTD: "planes-zstd", SliceCodec.PLANES_DEFLATE: "planes-deflate"}
RUN_CODECS = st.sampled_from(list(SliceCodec))


def payload_of(
    kv: np.ndarray[tuple[int, int, int], np.dtype[np.uint8]], runs: list[tuple[int, SliceCodec]]
) -> tuple[PayloadDirectory, bytes]:
    """The payload of chunks uint8[layers, chunks, slice_bytes] in runs."""
    layers, _, slice_bytes = kv.shape
    ends = list(itertools.accumulate(count for count, _ in runs))
    rows = [
        [
            kv[layer, end - count : end]
            if codec is SliceCodec.PLAIN
            else pack_row(
                SliceEncoder(CODECS[codec], 2).encode_slices(kv[layer, end - count : end])
            )
            for layer in range(layers)
        ]
        for (count, codec), end in zip(runs, ends, strict=True)
    ]
    directory = PayloadDirectory(
        tuple(
            PayloadRun(count, codec, tuple(row.shape[1] for row in of_run))
            for (count, codec), of_run in zip(runs, rows, strict=True)
        ),
        slice_bytes,
    )
    body = b"".join(row.tobytes() for layer in zip(*rows, strict=True) for row in layer)
    return directory, directory.to_bytes() + body


@given(
    st.lists(st.tuples(st.integers(1, 5), RUN_CODECS), min_size=1, max_size=5),
    st.integers(1, 4),
    st.integers(1, 400),
)
@settings(max_examples=examples(60), deadline=None)
def test_a_payload_is_decoded_layer_by_layer(
    runs: list[tuple[int, SliceCodec]], layers: int, numbers: int
) -> None:
    chunks = sum(count for count, _ in runs)
    kv = kv_slices(layers * chunks, 4 * numbers, 2, 7).reshape(layers, chunks, -1)
    written, payload = payload_of(kv, runs)
    assert written.payload_bytes == len(payload)
    assert written.decoded_bytes == kv.size
    directory = PayloadDirectory.from_bytes(
        payload[: written.directory_bytes],
        chunk_count=chunks,
        layer_count=layers,
        slice_bytes=4 * numbers,
    )
    assert directory == written
    decoder = SliceDecoder()
    for layer, (begin, end) in enumerate(itertools.pairwise(directory.layer_offsets)):
        out = np.zeros((chunks, 2, 2 * numbers), np.uint8)  # K and V of their own
        directory.decode_layer(layer, memoryview(payload)[begin:end], out, decoder)
        assert np.array_equal(out.reshape(chunks, -1), kv[layer])
        rows = list(directory.rows(layer))
        assert rows[0].offset_bytes == begin
        assert [(row.chunk_count, row.codec) for row in rows] == runs


RUNS = (
    PayloadRun(2, SliceCodec.PLANES_ZSTD, (64, 128, 64)),
    PayloadRun(1, SliceCodec.PLAIN, (100, 100, 100)),
)
WRITTEN = PayloadDirectory(RUNS, 100).to_bytes()


@given(st.integers(0, len(WRITTEN) - 1), st.integers(1, 255))
@settings(max_examples=examples(200), deadline=None)
def test_any_changed_byte_of_a_directory_is_found(where: int, change: int) -> None:
    damaged = bytearray(WRITTEN)
    damaged[where] ^= change
    with pytest.raises(DamagedData):
        PayloadDirectory.from_bytes(bytes(damaged), chunk_count=3, layer_count=3, slice_bytes=100)


@given(st.binary(max_size=300))
@settings(max_examples=examples(200), deadline=None)
def test_no_bytes_are_taken_for_a_directory(data: bytes) -> None:
    with pytest.raises(DamagedData):
        PayloadDirectory.from_bytes(data, chunk_count=3, layer_count=3, slice_bytes=100)


@pytest.mark.parametrize(
    ("chunk_count", "layer_count", "slice_bytes"),
    [(4, 3, 100), (3, 2, 100), (3, 3, 101), (1, 3, 4)],
)
def test_a_directory_of_another_request_is_refused(
    chunk_count: int, layer_count: int, slice_bytes: int
) -> None:
    with pytest.raises(DamagedData, match="directory"):
        PayloadDirectory.from_bytes(
            WRITTEN, chunk_count=chunk_count, layer_count=layer_count, slice_bytes=slice_bytes
        )


@pytest.mark.parametrize(
    "runs",
    [
        (),
        (PayloadRun(1, SliceCodec.PLANES_ZSTD, ()),),
        (PayloadRun(0, SliceCodec.PLANES_ZSTD, (64,)),),
        (PayloadRun(1, SliceCodec.PLANES_ZSTD, (192,)),),
        (PayloadRun(1, SliceCodec.PLAIN, (64,)),),
        (PayloadRun(1, SliceCodec.PLANES_ZSTD, (64,)), PayloadRun(1, SliceCodec.PLAIN, (100,) * 2)),
    ],
)
def test_runs_that_cannot_be_are_refused(runs: tuple[PayloadRun, ...]) -> None:
    with pytest.raises(InvalidRequest):
        PayloadDirectory(runs, 100)


def test_a_damaged_frame_is_told_and_memory_of_another_size_is_refused() -> None:
    kv = kv_slices(4, 64, 2, 1).reshape(1, 4, -1)
    directory, payload = payload_of(kv, [(1, SliceCodec.PLAIN), (3, SliceCodec.PLANES_ZSTD)])
    layer = bytearray(payload[directory.directory_bytes :])
    out = np.zeros((4, kv.shape[2]), np.uint8)
    with pytest.raises(InvalidRequest, match="4 chunks"):
        directory.decode_layer(0, memoryview(layer)[1:], out, SliceDecoder())
    layer[-1] ^= 1
    with pytest.raises(DamagedData, match=r"^chunk 3: what follows"):
        directory.decode_layer(0, memoryview(layer), out, SliceDecoder())


def test_golden_bytes() -> None:
    runs = (
        PayloadRun(2, SliceCodec.PLANES_ZSTD, (64, 128)),
        PayloadRun(1, SliceCodec.PLAIN, (100, 100)),
    )
    golden = bytes.fromhex(
        "02 00 00 00 02 00 00 00 02 00 00 00 01 00 00 00 40 00 00 00 80 00 00 00 "
        "01 00 00 00 00 00 00 00 64 00 00 00 64 00 00 00 55 80 da 90 1c bc 12 c7 "
    )
    directory = PayloadDirectory(runs, 100)
    assert directory.to_bytes() == golden.ljust(directory_bytes(2, 2), b"\0")
    assert directory.layer_offsets == (64, 292, 648)
