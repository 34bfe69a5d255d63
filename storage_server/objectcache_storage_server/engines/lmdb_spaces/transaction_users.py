"""Who is in a transaction of an index: closing waits for them, and nobody enters after it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator

from objectcache_schemas.errors import Unavailable


class TransactionUsers:
    """Counts them. Safe to use from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0
        self._has_ended = False

    @contextlib.contextmanager
    def one(self) -> Generator[None, None, None]:
        """Be a user in the block. Raises `Unavailable` after `end`."""
        with self._changed:
            if self._has_ended:
                raise Unavailable("the index is closed")
            self._count += 1
        try:
            yield
        finally:
            with self._changed:
                self._count -= 1
                self._changed.notify_all()

    def end(self) -> None:
        """Let nobody in any more, and wait until nobody is."""
        with self._changed:
            self._has_ended = True
            self._changed.wait_for(lambda: self._count == 0)
