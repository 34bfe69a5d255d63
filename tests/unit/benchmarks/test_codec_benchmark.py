"""The slices that the codecs are measured with, and the rows that come out; nothing is timed."""

import numpy as np

from benchmarks.encodings.codecs import lossless_rows, lossy_rows
from benchmarks.encodings.kv_samples import KvSample, gaussian
from objectcache_encodings.lossy import LOSSY_DTYPES

LAYERS, TOKENS = 2, 128
SAMPLE = KvSample("a sample", gaussian().numbers[:LAYERS, :, :TOKENS], is_real=False)


def test_a_slice_is_a_chunks_keys_and_then_its_values() -> None:
    rows = SAMPLE.rows(64)
    assert [row.shape for row in rows] == [(2, 2 * 64 * 3 * 64 * 2)] * LAYERS
    second_chunk = np.ascontiguousarray(SAMPLE.numbers[1, :, 64:128])
    assert (rows[1][1].view("<u2") == second_chunk.reshape(-1)).all()


def test_every_way_has_a_row_beside_what_it_is_compared_with() -> None:
    rows = {row.name: row for row in lossless_rows(SAMPLE, 64, rounds=1)}
    for encoding in ("planes-zstd", "planes-deflate"):
        stored = rows[f"{encoding}: decoded bytes of stored ones, at one pitch a layer"]
        assert 1.42 < stored.median < 1.6
        assert stored.goal == ""  # which is for a real model's
        decode, bare = rows[f"{encoding}: decode"], rows[f"{encoding}: bare loop"]
        assert decode.ratio == decode.median / bare.median
    assert rows["memcpy"].ratio is None


def test_a_lossy_dtype_is_compared_with_bf16_not_with_symbols() -> None:
    for name, least in (("lossy-q8", 1.9), ("lossy-q4", 3.4)):
        assert name in LOSSY_DTYPES
        first, *rates = lossy_rows(name, SAMPLE, rounds=1)
        assert first.median > least
        assert [row.name.partition(": ")[2] for row in rates] == [
            "decode to symbols",
            "dequantise",
            "quantise",
        ]
