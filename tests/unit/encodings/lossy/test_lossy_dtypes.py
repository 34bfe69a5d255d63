"""What a lossy dtype loses is bounded, and nobody gets it who did not ask by name."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objectcache_encodings import SliceDecoder, SliceEncoder, element_bytes_of, pack_row
from objectcache_encodings.lossy import LOSSY_DTYPES, KvShape, kv_shape, lossy_layout, lossy_name
from objectcache_encodings.lossy.kv_shape import bfloat16_floats
from objectcache_schemas.errors import DamagedData, InvalidRequest
from objectcache_schemas.layout import KvLayout
from tests.unit.examples import examples

NUMBERS = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}  # of a number, rounded
# Of the largest magnitude of a group; of its range for q4, whose bfloat16 bounds are of the range
# and of the least number.
DOCUMENTED = {"lossy-q8": 0.0040, "lossy-q6": 0.0163, "lossy-q4": 0.0340, "lossy-bins": 0.0720}
SHAPES = st.builds(
    KvShape,
    tokens=st.sampled_from([1, 3, 16, 64, 96]),
    heads=st.integers(1, 3),
    width=st.sampled_from([2, 6, 64]),
    numbers=st.sampled_from(sorted(NUMBERS)),
    parts=st.sampled_from([1, 2]),
)
MODEL = KvShape(tokens=16, heads=3, width=64)


def as_slice(shape: KvShape, floats: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """uint8[1, slice_bytes]: the numbers in the type of the shape."""
    slice_ = np.zeros((1, shape.slice_bytes), np.uint8)
    shape.from_floats(np.array(floats, np.float32), slice_[0])
    return slice_


def normal(shape: KvShape, seed: int, scale: float) -> npt.NDArray[np.float32]:
    """Numbers as keys are: channels of very different sizes."""
    generator = np.random.default_rng(seed)
    numbers = generator.standard_normal(shape.axes, np.float32)
    channels = np.exp2(generator.integers(-6, 5, shape.axes[2:])).astype(np.float32)
    return numbers * channels * np.float32(scale)


def there_and_back(
    name: str, shape: KvShape, slice_: npt.NDArray[np.uint8], layer: int = 0
) -> npt.NDArray[np.float32]:
    dtype = LOSSY_DTYPES[name](shape)
    quantised = dtype.quantise(slice_, layer)
    assert quantised.shape == (1, dtype.slice_bytes)
    out = np.zeros_like(slice_)
    dtype.dequantise(quantised, layer, out)
    return shape.to_floats(out[0])


@pytest.mark.parametrize("name", LOSSY_DTYPES)
@given(
    shape=SHAPES,
    seed=st.integers(0, 999),
    scale=st.sampled_from([1.0, 1e-30, 1e-3, 900.0]),
    offset=st.sampled_from([0.0, 5.0, -300.0]),
    layer=st.sampled_from([0, 5, 20]),
)
@settings(max_examples=examples(40), deadline=None)
def test_no_number_is_off_by_more_than_the_dtype_says(
    name: str, shape: KvShape, seed: int, scale: float, offset: float, layer: int
) -> None:
    slice_ = as_slice(shape, normal(shape, seed, scale) + np.float32(offset))
    floats = shape.to_floats(slice_[0])
    back = there_and_back(name, shape, slice_, layer)
    bound = LOSSY_DTYPES[name](shape).error_bound(floats, layer).astype(np.float64)
    off = np.abs(back.astype(np.float64) - floats)
    smallest = 1e-7 if shape.numbers == "float16" else 0
    rounding = NUMBERS[shape.numbers] * (np.abs(floats) + bound) + 2.0**-22 * np.abs(floats).max()
    assert (off <= bound + rounding + smallest).all()
    largest = np.ptp(floats) if name == "lossy-q4" else np.abs(floats).max()
    slack = 2.0**-7 * abs(floats.min()) if name == "lossy-q4" else 0
    assert bound.max() <= DOCUMENTED[name] * (largest + slack)


@pytest.mark.parametrize("name", LOSSY_DTYPES)
def test_zeros_come_back_as_zeros_beside_other_groups(name: str) -> None:
    floats = normal(MODEL, 1, 1.0)
    floats[:, 5] = 0
    floats[:, :, 1, 7] = 0
    back = there_and_back(name, MODEL, as_slice(MODEL, floats))
    if name == "lossy-q4":  # whose keys are grouped by channel, and values need not hold zero
        assert (back[0, :, 1, 7] == 0).all()
        assert (back[1, 5] == 0).all()
    else:
        assert (back[floats == 0] == 0).all()


@pytest.mark.parametrize(
    ("name", "least"),
    [("lossy-q8", 2.0), ("lossy-q6", 2.6), ("lossy-q4", 3.5), ("lossy-bins", 4.2)],
)
def test_quantised_slices_shrink_and_are_framed_without_further_loss(
    name: str, least: float
) -> None:
    shape = KvShape(tokens=64, heads=3, width=64)
    slices = np.concatenate(
        [
            as_slice(shape, np.random.default_rng(n).standard_normal(shape.axes, np.float32))
            for n in range(4)
        ]
    )
    quantised = LOSSY_DTYPES[name](shape).quantise(slices, 20)
    row = pack_row(SliceEncoder(element_bytes=1).encode_slices(quantised))
    assert slices.nbytes / row.nbytes > least
    out = np.zeros_like(quantised)
    SliceDecoder().decode_row(row, out)
    assert (out == quantised).all()


@pytest.mark.parametrize("name", LOSSY_DTYPES)
def test_parts_are_dequantised_into_places_of_their_own(name: str) -> None:
    dtype = LOSSY_DTYPES[name](MODEL)
    slices = np.concatenate([as_slice(MODEL, normal(MODEL, n, 1.0)) for n in range(3)])
    quantised = dtype.quantise(slices, 3)
    together = np.zeros_like(slices)
    dtype.dequantise(quantised, 3, together)
    memory = np.full((2, 7, MODEL.slice_bytes // 2), 0xEE, np.uint8)
    dtype.dequantise(quantised, 3, memory[:, 1::2].transpose(1, 0, 2))
    assert (memory[:, 1::2].transpose(1, 0, 2) == together.reshape(3, 2, -1)).all()
    assert (memory[:, ::2] == 0xEE).all()


@pytest.mark.parametrize("name", LOSSY_DTYPES)
@pytest.mark.parametrize(
    ("shape", "block_tokens", "of_q4"),
    [
        (KvShape(tokens=40, heads=8, width=1024), 16, 10),  # parts of a group of 40
        (KvShape(tokens=320, heads=4, width=256), 128, 128),  # two groups and a half of three
        (KvShape(tokens=192, heads=5, width=128, parts=1), 192, 192),
    ],
)
def test_blocks_of_tokens_are_dequantised_as_the_whole_slice_is(
    name: str, shape: KvShape, block_tokens: int, of_q4: int
) -> None:
    dtype, whole = LOSSY_DTYPES[name](shape), LOSSY_DTYPES[name](shape)
    assert dtype.block_tokens == (of_q4 if name == "lossy-q4" else block_tokens)
    whole.block_tokens = shape.tokens
    quantised = dtype.quantise(as_slice(shape, normal(shape, 1, 1.0)), 5)
    memory = np.full((2, shape.parts, shape.slice_bytes // shape.parts + 8), 0xEE, np.uint8)
    outs = memory[:, :, 8:]
    for each, out in zip((dtype, whole), outs, strict=True):
        each.dequantise(quantised, 5, out[np.newaxis])
    assert np.array_equal(outs[0], outs[1])
    assert (memory[:, :, :8] == 0xEE).all()
    quantised[0, : dtype.slice_bytes - shape.count // 2] = 0xFF  # scales, and symbols
    with pytest.raises(DamagedData):
        dtype.dequantise(quantised, 5, outs[:1])


def test_bytes_of_a_slice_are_arithmetic() -> None:
    shape = KvShape(tokens=64, heads=8, width=128)
    count = 2 * 64 * 8 * 128
    assert {name: dtype(shape).slice_bytes for name, dtype in LOSSY_DTYPES.items()} == {
        "lossy-q8": count + 2 * 64 * 8 * 2,
        "lossy-q6": count + 2 * 64 * 8 * 2,
        "lossy-q4": count // 2 + (8 * 128 + 64 * 8) * 4,
        "lossy-bins": count + 2 * 64 * 2,
    }


@pytest.mark.parametrize("name", LOSSY_DTYPES)
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf, 3e38])
def test_numbers_that_are_none_are_refused(name: str, number: float) -> None:
    floats = np.zeros(MODEL.axes, np.float32)
    floats[1, 7, 2, 5] = number
    with pytest.raises(InvalidRequest, match="not finite or too large"):
        LOSSY_DTYPES[name](MODEL).quantise(as_slice(MODEL, floats), 0)


@pytest.mark.parametrize("name", LOSSY_DTYPES)
def test_a_forged_scale_is_refused(name: str) -> None:
    dtype = LOSSY_DTYPES[name](MODEL)
    with pytest.raises(DamagedData, match="scale"):
        dtype.dequantise(
            np.full((1, dtype.slice_bytes), 0xFF, np.uint8),
            0,
            np.zeros((1, MODEL.slice_bytes), np.uint8),
        )


LAYOUT = KvLayout(
    num_layers=30,
    chunk_tokens=16,
    per_layer_chunk_bytes=MODEL.slice_bytes,
    dtype="torch.bfloat16",
    fingerprint="smollm2",
)


def test_every_lossy_layout_has_keys_of_its_own() -> None:
    layouts = [LAYOUT, *(lossy_layout(LAYOUT, name, MODEL) for name in LOSSY_DTYPES)]
    keys = [layout.chunk_keys(range(48)) for layout in layouts]
    assert len({key for some in keys for key in some}) == 3 * len(layouts)
    for name, layout in zip(LOSSY_DTYPES, layouts[1:], strict=True):
        assert layout.dtype == f"{name}/torch.bfloat16"
        assert lossy_name(layout.dtype) == name
        assert kv_shape(layout, 3, 64) == MODEL
        assert element_bytes_of(layout.dtype) == 1
        assert layout.per_layer_chunk_bytes == LOSSY_DTYPES[name](MODEL).slice_bytes
    assert lossy_name(LAYOUT.dtype) is None
    assert kv_shape(LAYOUT, 3, 64) == MODEL


@pytest.mark.parametrize(
    ("dtype", "numbers"),
    [
        ("lossy-q8/auto/torch.float16", "float16"),
        ("auto/torch.bfloat16", "bfloat16"),
        ("float32", "float32"),
    ],
)
def test_a_layouts_dtype_says_what_the_model_computes_with(dtype: str, numbers: str) -> None:
    layout = msgspec.structs.replace(LAYOUT, dtype=dtype)
    assert kv_shape(layout, 3, 64).numbers == numbers


@pytest.mark.parametrize("dtype", ["fp8_e4m3/torch.bfloat16", "uint8", "auto", "lossy-q8"])
def test_numbers_that_cannot_be_quantised_have_no_shape(dtype: str) -> None:
    with pytest.raises(InvalidRequest, match="numbers must be one of"):
        kv_shape(msgspec.structs.replace(LAYOUT, dtype=dtype), 3, 64)


def test_a_layout_that_does_not_fit_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="none of lossy-q8"):
        lossy_layout(LAYOUT, "q8", MODEL)
    with pytest.raises(InvalidRequest, match="lossy already"):
        lossy_layout(lossy_layout(LAYOUT, "lossy-q8", MODEL), "lossy-q4", MODEL)
    with pytest.raises(InvalidRequest, match="bytes of 16 tokens"):
        lossy_layout(LAYOUT, "lossy-q8", KvShape(tokens=16, heads=4, width=64))
    with pytest.raises(InvalidRequest, match="lossy-q5"):
        lossy_name("lossy-q5/torch.bfloat16")
    with pytest.raises(InvalidRequest, match="even width"):
        LOSSY_DTYPES["lossy-q4"](KvShape(tokens=16, heads=1, width=3))


@pytest.mark.parametrize(
    "shape", [{"tokens": 0}, {"heads": 0}, {"width": 0}, {"parts": 3}, {"numbers": "int8"}]
)
def test_a_shape_out_of_bounds_is_refused(shape: dict[str, int | str]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(shape))):
        KvShape(**{"tokens": 16, "heads": 3, "width": 64, **shape})  # type: ignore[arg-type]


def test_arrays_of_other_shapes_are_refused() -> None:
    dtype = LOSSY_DTYPES["lossy-q8"](MODEL)
    good = np.zeros((2, dtype.slice_bytes), np.uint8)
    with pytest.raises(InvalidRequest, match="slices is uint8"):
        dtype.quantise(np.zeros((1, 7), np.uint8), 0)
    with pytest.raises(InvalidRequest, match="out is uint8"):
        dtype.dequantise(good, 0, np.zeros((2, 7), np.uint8))
    with pytest.raises(InvalidRequest, match="1 slices, not 2"):
        dtype.dequantise(good, 0, np.zeros((1, MODEL.slice_bytes), np.uint8))


@pytest.mark.parametrize("layer", [0, 20])
@pytest.mark.parametrize("name", LOSSY_DTYPES)
def test_whatever_scales_and_symbols_a_slice_has_its_numbers_are_finite(
    name: str, layer: int
) -> None:
    lossy = LOSSY_DTYPES[name](MODEL)
    out = np.empty((1, MODEL.slice_bytes), np.uint8)
    symbols_bytes = MODEL.count // 2 if name == "lossy-q4" else MODEL.count
    refused = 0
    # Of a bfloat16: large, larger, the largest, infinite, and no number of either kind.
    for word in (0x3F80, *range(0x7A00, 0x7F80, 0x10), 0x7F7F, 0xFF7F, 0x7F80, 0x7F81, 0xFFFF):
        for symbol in (0x00, 0x7F, 0xFF):
            stored = np.full((1, lossy.slice_bytes), symbol, np.uint8)
            stored[0, :-symbols_bytes].view("<u2")[:] = word
            try:
                lossy.dequantise(stored, layer, out)
            except DamagedData:
                refused += 1
            else:
                assert np.isfinite(bfloat16_floats(out.view("<u2"))).all(), (word, symbol)
    assert refused >= 12


@pytest.mark.parametrize("layer", [0, 20])
@pytest.mark.parametrize("name", LOSSY_DTYPES)
def test_the_largest_numbers_that_can_be_quantised_come_back(name: str, layer: int) -> None:
    floats = np.full(MODEL.axes, 2.0**125, np.float32)
    floats[:, ::2] *= -1
    lossy = LOSSY_DTYPES[name](MODEL)
    out = np.empty((1, MODEL.slice_bytes), np.uint8)
    lossy.dequantise(lossy.quantise(as_slice(MODEL, floats), layer), layer, out)
    assert np.allclose(bfloat16_floats(out.view("<u2")).reshape(MODEL.axes), floats, rtol=0.2)
