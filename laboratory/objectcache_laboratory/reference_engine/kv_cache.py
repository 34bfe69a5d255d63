"""The engine's own KV, in the shape that attention reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from objectcache_laboratory.reference_engine.config import ModelConfig

Array = npt.NDArray[np.float32]


@dataclass(slots=True, repr=False)
class KvCache:
    """Keys (after RoPE) and values of the first `length` tokens of a sequence.

    `keys` and `values` are float32[num_layers, n_kv_heads, capacity, head_dim]; the rows from
    `length` on hold nothing.
    """

    keys: Array
    values: Array
    length: int = 0

    @classmethod
    def empty(cls, config: ModelConfig, capacity: int) -> KvCache:
        """A cache with room for `capacity` tokens."""
        shape = (config.num_layers, config.n_kv_heads, capacity, config.head_dim)
        return cls(np.empty(shape, np.float32), np.empty(shape, np.float32))

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return int(self.keys.shape[0])

    @property
    def capacity(self) -> int:
        """Tokens that fit without growing."""
        return int(self.keys.shape[2])

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` tokens in total; copies everything if there is not enough."""
        if capacity > self.capacity:
            self.keys = self._grown(self.keys, capacity)
            self.values = self._grown(self.values, capacity)

    def _grown(self, old: Array, capacity: int) -> Array:
        layers, heads, _, head_dim = old.shape
        grown = np.empty((layers, heads, capacity, head_dim), np.float32)
        grown[:, :, : self.length] = old[:, :, : self.length]
        return grown

    def write(self, layer: int, first_position: int, keys: Array, values: Array) -> None:
        """Store one layer's float32[tokens, n_kv_heads, head_dim] from a position on.

        `length` is the caller's to advance, once all layers have it.
        """
        rows = slice(first_position, first_position + keys.shape[0])
        self.keys[layer, :, rows] = keys.transpose(1, 0, 2)
        self.values[layer, :, rows] = values.transpose(1, 0, 2)

    def __repr__(self) -> str:
        size_mib = (self.keys.nbytes + self.values.nbytes) / (1 << 20)
        return (
            f"<KvCache {self.length}/{self.capacity} tokens, "
            f"{self.num_layers} layers, {size_mib:.1f} MiB>"
        )
