"""The contract of a client under comparison. It runs in a process of its own, see `worker`."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.basis.prefix import check_layer
from benchmarks.compare.cells import Cell
from benchmarks.compare.ways import Way
from objectcache_laboratory.replay.kv_bytes import KvBytes

Bytes = npt.NDArray[np.uint8]
PIECE_CHUNKS = 16  # made at a time, so that no second prefix is in memory


@dataclass(frozen=True, slots=True)
class Prefix:
    """What is stored and fetched: the chunks of a cell under their keys."""

    cell: Cell
    keys: tuple[str, ...]

    @classmethod
    def of(cls, cell: Cell) -> Prefix:
        """The prefix of a cell."""
        return cls(cell, tuple(cell.geometry.keys()))

    @property
    def num_layers(self) -> int:
        """Layers of a chunk."""
        return self.cell.model.num_layers

    @property
    def slice_bytes(self) -> int:
        """Bytes of one layer of one chunk."""
        return self.cell.geometry.slice_bytes

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk."""
        return self.cell.geometry.chunk_bytes

    def chunks(self) -> Iterator[tuple[str, Bytes]]:
        """Each key with its uint8[num_layers, slice_bytes]."""
        kv = KvBytes(self.cell.geometry.layout())
        for first in range(0, len(self.keys), PIECE_CHUNKS):
            keys = self.keys[first : first + PIECE_CHUNKS]
            yield from zip(keys, kv.chunks(keys), strict=True)

    def layer_of_chunks(self, memory: Bytes, layer: int) -> Bytes:
        """View of a layer, uint8[chunks, slice_bytes], where whole chunks follow each other."""
        chunks: Bytes = memory.reshape(len(self.keys), self.num_layers, self.slice_bytes)
        payload: Bytes = chunks[:, layer]
        return payload

    def layer_of_layers(self, memory: Bytes, layer: int) -> Bytes:
        """View of a layer, uint8[chunks, slice_bytes], where whole layers follow each other."""
        layers: Bytes = memory.reshape(self.num_layers, len(self.keys), self.slice_bytes)
        payload: Bytes = layers[layer]
        return payload

    def check(self, layer: int, payload: Bytes) -> None:
        """Stop the benchmark if a byte of uint8[chunks, slice_bytes] is wrong."""
        check_layer(self.cell.geometry, list(self.keys), layer, payload)


class StoreClient(ABC):
    """A client with one or more ways to fetch. Made where the benchmark runs, sent to its process,
    and opened there, so a constructor keeps words and numbers alone.

    The order of calls: `open`, then for each prefix `store`, any number of `fetch` with a `layer`
    for each layer and a `clear` after it, and `drop`; at the end `close`. What a call raises ends
    the client's part in the comparison, with the reason in the table.
    """

    ways: tuple[Way, ...]

    @abstractmethod
    def open(self) -> None:
        """Connect; imports the library."""

    @abstractmethod
    def store(self, prefix: Prefix) -> None:
        """Store a prefix, and make the target that it will be fetched into."""

    @abstractmethod
    def fetch(self, way: Way) -> Sequence[float]:
        """Fetch the prefix; for each layer the `time.perf_counter` at which it was whole."""

    @abstractmethod
    def layer(self, way: Way, layer: int) -> Bytes:
        """What the last fetch left: uint8[chunks, slice_bytes]."""

    @abstractmethod
    def clear(self) -> None:
        """Overwrite the target, so that the next check finds the bytes of the next fetch alone."""

    @abstractmethod
    def drop(self) -> None:
        """Delete the prefix and give the target back."""

    @abstractmethod
    def close(self) -> None:
        """Disconnect."""


def all_at_once(prefix: Prefix) -> Sequence[float]:
    """The arrivals of a fetch that has just ended and delivers no layer before the others."""
    return [time.perf_counter()] * prefix.num_layers
