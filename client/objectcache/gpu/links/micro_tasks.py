"""Links, and what they carry: transfers, cut into micro-tasks. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from objectcache.gpu.pieces import Pieces


@dataclass(frozen=True, slots=True)
class DeviceLink:
    """A way between the host, or a store, and the memory of devices.

    A GPU's PCIe link is direct for that GPU, and relays for those that it reaches as peers. A
    storage NIC that writes into GPUs' memory is direct for each that it reaches, and relays for
    none.
    """

    number: int
    direct: frozenset[int]  # numbers of devices
    relayed: frozenset[int] = frozenset()


@dataclass(slots=True, eq=False)
class DeviceTransfer:
    """What somebody wants copied to or from one device, as one: a layer. By `LinkPulls.begin`.

    `links` are the numbers of those that can carry it: a storage NIC has no bytes that are in host
    memory alone. `node` is the NUMA node of its host memory: links are as quick as they are near.
    """

    device: int
    due: int  # how soon it is needed, lower first
    links: frozenset[int]
    node: int
    left: int = 0  # micro-tasks that are queued or on a link
    in_flight: int = 0  # those on links
    is_aborted: bool = False
    # Since when it is known that nothing has to come before it: `inf` while a link may still wait.
    free_s: float = float("-inf")

    @property
    def is_quiet(self) -> bool:
        """Whether no link reads or writes its memory, nor will."""
        return self.left == 0

    @property
    def is_done(self) -> bool:
        """Whether all of it was carried."""
        return self.is_quiet and not self.is_aborted


@dataclass(frozen=True, slots=True, eq=False)
class MicroTask:
    """What a link carries at once: some of a transfer's pieces."""

    transfer: DeviceTransfer
    pieces: Pieces
    number: int  # in the order in which they are made
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Pull:
    """A micro-task that a link has taken. `relay_buffer` is the one that it goes through."""

    task: MicroTask
    relay_buffer: int | None = None

    @property
    def is_relayed(self) -> bool:
        """Whether another device than its own has it in between."""
        return self.relay_buffer is not None
