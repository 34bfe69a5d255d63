"""The targets that a client's caller holds, found again by an address within them."""

from __future__ import annotations

import threading
import weakref

from objectcache.landing.targets import SessionTarget


class HeldTargets:
    """Explicit targets of one client and one transport, as long as somebody holds them.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._targets: weakref.WeakSet[SessionTarget] = weakref.WeakSet()
        self._lock = threading.Lock()

    def add(self, target: SessionTarget) -> None:
        """Have it found from now on."""
        with self._lock:
            self._targets.add(target)

    def holding(self, address: int, length_bytes: int) -> tuple[SessionTarget, int] | None:
        """The target that has all of this memory, and where in it the memory begins."""
        with self._lock:
            for target in self._targets:
                offset_bytes = address - target.address
                if 0 <= offset_bytes <= target.length_bytes - length_bytes:
                    return target, offset_bytes
        return None

    def __repr__(self) -> str:
        return f"<HeldTargets {len(self._targets)}>"
