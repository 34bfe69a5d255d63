"""Numbers that are like those of KV cache: normal, of few exponents."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

SEED = 17


def kv_slices(
    count: int, slice_bytes: int, element_bytes: int = 2, seed: int = SEED
) -> npt.NDArray[np.uint8]:
    """uint8[count, slice_bytes]: bf16 where an element has two bytes, fp32 where four, random
    bytes where one.
    """
    generator = np.random.default_rng(seed)
    if element_bytes == 1:
        return generator.integers(0, 256, (count, slice_bytes), np.uint8)
    numbers = generator.standard_normal((count, slice_bytes // element_bytes), np.float32)
    if element_bytes == 4:
        return numbers.view(np.uint8)
    return (numbers.view("<u4") >> 16).astype("<u2").view(np.uint8)
