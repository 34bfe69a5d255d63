"""What the machine can do without us: copies out of the page cache, a TCP stream, a write."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import socket
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from objectcache_schemas.limits import MIB

PIECE_BYTES = 2 * MIB
COPY_THREADS = 2


class PageCacheCopy:
    """`COPY_THREADS` threads that read the same object files into warm memory.

    Into the target that deliveries in shared memory land in, and into anonymous memory. Deliveries
    are judged by the former: what a copy costs depends on the pages it writes to, by a factor of up
    to two on a virtual machine, so both have to write to the same ones.
    """

    def __init__(
        self, files: Sequence[Path], chunk_bytes: int, target: memoryview, stack: ExitStack
    ) -> None:
        self._chunk_bytes = chunk_bytes
        length_bytes = chunk_bytes * len(files)
        self._descriptors = [os.open(file, os.O_RDONLY) for file in files]
        for descriptor in self._descriptors:
            stack.callback(os.close, descriptor)
        self._target = target
        self._anonymous = mmap.mmap(-1, length_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._pool = stack.enter_context(ThreadPoolExecutor(COPY_THREADS))
        self.into_target()
        self.into_anonymous_memory()

    def into_target(self) -> None:
        """Copy everything once."""
        self._copy(self._target)

    def into_anonymous_memory(self) -> None:
        """Copy everything once."""
        self._copy(memoryview(self._anonymous))

    def _copy(self, memory: memoryview) -> None:
        shares = [range(n, len(self._descriptors), COPY_THREADS) for n in range(COPY_THREADS)]
        list(self._pool.map(partial(self._copy_share, memory), shares))

    def _copy_share(self, memory: memoryview, share: range) -> None:
        for index in share:
            for offset in range(0, self._chunk_bytes, PIECE_BYTES):
                length = min(PIECE_BYTES, self._chunk_bytes - offset)
                start = index * self._chunk_bytes + offset
                read = os.preadv(self._descriptors[index], [memory[start : start + length]], offset)
                assert read == length


class LoopbackStream:
    """One TCP stream on 127.0.0.1 from another process, into warm memory of the whole payload."""

    def __init__(self, receiver: socket.socket, length_bytes: int) -> None:
        self._receiver = receiver
        self._memory = memoryview(bytearray(length_bytes))

    def receive(self) -> None:
        """Ask for the payload and take it."""
        self._receiver.sendall(b"s")
        offset = 0
        while offset < len(self._memory):
            offset += self._receiver.recv_into(self._memory[offset : offset + PIECE_BYTES])


@contextmanager
def loopback_stream(length_bytes: int) -> Generator[LoopbackStream]:
    """A sending process that ends with the block."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        sender = multiprocessing.get_context("spawn").Process(
            target=_send_when_asked, args=(address, length_bytes), daemon=True
        )
        sender.start()
        receiver, _ = listener.accept()
    try:
        with receiver:
            receiver.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield LoopbackStream(receiver, length_bytes)
    finally:
        sender.join(timeout=10)
        sender.kill()


def _send_when_asked(address: tuple[str, int], length_bytes: int) -> None:
    piece = memoryview(os.urandom(PIECE_BYTES))
    with socket.create_connection(address) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while connection.recv(1):
            for offset in range(0, length_bytes, PIECE_BYTES):
                connection.sendall(piece[: min(PIECE_BYTES, length_bytes - offset)])


def write_and_sync(folder: Path, length_bytes: int, file_count: int) -> None:
    """Write `length_bytes` to `file_count` files, each flushed to the device, and the folder."""
    piece = memoryview(os.urandom(PIECE_BYTES))
    files = [folder / f"plain-{number}" for number in range(file_count)]
    for file in files:
        _write_file(file, piece, length_bytes // file_count)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(descriptor)
    os.close(descriptor)


def remove_written(folder: Path) -> None:
    """Remove what `write_and_sync` wrote; apart from it, so that it is not timed."""
    for file in folder.glob("plain-*"):
        file.unlink()


def _write_file(file: Path, piece: memoryview, length_bytes: int) -> None:
    with file.open("wb", buffering=0) as output:
        for offset in range(0, length_bytes, PIECE_BYTES):
            output.write(piece[: min(PIECE_BYTES, length_bytes - offset)])
        os.fsync(output.fileno())
