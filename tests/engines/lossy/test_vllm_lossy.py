"""vLLM's connector with `lossy`: what one engine quantised, another has dequantised in its blocks,
and an engine without the setting finds nothing of it.
"""

# ruff: noqa: F401, F811 (fixtures of another module)

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from objectcache.connectors.vllm.geometry import lossy_of
from objectcache_encodings.lossy import LOSSY_DTYPES, KvShape, LossyDtype
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.layout import KvLayout
from tests.engines.test_vllm_connector import (
    StartEngine,
    configs,
    prompt,
    start,
    stored_by_another,
)
from tests.engines.vllm_engine import (
    BLOCK_TOKENS,
    HEADS,
    LATENT_WIDTH,
    WIDTH,
    Engine,
    kv_cache_config,
)
from tests.fetcher.fetchers import RunningFetcher
from tests.servers import RunningServer

SHAPE = KvShape(tokens=BLOCK_TOKENS, heads=HEADS, width=WIDTH)
LATENT = KvShape(tokens=BLOCK_TOKENS, heads=1, width=LATENT_WIDTH, parts=1)
WORDS = ["q8", "q6", "q4", "bins"]


def block(engine: Engine, request: Any, number: int, layer: int, latent: bool) -> list[Any]:
    """One block of a prompt, as it is held and as the model computed it: uint8[1, slice_bytes] in
    the order of a slice.
    """
    name = engine._names[layer]
    tokens = range(number * BLOCK_TOKENS, (number + 1) * BLOCK_TOKENS)
    places = [engine._places(request, position, layer, name)[0] for position in tokens]
    slices = []
    for held_or_right in zip(*places, strict=True):
        rows = torch.stack([row.flatten() for row in held_or_right])
        if not latent:
            rows = rows.view(BLOCK_TOKENS, HEADS, 2, WIDTH).permute(2, 0, 1, 3)
        slices.append(rows.contiguous().view(torch.uint8).numpy().reshape(1, -1))
    return slices


@pytest.mark.parametrize("load_mode", ["layerwise", "before_schedule", "per_request"])
@pytest.mark.parametrize("word", WORDS)
def test_blocks_hold_what_the_dtype_gives_of_what_was_computed(
    start: StartEngine, word: str, load_mode: str
) -> None:
    tokens = prompt(zlib.crc32(f"{word} {load_mode}".encode()), 100)
    stored_by_another(start, tokens, lossy=word)
    second = start("BLNHC", lossy=word, load_mode=load_mode)
    request = second.add("again", tokens)
    second.run()
    assert second.loaded_tokens == {"again": 96}
    assert second.failed_blocks == set()
    lossy = LOSSY_DTYPES[f"lossy-{word}"](SHAPE)
    for layer in range(len(second._names)):
        for number in range(96 // BLOCK_TOKENS):
            held, computed = block(second, request, number, layer, latent=False)
            expected = np.empty_like(computed)
            lossy.dequantise(lossy.quantise(computed, layer), layer, expected)
            assert np.array_equal(held, expected), (layer, number)
            assert not np.array_equal(held, computed)


def test_latents_are_quantised_a_token_at_a_time(start: StartEngine) -> None:
    tokens = prompt(301, 70)
    stored_by_another(start, tokens, latent=True, lossy="q8")
    second = start(latent=True, lossy="q8")
    request = second.add("again", tokens)
    second.run()
    assert second.loaded_tokens == {"again": 64}
    lossy = LOSSY_DTYPES["lossy-q8"](LATENT)
    held, computed = block(second, request, 1, 0, latent=True)
    expected = np.empty_like(computed)
    lossy.dequantise(lossy.quantise(computed, 0), 0, expected)
    assert np.array_equal(held, expected)


def test_an_engine_that_asks_for_no_loss_or_another_one_finds_nothing_and_the_other_way_round(
    start: StartEngine,
) -> None:
    lossy, lossless = prompt(302, 100), prompt(303, 100)
    stored_by_another(start, lossy, lossy="q8")
    stored_by_another(start, lossless)
    assert start().answer("lossless", lossy) == 0
    assert start(lossy="q6").answer("other", lossy) == 0
    assert start(lossy="q8").answer("lossy", lossless) == 0
    assert start(lossy="q8").answer("again", lossy) == 96


def test_a_fetcher_dequantises_what_the_engine_loads(
    server: RunningServer, start: StartEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(304, 100)
    stored_by_another(start, tokens, lossy="q8")
    lossy = LOSSY_DTYPES["lossy-q8"](SHAPE)

    def refuse(*_: object) -> None:
        raise AssertionError("the engine's process dequantises")

    with RunningFetcher(server, tmp_path / "fetcher.log") as fetcher:
        patience = dict.fromkeys(("load_timeout_s", "timeout_s", "relay_timeout_s"), 60.0)
        second = start(lossy="q8", fetcher=fetcher.endpoint, **patience)
        with monkeypatch.context() as patched:
            patched.setattr(LossyDtype, "dequantise", refuse)
            request = second.add("again", tokens)
            second.run()
        assert second.loaded_tokens == {"again": 96}
        assert second.failed_blocks == set()
    held, computed = block(second, request, 2, 1, latent=False)
    expected = np.empty_like(computed)
    lossy.dequantise(lossy.quantise(computed, 1), 1, expected)
    assert np.array_equal(held, expected)


@pytest.mark.parametrize("dtype", ["fp8/torch.bfloat16", "fp8_ds_mla/torch.bfloat16"])
def test_kv_that_cannot_be_quantised_is_refused_by_the_settings_name(dtype: str) -> None:
    spec = kv_cache_config().kv_cache_groups[0].kv_cache_spec
    layout = KvLayout(
        num_layers=4,
        chunk_tokens=BLOCK_TOKENS,
        per_layer_chunk_bytes=SHAPE.slice_bytes // 2,
        dtype=dtype,
        fingerprint="f",
    )
    with pytest.raises(InvalidRequest, match="connector setting 'lossy' is 'q8'"):
        lossy_of(spec, layout, "q8")
    assert lossy_of(spec, layout, "") is None


def test_it_is_refused_at_the_engines_start(start: StartEngine) -> None:
    with pytest.raises(InvalidRequest, match="connector setting 'lossy' must be one of q8, q6"):
        start(lossy="fp4")
