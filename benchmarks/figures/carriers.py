"""What carries the bytes on this machine, and how series are called after it.

A series is named by what carried its bytes here, then by the paper's word for the same part of the
design: nothing goes by the name of a network that carried none of it.
"""

from __future__ import annotations

from importlib.util import find_spec

SHARED_MEMORY = "shared_memory"
NIXL = "nixl"
CARRIERS = {SHARED_MEMORY: "shared memory", NIXL: "NIXL (UCX copies between processes)"}
HTTP = "HTTP bodies over loopback"
OWN_MEMORY = "own memory"


def transports() -> tuple[str, ...]:
    """Shared memory, and NIXL where its package is installed.

    Verbs are left out: where they are emulated their times say nothing.
    """
    return (SHARED_MEMORY, NIXL) if find_spec("nixl_cu12") else (SHARED_MEMORY,)


def series(carrier: str, how: str, papers: str) -> str:
    """A series' name: what carried the bytes, how they were asked for, the paper's word."""
    return f"{carrier}, {how} (paper: {papers})"
