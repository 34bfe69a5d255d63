"""The geometry of the reference model, and the KV layout that follows from it."""

from __future__ import annotations

from dataclasses import dataclass

from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.layout import KvLayout

VOCABULARY = 256  # tokens are bytes
DTYPE = "float32"
DTYPE_BYTES = 4
WEIGHTS_REVISION = "reference-1"  # changes when the same config and seed would give other KV


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and seed of a reference model.

    Raises `InvalidRequest` when built with values that do not go together.
    """

    num_layers: int = 12
    hidden: int = 512
    n_heads: int = 8
    n_kv_heads: int = 4
    head_dim: int = 64
    mlp_hidden: int = 1408
    seed: int = 0
    rope_theta: float = 10_000.0

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden", "n_heads", "n_kv_heads", "head_dim", "mlp_hidden"):
            if getattr(self, name) < 1:
                raise InvalidRequest(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.n_heads % self.n_kv_heads:
            raise InvalidRequest(
                f"n_heads ({self.n_heads}) must be a multiple of n_kv_heads ({self.n_kv_heads})"
            )
        if self.head_dim % 2:
            raise InvalidRequest(f"head_dim must be even for RoPE, got {self.head_dim}")
        if self.rope_theta <= 1:
            raise InvalidRequest(f"rope_theta must be above 1, got {self.rope_theta}")

    def slice_bytes(self, chunk_tokens: int) -> int:
        """S: bytes of one layer of one chunk, `float32[2 (K, V), G, n_kv_heads, head_dim]`."""
        return 2 * chunk_tokens * self.n_kv_heads * self.head_dim * DTYPE_BYTES

    def fingerprint(self) -> str:
        """Names everything that decides the KV bytes of a token sequence."""
        return (
            f"{WEIGHTS_REVISION} layers={self.num_layers} hidden={self.hidden} "
            f"heads={self.n_heads}/{self.n_kv_heads}x{self.head_dim} mlp={self.mlp_hidden} "
            f"rope={self.rope_theta!r} seed={self.seed} dtype={DTYPE}"
        )

    def kv_layout(self, chunk_tokens: int) -> KvLayout:
        """The layout of a bucket that holds this model's KV; raises `InvalidRequest`."""
        return KvLayout(
            num_layers=self.num_layers,
            chunk_tokens=chunk_tokens,
            per_layer_chunk_bytes=self.slice_bytes(chunk_tokens),
            dtype=DTYPE,
            fingerprint=self.fingerprint(),
        )
