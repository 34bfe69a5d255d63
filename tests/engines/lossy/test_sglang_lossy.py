"""SGLang's linker with `lossy`, and its HiCache storage, which takes pages as they are."""

# ruff: noqa: E402 (SGLang is prepared for a CPU before it is imported)

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.engines import sglang_on_cpu

sglang_on_cpu.prepare()

import torch

from objectcache.errors import InvalidRequest
from objectcache_encodings.lossy import LOSSY_DTYPES, KvShape
from tests.engines.test_sglang_linker import (
    LAYERS,
    PAGE,
    contents,
    hashes,
    linker_of,
    offload,
    pool_of,
    same,
    slots,
    transfer,
)
from tests.servers import RunningServer


def through(word: str, pool: Any, pages: tuple[int, ...]) -> list[torch.Tensor]:
    """What comes back of these pages, as `contents` has them."""
    parts = [pool.k_buffer, pool.v_buffer] if hasattr(pool, "v_buffer") else [pool.kv_buffer]
    _, heads, width = parts[0][0].shape
    lossy = LOSSY_DTYPES[f"lossy-{word}"](
        KvShape(tokens=PAGE, heads=heads, width=width, parts=len(parts))
    )
    found = [part[layer][slots(*pages)] for part in parts for layer in range(LAYERS)]
    for layer in range(LAYERS):
        rows = [found[part * LAYERS + layer].view(len(pages), -1) for part in range(len(parts))]
        slices = torch.cat(rows, 1).contiguous().view(torch.uint8).numpy()
        out = np.empty((len(pages), len(parts), slices.shape[1] // len(parts)), np.uint8)
        lossy.dequantise(lossy.quantise(slices, layer), layer, out)
        for part in range(len(parts)):
            place = found[part * LAYERS + layer]
            back = torch.from_numpy(np.ascontiguousarray(out[:, part]))
            found[part * LAYERS + layer] = back.view(torch.bfloat16).view(place.shape)
    return [each.view(torch.uint8) for each in found]


@pytest.mark.parametrize("word", ["q8", "bins"])
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_pages_hold_what_the_dtype_gives_of_what_was_offloaded(
    server: RunningServer, kind: str, word: str
) -> None:
    pool = pool_of(kind)
    for buffers in (getattr(pool, name, []) for name in ("k_buffer", "v_buffer", "kv_buffer")):
        for buffer in buffers:
            buffer.normal_()
    linker = linker_of(server, pool, f"m/lossy-{kind}-{word}", lossy=word)
    keys = hashes("q", 3)
    expected, exact = through(word, pool, (1, 9, 4)), contents(pool, slots(1, 9, 4))
    assert offload(linker, keys, slots(1, 9, 4))
    assert linker.lookup("r", transfer(keys)) == [1, 2, 3]
    assert linker.load("r", transfer(keys, slots(20, 31, 22)))
    assert linker.finish_layer_wise_loading(linker.start_layer_wise_loading())
    loaded = contents(pool, slots(20, 31, 22))
    assert same(loaded, expected)
    assert not same(loaded, exact)
    lossless = linker_of(server, pool, f"m/lossy-{kind}-{word}")
    assert lossless.lookup("r", transfer(keys)) == []
    assert offload(lossless, keys[:1], slots(1))
    assert linker.lookup("r", transfer(keys)) == [1, 2, 3]
    linker.close()
    lossless.close()


def test_fp8_pages_are_refused_by_the_settings_name(server: RunningServer) -> None:
    pool = sglang_on_cpu.device_pool(
        "mha", tokens=256, page_tokens=PAGE, layers=LAYERS, dtype=torch.float8_e5m2
    )
    with pytest.raises(InvalidRequest, match="connector setting 'lossy' is 'q8'"):
        linker_of(server, pool, "m/fp8", lossy="q8")
