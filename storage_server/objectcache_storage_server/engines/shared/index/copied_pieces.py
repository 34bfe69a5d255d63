"""The compact copy of an environment, in pieces, without a file in between."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator


def copied_pieces(write: Callable[[int], None], size_bytes: int) -> Generator[bytes, None, None]:
    """Pieces of this size, and the last one, of what `write` writes to a descriptor.

    A thread writes to a pipe; it ends when the generator is closed. Raises what `write` raises.
    """
    source, sink = os.pipe2(os.O_CLOEXEC)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            write(sink)
        except BaseException as error:
            errors.append(error)
        finally:
            os.close(sink)

    thread = threading.Thread(target=run, name="checkpoint-copy", daemon=True)
    thread.start()
    try:
        while piece := _read_fully(source, size_bytes):
            yield piece
    finally:
        os.close(source)
        thread.join()
    if errors:
        raise errors[0]


def _read_fully(source: int, size_bytes: int) -> bytes:
    """The next bytes of a pipe, fewer only at its end."""
    piece = bytearray(size_bytes)
    filled = 0
    with memoryview(piece) as memory:
        while filled < size_bytes:
            count = os.readv(source, [memory[filled:]])
            if not count:
                break
            filled += count
    return bytes(piece[:filled])
