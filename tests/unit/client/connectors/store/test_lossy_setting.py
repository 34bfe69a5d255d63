"""The setting `lossy`: off unless it is named, and refused by its name where it cannot be had."""

from __future__ import annotations

import logging

import pytest

from objectcache.connectors.store.configuration import StoreConfiguration
from objectcache.connectors.store.lossy_setting import (
    LOSSY_WORDS,
    lossy_dtype_of,
    refuse_lossy,
    stored_dtype,
)
from objectcache_encodings.lossy import lossy_layout, lossy_name
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.layout import KvLayout

HEADS, WIDTH, TOKENS = 2, 8, 16


def layout_of(dtype: str, slice_bytes: int = 2 * TOKENS * HEADS * WIDTH * 2) -> KvLayout:
    return KvLayout(
        num_layers=3,
        chunk_tokens=TOKENS,
        per_layer_chunk_bytes=slice_bytes,
        dtype=dtype,
        fingerprint="f",
    )


def test_nothing_is_lossy_unless_it_is_asked_for() -> None:
    given = {"endpoint": "http://h:1", "bucket": "kvs", "access_key": "a", "secret_key": "s"}
    assert StoreConfiguration.from_mapping(given, {}).lossy == ""
    assert StoreConfiguration.from_mapping({**given, "lossy": "q6"}, {}).lossy == "q6"
    assert lossy_dtype_of(layout_of("torch.bfloat16"), "", HEADS, WIDTH) is None
    assert stored_dtype("", "auto/torch.bfloat16") == "auto/torch.bfloat16"


@pytest.mark.parametrize("word", LOSSY_WORDS)
@pytest.mark.parametrize("dtype", ["torch.bfloat16", "auto/torch.float16", "float32"])
def test_what_names_in_keys_say_is_what_the_chunks_are(
    word: str, dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    layout = layout_of(dtype, 2 * TOKENS * HEADS * WIDTH * (4 if dtype == "float32" else 2))
    with caplog.at_level(logging.WARNING, "objectcache.connectors"):
        lossy = lossy_dtype_of(layout, word, HEADS, WIDTH)
    assert lossy is not None
    stored = lossy_layout(layout, lossy.name, lossy.shape)
    assert stored.dtype == stored_dtype(word, dtype)
    assert lossy_name(stored.dtype) == f"lossy-{word}"
    assert stored.key_seed() != layout.key_seed()
    assert f"KV is stored lossy, as lossy-{word}" in caplog.text


@pytest.mark.parametrize(
    ("dtype", "slice_bytes"),
    [
        ("fp8_e4m3/torch.bfloat16", TOKENS * HEADS * WIDTH * 2),
        ("fp8_ds_mla/torch.bfloat16", TOKENS * HEADS * WIDTH * 2),
        ("torch.uint8", TOKENS * HEADS * WIDTH * 2),
        ("torch.bfloat16", 2 * TOKENS * HEADS * WIDTH * 2 + 64),  # packed with something else
    ],
)
def test_what_cannot_be_quantised_is_refused_by_the_settings_name(
    dtype: str, slice_bytes: int
) -> None:
    with pytest.raises(InvalidRequest, match="connector setting 'lossy' is 'q8'"):
        lossy_dtype_of(layout_of(dtype, slice_bytes), "q8", HEADS, WIDTH)


def test_a_connector_that_does_not_quantise_says_so() -> None:
    refuse_lossy("", "it takes blocks as they are")
    with pytest.raises(InvalidRequest, match="setting 'lossy' is 'q4': it takes blocks as they"):
        refuse_lossy("q4", "it takes blocks as they are")
