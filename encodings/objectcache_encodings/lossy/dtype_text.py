"""A lossy dtype and the shape of its slices as one line of text: what a layout does not say, for
whoever dequantises in another process.
"""

from __future__ import annotations

from objectcache_encodings.lossy.kv_shape import KvShape
from objectcache_encodings.lossy.lossy_dtype import LossyDtype
from objectcache_encodings.lossy.names import LOSSY_DTYPES
from objectcache_schemas.errors import InvalidRequest

TEXT_CHARS_MAX = 128


def dtype_text(lossy: LossyDtype) -> str:
    """Such as `lossy-q8;bfloat16;2x64x8x128`: parts, tokens, heads, width."""
    axes = "x".join(map(str, lossy.shape.axes))
    return f"{lossy.name};{lossy.shape.numbers};{axes}"


def dtype_of_text(text: str, field: str) -> LossyDtype:
    """`field` is what the text came in. Raises `InvalidRequest` that names it for what `dtype_text`
    does not write.
    """
    try:
        name, numbers, axes = text[: TEXT_CHARS_MAX + 1].split(";")
        parts, tokens, heads, width = (int(axis) for axis in axes.split("x"))
        lossy = LOSSY_DTYPES[name](KvShape(tokens, heads, width, numbers, parts))
    except (ValueError, KeyError) as error:
        raise InvalidRequest(
            f"{field} is {text[:TEXT_CHARS_MAX]!r}, not NAME;NUMBERS;PARTSxTOKENSxHEADSxWIDTH of a "
            "lossy dtype"
        ) from error
    except InvalidRequest as error:
        raise InvalidRequest(f"{field}: {error.message}") from error
    if dtype_text(lossy) != text:
        raise InvalidRequest(
            f"{field} is {text[:TEXT_CHARS_MAX]!r}, which is written {dtype_text(lossy)!r}"
        )
    return lossy
