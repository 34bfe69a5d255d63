"""Reuse of a prefix by Transformers, layer by layer: run it twice, and the second run reuses.

    OBJECTCACHE_ENDPOINT=http://127.0.0.1:9000 OBJECTCACHE_ACCESS_KEY=... \\
    OBJECTCACHE_SECRET_KEY=... python examples/transformers_prefix_reuse.py

A Llama with random weights, on the CPU: nothing is downloaded, and the weights are the same in
every run.
"""

from __future__ import annotations

import time
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
from transformers import (  # pyright: ignore[reportMissingImports]
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
)

from objectcache import Client
from objectcache.connectors.layer_timings import LayerTimings
from objectcache.connectors.transformers_cache import LayerwiseCache, chunks_of, layout_of
from objectcache.errors import ObjectCacheError
from objectcache.kv_bucket import KvBucket

BUCKET = "transformers-example"
CHUNK_TOKENS = 64
DOCUMENT_TOKENS = 1024
QUESTION_TOKENS = 40


def make_model() -> Any:
    """A small Llama whose weights come from a fixed seed."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def prefill(model: Any, bucket: KvBucket, prompt: Any, timings: LayerTimings) -> tuple[Any, int]:
    """Logits of what was computed, and how many tokens of the prompt were not: their KV came from
    the bucket, while the layers before were computed.
    """
    keys = bucket.chunk_keys(prompt[0, :-1].numpy())  # a model computes one token at least
    try:
        matched = bucket.match(keys)
        with timings.fetch(bucket, keys[:matched], prompt.shape[1]) as delivery:
            reused = matched * CHUNK_TOKENS
            cache: Any = LayerwiseCache(model.config, delivery, bucket.layout, timings)
            logits = run(model, prompt[:, reused:], cache)
    except ObjectCacheError as error:
        print(f"computing everything: {error}")
        matched, reused, cache = 0, 0, DynamicCache(config=model.config)
        logits = run(model, prompt, cache)
    if matched < len(keys):
        chunks = chunks_of(cache, len(keys), bucket.layout)
        parent = keys[matched - 1] if matched else None
        bucket.put(keys[matched:], chunks[matched:], parent_key=parent)
    return logits, reused


def run(model: Any, tokens: Any, cache: Any) -> Any:
    """Logits of tokens behind what the cache holds."""
    with torch.no_grad():
        return model(tokens, past_key_values=cache).logits


def main() -> None:
    """Ask two questions about one document."""
    model = make_model()
    layout = layout_of(
        model.config, torch.bfloat16, chunk_tokens=CHUNK_TOKENS, weights_revision="seed 0"
    )
    generator = torch.Generator().manual_seed(1)
    document = torch.randint(0, 1000, (1, DOCUMENT_TOKENS), generator=generator)
    with Client.from_environment() as client:
        bucket = client.kv_bucket(BUCKET, layout, create=True)
        timings = LayerTimings(model)
        for number in (1, 2):
            question = torch.randint(0, 1000, (1, QUESTION_TOKENS), generator=generator)
            prompt = torch.cat([document, question], dim=1)
            started_s = time.monotonic()
            logits, reused = prefill(model, bucket, prompt, timings)
            took_s = time.monotonic() - started_s
            print(
                f"question {number}: {reused} of {prompt.shape[1]} tokens reused, "
                f"{took_s * 1000:.0f} ms, next token {int(logits[0, -1].argmax())}"
            )


if __name__ == "__main__":
    main()
