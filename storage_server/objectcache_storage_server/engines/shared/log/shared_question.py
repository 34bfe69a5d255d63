"""One question for all who ask at once: everybody gets an answer to one that was put later."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from objectcache_storage_server.engines.blobs.blob_store import StoreTimeout


class SharedQuestion:
    """Safe to use from any thread."""

    def __init__(self, ask: Callable[[float], int], what: str) -> None:
        """`ask` gets a deadline; its answers never become smaller."""
        self._ask = ask
        self._what = what
        self._changed = threading.Condition()
        self._begun = 0  # questions so far
        self._answered = 0  # number of the newest question that was answered
        self._is_asking = False
        self._answer = 0

    @property
    def latest(self) -> int:
        """The newest answer so far; 0 before the first."""
        return self._answer

    def answer(self, deadline_s: float) -> int:
        """The answer to a question that was put after this call. Raises `StoreTimeout`, and what
        the question does where this caller puts it.
        """
        with self._changed:
            wanted = self._begun + 1
            while self._answered < wanted:
                if not self._is_asking:
                    break
                if not self._changed.wait(deadline_s - time.monotonic()):
                    raise StoreTimeout(f"{self._what}: the store did not answer in time")
            else:
                return self._answer
            self._begun += 1
            self._is_asking, number = True, self._begun
        answer: int | None = None
        try:
            answer = self._ask(deadline_s)
            return answer
        finally:
            with self._changed:
                self._is_asking = False
                if answer is not None:
                    self._answered, self._answer = number, answer
                self._changed.notify_all()
