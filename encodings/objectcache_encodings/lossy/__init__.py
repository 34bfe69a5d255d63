"""Dtypes that lose something, each by a name that begins with `lossy-`; never unasked.

shape = kv_shape(layout, heads=8, width=128)                # [2, chunk_tokens, 8, 128]
lossy = lossy_layout(layout, "lossy-q8", shape)             # other dtype, other keys
q8 = LOSSY_DTYPES["lossy-q8"](shape)
quantised = q8.quantise(slices, layer)                      # uint8[n, q8.slice_bytes]
q8.dequantise(quantised, layer, out)                        # uint8[n, shape.slice_bytes]
"""

from objectcache_encodings.lossy.dtype_text import dtype_of_text, dtype_text
from objectcache_encodings.lossy.kv_shape import KvShape
from objectcache_encodings.lossy.lossy_dtype import LossyDtype
from objectcache_encodings.lossy.names import LOSSY_DTYPES, kv_shape, lossy_layout, lossy_name

__all__ = [
    "LOSSY_DTYPES",
    "KvShape",
    "LossyDtype",
    "dtype_of_text",
    "dtype_text",
    "kv_shape",
    "lossy_layout",
    "lossy_name",
]
