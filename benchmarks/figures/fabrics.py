"""Which transports into registered memory this machine has, and how figures call them."""

from __future__ import annotations

from importlib.util import find_spec

SHARED_MEMORY = "shared_memory"
NIXL = "nixl"


def transports() -> tuple[str, ...]:
    """Shared memory, and NIXL where its package is installed.

    Verbs are left out: where they are emulated their times say nothing.
    """
    return (SHARED_MEMORY, NIXL) if find_spec("nixl_cu12") else (SHARED_MEMORY,)


def labelled(path: str, transport: str) -> str:
    """A series' name."""
    return path if transport == SHARED_MEMORY else f"{path}, {transport.upper()}"
