"""Pieces of the direct path as NVMe commands: the copy thread's part of IV-B's data flow."""

from __future__ import annotations

from collections.abc import Sequence

from objectcache_storage_server.engines.local.direct.alignment import Alignment
from objectcache_storage_server.engines.local.direct.batches import DirectPiece, Submitter
from objectcache_storage_server.engines.local.direct.nvme.nvme_commands import (
    Opcode,
    lba_range,
    lbas_per_command,
    transfer_commands,
)
from objectcache_storage_server.engines.local.direct.nvme.nvme_device import NvmeDevice

MEMORY_ALIGNMENT_BYTES = 4  # a command names its memory in dwords


class NvmeSubmitter(Submitter):
    """Offsets are bytes of the namespace; file descriptors count for nothing.

    The controller may move fewer bytes a command than a piece has, so that pieces are cut again
    here, at what it takes (eq. 7 to 11).
    """

    def __init__(self, device: NvmeDevice) -> None:
        """`device` stays the caller's to close."""
        namespace = device.namespace
        self._device = device
        self._nsid, self._lba_bytes = namespace.nsid, namespace.lba_bytes
        self._lbas_max = lbas_per_command(device.transfer_bytes_max, namespace.lba_bytes)
        self.alignment = Alignment(namespace.lba_bytes, MEMORY_ALIGNMENT_BYTES)
        self.description = (
            f"nvme: commands of at most {self._lbas_max * self._lba_bytes} bytes, "
            f"blocks of {self._lba_bytes}, to {device.name}"
        )

    def read(self, pieces: Sequence[DirectPiece]) -> None:
        self._device.run(self._commands(Opcode.READ, pieces), "NVMe read")

    def write(self, pieces: Sequence[DirectPiece]) -> None:
        self._device.run(self._commands(Opcode.WRITE, pieces), "NVMe write")

    def close(self) -> None:
        """The device is not this object's."""

    def _commands(self, opcode: Opcode, pieces: Sequence[DirectPiece]) -> list[bytes]:
        return [
            command
            for piece in pieces
            for command in transfer_commands(
                opcode,
                self._nsid,
                lba_range(piece.offset_bytes, len(piece.memory), self._lba_bytes),
                piece.address,
                self._lba_bytes,
                self._lbas_max,
            )
        ]
