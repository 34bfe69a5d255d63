"""Run in a process of its own: what opening a store costs, and what it takes of memory.

`python -m benchmarks.deliveries.opened_store FOLDER` prints one JSON document.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path

import msgspec

from benchmarks.server_costs.server_memory import memory_bytes
from objectcache_runtime.settings import StorageSettings
from objectcache_storage_server.engines.open_engine import open_local_engine


class Opened(msgspec.Struct, frozen=True):
    """Of one open store."""

    seconds: float
    memory_bytes: int  # of the process' own, by opening it
    objects: int


def main() -> int:
    """Entry point."""
    gc.collect()
    before_bytes = memory_bytes(os.getpid(), "RssAnon")
    begin_s = time.perf_counter()
    engine = open_local_engine(Path(sys.argv[1]), StorageSettings())
    seconds = time.perf_counter() - begin_s
    gc.collect()
    taken_bytes = memory_bytes(os.getpid(), "RssAnon") - before_bytes
    opened = Opened(seconds, taken_bytes, engine.status().objects)
    engine.close()
    sys.stdout.buffer.write(msgspec.json.encode(opened))
    return 0


if __name__ == "__main__":
    sys.exit(main())
