"""What the model answers, computed by Transformers from the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.vllm_serve.served_vllm import ANSWER_TOKENS


class Judge:
    """Knows the right answer to every prompt, and computes it once."""

    def __init__(self, model: Path) -> None:
        # Several threads wait for each other, which beside a vLLM takes them many times as long.
        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._known: dict[tuple[int, ...], list[int]] = {}

    def answer(self, prompt: Sequence[int]) -> list[int]:
        """The likeliest token, then the likeliest after that one, and so on."""
        key = tuple(prompt)
        if key not in self._known:
            self._known[key] = self._compute(prompt)
        return self._known[key]

    def answers(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """The answers to several."""
        return [self.answer(prompt) for prompt in prompts]

    def _compute(self, prompt: Sequence[int]) -> list[int]:
        tokens, kept, answer = list(prompt), None, list[int]()
        with torch.inference_mode():
            for _ in range(ANSWER_TOKENS):
                reply = self._model(
                    torch.tensor([tokens]), past_key_values=kept, use_cache=True, logits_to_keep=1
                )
                tokens, kept = [int(reply.logits[0, -1].argmax())], reply.past_key_values
                answer += tokens
        return answer
