"""The C library's heap, which must not grow by what its many threads once needed.

Each thread allocates from an arena that it shares with few others: eight arenas a processor, by
default. Buffers of deliveries and puts leave holes in all of them, which go back to the system only
where they lie at an arena's end. After ten minutes of mixed load 17 MiB were in use, as from the
third minute on, and the holes had grown from 5 to 15 MiB. With few arenas, whose free pages are
given back now and then, what is held follows what is used.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

ARENAS_MAX = 2  # threads that allocate at once mostly hold the interpreter's lock, of which is one
TRIM_EVERY_S = 60.0
_M_ARENA_MAX = -8  # of malloc.h


def bound_arenas() -> None:
    """Before there are threads. Without effect where the C library has no arenas (musl)."""
    mallopt = _function("mallopt")
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, ARENAS_MAX)


class HeapTrimmer:
    """Gives the heap's free pages back every TRIM_EVERY_S, until it is closed."""

    def __init__(self) -> None:
        self._closing = threading.Event()
        self._trim = _function("malloc_trim")
        self._thread = threading.Thread(target=self._run, name="heap-trim", daemon=True)
        if self._trim is not None:
            self._thread.start()

    def _run(self) -> None:
        while not self._closing.wait(TRIM_EVERY_S):
            self._trim(0)

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()


def _function(name: str) -> Any:
    """A function of the C library, which runs without the interpreter's lock; None without it."""
    return getattr(ctypes.CDLL(None), name, None)
