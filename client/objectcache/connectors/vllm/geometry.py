"""What a vLLM engine stores: read from its configuration, or refused with what stands against it.

Everything here is attribute access on vLLM's own objects, so that it can be read without vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from objectcache.connectors.identity.model_identity import HUB_REVISION, ModelIdentity, identify
from objectcache.connectors.identity.namespace import KvNamespace, compute_fingerprint
from objectcache.connectors.store.lossy_setting import lossy_dtype_of, refuse_lossy, stored_dtype
from objectcache_encodings.lossy import LossyDtype
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.layout import KvLayout

_HASHES = ("sha256", "sha256_cbor")
_DTYPES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla")
_ATTENTION = ("FullAttentionSpec", "MLAAttentionSpec")
_DRAFTS_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix")


@dataclass(frozen=True, slots=True)
class EngineGeometry:
    """One engine's blocks, and the names of what each of its ranks stores.

    Ranks that hold the same KV (MLA under tensor parallelism) share a name, and one stores it.
    """

    block_tokens: int
    spec: Any
    namespaces: tuple[KvNamespace, ...]
    rank: int
    stores: bool
    fingerprint: str  # what computes, as the server is told it
    dtype: str  # of the KV as the engine keeps it; in names it may be a lossy one of it

    @property
    def namespace(self) -> KvNamespace:
        """This rank's."""
        return self.namespaces[self.rank]

    def with_weights(self, weights: str) -> EngineGeometry:
        """The same with the names of these weights."""
        if weights == self.namespace.weights_revision:
            return self
        names = tuple(replace(name, weights_revision=weights) for name in self.namespaces)
        return replace(self, namespaces=names)


def read_geometry(
    vllm_config: Any,
    kv_cache_config: Any,
    weights_revision: str,
    vllm_version: str,
    environment: Mapping[str, str],
    lossy: str = "",
) -> EngineGeometry:
    """The geometry of an engine; both of its roles read the same. The environment tells how layers
    are shared among pipeline ranks, and where models are kept. `lossy` is the connector's setting.

    Raises `InvalidRequest` naming the option of vLLM that the connector cannot serve: what would
    not be stored whole, or could be found by an engine that computes other bytes.
    """
    spec = _only_spec(kv_cache_config)
    _check_engine(vllm_config)
    latent = type(spec).__name__ == "MLAAttentionSpec"
    parallel = vllm_config.parallel_config
    tensor_ranks = 1 if latent else parallel.tensor_parallel_size
    rank_count = tensor_ranks * parallel.pipeline_parallel_size
    world = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    stage, tensor_rank = divmod(parallel.rank % world, parallel.tensor_parallel_size)
    identity = _identity(vllm_config.model_config, weights_revision, environment)
    layer_split = environment.get("VLLM_PP_LAYER_PARTITION", "")
    layout = _layout(vllm_config, spec, tensor_ranks, layer_split)
    dtype = f"{vllm_config.cache_config.cache_dtype}/{vllm_config.model_config.dtype}"
    namespaces = tuple(
        KvNamespace(
            model=identity.model,
            weights_revision=identity.weights_revision,
            dtype=stored_dtype(lossy, dtype),
            layout=layout,
            hashing=_hashing(vllm_config.cache_config, vllm_version),
            rank=rank,
            rank_count=rank_count,
            configuration=identity.configuration,
        )
        for rank in range(rank_count)
    )
    return EngineGeometry(
        block_tokens=spec.block_size,
        spec=spec,
        namespaces=namespaces,
        rank=stage * tensor_ranks + (0 if latent else tensor_rank),
        stores=not latent or tensor_rank == 0,
        fingerprint=compute_fingerprint(identity.model, parallel.tensor_parallel_size),
        dtype=dtype,
    )


def lossy_of(spec: Any, layout: KvLayout, word: str) -> LossyDtype | None:
    """What quantises an engine's blocks; None where the setting `lossy` is left out.

    Raises `InvalidRequest` naming the setting, where its blocks cannot be quantised.
    """
    latent = type(spec).__name__ == "MLAAttentionSpec"
    if word and not latent and spec.head_size != spec.head_size_v:
        refuse_lossy(word, f"keys are {spec.head_size} wide and values {spec.head_size_v}")
    return lossy_dtype_of(layout, word, spec.num_kv_heads, spec.head_size, 1 if latent else 2)


def _only_spec(kv_cache_config: Any) -> Any:
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise InvalidRequest(
            f"the model has {len(groups)} kinds of KV cache; the connector stores one: start vLLM "
            "with --disable-hybrid-kv-cache-manager, or without the connector"
        )
    spec = groups[0].kv_cache_spec
    if type(spec).__name__ not in _ATTENTION:
        raise InvalidRequest(
            f"the model's KV cache is a {type(spec).__name__}; the connector stores full attention "
            f"and MLA ({', '.join(_ATTENTION)})"
        )
    if spec.tokens_per_state != 1 or getattr(spec, "model_version", None) is not None:
        raise InvalidRequest("the model's KV cache holds compressed states, not one row a token")
    if kv_cache_config.hash_block_size not in (None, spec.block_size):
        raise InvalidRequest(
            f"blocks of {spec.block_size} tokens are hashed by {kv_cache_config.hash_block_size}; "
            "the connector needs one hash a block"
        )
    return spec


def _check_engine(vllm_config: Any) -> None:
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    if cache.prefix_caching_hash_algo not in _HASHES:
        raise InvalidRequest(
            f"--prefix-caching-hash-algo {cache.prefix_caching_hash_algo} differs from process to "
            f"process; use sha256_cbor or sha256"
        )
    if cache.cache_dtype not in _DTYPES:
        raise InvalidRequest(
            f"--kv-cache-dtype {cache.cache_dtype} keeps scales beside the KV; "
            f"there are {', '.join(_DTYPES)}"
        )
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise InvalidRequest(f"{name} must be 1, got {getattr(parallel, name)}")
    draft = vllm_config.speculative_config
    if draft is not None and draft.method not in _DRAFTS_WITHOUT_KV:
        raise InvalidRequest(
            f"speculative decoding by {draft.method} has KV of its own, which is not stored; "
            f"there are {', '.join(_DRAFTS_WITHOUT_KV)}"
        )


def _identity(
    model_config: Any, weights_revision: str, environment: Mapping[str, str]
) -> ModelIdentity:
    return identify(
        model_config.model,
        weights_revision,
        environment,
        configuration=model_config.hf_config,
        options={"quantization": model_config.quantization},
        revision=model_config.revision or HUB_REVISION,
        configuration_of_weights=model_config.hf_config_path in (None, "", model_config.model),
    )


def _layout(vllm_config: Any, spec: Any, tensor_ranks: int, layer_split: str) -> str:
    """The bytes of a chunk: its rows, and which layers and heads a rank has."""
    kind = "latent" if type(spec).__name__ == "MLAAttentionSpec" else "l2td"
    layers = vllm_config.model_config.get_total_num_hidden_layers()
    stages = vllm_config.parallel_config.pipeline_parallel_size
    return (
        f"{kind}/layers={layers}/{layer_split}/tokens={spec.block_size}/heads={spec.num_kv_heads}"
        f"/widths={spec.head_size}+{spec.head_size_v}/bytes={spec.unpadded_page_size_bytes}"
        f"/tensor_ranks={tensor_ranks}/pipeline_ranks={stages}"
    )


def _hashing(cache_config: Any, vllm_version: str) -> str:
    """sha256 hashes Python's pickle, which may change between versions; CBOR is what it is."""
    name: str = cache_config.prefix_caching_hash_algo
    return name if name == "sha256_cbor" else f"{name}/vllm-{vllm_version}"
