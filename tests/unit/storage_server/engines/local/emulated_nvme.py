"""An NVMe namespace in memory that executes packed commands as a controller would.

Strict about every field: what a controller refuses ends with the status that the specification
names, and what it leaves to the driver (memory that is not there) cannot be detected here either.
Written blocks are volatile until a flush, where the controller has a write cache.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import struct
import threading
from collections.abc import Callable, Sequence

from objectcache_schemas.limits import KIB, MIB
from objectcache_storage_server.engines.local.direct.nvme.nvme_device import NvmeDevice
from objectcache_storage_server.engines.local.direct.nvme.nvme_identify import (
    Controller,
    DeallocateLimits,
    Namespace,
)

FLUSH, WRITE, READ, DATASET_MANAGEMENT = 0x00, 0x01, 0x02, 0x09
DO_NOT_RETRY = 1 << 14
INVALID_OPCODE = DO_NOT_RETRY | 0x001
INVALID_FIELD = DO_NOT_RETRY | 0x002
INVALID_NAMESPACE = DO_NOT_RETRY | 0x00B
LBA_OUT_OF_RANGE = DO_NOT_RETRY | 0x080
NAMESPACE_NOT_READY = 0x082
CAPACITY_EXCEEDED = DO_NOT_RETRY | 0x081
SIZE_LIMIT_EXCEEDED = DO_NOT_RETRY | 0x183
UNRECOVERED_READ_ERROR = DO_NOT_RETRY | 0x281
DEALLOCATED_BYTE = b"\xde"  # a controller may return anything; this is nothing that anybody wrote

Fault = Callable[[int, int, int], int]  # opcode, first LBA, LBA count -> status


class EmulatedNvme(NvmeDevice):
    """`blocks` is the namespace's content; `faults` may end a command before it does anything."""

    def __init__(
        self,
        capacity_bytes: int = 8 * MIB,
        *,
        lba_bytes: int = 512,
        transfer_bytes_max: int = 128 * KIB,
        nsid: int = 1,
        has_write_cache: bool = True,
        has_deallocate: bool = True,
        deallocate_limits: DeallocateLimits | None = None,
    ) -> None:
        self.name = "emulated"
        self.namespace = Namespace(nsid, lba_bytes, capacity_bytes // lba_bytes)
        self.controller = Controller(
            "emulated", "0", transfer_bytes_max, has_deallocate, has_write_cache
        )
        self.transfer_bytes_max = transfer_bytes_max
        self.deallocate_limits = deallocate_limits or DeallocateLimits()
        self.blocks = mmap.mmap(-1, self.namespace.capacity_bytes)  # zeros that cost nothing
        self.executed: list[tuple[int, int, int]] = []  # opcode, first LBA, LBA count
        self.faults: Fault = lambda opcode, start, count: 0
        self.is_closed = False
        self._durable = mmap.mmap(-1, len(self.blocks))
        self._unflushed: list[tuple[int, int]] = []  # begin and end, in bytes
        self._one_at_a_time = threading.Lock()

    def execute(self, commands: Sequence[bytes]) -> list[int]:
        assert not self.is_closed
        with self._one_at_a_time:
            return [self._execute(Command(raw)) for raw in commands]

    def close(self) -> None:
        self.is_closed = True

    def lose_power(self, seed: int) -> None:
        """Any part of what was not flushed is gone."""
        chance, lba_bytes = random.Random(seed), self.namespace.lba_bytes
        for begin, end in self._unflushed:
            for at in range(begin, end, lba_bytes):
                if chance.random() < 0.5:
                    self.blocks[at : at + lba_bytes] = self._durable[at : at + lba_bytes]
        self._flush()

    def flush(self) -> None:
        """All that was written is durable."""
        with self._one_at_a_time:
            self._flush()

    def change(self, begin: int, data: bytes) -> None:
        """A write that came in no command of ours."""
        with self._one_at_a_time:
            self._change(begin, data)

    def _execute(self, command: Command) -> int:
        status = self._refusal(command)
        if status:
            return status
        self.executed.append((command.opcode, command.start, command.count))
        status = self.faults(command.opcode, command.start, command.count)
        if status:
            return status
        if command.opcode == FLUSH:
            self._flush()
        elif command.opcode == DATASET_MANAGEMENT:
            return self._deallocate(command)
        else:
            self._transfer(command)
        return 0

    def _refusal(self, command: Command) -> int:
        if command.opcode not in (FLUSH, WRITE, READ, DATASET_MANAGEMENT):
            return INVALID_OPCODE
        if command.nsid != self.namespace.nsid:
            return INVALID_NAMESPACE
        if command.has_reserved_bits():
            return INVALID_FIELD
        if command.opcode in (WRITE, READ):
            return self._transfer_refusal(command)
        return 0

    def _transfer_refusal(self, command: Command) -> int:
        length_bytes = command.count * self.namespace.lba_bytes
        if length_bytes > self.transfer_bytes_max or length_bytes != command.data_bytes:
            return INVALID_FIELD
        if command.address == 0 or command.address % 4:
            return INVALID_FIELD
        if command.start + command.count > self.namespace.lba_count:
            return LBA_OUT_OF_RANGE
        return 0

    def _transfer(self, command: Command) -> None:
        lba_bytes = self.namespace.lba_bytes
        begin, length = command.start * lba_bytes, command.count * lba_bytes
        if command.opcode == READ:
            ctypes.memmove(command.address, self.blocks[begin : begin + length], length)
            return
        self._change(begin, ctypes.string_at(command.address, length))

    def _deallocate(self, command: Command) -> int:
        limits = self.deallocate_limits
        if command.ranges > limits.ranges_max or command.data_bytes != 16 * command.ranges:
            return SIZE_LIMIT_EXCEEDED
        listed = ctypes.string_at(command.address, command.data_bytes)
        ranges = list(struct.iter_unpack("<IIQ", listed))
        if sum(count for _, count, _ in ranges) > limits.lbas_max:
            return SIZE_LIMIT_EXCEEDED
        for _, count, start in ranges:
            if count > limits.range_lbas_max:
                return SIZE_LIMIT_EXCEEDED
            if start + count > self.namespace.lba_count:
                return LBA_OUT_OF_RANGE
        for _, count, start in ranges:
            lba_bytes = self.namespace.lba_bytes
            self._change(start * lba_bytes, DEALLOCATED_BYTE * (count * lba_bytes))
        return 0

    def _change(self, begin: int, data: bytes) -> None:
        self.blocks[begin : begin + len(data)] = data
        if self.controller.has_write_cache:
            self._unflushed.append((begin, begin + len(data)))

    def _flush(self) -> None:
        for begin, end in self._unflushed:
            self._durable[begin:end] = self.blocks[begin:end]
        self._unflushed.clear()


class Command:
    """A `struct nvme_uring_cmd`, taken apart field by field, as the kernel's header has them."""

    def __init__(self, raw: bytes) -> None:
        assert len(raw) == 72
        self.opcode, self.flags = raw[0], raw[1]
        (self.nsid,) = struct.unpack_from("<I", raw, 4)
        (self.address,) = struct.unpack_from("<Q", raw, 24)
        (self.data_bytes,) = struct.unpack_from("<I", raw, 36)
        self.dwords = struct.unpack_from("<6I", raw, 40)  # 10 to 15
        self.unused = raw[1:4] + raw[8:24] + raw[32:36] + raw[68:72]
        self.start = self.count = self.ranges = 0
        if self.opcode in (WRITE, READ):
            self.start = self.dwords[0] | self.dwords[1] << 32
            self.count = (self.dwords[2] & 0xFFFF) + 1
        if self.opcode == DATASET_MANAGEMENT:
            self.ranges = (self.dwords[0] & 0xFF) + 1

    def has_reserved_bits(self) -> bool:
        """Whether anything is set that the store has no reason to set."""
        allowed = {
            FLUSH: (0, 0, 0),
            WRITE: (0xFFFF_FFFF, 0xFFFF_FFFF, 0xFFFF),
            READ: (0xFFFF_FFFF, 0xFFFF_FFFF, 0xFFFF),
            DATASET_MANAGEMENT: (0xFF, 0b100, 0),
        }[self.opcode]
        used = zip(self.dwords, (*allowed, 0, 0, 0), strict=True)
        return any(self.unused) or any(dword & ~mask for dword, mask in used)
