"""The other process of a bare NIXL write: `python -m benchmarks.deliveries.nixl_writer`.

Standard input has JSON lines: the reader's memory first, answered by "ready"; then how to write all
of it, once a line.
"""

from __future__ import annotations

import json
import mmap
import sys
from typing import Any

import numpy as np

from objectcache_fabrics.nixl.agent import MemoryPiece, NixlAgent, NixlTransfer

WRITER, READER = "bench-writer", "bench-reader"


def main() -> None:
    """Serve until standard input ends."""
    target = json.loads(sys.stdin.readline())
    length_bytes: int = target["length_bytes"]
    source = np.frombuffer(mmap.mmap(-1, length_bytes), np.uint8)
    source[:] = 1
    agent = NixlAgent(WRITER, "lo", "")
    agent.register(MemoryPiece(source.ctypes.data, length_bytes))
    agent.add_peer(bytes.fromhex(target["metadata"]))
    print("ready", flush=True)
    for line in sys.stdin:
        _write(agent, source.ctypes.data, target["address"], json.loads(line))
    agent.close()


def _write(agent: NixlAgent, source: int, target: int, how: dict[str, Any]) -> None:
    """Write the payload layer by layer, and notify each when its pieces are done."""
    layer_bytes, piece_bytes = how["layer_bytes"], how["piece_bytes"]
    for layer in range(how["layer_count"]):
        under_way: list[NixlTransfer] = []
        for offset in range(layer * layer_bytes, (layer + 1) * layer_bytes, piece_bytes):
            length_bytes = min(piece_bytes, (layer + 1) * layer_bytes - offset)
            here = MemoryPiece(source + offset, length_bytes)
            there = MemoryPiece(target + offset, length_bytes)
            under_way.append(agent.start("WRITE", [here], [there], READER))
        while under_way:
            if agent.poll(under_way[-1]):
                agent.release(under_way.pop())
        agent.notify(READER, str(layer).encode())
        agent.notifications()


if __name__ == "__main__":
    main()
