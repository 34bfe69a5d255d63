"""Memory that Mooncake Store keeps objects in, until the input ends.

`python -m benchmarks.compare.clients.mooncake_segment PORT MASTER_PORT BYTES`
"""

from __future__ import annotations

import os
import sys

from benchmarks.compare.clients.mooncake_client import LOCAL_BUFFER_BYTES, connected_store


def main(arguments: list[str]) -> None:
    """Serve a segment; says `ready` when it is mounted."""
    own_port, master_port, segment_bytes = (int(word) for word in arguments)
    store = connected_store(own_port, master_port, segment_bytes, LOCAL_BUFFER_BYTES)
    print("ready", flush=True)
    sys.stdin.read()
    store.close()
    os._exit(0)  # the library's destructors wait for threads that have gone


if __name__ == "__main__":
    main(sys.argv[1:])
