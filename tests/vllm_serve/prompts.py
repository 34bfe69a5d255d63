"""Prompts of random tokens, each named by a number so that tests do not meet each other's."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tests.vllm_serve.served_vllm import BLOCK_TOKENS
from tests.vllm_serve.small_model import VOCABULARY

SHARED_TOKENS = 1024
FIRST_TOKEN = 2  # those before it begin and end a text


def prompt(seed: int, tokens: int) -> list[int]:
    """The same in every run."""
    choose = random.Random(seed)
    return [choose.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(tokens)]


def with_another_token(tokens: list[int], place: int) -> list[int]:
    """The same but for one token."""
    other = FIRST_TOKEN + (tokens[place] + 1) % (VOCABULARY - FIRST_TOKEN)
    return [*tokens[:place], other, *tokens[place + 1 :]]


def sharing(seed: int, count: int) -> list[list[int]]:
    """Prompts with one beginning and ends of their own, of different lengths."""
    beginning = prompt(seed, SHARED_TOKENS)
    return [beginning + prompt(seed + 1 + one, 40 + 37 * one) for one in range(count)]


def blocks_of(prompts: Sequence[list[int]]) -> set[tuple[int, ...]]:
    """What is stored of prompts: their full blocks, each named by all tokens up to its end."""
    return {
        tuple(tokens[:end])
        for tokens in prompts
        for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS)
    }


def loadable_tokens(tokens: list[int]) -> int:
    """Tokens of a stored prompt that are loaded: full blocks, and never the last token."""
    return (len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
