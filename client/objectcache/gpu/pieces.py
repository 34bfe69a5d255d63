"""Which bytes of host memory belong to which bytes of a device, in pieces and micro-tasks. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from objectcache.payload import Bytes
from objectcache_schemas.errors import InvalidRequest

Numbers = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Rows:
    """Pieces of one size at equal distances on both sides: one copy of a rectangle."""

    host: int
    host_pitch_bytes: int
    device: int
    device_pitch_bytes: int
    width_bytes: int
    count: int


@dataclass(frozen=True, slots=True)
class Pieces:
    """Runs of bytes that are copied together: addresses on both sides and sizes, each uint64[n]."""

    host: Numbers
    device: Numbers
    sizes_bytes: Numbers

    @classmethod
    def of(cls, triples: Sequence[tuple[int, int, int]]) -> Pieces:
        """From (host address, device address, bytes)."""
        columns = np.ascontiguousarray(np.array(triples, np.uint64).reshape(-1, 3).T)
        return cls(*columns)

    def __len__(self) -> int:
        return len(self.sizes_bytes)

    @property
    def total_bytes(self) -> int:
        """Bytes of all pieces."""
        return int(self.sizes_bytes.sum())

    def joined(self) -> Pieces:
        """The same bytes, with pieces that follow each other on both sides as one."""
        if len(self) < 2:
            return self
        host_follows = self.host[1:] == self.host[:-1] + self.sizes_bytes[:-1]
        device_follows = self.device[1:] == self.device[:-1] + self.sizes_bytes[:-1]
        first = np.flatnonzero(np.concatenate(([True], ~(host_follows & device_follows))))
        sizes = np.add.reduceat(self.sizes_bytes, first)
        return Pieces(self.host[first], self.device[first], sizes)

    def split(self, piece_bytes_max: int) -> Pieces:
        """The same bytes in pieces of at most so many."""
        counts = -(-self.sizes_bytes.astype(np.int64) // piece_bytes_max)
        index = np.repeat(np.arange(len(self)), counts)
        number = np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)
        offset = (number * piece_bytes_max).astype(np.uint64)
        sizes = np.minimum(self.sizes_bytes[index] - offset, np.uint64(piece_bytes_max))
        return Pieces(self.host[index] + offset, self.device[index] + offset, sizes)

    def micro_tasks(self, task_bytes: int, pieces_max: int) -> list[Pieces]:
        """The same bytes in their order, in tasks of whole pieces: as many as `task_bytes` and
        `pieces_max` allow. Longer pieces are split.
        """
        pieces = self
        if len(self) and int(self.sizes_bytes.max()) > task_bytes:
            pieces = self.split(task_bytes)
        ends = np.cumsum(pieces.sizes_bytes)
        tasks: list[Pieces] = []
        begin, done_bytes = 0, 0
        while begin < len(pieces):
            full = int(np.searchsorted(ends, np.uint64(done_bytes + task_bytes), side="right"))
            end = min(full, begin + pieces_max)
            tasks.append(pieces._between(begin, end))
            begin, done_bytes = end, int(ends[end - 1])
        return tasks

    def host_runs(self) -> list[tuple[int, int, int]]:
        """(host address, offset in the pieces' order, bytes) of what follows on in host memory."""
        offsets = np.cumsum(self.sizes_bytes) - self.sizes_bytes
        runs = Pieces(self.host, offsets, self.sizes_bytes).joined()
        return runs.triples()

    def triples(self) -> list[tuple[int, int, int]]:
        """(host address, device address, bytes) of each."""
        columns = (self.host.tolist(), self.device.tolist(), self.sizes_bytes.tolist())
        return list(zip(*columns, strict=True))

    def rows(self) -> list[Rows]:
        """The same bytes as rectangles, in the order of device addresses."""
        order = np.argsort(self.device)
        host = self.host[order].astype(np.int64)
        device = self.device[order].astype(np.int64)
        sizes = self.sizes_bytes[order].astype(np.int64)
        host_steps, device_steps = np.diff(host), np.diff(device)
        fits = (sizes[1:] == sizes[:-1]) & (host_steps >= sizes[:-1])
        same = (host_steps[1:] == host_steps[:-1]) & (device_steps[1:] == device_steps[:-1])
        # Steps at which no rectangle that began before goes on; behind the last piece none does.
        ends = [*(np.flatnonzero(~(fits[1:] & same)) + 1).tolist(), len(fits)]
        found: list[Rows] = []
        first = 0
        while first < len(self):
            last, width = first, int(sizes[first])
            host_pitch = device_pitch = width
            if first < len(fits) and fits[first]:
                last = ends[bisect.bisect_right(ends, first)]
                host_pitch, device_pitch = int(host_steps[first]), int(device_steps[first])
            place = (int(host[first]), host_pitch, int(device[first]), device_pitch)
            found.append(Rows(*place, width, last - first + 1))
            first = last + 1
        return found

    def where(self, chosen: npt.NDArray[np.bool_]) -> Pieces:
        """Those that are chosen: bool[n]."""
        return Pieces(self.host[chosen], self.device[chosen], self.sizes_bytes[chosen])

    def _between(self, begin: int, end: int) -> Pieces:
        return Pieces(self.host[begin:end], self.device[begin:end], self.sizes_bytes[begin:end])

    def __repr__(self) -> str:
        return f"<Pieces {len(self)}, {self.total_bytes} bytes>"


@dataclass(frozen=True, slots=True)
class BlockPart:
    """One run of bytes of every block: where block 0 has it, from block to block, and its length.

    `[2, blocks, tokens, heads, dim]` has two parts, K and V; `[blocks, 2, tokens, heads, dim]` one,
    which is the whole block, as has a latent (MLA).
    """

    address: int
    block_stride_bytes: int
    length_bytes: int


class PagedBlocks:
    """One layer's blocks on a device, whose slices are their parts one after the other."""

    def __init__(self, parts: Sequence[BlockPart], block_count: int) -> None:
        self._block_count = block_count
        self._addresses = np.array([part.address for part in parts], np.int64)
        self._strides = np.array([part.block_stride_bytes for part in parts], np.int64)
        self._lengths = np.array([part.length_bytes for part in parts], np.int64)
        self._offsets = np.cumsum(self._lengths) - self._lengths
        self.slice_bytes = int(self._lengths.sum())

    def pieces(self, block_ids: Sequence[int] | npt.NDArray[np.int64], slices: Bytes) -> Pieces:
        """Where slices, uint8[len(block_ids), slice_bytes] with contiguous rows, and blocks lie.

        Raises `InvalidRequest` for blocks that are not there, and slices of another length, type or
        with gaps within a row.
        """
        blocks = np.asarray(block_ids, np.int64)
        if ((blocks < 0) | (blocks >= self._block_count)).any():
            raise InvalidRequest(f"blocks must be within {self._block_count}, got {block_ids!r}")
        if slices.shape != (len(blocks), self.slice_bytes):
            raise InvalidRequest(
                f"slices of shape {slices.shape} do not fill {len(blocks)} blocks of "
                f"{self.slice_bytes} bytes"
            )
        if slices.dtype != np.uint8:
            raise InvalidRequest(f"slices must be uint8, got {slices.dtype}")
        if slices.size and self.slice_bytes > 1 and slices.strides[1] != 1:
            raise InvalidRequest(
                f"each slice must be contiguous, got a byte every {slices.strides[1]} bytes"
            )
        starts = slices.ctypes.data + np.arange(len(blocks)) * slices.strides[0]
        host = starts[:, None] + self._offsets
        device = self._addresses + blocks[:, None] * self._strides
        sizes = np.broadcast_to(self._lengths, host.shape)
        return Pieces(*(each.reshape(-1).astype(np.uint64) for each in (host, device, sizes)))

    def __repr__(self) -> str:
        return f"<PagedBlocks {self._block_count} of {self.slice_bytes} bytes>"
