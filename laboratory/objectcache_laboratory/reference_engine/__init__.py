"""A small, exact prefill engine in numpy: the honest consumer of delivered KV.

A decoder-only transformer (RMSNorm, RoPE, grouped-query attention, SwiGLU) over bytes, with seeded
random weights. It says nothing worth reading, but every byte of KV decides its logits, so it shows
whether a prefix that went through the store computes what the same prefix computes locally.
"""

from objectcache_laboratory.reference_engine.config import ModelConfig
from objectcache_laboratory.reference_engine.engine import (
    RECOMPUTATION_TOLERANCE,
    PrefillResult,
    ReferenceEngine,
    relative_difference,
)
from objectcache_laboratory.reference_engine.kv_cache import KvCache
from objectcache_laboratory.reference_engine.kv_chunks import (
    KvSource,
    LocalKv,
    from_chunks,
    layer_payload,
    to_chunks,
)
from objectcache_laboratory.reference_engine.timeline import LayerTiming

__all__ = [
    "RECOMPUTATION_TOLERANCE",
    "KvCache",
    "KvSource",
    "LayerTiming",
    "LocalKv",
    "ModelConfig",
    "PrefillResult",
    "ReferenceEngine",
    "from_chunks",
    "layer_payload",
    "relative_difference",
    "to_chunks",
]
