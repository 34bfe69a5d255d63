"""The direct path through io_uring: a batch is one system call. One ring a thread."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from objectcache_storage_server.engines.local.direct.batches import DirectPiece, Submitter
from objectcache_storage_server.engines.local.direct.ring import OP_READ, OP_WRITE, Ring, Sqes

RETRIES_MAX = 16  # of a batch in which no piece made progress, before its error counts
_AGAIN = (-errno.EAGAIN, -errno.EINTR)


class UringSubmitter(Submitter):
    """A ring in every thread that reads or writes, released when the thread ends or at close."""

    description = "io_uring"

    def __init__(self, depth: int) -> None:
        """At most `depth` pieces in flight a thread, rounded up to a power of two.

        Raises `OSError` where io_uring is not allowed, or older than reads without vectors.
        """
        self._depth = depth
        self._local = threading.local()
        self._probe()

    def read(self, pieces: Sequence[DirectPiece]) -> None:
        self._run(OP_READ, pieces)

    def write(self, pieces: Sequence[DirectPiece]) -> None:
        self._run(OP_WRITE, pieces)

    def close(self) -> None:
        self._local = threading.local()  # the last reference to every thread's ring

    def _run(self, opcode: int, pieces: Sequence[DirectPiece]) -> None:
        ring = self._ring()
        sqes = ring.prepare(len(pieces))
        file_descriptors, offsets, addresses, memories = zip(*pieces, strict=True)
        sqes["opcode"] = opcode
        sqes["fd"] = file_descriptors
        sqes["off"] = offsets
        sqes["addr"] = addresses
        sqes["len"] = [len(memory) for memory in memories]
        _run_whole(ring, sqes)

    def _ring(self) -> Ring:
        ring: Ring | None = getattr(self._local, "ring", None)
        if ring is None:
            ring = self._local.ring = Ring(self._depth)
        return ring

    def _probe(self) -> None:
        """Reads of no file: one that the kernel knows how to refuse, it knows how to do."""
        ring = Ring(1)
        try:
            sqes = ring.prepare(1)
            sqes["opcode"], sqes["fd"] = OP_READ, -1
            if int(ring.run(sqes)[0]) != -errno.EBADF:
                raise OSError(errno.EOPNOTSUPP, "this kernel's io_uring is too old")
        finally:
            ring.close()


def _run_whole(ring: Ring, sqes: Sqes) -> None:
    """Run the entries until each has moved all its bytes; raises the first error."""
    stalls = 0
    while len(sqes):
        results = ring.run(sqes)
        if np.array_equal(results, sqes["len"]):
            return
        _raise_first_error(results)
        moved = np.maximum(results, 0)
        stalls = 0 if moved.any() else stalls + 1
        if stalls > RETRIES_MAX:
            raise OSError(errno.EAGAIN, "the device keeps asking to try again")
        sqes = _remainders(sqes, moved)


def _raise_first_error(results: npt.NDArray[np.int32]) -> None:
    failed = results[(results <= 0) & ~np.isin(results, _AGAIN)]
    if len(failed):
        number = -int(failed[0]) or errno.EIO  # nothing moved: the file ends here
        raise OSError(number, os.strerror(number))


def _remainders(sqes: Sqes, moved: npt.NDArray[np.int32]) -> Sqes:
    """What is left of entries of which `moved` bytes were."""
    moved_bytes = moved.astype(np.uint64)
    sqes["off"] += moved_bytes
    sqes["addr"] += moved_bytes
    sqes["len"] -= moved.astype(np.uint32)
    return sqes[sqes["len"] > 0]
