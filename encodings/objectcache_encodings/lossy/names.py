"""Lossy dtypes by name, and the layouts that have them.

A quantised chunk is other content than the chunk that it was made from, so it is stored under
another key: the layout's `dtype` and `per_layer_chunk_bytes` differ, and both are part of the seed
of chunk keys. Whoever asks for the lossless layout cannot match it.
"""

from __future__ import annotations

import msgspec

from objectcache_encodings.dtype_names import LOSSY_PREFIX, number_type
from objectcache_encodings.lossy.kivi import Q4
from objectcache_encodings.lossy.kv_shape import KvShape
from objectcache_encodings.lossy.lossy_dtype import LossyDtype
from objectcache_encodings.lossy.symmetric import Q6, Q8, CacheGenBins
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.layout import KvLayout

LOSSY_DTYPES: dict[str, type[LossyDtype]] = {
    dtype.name: dtype for dtype in (Q8, Q6, Q4, CacheGenBins)
}


def lossy_name(dtype: str) -> str | None:
    """The lossy dtype that a layout's `dtype` names, such as `lossy-q8` of
    `lossy-q8/torch.bfloat16`; None of a lossless one.

    Raises `InvalidRequest` for a name that claims to be lossy and is none of `LOSSY_DTYPES`.
    """
    if not dtype.startswith(LOSSY_PREFIX):
        return None
    name = dtype.partition("/")[0]
    if name not in LOSSY_DTYPES:
        raise InvalidRequest(f"dtype {name!r} is none of {', '.join(LOSSY_DTYPES)}")
    return name


def kv_shape(layout: KvLayout, heads: int, width: int, parts: int = 2) -> KvShape:
    """The shape of a layout's slices, lossy or not, whose dtype names the model's numbers.

    Raises `InvalidRequest` where these are none that can be quantised, such as those of KV that an
    engine keeps in fp8.
    """
    return KvShape(layout.chunk_tokens, heads, width, number_type(layout.dtype), parts)


def lossy_layout(layout: KvLayout, name: str, shape: KvShape) -> KvLayout:
    """The layout of chunks that are quantised before they are stored, from that of the model's own.

    Raises `InvalidRequest` where `name` is no lossy dtype, `layout` is lossy already, or `shape` is
    not that of its slices.
    """
    if name not in LOSSY_DTYPES:
        raise InvalidRequest(f"dtype {name!r} is none of {', '.join(LOSSY_DTYPES)}")
    if layout.dtype.startswith(LOSSY_PREFIX):
        raise InvalidRequest(f"the layout is lossy already: {layout.dtype}")
    if (layout.chunk_tokens, layout.per_layer_chunk_bytes) != (shape.tokens, shape.slice_bytes):
        raise InvalidRequest(
            f"slices of {shape} have {shape.slice_bytes} bytes of {shape.tokens} tokens, those of "
            f"the layout {layout.per_layer_chunk_bytes} of {layout.chunk_tokens}"
        )
    return msgspec.structs.replace(
        layout,
        dtype=f"{name}/{layout.dtype}",
        per_layer_chunk_bytes=LOSSY_DTYPES[name](shape).slice_bytes,
    )
