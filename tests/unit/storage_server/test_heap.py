"""What the heap holds follows what is used."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from objectcache_schemas.limits import MIB
from objectcache_storage_server import heap
from tests.integration.served import wait_until

PIECE_BYTES = 4096
PIECES = 64 * MIB // PIECE_BYTES
ARENAS = """
import ctypes, threading
from objectcache_storage_server.heap import bound_arenas
bound_arenas()
ready = threading.Barrier(17)
def allocate():
    held = [bytearray(10_000) for _ in range(10)]
    ready.wait()
threads = [threading.Thread(target=allocate) for _ in range(16)]
for thread in threads:
    thread.start()
ready.wait()
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
libc.malloc_info(0, ctypes.c_void_p(libc.fopen(b"/proc/self/fd/1", b"w")))
libc.fflush(None)
"""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="malloc_trim is of glibc")


def own_bytes() -> int:
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)


def test_holes_in_the_heap_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "TRIM_EVERY_S", 0.01)
    pieces = [bytearray(PIECE_BYTES) for _ in range(PIECES)]
    kept = pieces[:: 1 * MIB // PIECE_BYTES]  # so that no end of an arena is free
    full_bytes = own_bytes()
    del pieces
    trimmer = heap.HeapTrimmer()
    try:
        wait_until(lambda: own_bytes() < full_bytes - 48 * MIB, "the holes")
    finally:
        trimmer.close()
    assert len(kept) == 64


def test_many_threads_share_few_arenas() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ARENAS], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.count("<heap nr=") == heap.ARENAS_MAX
