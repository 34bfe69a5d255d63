"""Threads that are kept for the next piece of work, because starting one costs as much as a
delivery's request.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

IDLE_MAX = 8  # more end when their work does

Work = Callable[[], None]


class ThreadReserve:
    """Runs each piece of work at once, in a thread of its own. Thread-safe.

    The threads are daemons: work that never ends does not keep the process.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[Work | None]] = []
        self._closed = False

    def start(self, work: Work) -> None:
        """Begin the work. It must not raise."""
        with self._lock:
            inbox = self._idle.pop() if self._idle else None
        if inbox is None:
            inbox = queue.SimpleQueue()
            threading.Thread(
                target=self._serve, args=(inbox,), name=self._name, daemon=True
            ).start()
        inbox.put(work)

    def close(self) -> None:
        """End idle threads now and others after their work. Repeating has no effect."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for inbox in idle:
            inbox.put(None)

    def _serve(self, inbox: queue.SimpleQueue[Work | None]) -> None:
        while (work := inbox.get()) is not None:
            work()
            del work  # an idle thread must not keep a delivery's memory
            if not self._keep(inbox):
                return

    def _keep(self, inbox: queue.SimpleQueue[Work | None]) -> bool:
        with self._lock:
            if self._closed or len(self._idle) >= IDLE_MAX:
                return False
            self._idle.append(inbox)
            return True

    def __repr__(self) -> str:
        return f"<ThreadReserve {len(self._idle)} idle>"
