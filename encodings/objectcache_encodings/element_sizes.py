"""How many bytes a number of a slice has, which decides how many planes it is split into."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from objectcache_encodings.dtype_names import LOSSY_PREFIX, number_type
from objectcache_encodings.encoder import SliceEncoder

_BY_NAME = {
    "bfloat16": 2,
    "bf16": 2,
    "float16": 2,
    "fp16": 2,
    "half": 2,
    "float32": 4,
    "fp32": 4,
    "float": 4,
    "int8": 1,
}


def element_bytes_of(dtype: str) -> int | None:
    """By a layout's dtype, such as `torch.bfloat16`; symbols of lossy dtypes have one byte.

    None where the name says nothing, `uint8` among them: bytes of which nothing is known.
    """
    name = number_type(dtype)
    if dtype.startswith(LOSSY_PREFIX) or name.startswith(("fp8", "float8")):
        return 1
    return _BY_NAME.get(name)


def smallest_element_bytes(slice_: bytes | memoryview | npt.NDArray[np.uint8]) -> int:
    """The size with which a slice of unknown numbers encodes to the fewest bytes.

    For a bucket whose dtype says nothing: one slice tells.
    """
    data = np.frombuffer(slice_, np.uint8)
    sizes = [size for size in (2, 4, 1) if data.size % size == 0]
    return min(sizes, key=lambda size: len(SliceEncoder(element_bytes=size).encode_slice(data)))
