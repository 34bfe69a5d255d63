"""What a model reads and computes for a token, and how fast a GPU of the paper's does it.

Bytes and FLOP are arithmetic over published shapes: active parameters times two for each token, and
what attention adds for each token and token of context. FLOP per second are no arithmetic: they are
one figure a model, fitted where the paper says a result (docs/dual_path.md, "The simulator").
"""

from __future__ import annotations

from dataclasses import dataclass

from objectcache_schemas.errors import InvalidRequest

APPEND_TOKENS = 429  # of Table 1


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """`kv_bytes_per_token` is the KV of all layers that grow with the context, without indexer
    keys, which `index_bytes_per_token` counts; both are stored and read.

    `prefill_flop_per_s` is one GPU's. A decode step of n requests takes `decode_step_s` + n x
    `decode_request_s`. `kv_capacity_tokens` is what one decode GPU holds. GPUs of a group with
    `expert_parallel` step together.
    """

    name: str
    title: str
    num_layers: int
    kv_bytes_per_token: int
    flop_per_token: float
    flop_per_token_context: float
    index_bytes_per_token: int = 0
    prefill_flop_per_s: float = 200e12
    decode_step_s: float = 0.020
    decode_request_s: float = 0.0003
    kv_capacity_tokens: int = 1_000_000
    expert_parallel: bool = True
    default_nodes: str = "2P4D"

    @property
    def layer_bytes_per_token(self) -> int:
        """Of one layer, indexer keys included."""
        return (self.kv_bytes_per_token + self.index_bytes_per_token) // self.num_layers

    def flop(self, cached_tokens: float, new_tokens: float) -> float:
        """Of the prefill of `new_tokens` behind `cached_tokens`, as Table 1 counts it."""
        return new_tokens * (self.flop_per_token + self.flop_per_token_context * cached_tokens)

    def gbytes_per_pflop(self, context_tokens: int, append_tokens: int = APPEND_TOKENS) -> float:
        """Table 1's ratio: KV that is read over FLOP that are computed with it."""
        read_gbytes = self.kv_bytes_per_token * context_tokens / 1e9
        return read_gbytes / (self.flop(context_tokens, append_tokens) / 1e15)


# Layers x bytes: DeepSeek's latent KV is 512 FP8, 4 scales and 64 rotary BF16 (656), an indexer key
# 128 FP8 and a scale (132; 68 of the 27B model's width); Qwen2.5 8 heads x 128 x 2 in FP16; the
# others FP8. GPT-OSS counts its 18 layers of full attention: the others' window is 128 tokens.
# FLOP: 2 x active parameters, sparse attention over a fixed number of tokens with them, and per
# token of context: the indexer's heads x width x 2 (DeepSeek-V3.2), or attention over all tokens.
MODELS = {
    model.name: model
    for model in (
        ModelCosts(
            "ds660b",
            "DeepSeek-V3.2",
            num_layers=61,
            kv_bytes_per_token=656 * 61,
            index_bytes_per_token=132 * 61,
            flop_per_token=109e9,
            flop_per_token_context=64 * 128 * 2 * 61,
            prefill_flop_per_s=300e12,
            kv_capacity_tokens=1_000_000,
        ),
        ModelCosts(
            "ds27b",
            "DS 27B (paper's appendix A.2)",
            num_layers=30,
            kv_bytes_per_token=656 * 30,
            index_bytes_per_token=68 * 30,
            flop_per_token=10.1e9,
            flop_per_token_context=32 * 64 * 2 * 30,
            prefill_flop_per_s=110e12,
            decode_step_s=0.012,
            decode_request_s=0.0002,
            kv_capacity_tokens=3_000_000,
            default_nodes="1P1D",
        ),
        ModelCosts(
            "qwen32b",
            "Qwen2.5-32B (FP16)",
            num_layers=64,
            kv_bytes_per_token=2 * 8 * 128 * 2 * 64,
            flop_per_token=65e9,
            flop_per_token_context=40 * 128 * 4 * 64,
            prefill_flop_per_s=350e12,
            kv_capacity_tokens=240_000,
            expert_parallel=False,
            default_nodes="1P2D",
        ),
        ModelCosts(
            "dsv3",
            "DeepSeek-V3",
            num_layers=61,
            kv_bytes_per_token=656 * 61,
            flop_per_token=74e9,
            flop_per_token_context=128 * (576 + 512) * 2 * 61,
            prefill_flop_per_s=400e12,
        ),
        ModelCosts(
            "gptoss120b",
            "GPT-OSS-120B",
            num_layers=18,
            kv_bytes_per_token=2 * 8 * 64 * 18,
            flop_per_token=10.2e9,
            flop_per_token_context=64 * 64 * 4 * 18,
            kv_capacity_tokens=3_000_000,
        ),
        ModelCosts(
            "qwen235b",
            "Qwen3-235B-A22B",
            num_layers=94,
            kv_bytes_per_token=2 * 4 * 128 * 94,
            flop_per_token=44e9,
            flop_per_token_context=64 * 128 * 4 * 94,
            kv_capacity_tokens=500_000,
        ),
    )
}

# The paper's Table 1: GB/PFLOP at a context of 16K and 64K.
TABLE_1 = {
    "qwen32b": (117.0, 267.0),
    "ds660b": (13.0, 36.0),
    "dsv3": (4.8, 5.8),
    "gptoss120b": (47.0, 95.0),
    "qwen235b": (39.0, 60.0),
}


def model_named(name: str) -> ModelCosts:
    """Raises `InvalidRequest` for a name that is not there."""
    if name not in MODELS:
        raise InvalidRequest(f"model {name!r} is not known; one of {', '.join(MODELS)}")
    return MODELS[name]
