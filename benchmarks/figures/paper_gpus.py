"""The paper's prefill times by GPU and model: tables A1, A2 and A8."""

from __future__ import annotations

from dataclasses import dataclass

HIT_RATES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
LLAMA, DEEPSEEK = "Llama 3.1 8B", "DeepSeek-R1-Distill-Qwen-7B"


@dataclass(frozen=True, slots=True)
class Model:
    """What decides the size of a KV cache: `token_bytes` are a token's in one layer."""

    num_layers: int
    token_bytes: int


MODELS = {
    LLAMA: Model(32, 2 * 8 * 128 * 2),  # K and V, 8 KV heads of 128, 2 bytes
    DEEPSEEK: Model(28, 2 * 4 * 128 * 2),
}


@dataclass(frozen=True, slots=True)
class Prefill:
    """What was not cached of a prompt, computed in `total_ms`."""

    gpu: str
    model: str
    context_tokens: int
    hit_rate: float
    total_ms: float

    @property
    def cached_bytes(self) -> int:
        """KV bytes of the cached tokens, of all layers."""
        model = MODELS[self.model]
        tokens = int(self.context_tokens * self.hit_rate)
        return tokens * model.num_layers * model.token_bytes


# By hit rate, at G=16: table A1, then table A2.
_BY_HIT_RATE = {
    ("A100", LLAMA, 4096): (322.6, 270.5, 236.3, 192.6, 149.3, 109.0, 70.2),
    ("A100", LLAMA, 65536): (11643.8, 10768.3, 9616.7, 8236.6, 6577.9, 4676.2, 2538.5),
    ("H100", LLAMA, 4096): (143.5, 122.8, 107.1, 87.5, 69.0, 50.0, 33.7),
    ("H100", LLAMA, 65536): (4948.6, 4547.8, 4015.1, 3410.1, 2699.0, 1911.2, 1022.1),
    ("A100", DEEPSEEK, 4096): (283.1, 251.2, 212.0, 177.7, 140.6, 102.6, 60.2),
    ("A100", DEEPSEEK, 65536): (9633.1, 8893.6, 7932.3, 6769.8, 5414.7, 3847.8, 2098.0),
    ("H100", DEEPSEEK, 4096): (133.7, 117.1, 98.4, 83.9, 68.1, 45.6, 31.7),
    ("H100", DEEPSEEK, 65536): (4259.2, 3898.4, 3425.6, 2895.8, 2280.2, 1616.2, 847.2),
}
# Table A8, of contexts that tables A1 and A2 lack.
_BETWEEN = (
    Prefill("A100", LLAMA, 16384, 0.5, 955.89),
    Prefill("A100", LLAMA, 16384, 0.875, 281.76),
    Prefill("A100", LLAMA, 32768, 0.5, 2589.25),
    Prefill("A100", LLAMA, 32768, 0.875, 763.19),
)
PREFILLS = (
    *(
        Prefill(gpu, model, context_tokens, hit_rate, total_ms)
        for (gpu, model, context_tokens), times_ms in _BY_HIT_RATE.items()
        for hit_rate, total_ms in zip(HIT_RATES, times_ms, strict=True)
    ),
    *_BETWEEN,
)
