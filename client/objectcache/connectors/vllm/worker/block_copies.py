"""How layers come from host memory into vLLM's blocks, and out of them: while the engine waits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from objectcache.connectors.vllm.worker.paged_layout import PagedLayer
from objectcache.deliveries.delivery import Delivery
from objectcache.landing.regions import Region
from objectcache.landing.target_pool import memory_file_region
from objectcache.landing.targets import SessionTarget
from objectcache.payload import Bytes


@dataclass(frozen=True, slots=True)
class BlocksOut:
    """Blocks of one layer, and where their slices belong: uint8[len(block_ids), slice_bytes] in
    host memory, rows contiguous.
    """

    block_ids: Sequence[int]
    slices: Bytes


class BlockLoad(ABC):
    """One delivery's layers on their way into blocks. Called from one thread at a time."""

    @abstractmethod
    def wait(self, layer: int, timeout_s: float) -> int:
        """Have a layer in its blocks for whatever the calling thread asks the device for from now
        on; how many blocks of the load are stored.

        Raises as `Delivery.wait_layer` does, and whatever the device does.
        """

    def check(self) -> None:  # noqa: B027 - what is waited for is there
        """All layers were waited for: raise where the device's may be others' bytes for all that.
        Sleeps until it is known.
        """

    @abstractmethod
    def close(self) -> None:
        """Return when nothing is written into the blocks any more. Repeating has no effect."""


class HostArrival(ABC):
    """Slices on their way out of a device."""

    @abstractmethod
    def wait(self) -> None:
        """Sleep until they are in host memory; from any thread. Raises what has kept them."""


class BlockCopies(ABC):
    """Both directions, for all layers of one worker."""

    def __init__(self, layers: Sequence[PagedLayer]) -> None:
        self.layers = layers

    def enter_thread(self) -> None:  # noqa: B027 - the host's need nothing
        """Called once in each thread that loads, or closes loads."""

    def region(self, length_bytes: int) -> Region:
        """Memory for deliveries. Raises `Unavailable`."""
        return memory_file_region(length_bytes)

    def reachable(self, register: Callable[[int], SessionTarget]) -> Callable[[int], SessionTarget]:
        """What makes memory to save into, of what makes memory that the server reads."""
        return register

    @abstractmethod
    def load(self, delivery: Delivery, block_ids: Sequence[int]) -> BlockLoad:
        """Begin to lay a delivery into blocks; it has at most as many chunks as there are."""

    @abstractmethod
    def save(self, layer: int, moves: Sequence[BlocksOut]) -> HostArrival | None:
        """Take a layer's blocks as the calling thread's calls have left them. Whatever it asks the
        device for afterwards may overwrite them. None: their slices are there already.
        """

    def close(self) -> None:  # noqa: B027 - the host's hold nothing
        """Nothing is loaded or saved any more."""


class WaitedCopies(BlockCopies):
    """Whoever waits for a layer, or saves one, copies it."""

    def load(self, delivery: Delivery, block_ids: Sequence[int]) -> BlockLoad:
        return _WaitedLoad(self.layers, delivery, block_ids)

    def save(self, layer: int, moves: Sequence[BlocksOut]) -> None:
        for move in moves:
            self.layers[layer].store(move.block_ids, move.slices)


class _WaitedLoad(BlockLoad):
    def __init__(
        self, layers: Sequence[PagedLayer], delivery: Delivery, block_ids: Sequence[int]
    ) -> None:
        self._layers = layers
        self._delivery: Delivery | None = delivery
        self._block_ids = block_ids

    def wait(self, layer: int, timeout_s: float) -> int:
        assert self._delivery is not None
        slices = self._delivery.wait_layer(layer, timeout_s)
        self._layers[layer].load(self._block_ids[: len(slices)], slices)
        return len(slices)

    def close(self) -> None:
        self._delivery = None  # its memory is given out again when nobody holds it
