"""The connectors' setting `lossy`: which lossy dtype an engine's KV is stored in, by name only."""

from __future__ import annotations

import logging

from objectcache_encodings.dtype_names import LOSSY_PREFIX
from objectcache_encodings.lossy import LOSSY_DTYPES, LossyDtype, kv_shape, lossy_layout
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.layout import KvLayout

LOSSY_WORDS = tuple(name.removeprefix(LOSSY_PREFIX) for name in LOSSY_DTYPES)

_LOG = logging.getLogger("objectcache.connectors")


def check_lossy(word: str) -> None:
    """Raise `InvalidRequest` for what is neither empty, which is lossless, nor a dtype's word."""
    if word and word not in LOSSY_WORDS:
        raise InvalidRequest(
            f"connector setting 'lossy' must be one of {', '.join(LOSSY_WORDS)}, or left out for "
            f"lossless chunks, got {word!r}"
        )


def refuse_lossy(word: str, why: str) -> None:
    """Raise `InvalidRequest` where a connector that cannot quantise is told to."""
    if word:
        raise InvalidRequest(f"connector setting 'lossy' is {word!r}: {why}; leave it out")


def stored_dtype(word: str, dtype: str) -> str:
    """What names in keys say of the type: the engine's own, or a lossy dtype of it."""
    return f"{LOSSY_PREFIX}{word}/{dtype}" if word else dtype


def lossy_dtype_of(
    layout: KvLayout, word: str, heads: int, width: int, parts: int = 2
) -> LossyDtype | None:
    """What quantises slices [parts, chunk_tokens, heads, width] of the engine's own `layout`; None
    where the word is empty. The log says so.

    Raises `InvalidRequest` naming the setting, where the engine's numbers are none that can be
    quantised, such as fp8, or its slices are of another shape.
    """
    check_lossy(word)
    if not word:
        return None
    name = f"{LOSSY_PREFIX}{word}"
    try:
        shape = kv_shape(layout, heads, width, parts)
        lossy = LOSSY_DTYPES[name](shape)
        stored = lossy_layout(layout, name, shape)
    except InvalidRequest as error:
        raise InvalidRequest(f"connector setting 'lossy' is {word!r}: {error.message}") from error
    _LOG.warning(
        "KV is stored lossy, as %s: %d bytes in the place of %d a slice, and other numbers come "
        "back",
        name,
        stored.per_layer_chunk_bytes,
        layout.per_layer_chunk_bytes,
    )
    return lossy
