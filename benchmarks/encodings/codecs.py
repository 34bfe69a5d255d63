"""What encodings save and cost: bytes, and decoded bytes a second of one core.

Rates are of decoded bytes, by the processor time of the thread. In each round every way has its
turn: over all rows, which come out of memory, and over one that stays in the core's cache. Normal
numbers, and the KV of a real model where it is installed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import zstandard

from benchmarks.basis.bench import Bench
from benchmarks.basis.measure import Row, Samples
from benchmarks.encodings.kv_samples import HEADS, TOKENS, WIDTH, KvSample, Slices, gaussian
from benchmarks.encodings.smollm2 import JUDGED_TOKENS, SmolLm2, missing_packages
from objectcache_encodings import (
    ENCODINGS,
    HEADER_BYTES,
    SliceCodec,
    SliceDecoder,
    SliceEncoder,
    pack_row,
)
from objectcache_encodings.frames import headers_of
from objectcache_encodings.lossy import LOSSY_DTYPES, KvShape
from objectcache_encodings.plane_coders import PlaneCoder, plane_coder

CHUNK_TOKENS = (64, 16)  # slices of 48 and 12 KiB
ROUNDS = 2  # times `scale.repeats`
RATIO_GOAL, BARE_GOAL_GB_PER_S, DECODE_GOAL = 1.42, 2.1, 0.85
GB = 1e9
COPY_GB_PER_S, HUFFMAN_GB_PER_S, JOIN_GB_PER_S, XXH3_GB_PER_S = 10.0, 1.6, 15.0, 25.0


def measure_codecs(bench: Bench) -> Iterator[Row]:
    """Rows of each sample and length of slices, then of lossy dtypes."""
    rounds = 1 if bench.scale.is_quick else ROUNDS * bench.scale.repeats
    model = None if bench.scale.is_quick or missing_packages() else SmolLm2()
    samples = [gaussian(), *([model.sample()] if model else [])]
    for sample in samples:
        for chunk_tokens in CHUNK_TOKENS:
            yield from lossless_rows(sample, chunk_tokens, rounds)
    for name in LOSSY_DTYPES:
        yield from lossy_rows(name, samples[-1], rounds)
        if model:
            yield _quality_row(name, model)


@dataclass(frozen=True, slots=True)
class CodedRow:
    """A row of slices, and its parts as each way of decoding takes them."""

    slices: Slices
    frames: list[bytes]
    row: Slices
    planes: list[Slices]  # the last planes
    coded: list[memoryview]
    raw: Slices

    @classmethod
    def of(cls, slices: Slices, encoder: SliceEncoder) -> CodedRow:
        frames = encoder.encode_slices(slices)
        row = pack_row(frames)
        raw_end = HEADER_BYTES + slices.shape[1] // 2
        lengths = headers_of(row)["coded_bytes"].tolist()
        coded = [one[raw_end : raw_end + n].data for one, n in zip(row, lengths, strict=True)]
        planes = [np.ascontiguousarray(one[1::2]) for one in slices]
        return cls(slices, frames, row, planes, coded, row[:, HEADER_BYTES:raw_end])


def coded_rows(sample: KvSample, chunk_tokens: int, encoding: str) -> list[CodedRow]:
    """A sample in chunks of so many tokens, a row for each layer."""
    encoder = SliceEncoder(encoding, 2)
    return [CodedRow.of(slices, encoder) for slices in sample.rows(chunk_tokens)]


def bare_loop(coder: PlaneCoder, one: CodedRow, out: Slices) -> None:
    """Decode and interleave, and check nothing."""
    words, shift = out.view("<u2"), np.uint16(256)
    for index, coded in enumerate(one.coded):
        plane = np.frombuffer(coder.decode(coded, one.raw.shape[1]), np.uint8)
        np.multiply(plane, shift, out=words[index])
        np.bitwise_or(words[index], one.raw[index], out=words[index])


def _bare_zstd(context: zstandard.ZstdDecompressor, one: CodedRow) -> None:
    for coded in one.coded:
        context.decompress(coded)


def _encode(encoder: SliceEncoder, slices: Slices) -> None:
    for one in slices:
        encoder.encode_slice(one)


def lossless_rows(sample: KvSample, chunk_tokens: int, rounds: int) -> Iterator[Row]:
    """What is stored of a sample in chunks of so many tokens, and at which rates."""
    rows = sample.rows(chunk_tokens)
    out = np.empty_like(rows[0])
    decoder, context = SliceDecoder(), zstandard.ZstdDecompressor()
    ways: dict[str, Callable[[int], object]] = {
        "memcpy": lambda index: np.copyto(out, rows[index]),
    }
    stored = dict[str, float]()
    for encoding in ENCODINGS:
        encoder, coder = SliceEncoder(encoding, 2), plane_coder(ENCODINGS[encoding])
        coded = coded_rows(sample, chunk_tokens, encoding)
        for one in coded:
            decoder.decode_row(one.row, out)
            assert (out == one.slices).all()
        decoded_bytes = sum(one.slices.nbytes for one in coded)
        stored[encoding] = decoded_bytes / sum(one.row.nbytes for one in coded)
        ways |= _ways(encoding, coded, encoder, decoder, coder, context, out)
    times = _in_turns(ways, len(rows), rounds)
    rates = {way: _rates(times.seconds[way], decoded_bytes) for way in ways}
    group = f"Codecs: {sample.name}, slices of {out.shape[1] // 1024} KiB"
    for encoding, ratio in stored.items():
        yield Row(
            group,
            f"{encoding}: decoded bytes of stored ones, at one pitch a layer",
            "x",
            (ratio,),
            ratio / RATIO_GOAL,
            f"{RATIO_GOAL}",
            "at least 1" if sample.is_real else "",
            "sign and exponent 3.7 bits of 8, mantissa 8 of 8: 1.37 to 1.5",
        )
    yield from _rate_rows(group, rates)


def _ways(
    encoding: str,
    coded: Sequence[CodedRow],
    encoder: SliceEncoder,
    decoder: SliceDecoder,
    coder: PlaneCoder,
    context: zstandard.ZstdDecompressor,
    out: Slices,
) -> dict[str, Callable[[int], object]]:
    """What is timed of an encoding, each for the row of a layer."""
    ways: dict[str, Callable[[int], object]] = {
        f"{encoding}: bare loop": lambda index: bare_loop(coder, coded[index], out),
        f"{encoding}: decode": lambda index: decoder.decode_row(coded[index].row, out),
        f"{encoding}: bare loop, one row": lambda _: bare_loop(coder, coded[0], out),
        f"{encoding}: decode, one row": lambda _: decoder.decode_row(coded[0].row, out),
        f"{encoding}: bare encoder": lambda index: [
            coder.encode(plane.data) for plane in coded[index].planes
        ],
        f"{encoding}: encode": lambda index: _encode(encoder, coded[index].slices),
    }
    if ENCODINGS[encoding] is SliceCodec.PLANES_ZSTD:
        ways["bare zstd, planes alone"] = lambda index: _bare_zstd(context, coded[index])
    return ways


def _in_turns(ways: dict[str, Callable[[int], object]], row_count: int, rounds: int) -> Samples:
    """Processor seconds of a pass over all rows, of each way in each round."""
    times = Samples()
    for _ in range(rounds + 1):
        for name, way in ways.items():
            begun_s = time.thread_time()
            for index in range(row_count):
                way(index)
            times.add(name, time.thread_time() - begun_s)
    for taken in times.seconds.values():
        del taken[0]  # memory is touched for the first time
    return times


def _rates(seconds: Sequence[float], decoded_bytes: int) -> tuple[float, ...]:
    return tuple(decoded_bytes / second / GB for second in seconds)


def _median(rates: Sequence[float]) -> float:
    return float(np.median(rates))


def _rate_rows(group: str, rates: dict[str, tuple[float, ...]]) -> Iterator[Row]:
    for way, samples in rates.items():
        encoding, _, what = way.partition(": ")
        ratio, ratio_of, goal, by_hand = None, "", "", f"{COPY_GB_PER_S:g} GB/s"
        huffman_gb_per_s = 2 * HUFFMAN_GB_PER_S
        bare = 1 / (1 / huffman_gb_per_s + 1 / JOIN_GB_PER_S)
        if way.startswith("bare zstd"):
            by_hand = f"half the bytes, at {HUFFMAN_GB_PER_S}: {huffman_gb_per_s:.1f} GB/s"
        elif what.startswith("bare loop"):
            ratio = _median(samples) / BARE_GOAL_GB_PER_S
            ratio_of = f"{BARE_GOAL_GB_PER_S} GB/s"
            goal = "at least 1" if encoding == "planes-zstd" and "48" in group else ""
            by_hand = f"and joined at {JOIN_GB_PER_S:g}: {bare:.1f} GB/s"
        elif what.startswith("decode"):
            ratio = _median(samples) / _median(rates[way.replace("decode", "bare loop")])
            ratio_of, goal = "the bare loop", f"at least {DECODE_GOAL}"
            by_hand = f"and xxh3: {1 / (1 / bare + 1 / XXH3_GB_PER_S):.1f} GB/s"
        elif what == "encode":
            ratio = _median(samples) / _median(rates[f"{encoding}: bare encoder"])
            ratio_of, by_hand = "the bare encoder", "and split, hashed, copied: 0.75 of it"
        elif what == "bare encoder":
            by_hand = "half the bytes, counted and coded at 0.7: 1.4 GB/s"
        yield Row(group, way, "GB/s", samples, ratio, ratio_of, goal, by_hand)


def lossy_rows(name: str, sample: KvSample, rounds: int) -> Iterator[Row]:
    """What is stored of a sample in a lossy dtype, and at which rates of bf16."""
    chunk_tokens = CHUNK_TOKENS[0]
    shape = KvShape(chunk_tokens, HEADS, WIDTH)
    dtype, encoder, decoder = (
        LOSSY_DTYPES[name](shape),
        SliceEncoder(element_bytes=1),
        SliceDecoder(),
    )
    rows = sample.rows(chunk_tokens)
    quantised = [dtype.quantise(slices, layer) for layer, slices in enumerate(rows)]
    packed = [pack_row(encoder.encode_slices(some)) for some in quantised]
    plain_bytes = sum(slices.nbytes for slices in rows)
    out, symbols = np.empty_like(rows[0]), np.empty_like(quantised[0])
    squares = np.zeros(2)
    for layer, (slices, some) in enumerate(zip(rows, quantised, strict=True)):
        dtype.dequantise(some, layer, out)
        exact, back = (_floats(shape, one) for one in (slices, out))
        squares += ((back - exact) ** 2).sum(), (exact**2).sum()
    times = _in_turns(
        {
            "memcpy": lambda layer: np.copyto(out, rows[layer]),
            "decode to symbols": lambda layer: decoder.decode_row(packed[layer], symbols),
            "dequantise": lambda layer: dtype.dequantise(quantised[layer], layer, out),
            "quantise": lambda layer: dtype.quantise(rows[layer], layer),
        },
        len(rows),
        rounds,
    )
    group = f"Lossy dtypes: {sample.name}, slices of 64 tokens"
    coded = plain_bytes / sum(one.nbytes for one in packed)
    yield Row(
        group,
        f"{name}: bytes of bf16 of stored ones, encoded (relative RMS error "
        f"{(squares[0] / squares[1]) ** 0.5:.4f})",
        "x",
        (coded,),
        coded / (plain_bytes / sum(some.nbytes for some in quantised)),
        "not encoded",
        "",
        "16 bits of the symbols' entropy",
    )
    by_hand = {
        "decode to symbols": "Huffman decodes 1 to 1.5 GB/s of symbols, 2 bytes of bf16 each",
        "dequantise": "numpy: 4 passes over float32, 1.5 GB/s of bf16",
        "quantise": "numpy: 4 passes over float32, 1.5 GB/s of bf16",
    }
    for way, estimate in by_hand.items():
        rates = _rates(times.seconds[way], plain_bytes)
        copied = _median(_rates(times.seconds["memcpy"], plain_bytes))
        yield Row(
            group,
            f"{name}: {way}",
            "GB/s",
            rates,
            _median(rates) / copied,
            "memcpy of the bf16",
            "",
            estimate,
        )


def _floats(shape: KvShape, slices: Slices) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return np.stack([shape.to_floats(one) for one in slices]).astype(np.float64)


def _quality_row(name: str, model: SmolLm2) -> Row:
    """The model's prefix goes through the dtype, chunks of 64 tokens."""
    shape = KvShape(CHUNK_TOKENS[0], HEADS, WIDTH)
    dtype = LOSSY_DTYPES[name](shape)

    def through(
        layer: int, numbers: np.ndarray[tuple[int, ...], np.dtype[np.uint16]]
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.uint16]]:
        parts, tokens, heads, width = numbers.shape
        chunks = numbers.reshape(parts, tokens // shape.tokens, shape.tokens, heads, width)
        slices = np.ascontiguousarray(chunks.swapaxes(0, 1)).reshape(chunks.shape[1], -1)
        out = np.empty_like(slices)
        dtype.dequantise(dtype.quantise(slices.view(np.uint8), layer), layer, out.view(np.uint8))
        there = (chunks.shape[1], parts, shape.tokens, heads, width)
        return out.reshape(there).swapaxes(0, 1).reshape(numbers.shape)

    judged = model.judge(through)
    return Row(
        f"Lossy dtypes: SmolLM2-135M, {JUDGED_TOKENS} tokens behind {TOKENS:,}",
        f"{name}: same likeliest token (NLL {judged.nll:.3f}, {model.exact_nll:.3f} exact; "
        f"KL {judged.kl:.4f})",
        "%",
        (100 * judged.same_top1,),
        None,
        "",
        "",
        "",
        details={"nll": judged.nll, "kl": judged.kl, "nll_exact": model.exact_nll},
    )
