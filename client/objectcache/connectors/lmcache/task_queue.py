"""Tasks that a caller submits, hears of by an event, and asks the result of, once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from objectcache_schemas.errors import ObjectCacheError, Unavailable

Result = TypeVar("Result")

_LOG = logging.getLogger("objectcache.connectors.lmcache")


class TaskQueue(Generic[Result]):
    """Runs tasks in threads of its own. Thread-safe.

    Every task gets a result, and the event is signalled for each: `failed` where its work raised,
    where `tasks_max` are open already, and where the queue was closed before it began.
    """

    def __init__(
        self, name: str, threads_max: int, tasks_max: int, signal: Callable[[], object]
    ) -> None:
        self._name = name
        self._tasks_max = tasks_max
        self._signal = signal
        self._executor = ThreadPoolExecutor(threads_max, f"objectcache-{name}")
        self._lock = threading.Lock()
        self._next_id = 0
        self._open = 0
        self._closed = False
        self._results: dict[int, Result] = {}
        self.failure_count = 0

    def submit(self, work: Callable[[], Result], failed: Result) -> int:
        """Begin a task; returns its id at once."""
        with self._lock:
            task_id = self._next_id
            self._next_id += 1
            self._open += 1
            refused = self._closed or self._open > self._tasks_max
            if not refused:
                self._executor.submit(self._run, task_id, work, failed)
        if refused:
            reason = "the adapter is closed" if self._closed else f"{self._tasks_max} are open"
            _LOG.warning("a %s task is refused: %s", self._name, reason)
            self._finish(task_id, failed, has_failed=True)
        return task_id

    def pop(self, task_id: int) -> Result | None:
        """A task's result, once; None while it has none."""
        with self._lock:
            return self._results.pop(task_id, None)

    def pop_all(self) -> dict[int, Result]:
        """All results that nobody has taken, by task."""
        with self._lock:
            results, self._results = self._results, {}
        return results

    def close(self) -> None:
        """Wait for tasks that run; those that have not begun fail. Repeating has no effect."""
        with self._lock:
            self._closed = True
        self._executor.shutdown(wait=True)

    def _run(self, task_id: int, work: Callable[[], Result], failed: Result) -> None:
        result, has_failed = failed, True
        try:
            if not self._closed:
                result = work()
                has_failed = False
        except ObjectCacheError as error:
            # Of a store that is away its outage tells, once and not with every task.
            level = logging.DEBUG if isinstance(error, Unavailable) else logging.WARNING
            _LOG.log(level, "a %s task has failed: %s", self._name, error)
        except Exception:  # whoever waits for the task must hear of it, whatever went wrong
            _LOG.exception("a %s task has failed", self._name)
        finally:
            self._finish(task_id, result, has_failed)

    def _finish(self, task_id: int, result: Result, has_failed: bool) -> None:
        with self._lock:
            self._open -= 1
            self.failure_count += has_failed
            self._results[task_id] = result
        self._signal()

    def __repr__(self) -> str:
        return f"<TaskQueue {self._name}, {self._open}/{self._tasks_max} open>"
