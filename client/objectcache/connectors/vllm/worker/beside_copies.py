"""Copies between host memory and vLLM's blocks on a GPU, beside what the engine computes.

Not run on a GPU: tested on an emulated device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from objectcache.connectors.device.engine_copier import EngineCopier
from objectcache.connectors.vllm.worker.block_copies import (
    BlockCopies,
    BlockLoad,
    BlocksOut,
    HostArrival,
    WaitedCopies,
)
from objectcache.connectors.vllm.worker.paged_layout import PagedLayer
from objectcache.deliveries.delivery import Delivery
from objectcache.gpu.copier import LAYERS_AT_ONCE, BlockSave
from objectcache.gpu.layer_load import LayerLoad
from objectcache.gpu.links.checked_links import CheckedLinks
from objectcache.gpu.pieces import BlockPart, PagedBlocks, Pieces
from objectcache.landing.regions import Region
from objectcache.landing.targets import SessionTarget
from objectcache.payload import Bytes
from objectcache_schemas.errors import DeliveryFailed

# Of a block's runs of bytes: shorter ones are copied by way of a buffer on the GPU, since the
# copier's work is a piece's, however short. Pieces of 32 KiB were measured, others were not.
DIRECT_BYTES_MIN = 4096
# Of a load: the next layer is copied into one while the other is laid into blocks. Over several
# links there are as many as layers that are copied at once.
BUFFERS = 2
SAVES_AHEAD = 4  # layers that are on their way out, each in a buffer of its own


class BesideCopies(BlockCopies):
    """By a copier. Where that does not reach the memory, whoever waits copies."""

    def __init__(self, layers: Sequence[PagedLayer], copier: EngineCopier) -> None:
        super().__init__(layers)
        self._copier = copier
        self._waited = WaitedCopies(layers)
        self._blocks = [_direct_blocks(layer) for layer in layers]
        self._under_way: deque[_Saving] = deque()
        self._saved: tuple[tuple[int, ...], Any] = ((), None)  # blocks, and their index

    def enter_thread(self) -> None:
        self._copier.enter_thread()

    def region(self, length_bytes: int) -> Region:
        return self._copier.region(length_bytes)

    def reachable(self, register: Callable[[int], SessionTarget]) -> Callable[[int], SessionTarget]:
        return self._copier.reachable(register)

    def load(self, delivery: Delivery, block_ids: Sequence[int]) -> BlockLoad:
        first = delivery.layers.start
        if not delivery.chunk_count or not self._copier.reaches(delivery.ready_layer(first)):
            return self._waited.load(delivery, block_ids)
        stored = block_ids[: delivery.chunk_count]
        direct = [blocks for blocks in self._blocks if blocks is not None]
        if len(direct) == len(self.layers):
            return _DirectLoad(self._copier, direct, delivery, stored)
        return _BufferedLoad(self._copier, self.layers, delivery, stored)

    def save(self, layer: int, moves: Sequence[BlocksOut]) -> HostArrival | None:
        if not all(self._copier.reaches(move.slices) for move in moves):
            self._waited.save(layer, moves)
            return None
        while len(self._under_way) >= SAVES_AHEAD:
            self._under_way.popleft().sleep()
        try:
            saving = self._begun(self.layers[layer], moves)
        except Exception as error:  # these blocks are not stored; the engine goes on
            return _NotSaved(error)
        self._under_way.append(saving)
        return saving

    def _begun(self, paged: PagedLayer, moves: Sequence[BlocksOut]) -> _Saving:
        blocks = tuple(block for move in moves for block in move.block_ids)
        if self._saved[0] != blocks:  # a step's layers have the same ones
            self._saved = (blocks, paged.index(blocks))
        buffer = paged.buffer(len(blocks))
        paged.gather(self._saved[1], buffer)
        pieces, begin = [], 0
        for move in moves:
            places = _rows_of(buffer, paged.slice_bytes, begin, len(move.block_ids))
            pieces.append(places.pieces(range(len(move.block_ids)), move.slices))
            begin += len(move.block_ids)
        columns = [
            np.concatenate([getattr(part, name) for part in pieces])
            for name in ("host", "device", "sizes_bytes")
        ]
        save = self._copier.copier.save(Pieces(*columns), self._copier.current_stream())
        return _Saving(save, buffer)

    def close(self) -> None:
        self._copier.close()
        self._under_way.clear()

    def __repr__(self) -> str:
        return f"<BesideCopies {self._copier!r}>"


class _CopiedLoad(BlockLoad):
    """What a copier lays down. Its blocks, or buffers, are written until it is closed."""

    def __init__(self, copier: EngineCopier, load: LayerLoad, count: int) -> None:
        self._stream = copier.current_stream
        self._may_lose = _is_linked(copier)
        self._load: LayerLoad | None = load
        self._count = count

    def wait(self, layer: int, timeout_s: float) -> int:
        assert self._load is not None
        stream = self._stream()
        self._load.wait(layer, stream, timeout_s)
        self._arrived(self._load, layer, stream)
        return self._count

    def _arrived(self, load: LayerLoad, layer: int, stream: int) -> None:
        """The layer is there for what is queued on the stream from now on."""

    def check(self) -> None:
        # A stream goes on behind a neighbour's link that has failed.
        if self._may_lose and self._load is not None:
            self._load.finish()

    def close(self) -> None:
        load, self._load = self._load, None
        if load is not None:
            load.close()


class _DirectLoad(_CopiedLoad):
    """Straight into the blocks, whose runs of bytes are long enough."""

    def __init__(
        self,
        copier: EngineCopier,
        blocks: Sequence[PagedBlocks],
        delivery: Delivery,
        block_ids: Sequence[int],
    ) -> None:
        def places(layer: int, slices: Bytes) -> Pieces:
            return blocks[layer].pieces(block_ids, slices)

        load = copier.copier.load(delivery, places, copier.current_stream())
        super().__init__(copier, load, len(block_ids))


class _BufferedLoad(_CopiedLoad):
    """Into buffers by turns, out of which the engine's own stream lays layers into blocks."""

    def __init__(
        self,
        copier: EngineCopier,
        layers: Sequence[PagedLayer],
        delivery: Delivery,
        block_ids: Sequence[int],
    ) -> None:
        count = len(block_ids)
        self._layers = layers
        self._next = delivery.layers.start
        self._index = layers[0].index(block_ids)
        ahead = LAYERS_AT_ONCE if _is_linked(copier) else BUFFERS
        self._buffers = [layers[0].buffer(count) for _ in range(ahead)]
        rows = [_rows_of(buffer, layers[0].slice_bytes, 0, count) for buffer in self._buffers]

        def places(layer: int, slices: Bytes) -> Pieces:
            return rows[layer % ahead].pieces(range(count), slices)

        stream = copier.current_stream()
        load = copier.copier.load(delivery, places, stream, ahead=ahead)
        super().__init__(copier, load, count)

    def wait(self, layer: int, timeout_s: float) -> int:
        if layer != self._next:  # what it waits for would never be copied
            raise DeliveryFailed(
                f"the engine asked for layer {layer}, not {self._next}", layer=layer
            )
        return super().wait(layer, timeout_s)

    def _arrived(self, load: LayerLoad, layer: int, stream: int) -> None:
        self._layers[layer].scatter(self._index, self._buffers[layer % len(self._buffers)])
        load.release(layer, stream)
        self._next = layer + 1

    def close(self) -> None:
        super().close()
        self._buffers.clear()


class _Saving(HostArrival):
    """A save, and the buffer that it is copied out of."""

    def __init__(self, save: BlockSave, buffer: Any) -> None:
        self._save = save
        self._buffer = buffer

    def wait(self) -> None:
        self._save.wait()
        self._buffer = None

    def sleep(self) -> None:
        """As `wait`; what has failed is told to whoever waits for the slices."""
        try:
            self.wait()
        except Exception:  # told there
            return


class _NotSaved(HostArrival):
    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait(self) -> None:
        raise self._error


def _is_linked(copier: EngineCopier) -> bool:
    """Whether it copies over several links."""
    return isinstance(copier.copier.links, CheckedLinks)


def _direct_blocks(layer: PagedLayer) -> PagedBlocks | None:
    """A layer's blocks, where their runs of bytes are long enough for a copy of their own."""
    parts = layer.block_parts()
    if min(part.length_bytes for part in parts) < DIRECT_BYTES_MIN:
        return None
    return PagedBlocks(parts, layer.block_count)


def _rows_of(buffer: Any, row_bytes: int, begin: int, count: int) -> PagedBlocks:
    """Some rows of a buffer as blocks of their own."""
    address = buffer.data_ptr() + begin * row_bytes
    return PagedBlocks([BlockPart(address, row_bytes, row_bytes)], count)
