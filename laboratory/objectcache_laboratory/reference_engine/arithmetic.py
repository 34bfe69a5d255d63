"""The layer's arithmetic without attention: RMSNorm, RoPE, SwiGLU. Pure, float32 throughout."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

RMS_EPSILON = np.float32(1e-5)
MLP_BLOCK_TOKENS = 512  # bounds the widest activation, float32[block, 2 mlp_hidden]


def rms_norm(x: Array, weight: Array) -> Array:
    """`x / rms(x) * weight` over the last axis; x float32[..., width], weight float32[width]."""
    mean_square = np.einsum("...i,...i->...", x, x) / np.float32(x.shape[-1])
    normed: Array = x * (1 / np.sqrt(mean_square + RMS_EPSILON))[..., None]
    normed *= weight
    return normed


class RotaryEmbedding:
    """RoPE for absolute positions, pairing element i with element i + head_dim/2.

    Su et al., "RoFormer", section 3.4; the pairing is that of Llama's released code.
    """

    def __init__(self, head_dim: int, theta: float) -> None:
        # float64: at position 4,000 a float32 angle would be off by 1e-4 radian.
        self._frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)

    def factors(self, first_position: int, count: int) -> tuple[Array, Array]:
        """Cosine and sine for `count` positions, each float32[count, 1, head_dim/2]."""
        positions = np.arange(first_position, first_position + count, dtype=np.float64)
        angles = (positions[:, None] * self._frequencies)[:, None, :]
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotate(x: Array, factors: tuple[Array, Array]) -> Array:
    """Rotate float32[tokens, heads, head_dim] by `RotaryEmbedding.factors`."""
    cosine, sine = factors
    first, second = np.split(x, 2, axis=-1)
    rotated = np.empty_like(x)
    half = x.shape[-1] // 2
    rotated[..., :half] = first * cosine - second * sine
    rotated[..., half:] = second * cosine + first * sine
    return rotated


def swiglu_mlp(x: Array, gate_up: Array, down: Array) -> Array:
    """`(silu(x @ gate) * (x @ up)) @ down` for float32[tokens, hidden]."""
    output = np.empty((x.shape[0], down.shape[1]), np.float32)
    for start in range(0, x.shape[0], MLP_BLOCK_TOKENS):
        rows = slice(start, start + MLP_BLOCK_TOKENS)
        gate, up = np.split(x[rows] @ gate_up, 2, axis=-1)
        activated = gate / (1 + np.exp(-gate))
        activated *= up
        np.matmul(activated, down, out=output[rows])
    return output
