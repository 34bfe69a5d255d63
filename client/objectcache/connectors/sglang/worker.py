"""One thread that carries out calls in order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Queue


class Worker:
    """Runs calls one after the other; they must not raise. The queue is bounded by its callers: a
    scheduler's batch, or pages that it holds.
    """

    def __init__(self, name: str) -> None:
        self._calls: Queue[Callable[[], None] | None] = Queue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], None]) -> None:
        """Queue a call."""
        self._calls.put(call)

    def join(self) -> None:
        """Wait until nothing is queued or running."""
        self._calls.join()

    def close(self) -> None:
        """End the thread after what is queued. Repeating has no effect."""
        if self._thread.is_alive():
            self._calls.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            finally:
                self._calls.task_done()
        self._calls.task_done()
