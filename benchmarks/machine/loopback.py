"""A limit of the machine: one TCP stream on 127.0.0.1 from another process."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from benchmarks.machine.page_cache_copy import FileRun
from objectcache_schemas.limits import MIB

PIECE_BYTES = 2 * MIB
FROM_MEMORY, FROM_FILES = b"m", b"f"


class LoopbackStream:
    """Receives into warm memory of the whole payload."""

    def __init__(self, receiver: socket.socket, length_bytes: int) -> None:
        self._receiver = receiver
        self._memory = memoryview(bytearray(length_bytes))

    def from_memory(self) -> None:
        """Ask for the payload out of warm memory of the sender, and take it."""
        self._receive(FROM_MEMORY)

    def from_files(self) -> None:
        """Ask for the payload by sendfile, straight out of the page cache, and take it."""
        self._receive(FROM_FILES)

    def _receive(self, kind: bytes) -> None:
        self._receiver.sendall(kind)
        offset = 0
        while offset < len(self._memory):
            offset += self._receiver.recv_into(self._memory[offset : offset + PIECE_BYTES])


@contextmanager
def loopback_stream(length_bytes: int, runs: Sequence[FileRun]) -> Generator[LoopbackStream]:
    """A sending process that ends with the block. `runs` are `length_bytes` of files."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        sender = multiprocessing.get_context("spawn").Process(
            target=_send_when_asked, args=(address, length_bytes, tuple(runs)), daemon=True
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


def _send_when_asked(
    address: tuple[str, int], length_bytes: int, runs: tuple[FileRun, ...]
) -> None:
    memory = memoryview(os.urandom(PIECE_BYTES))
    files = [(os.open(run.file, os.O_RDONLY), run) for run in runs]
    with socket.create_connection(address) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while kind := connection.recv(1):
            if kind == FROM_MEMORY:
                for offset in range(0, length_bytes, PIECE_BYTES):
                    connection.sendall(memory[: min(PIECE_BYTES, length_bytes - offset)])
            else:
                for descriptor, run in files:
                    _send_file(connection, descriptor, run)


def _send_file(connection: socket.socket, descriptor: int, run: FileRun) -> None:
    done = 0
    while done < run.length_bytes:
        offset = run.offset_bytes + done
        done += os.sendfile(
            connection.fileno(), descriptor, offset, min(PIECE_BYTES, run.length_bytes - done)
        )
