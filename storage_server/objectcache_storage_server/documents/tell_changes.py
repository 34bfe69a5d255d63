"""Tells of what other servers have changed, until whoever is told has put it in force."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from objectcache_schemas.errors import ObjectCacheError

RETRY_S = 1.0  # until a listener that failed is called again

logger = logging.getLogger("objectcache.storage_server.documents")


class ChangeTeller:
    """Calls listeners by the name of what has changed, in a thread of its own; one that fails is
    called again and again, since a change that is not in force is one that nobody made.
    """

    def __init__(self, name: str, retry_s: float = RETRY_S) -> None:
        """`name` is the thread's."""
        self._retry_s = retry_s
        self._listeners: dict[str, list[Callable[[], None]]] = {}
        self._lock = threading.Lock()
        self._due: dict[Callable[[], None], None] = {}  # in the order in which they are called
        self._woken = threading.Event()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Tell nobody any more."""
        self._is_closing.set()
        self._woken.set()
        self._thread.join()

    def listen(self, name: str, listener: Callable[[], None]) -> None:
        """Have `listener` called after each change of what is called so."""
        with self._lock:
            self._listeners.setdefault(name, []).append(listener)

    def changed(self, names: Iterable[str] | None) -> None:
        """These have changed, or None, anything; never blocks."""
        with self._lock:
            for name in self._listeners if names is None else names:
                self._due |= dict.fromkeys(self._listeners.get(name, ()))
            if not self._due:
                return
        self._woken.set()

    def _run(self) -> None:
        while True:
            self._woken.wait()
            self._woken.clear()
            if self._is_closing.is_set():
                return
            with self._lock:
                due, self._due = self._due, {}
            failed = [listener for listener in due if not _is_told(listener)]
            if failed:
                self._is_closing.wait(self._retry_s)
                with self._lock:
                    self._due |= dict.fromkeys(failed)
                self._woken.set()

    def __repr__(self) -> str:
        return f"<ChangeTeller of {sorted(self._listeners)}>"


def _is_told(listener: Callable[[], None]) -> bool:
    try:
        listener()
    except ObjectCacheError as error:
        logger.error("what another server changed is not in force here yet: %s", error)
    except Exception:  # a defect; the others are to be told all the same
        logger.exception("what another server changed is not in force here")
    else:
        return True
    return False
