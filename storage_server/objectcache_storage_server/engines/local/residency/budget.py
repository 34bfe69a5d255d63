"""How much page cache extents may take: Dual-Blade IV-A, equations (1) and (2). Pure.

    M* = min(M_avail, M_max - M_anon+shmem)        B = max(0, M* - M_pinned)

M_max counts for every cgroup with a limit, from the process' own to the root; the tightest decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from objectcache_storage_server.engines.local.residency.memory_state import MemoryState

# Available memory changes with every request of every process. A budget that followed it would move
# extents to and fro; the part of memory that is left unused is larger than this.
SETTLED_PART = 1 / 16


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes of extents that the page cache may hold, and what says so."""

    bytes: int
    source: str  # "setting", "meminfo", "cgroup v1", "cgroup v2" or "none", and what was unreadable


def page_cache_budget(
    state: MemoryState, untouched_bytes: int, fraction: float, setting_bytes: int = -1
) -> Budget:
    """The budget by equations (1) and (2), `fraction` of it, or `setting_bytes` unless negative.

    `untouched_bytes`, the paper's M_pinned, is memory of this process that is not yet touched but
    will be: the buffers that its settings allow. Without any source the budget is 0.
    """
    if setting_bytes >= 0:
        return Budget(setting_bytes, "setting")
    room_bytes, source = min(_rooms(state), default=(0, "none"))
    if state.unread:
        source += f" ({', '.join(state.unread)} unreadable)"
    return Budget(int(max(0, room_bytes - untouched_bytes) * fraction), source)


def settled_budget(previous: Budget, measured: Budget) -> Budget:
    """What was measured now, or `previous` bytes as long as they are about the same."""
    is_same = abs(measured.bytes - previous.bytes) <= SETTLED_PART * previous.bytes
    return Budget(previous.bytes if is_same else measured.bytes, measured.source)


def _rooms(state: MemoryState) -> Iterator[tuple[int, str]]:
    if state.available_bytes is not None:
        yield state.available_bytes, "meminfo"
    for group in state.groups:
        yield group.limit_bytes - group.held_bytes, f"cgroup v{group.version}"
